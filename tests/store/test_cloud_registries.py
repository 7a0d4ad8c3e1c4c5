"""Amazon's and Google's registries as they are documented, on loopback, and strict: what a client sends is checked as they check it.

Amazon: a POST to its token service, signed by Signature Version 4, gives a user and password for the registry, which asks for them itself
(Basic); blobs are redirected to storage, whose signed links refuse an Authorization beside them. Google: the key of a service account is the
password of `_json_key` at a token service, which gives a token for one repository; blobs are redirected, too. The verifier of signatures here
is written from Amazon's description and shares nothing with what it verifies.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from atoll.base.errors import Code, Refused
from atoll.control.service import Caller
from atoll.domain.tenancy import Team
from atoll.images.assembling import is_whole
from atoll.store.engine import Store
from tests.builders import NOW, client
from tests.e2e import oci
from tests.store.test_pull_credentials import KEY_ID, PROGRAM, SECRET, SERVICE_ACCOUNT, credentials, workshop

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built: scripts/setup.py --only programs")

REGION = "eu-central-1"
REPOSITORY = "team/app"
_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[A-Z0-9]+)/(?P<day>\d{8})/(?P<region>[a-z0-9-]+)/(?P<service>[a-z]+)/aws4_request, "
    r"SignedHeaders=(?P<names>[a-z0-9;-]+), Signature=(?P<signature>[0-9a-f]{64})"
)

Said = tuple[int, dict[str, str], bytes]


def refusal(handler: BaseHTTPRequestHandler, body: bytes) -> str:
    """Why Amazon would refuse a signed request: the kind of its error; nothing when it would not."""
    match = _SIGNED.fullmatch(handler.headers.get("Authorization", ""))
    if match is None:
        return "IncompleteSignatureException"
    if match["key"] != KEY_ID:
        return "UnrecognizedClientException"
    at = handler.headers.get("X-Amz-Date", "")
    names = match["names"].split(";")
    scoped = (match["day"], match["region"], match["service"]) == (at[:8], REGION, "ecr")
    if not scoped or names != sorted(set(names)) or not {"host", "x-amz-date"} <= set(names):
        return "InvalidSignatureException"
    # Every header of Amazon's own must be among the signed ones.
    if any(name.lower().startswith("x-amz-") and name.lower() not in names for name in handler.headers):
        return "InvalidSignatureException"
    if abs(datetime.strptime(at, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp() - NOW) > 300:
        return "InvalidSignatureException"
    canonical = f"{handler.command}\n{urlsplit(handler.path).path}\n{urlsplit(handler.path).query}\n"
    for name in names:
        value = re.sub(" +", " ", handler.headers.get(name, "").strip())
        canonical += f"{name}:{value}\n"
    canonical += f"\n{match['names']}\n{hashlib.sha256(body).hexdigest()}"
    scope = f"{match['day']}/{match['region']}/{match['service']}/aws4_request"
    wanted = f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}".encode()
    key = f"AWS4{SECRET}".encode()
    for part in (match["day"], match["region"], match["service"], "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return "" if hmac.compare_digest(hmac.digest(key, wanted, "sha256").hex(), match["signature"]) else "InvalidSignatureException"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@dataclass
class Cloud:
    """What the two have in common: a registry with one image, and storage elsewhere that blobs are redirected to."""

    layout: Path
    address: str = ""
    storage: str = ""
    seen: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    cut: bool = False
    """The storage cuts the first answer with a layer in its middle."""

    def answer(self, handler: BaseHTTPRequestHandler) -> Said:
        self.seen.append(f"{handler.command} {handler.path}")
        refused = self.enter(handler)
        if refused is not None:
            return refused
        if handler.path == "/v2/":
            return 200, {}, b"{}"
        kind, name = handler.path.split("/")[-2:]
        manifest = json.loads((self.layout / "index.json").read_text())["manifests"][0]
        if kind == "manifests":
            return 200, {"Content-Type": manifest["mediaType"]}, oci.blob(self.layout, manifest["digest"]).read_bytes()
        return 307, {"Location": f"http://{self.storage}/{name}?X-Amz-Signature=given"}, b""

    def store(self, handler: BaseHTTPRequestHandler) -> Said:
        """Storage: its link says it all, and a second way to be let in is an error."""
        if "Authorization" in handler.headers or not handler.path.endswith("?X-Amz-Signature=given"):
            self.wrong.append(f"{handler.path} with {handler.headers.get('Authorization')}")
            return 400, {}, b"<Error><Code>InvalidArgument</Code><Message>Only one auth mechanism allowed</Message></Error>"
        content = oci.blob(self.layout, urlsplit(handler.path).path.strip("/")).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        self.seen.append(f"storage {asked[1] if asked else 'whole'}")
        if asked is None:
            if self.cut and len(content) > 100_000:
                self.cut = False
                return 200, {"Content-Length": str(len(content))}, content[:60_000]
            return 200, {}, content
        begin = int(asked[1])
        return 206, {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}, content[begin:]

    def enter(self, handler: BaseHTTPRequestHandler) -> Said | None:
        raise NotImplementedError


@dataclass
class Amazons(Cloud):
    password: str = "given-for-12-hours"

    def enter(self, handler: BaseHTTPRequestHandler) -> Said | None:
        if handler.command == "POST":
            return self.token(handler)
        if handler.headers.get("Authorization") != basic("AWS", self.password):
            return 401, {"WWW-Authenticate": f'Basic realm="http://{self.address}/",service="ecr.amazonaws.com"'}, b"Not Authorized\n"
        return None

    def token(self, handler: BaseHTTPRequestHandler) -> Said:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        kind = refusal(handler, body)
        if not kind and handler.headers["X-Amz-Target"] != "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken":
            kind = "UnknownOperationException"
        if not kind and (handler.headers["Content-Type"] != "application/x-amz-json-1.1" or json.loads(body) != {}):
            kind = "SerializationException"
        if kind:
            return 400, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps({"__type": kind, "message": "no"}).encode()
        given = base64.b64encode(f"AWS:{self.password}".encode()).decode()
        data = {"authorizationToken": given, "expiresAt": NOW + 43200, "proxyEndpoint": f"http://{self.address}"}
        return 200, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps({"authorizationData": [data]}).encode()


@dataclass
class Googles(Cloud):
    token: str = "ya29.for-one-repository"

    def enter(self, handler: BaseHTTPRequestHandler) -> Said | None:
        where = urlsplit(handler.path)
        if where.path == "/v2/token":
            asked = parse_qs(where.query)
            right = asked.get("service") == ["docker.pkg.dev"] and asked.get("scope") == [f"repository:{REPOSITORY}:pull"]
            if handler.command != "GET" or not right or handler.headers.get("Authorization") != basic("_json_key", SERVICE_ACCOUNT):
                return 401, {}, b'{"errors":[{"code":"UNAUTHORIZED"}]}'
            return 200, {}, json.dumps({"token": self.token, "expires_in": 3600}).encode()
        if handler.headers.get("Authorization") != f"Bearer {self.token}":
            challenge = f'Bearer realm="http://{self.address}/v2/token",service="docker.pkg.dev"'
            return 401, {"WWW-Authenticate": challenge}, b'{"errors":[{"code":"UNAUTHORIZED"}]}'
        return None


@contextmanager
def serving(cloud: Cloud) -> Iterator[str]:
    def handler(say: Any) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                status, headers, body = say(self)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                if headers.get("Content-Length", str(len(body))) != str(len(body)):
                    self.close_connection = True

            do_GET = do_HEAD = do_POST = handle_any  # noqa: N815 - as the library calls them

            def log_message(self, *_: object) -> None: ...

        return Handler

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler(say)) for say in (cloud.answer, cloud.store)]
    cloud.address, cloud.storage = (f"127.0.0.1:{server.server_port}" for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield cloud.address
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


SENT = {
    "aws": {"type": "aws", "awsAccessKeyId": KEY_ID, "awsSecretAccessKey": SECRET, "awsRegion": REGION},
    "gcp": {"type": "gcp", "serviceAccountJson": SERVICE_ACCOUNT},
}
CLOUDS: dict[str, type[Cloud]] = {"aws": Amazons, "gcp": Googles}


async def pull(store: Store, ours: Team, place: Path, kind: str, *, cut: bool = False, **change: str) -> tuple[Cloud, str]:
    layer = oci.layer(oci.Entry("etc/from-image", hashlib.shake_256(b"x").digest(400_000)))
    cloud = CLOUDS[kind](oci.Image([layer]).write(place / "image"), cut=cut)
    with serving(cloud) as address:
        shop = workshop(store, place, address)
        given = credentials({**SENT[kind], **change})
        pulled = await shop.pull(f"registry:{address}/{REPOSITORY}:one", Caller(ours, client(ours)), given, lambda *_: None)
    return cloud, pulled.image


@pytest.mark.parametrize("kind", CLOUDS)
async def test_their_registries_are_pulled_from_as_they_are_documented(store: Store, ours: Team, tmp_path: Path, kind: str) -> None:
    cloud, image = await pull(store, ours, tmp_path, kind)
    assert is_whole(tmp_path / "images", image)
    assert not cloud.wrong, "storage was shown what is for the registry alone"
    tokens = [line for line in cloud.seen if line.startswith("POST") or "/v2/token" in line]
    assert 1 <= len(tokens) <= 3, tokens


@pytest.mark.parametrize("kind", CLOUDS)
async def test_a_cut_layer_is_gone_on_with_where_it_was_redirected_to(store: Store, ours: Team, tmp_path: Path, kind: str) -> None:
    cloud, image = await pull(store, ours, tmp_path, kind, cut=True)
    assert is_whole(tmp_path / "images", image)
    assert not cloud.wrong
    assert "storage 60000" in cloud.seen


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("aws", {"awsSecretAccessKey": "another-secret"}),
        ("aws", {"awsAccessKeyId": "AKIDANOTHER"}),
        ("aws", {"awsRegion": "us-east-1"}),
        ("gcp", {"serviceAccountJson": '{"type": "service_account"}'}),
    ],
)
async def test_what_they_would_refuse_is_refused(store: Store, ours: Team, tmp_path: Path, kind: str, change: dict[str, str]) -> None:
    with pytest.raises(Refused) as refused:
        await pull(store, ours, tmp_path, kind, **change)
    assert refused.value.code is Code.IMAGE_ACCESS_DENIED
    assert not list((tmp_path / "images").glob("blobs/sha256/*"))
