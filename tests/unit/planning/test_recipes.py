"""Recipes: what each step asks for, what it leaves to the next, and by what it is known again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import Refused
from atoll.domain.building import Recipe, Step, StepKind
from atoll.planning import recipes
from atoll.planning.recipes import Context, Copy, MakeDirectory, Run

HASH = "a" * 64


def step(kind: str, *args: str, **more: object) -> Step:
    return Step(StepKind(kind), args, **more)  # type: ignore[arg-type]


def followed(*steps: Step, context: Context | None = None) -> tuple[Context, list[object]]:
    now, actions = context or Context(), []
    for one in steps:
        now, action = recipes.follow(now, one)
        actions.append(action)
    return now, actions


def test_a_command_runs_as_whoever_is_user_then() -> None:
    _, actions = followed(step("RUN", "a"), step("USER", "root"), step("RUN", "b"), step("RUN", "c", "joe"), step("RUN", "d", ""))
    assert actions == [Run("a", "user"), None, Run("b", "root"), Run("c", "joe"), Run("d", "root")]


def test_variables_know_those_before_them() -> None:
    context, _ = followed(
        step("ENV", "A", "one", "B", "$A-${A}-$MISSING.", "C", r"\$A"),
        step("ENV", "PATH", "$PATH:/opt", "H", "$HOME"),
        step("ENV", "A", "${A}s"),
    )
    expected = {"A": "ones", "B": "one-one-.", "C": "$A", "PATH": f"{recipes.PATH}:/opt", "H": "/home/user"}
    assert context.env == expected


def test_directories_are_relative_to_the_one_before() -> None:
    context, actions = followed(
        step("WORKDIR", "app"), step("WORKDIR", "src/../lib"), step("USER", "root"), step("WORKDIR", "/srv"), step("WORKDIR", "~/x")
    )
    assert [one for one in actions if one] == [
        MakeDirectory("/home/user/app", "user"),
        MakeDirectory("/home/user/app/lib", "user"),
        MakeDirectory("/srv", "root"),
        MakeDirectory("/root/x", "root"),
    ]
    assert context.workdir == "/root/x"


@pytest.mark.parametrize(
    ("target", "expected"),
    [("/a/b", "/a/b"), ("/a/b/", "/a/b/"), ("b", "/w/b"), ("./", "/w/"), (".", "/w/"), ("/", "/"), ("../x", "/x"), ("$D/y", "/dir/y")],
)
def test_where_a_copy_goes(target: str, expected: str) -> None:
    context = Context(workdir="/w", env={"D": "/dir"})
    _, action = recipes.follow(context, step("COPY", "./src/", target, "", "", files_hash=HASH))
    assert action == Copy("src", expected, "user", None, HASH)


def test_a_copy_has_owner_and_mode() -> None:
    _, action = recipes.follow(Context(), step("COPY", "a", "/b", "root:adm", "0755", files_hash=HASH))
    assert action == Copy("a", "/b", "root:adm", "0755", HASH)


@pytest.mark.parametrize(
    "wrong",
    [
        step("RUN"),
        step("RUN", ""),
        step("RUN", "a\0b"),
        step("ENV", "A"),
        step("ENV", "A=B", "c"),
        step("ENV", "A", "x" * recipes.ENV_BYTES_MAX),
        step("WORKDIR"),
        step("USER", ""),
        step("COPY", "a", "/b"),
        step("COPY", "/etc/passwd", "/b", files_hash=HASH),
        step("COPY", "a/../../b", "/b", files_hash=HASH),
        step("COPY", "a", "/b", "-R root", files_hash=HASH),
        step("COPY", "a", "/b", "", "a+x", files_hash=HASH),
        step("COPY", "a", "/b", files_hash="../x"),
    ],
)
def test_what_cannot_be_followed_is_refused(wrong: Step) -> None:
    with pytest.raises(Refused):
        recipes.follow(Context(), wrong)
    with pytest.raises(Refused, match="step 2"):
        recipes.check(Recipe(from_template="base", steps=(step("RUN", "fine"), wrong)))


def keys(*steps: Step, image: str = "sha256:1", context: Context | None = None) -> list[str]:
    key = recipes.base_key(image, context or Context())
    return [key := recipes.step_key(key, one) for one in steps]


STEPS = [step("RUN", "a"), step("ENV", "A", "1"), step("COPY", "a", "/b", files_hash=HASH), step("RUN", "b", "root"), step("USER", "root")]


def test_a_changed_step_changes_its_key_and_all_after_it() -> None:
    before = keys(*STEPS)
    changed = [step("COPY", "a", "/b", files_hash="b" * 64) if one.kind is StepKind.COPY else one for one in STEPS]
    after = keys(*changed)
    assert after[:2] == before[:2]
    assert not set(after[2:]) & set(before)


def test_what_it_begins_with_is_in_every_key() -> None:
    others = [
        {"image": "sha256:2"},
        {"context": Context(user="root")},
        {"context": Context(env={"A": "1"})},
        {"context": Context(workdir="/w")},
    ]
    found = [set(keys(*STEPS, **other)) for other in [{}, *others]]  # type: ignore[arg-type]
    assert not any(one & other for one, other in itertools.combinations(found, 2))


@given(
    st.lists(st.lists(st.text(max_size=4), max_size=3), min_size=1, max_size=4),
    st.lists(st.lists(st.text(max_size=4), max_size=3), min_size=1, max_size=4),
)
def test_two_recipes_have_one_key_only_when_they_are_one(one: list[list[str]], other: list[list[str]]) -> None:
    """Arguments are not run together: `ab`, `c` is not `a`, `bc`."""
    first, second = ([Step(StepKind.RUN, tuple(args)) for args in steps] for steps in (one, other))
    assert (keys(*first)[-1] == keys(*second)[-1]) == (first == second)


def test_force_is_in_no_key() -> None:
    assert keys(step("RUN", "a")) == keys(step("RUN", "a", force=True))
