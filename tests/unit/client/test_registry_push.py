"""Pushing to registries, against one that only pretends: who is asked for what, and what nobody is told."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from dataclasses import dataclass, field

import httpx
import pytest

from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret
from atoll.client.registry import Blob, Place, Registry

CONTENT = b"a layer" * 1000
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
PASSWORD = "hush-hush"


@dataclass
class Foreign:
    """A registry elsewhere. `realm` is where it sends for tokens; empty: it wants user and password themselves."""

    realm: str = "https://auth.test/token"
    location: str = "/v2/team/app/blobs/uploads/1?state=x"
    status: int = 0
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    asked: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        request.read()
        basic = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        shown = request.headers.get("authorization")
        if request.url.host == "auth.test":
            good = shown == basic and request.url.params["scope"] == "repository:team/app:pull,push"
            return httpx.Response(200, json={"token": "good"}) if good else httpx.Response(401)
        if request.url.host == "store.test":
            assert shown is None, "another host is shown what is the registry's"
        elif shown != ("Bearer good" if self.realm else basic):
            challenge = f'Bearer realm="{self.realm}",service="s"' if self.realm else 'Basic realm="r"'
            return httpx.Response(401, headers={"WWW-Authenticate": challenge})
        if self.status:
            return httpx.Response(self.status, json={"errors": [{"code": "TEAM_STORAGE_LIMIT", "message": "enough"}]})
        match request.method, request.url.path.rsplit("/", 2)[-2]:
            case "HEAD", "blobs":
                return httpx.Response(200 if request.url.path.rpartition("/")[2] in self.blobs else 404)
            case "POST", "uploads":
                return httpx.Response(202, headers={"Location": self.location})
            case "PUT", "uploads":
                self.blobs[request.url.params["digest"]] = request.content
                return httpx.Response(201)
            case "PUT", "manifests":
                self.manifests[request.url.path.rpartition("/")[2]] = request.content
                return httpx.Response(201)
        raise AssertionError(request)


def registry(foreign: Foreign, *, address: str = "registry.test", password: str | None = PASSWORD) -> Registry:
    secret = None if password is None else Secret(password)
    return Registry(Place(address, "team/app", "one"), username="me", password=secret, transport=httpx.MockTransport(foreign))


@pytest.mark.parametrize(
    "foreign",
    [Foreign(), Foreign(realm=""), Foreign(location="https://store.test/uploads/1"), Foreign(location="https://registry.test/uploads/1")],
    ids=["token", "password", "elsewhere", "absolute"],
)
def test_an_image_is_pushed(foreign: Foreign) -> None:
    with registry(foreign) as pushing:
        layer = Blob("kind/layer", DIGEST, len(CONTENT))
        pushing.blob(layer, io.BytesIO(CONTENT))
        sent = len(foreign.asked)
        pushing.blob(layer, io.BytesIO(CONTENT))
        assert len(foreign.asked) == sent + 1, "what is there is not sent again"
        config = Blob("kind/config", "sha256:" + "1" * 64, 2)
        digest = pushing.manifest(config, [layer])
    assert foreign.blobs == {DIGEST: CONTENT}
    document = json.loads(foreign.manifests["one"])
    assert (document["config"]["digest"], document["layers"][0]["size"]) == (config.digest, len(CONTENT))
    assert digest == "sha256:" + hashlib.sha256(foreign.manifests["one"]).hexdigest()


@pytest.mark.parametrize(
    ("foreign", "password", "code"),
    [
        (Foreign(), "wrong", Code.IMAGE_ACCESS_DENIED),
        (Foreign(), None, Code.IMAGE_ACCESS_DENIED),
        (Foreign(realm=""), "wrong", Code.IMAGE_ACCESS_DENIED),
        (Foreign(realm="http://auth.test/token"), PASSWORD, Code.IMAGE_ACCESS_DENIED),
        (Foreign(location="http://store.test/uploads/1"), PASSWORD, Code.IMAGE_UNAVAILABLE),
        (Foreign(status=500), PASSWORD, Code.IMAGE_UNAVAILABLE),
        (Foreign(status=403), PASSWORD, Code.IMAGE_ACCESS_DENIED),
    ],
)
def test_what_is_refused_is_said_without_the_password(foreign: Foreign, password: str | None, code: Code) -> None:
    with registry(foreign, password=password) as pushing, pytest.raises(Refused) as refused:
        pushing.blob(Blob("kind/layer", DIGEST, len(CONTENT)), io.BytesIO(CONTENT))
    assert refused.value.code is code
    assert PASSWORD not in str(refused.value)
    clear = [one for one in foreign.asked if one.url.scheme == "http"]
    assert not any("authorization" in one.headers for one in clear), "nothing secret goes in clear"


def test_a_registrys_own_words_are_told() -> None:
    with registry(Foreign(status=403)) as pushing, pytest.raises(Refused, match="TEAM_STORAGE_LIMIT: enough"):
        pushing.blob(Blob("kind/layer", DIGEST, len(CONTENT)), CONTENT)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("localhost:3000/team/app:v1", Place("localhost:3000", "team/app", "v1")),
        ("registry.test/app", Place("registry.test", "app", "latest")),
        ("127.0.0.1:5000/a/b/c:x_Y.1", Place("127.0.0.1:5000", "a/b/c", "x_Y.1")),
        ("localhost/app", Place("localhost", "app", "latest")),
    ],
)
def test_where_to_push(text: str, place: Place) -> None:
    assert Place.parse(text) == place
    assert Place.parse(str(place)) == place


@pytest.mark.parametrize(
    "text", ["app", "team/app:1", "https://registry.test/app", "registry.test/App", "registry.test/app@sha256:1", "", "registry.test/app:"]
)
def test_what_says_no_place(text: str) -> None:
    with pytest.raises(Refused):
        Place.parse(text)
