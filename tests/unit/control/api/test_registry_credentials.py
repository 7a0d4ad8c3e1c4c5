"""Credentials of registries, in E2B's words: what the puller is told."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.base.errors import Refused
from atoll.control.api.e2b.requests import Registry, registry_credentials


def told(**given: Any) -> dict[str, str]:
    return registry_credentials(Registry.model_validate(given))


def test_googles_key_is_a_password() -> None:
    key = '{"type": "service_account", "private_key": "-----BEGIN\\n"}'
    assert told(type="gcp", serviceAccountJson=key) == {"username": "_json_key", "password": key}


def test_amazons_keys_are_kept_until_they_are_exchanged() -> None:
    keys = {"awsAccessKeyId": "a", "awsSecretAccessKey": "b", "awsRegion": "eu-west-1"}
    assert told(type="aws", **keys) == keys


def test_none_are_none() -> None:
    assert registry_credentials(None) == {}
    assert told(type="registry", username="me", password="p") == {"username": "me", "password": "p"}


@pytest.mark.parametrize("given", [{"type": "aws", "awsRegion": "eu-west-1"}, {"type": "gcp"}, {"type": "registry", "username": "me"}])
def test_what_is_missing_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(Refused, match="fromImageRegistry"):
        told(**given)
