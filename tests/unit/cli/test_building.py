"""What the words of `atoll template build` mean: a name, a place, or both."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.errors import Refused
from atoll.cli.building import meant


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "Shop"
    (here / "web").mkdir(parents=True)
    (here / "web" / "Dockerfile").touch()
    (here / "notes").mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize(
    ("what", "place", "name", "found"),
    [
        ("web", Path("web"), None, ("web", Path("web"))),
        ("web:v2", Path(), None, ("web:v2", Path())),
        ("web", None, None, ("web", Path("web"))),
        ("./web", None, None, ("web", Path("web"))),
        ("./web/", None, "front:v2", ("front:v2", Path("web"))),
        ("web/Dockerfile", None, None, ("web", Path("web/Dockerfile"))),
        ("./notes", None, None, ("notes", Path("notes"))),
        ("notes", None, "web", ("web", Path("notes"))),
        (".", None, None, ("shop", Path())),
        (".", None, "web", ("web", Path())),
        ("notes", None, None, ("notes", Path())),
        ("front", None, None, ("front", Path())),
        ("team/front:v2", None, None, ("team/front:v2", Path())),
        ("./absent", None, None, ("shop", Path("absent"))),
    ],
)
def test_a_word_alone_is_a_place_if_it_is_there_or_looks_like_one(
    what: str, place: Path | None, name: str | None, found: tuple[str, Path]
) -> None:
    assert meant(what, place, name) == found


def test_a_word_that_may_be_either_is_refused_with_both_ways_to_say_it(here: Path) -> None:
    (here / "Dockerfile").touch()
    with pytest.raises(Refused) as refused:
        meant("web", None, None)
    assert "build ./web" in str(refused.value.hint)
    assert "build web ." in str(refused.value.hint)
    assert meant("./web", None, None) == ("web", Path("web"))
    assert meant("Dockerfile", None, None) == ("shop", Path("Dockerfile"))
    assert meant("notes", None, None) == ("notes", Path())


def test_two_names_are_refused() -> None:
    with pytest.raises(Refused, match="both name the template"):
        meant("web", Path("web"), "front")
