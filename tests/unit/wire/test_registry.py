"""Tokens of the registry: whose repositories they open, and how the engine knows them."""

from __future__ import annotations

import json

import jwt
import pytest

from atoll.wire import registry

ROOT = b"r" * 32


@pytest.mark.parametrize(
    ("scope", "actions"),
    [
        ("repository:red/app:pull,push", ("pull", "push")),
        ("repository:red/deep/er/app:delete", ("delete",)),
        ("repository:red/app:*", ("pull", "push", "delete")),
        ("repository:blue/app:pull", None),
        ("repository:redder/app:pull", None),
        ("repository:red:pull", None),
        ("repository:red/../blue/app:pull", None),
        ("repository:red/App:pull", None),
        ("repository:red/app:own", None),
        ("registry:catalog:*", None),
        ("nonsense", None),
    ],
)
def test_a_team_gets_its_own_repositories_and_nothing_else(scope: str, actions: tuple[str, ...] | None) -> None:
    found = registry.granted("red", [scope])
    assert [one.actions for one in found] == ([] if actions is None else [actions])


def test_several_scopes_in_one_string_or_many() -> None:
    names = ["red/a", "red/b", "red/c"]
    found = registry.granted("red", ["repository:red/a:pull repository:red/b:pull", "repository:red/c:pull repository:blue/d:pull"])
    assert [one.name for one in found] == names
    assert len(registry.granted("red", ["repository:red/a:pull"] * 1000)) == registry.SCOPES_MAX


PUBLIC = ("red/app", "red/tools/*")


@pytest.mark.parametrize("team", [None, "blue"])
@pytest.mark.parametrize(
    ("scope", "opens"),
    [
        ("repository:red/app:pull", True),
        ("repository:red/app:pull,push,delete", True),
        ("repository:red/app:push", False),
        ("repository:red/app2:pull", False),
        ("repository:red/app/deeper:pull", False),
        ("repository:red/tools/one:pull", True),
        ("repository:red/tools/one/two:pull", True),
        ("repository:red/tools:pull", False),
        ("repository:green/tools/one:pull", False),
    ],
)
def test_anybody_pulls_what_is_public_and_does_nothing_else_with_it(team: str | None, scope: str, opens: bool) -> None:
    assert [one.actions for one in registry.granted(team, [scope], public=PUBLIC)] == ([("pull",)] if opens else [])


def test_a_repository_under_e2bs_name_is_its_templates_teams() -> None:
    scopes = [
        "repository:e2b/custom-envs/mine:pull,push",
        "repository:e2b/custom-envs/others:pull",
        "repository:e2b/custom-envs/mine/x:pull",
    ]
    found = registry.granted("red", scopes, templates={"mine"})
    assert found == (registry.Access("e2b/custom-envs/mine", ("pull", "push")),)
    assert registry.granted(None, scopes, templates=()) == ()
    # A team that is called so has none of them by its name.
    assert [one.name for one in registry.granted("e2b", [*scopes, "repository:e2b/app:pull"])] == ["e2b/app"]
    assert [registry.template_of(name) for name in ("e2b/custom-envs/t1", "e2b/other/t1", "e2b/custom-envs/", "e2b/custom-envs/a/b")] == [
        "t1",
        None,
        None,
        None,
    ]


def test_a_token_says_how_much_its_team_may_keep() -> None:
    said = registry.claims("cli_x", (), now=2e9, token_id="t", store=registry.Store("red", 5 << 20))
    assert said["atoll"] == {"team": "red", "storage_bytes": 5242880}
    assert registry.claims("cli_x", (), now=2e9, token_id="t", store=registry.Store("red", None))["atoll"]["storage_bytes"] is None


def test_the_key_set_verifies_what_the_key_signs_and_another_does_not() -> None:
    key, other = registry.signing_key(ROOT), registry.signing_key(b"s" * 32)
    content = registry.claims("cli_x", registry.granted("red", ["repository:red/a:pull"]), now=2e9, token_id="t")
    shown = jwt.PyJWK(registry.key_set(key)["keys"][0])
    options = {"verify_exp": True, "verify_nbf": False, "verify_iat": False}
    said = jwt.decode(jwt.encode(content, key, algorithm="EdDSA"), shown, algorithms=["EdDSA"], audience=registry.SERVICE, options=options)
    assert said["exp"] - said["iat"] == registry.TOKEN_S
    assert said["access"] == [{"type": "repository", "name": "red/a", "actions": ["pull"]}]
    with pytest.raises(jwt.InvalidSignatureError):
        jwt.decode(jwt.encode(content, other, algorithm="EdDSA"), shown, algorithms=["EdDSA"], audience=registry.SERVICE, options=options)
    assert '"d"' not in json.dumps(registry.key_set(key))
