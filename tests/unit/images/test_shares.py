"""Who holds what, among trees that share files: each file counts once, and for somebody, whichever of them go."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from atoll.images.cache import CachedImage
from atoll.images.shares import held


def image(name: str, own: int, *shares: tuple[str, int]) -> CachedImage:
    return CachedImage("sha256", name, Path(name), "x86_64", own + sum(size for _, size in shares), 1, own, shares)


BELOW = image("below", 100)
MORE = image("more", 10, ("below", 100))
MOST = image("most", 1, ("below", 100), ("more", 10))
OTHER = image("other", 5, ("below", 100))
ALL = (MOST, OTHER, MORE, BELOW)


def test_what_came_with_a_tree_is_its_own_as_long_as_it_is_there() -> None:
    assert held(ALL) == {"below": 100, "more": 10, "most": 1, "other": 5}


def test_what_several_share_counts_for_one_of_them_when_the_tree_that_it_came_with_is_gone() -> None:
    assert held([MORE, MOST, OTHER]) == {"more": 110, "most": 1, "other": 5}
    assert held([MOST]) == {"most": 111}
    assert held([OTHER]) == {"other": 105}
    assert held([image("all shared", 0, ("gone", 7))]) == {"all shared": 7}


def test_each_file_counts_once_whichever_of_them_are_left() -> None:
    for count in range(len(ALL) + 1):
        for left in combinations(ALL, count):
            parts = {one.digest: one.own_bytes for one in left} | {part: size for one in left for part, size in one.shares}
            assert sum(held(left).values()) == sum(parts.values()), left
