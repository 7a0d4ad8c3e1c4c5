"""Tokens that control gives its own pulls: for the team's repositories, at this deployment's registry."""

from __future__ import annotations

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.control.artifacts.own_registry import PULL_S, OwnRegistry
from atoll.programs.clock import SystemClock
from atoll.wire import registry

KEY = Ed25519PrivateKey.generate()
OWN = OwnRegistry(("localhost:1234", "127.0.0.1:1234"), KEY, SystemClock(), bytes)


@pytest.mark.parametrize(
    "reference", ["localhost:1234/acme/app", "127.0.0.1:1234/acme/app:v1", f"localhost:1234/acme/app@sha256:{'0' * 64}"]
)
def test_a_team_is_given_a_token_for_its_own(reference: str) -> None:
    said = jwt.decode(OWN.login("acme", reference)["token"], KEY.public_key(), algorithms=["EdDSA"], audience=registry.SERVICE)
    assert said["access"] == [{"type": "repository", "name": "acme/app", "actions": ["pull"]}]
    assert said["exp"] - said["iat"] == PULL_S


@pytest.mark.parametrize(
    "reference",
    [
        "localhost:1234/other/app:v1",
        "localhost:1234/acme",
        "localhost:1234/acme/../other/app",
        "localhost:12345/acme/app",
        "registry.example/acme/app",
        "localhost:1234.example/acme/app",
        "",
    ],
)
def test_and_nothing_for_anything_else(reference: str) -> None:
    assert OWN.login("acme", reference) == {}
