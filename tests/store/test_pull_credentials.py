"""Registries that want accounts of three kinds, pulled from by the real program: each a server on loopback, as Amazon's token service is.

From what a client sends as `fromImageRegistry` to the blobs in the store, with nothing in between replaced but the addresses.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest

from atoll.base.errors import Code, Refused
from atoll.control.api.e2b import requests
from atoll.control.artifacts.imports import Imports
from atoll.control.builds.amazon import Amazon, sign
from atoll.control.builds.workshop import SandboxWorkshop
from atoll.control.service import Caller
from atoll.domain.tenancy import Team
from atoll.images.artifacts import Folder
from atoll.images.assembling import is_whole
from atoll.images.carrier import Carrier
from atoll.images.library import Library
from atoll.store.engine import Store
from tests.builders import NOW, client
from tests.e2e import oci

PROGRAM = Path(os.environ.get("ATOLL_BIN") or Path(__file__).resolve().parents[2] / "build" / "bin") / "atoll-io"
KEY_ID, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
SERVICE_ACCOUNT = json.dumps({"type": "service_account", "private_key": "-----BEGIN-----\nsecret: with a colon\n"})

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM} is not built: scripts/setup.py --only programs")


class Still:
    def now(self) -> float:
        return NOW

    def boot(self) -> float:
        return 0.0


@dataclass
class Hub:
    """A registry with one image, whose only account is `user:password`, and Amazon's service that hands that account out."""

    layout: Path
    user: str
    password: str
    seen: list[str] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        shown = handler.headers.get("Authorization", "")
        self.seen.append(f"{handler.command} {handler.path}")
        if handler.command == "POST":
            return self.token(handler, shown)
        if shown != "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode():
            return 401, {"WWW-Authenticate": 'Basic realm="hub"'}, b"{}"
        if handler.path == "/v2/":
            return 200, {}, b"{}"
        kind, name = handler.path.split("/")[-2:]
        manifest = json.loads((self.layout / "index.json").read_text())["manifests"][0]
        if kind == "manifests":
            return 200, {"Content-Type": manifest["mediaType"]}, oci.blob(self.layout, manifest["digest"]).read_bytes()
        return 200, {}, oci.blob(self.layout, name).read_bytes()

    def token(self, handler: BaseHTTPRequestHandler, shown: str) -> tuple[int, dict[str, str], bytes]:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        names = ("content-type", "host", "x-amz-date", "x-amz-target")
        headers = {name: handler.headers[name] for name in names}
        right = sign("POST", handler.path, headers, body, key_id=KEY_ID, secret=SECRET, region="eu-central-1", service="ecr")
        if shown != right:
            return 400, {}, json.dumps({"__type": "x#InvalidSignatureException", "message": shown}).encode()
        given = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return 200, {}, json.dumps({"authorizationData": [{"authorizationToken": given}]}).encode()


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            status, headers, body = hub.answer(self)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = handle_any  # noqa: N815 - as the library calls them

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def workshop(store: Store, place: Path, address: str) -> SandboxWorkshop:
    images = place / "images"
    carrier, library = Carrier(PROGRAM, images), Library(images, Folder(images), Still().now)
    part = Imports(store=store, clock=Still(), dice=os.urandom, carrier=carrier, uploads=place / "uploads", library=library)  # type: ignore[arg-type]
    nothing = cast("Any", None)
    amazon = Amazon(Still(), endpoint=lambda _region: f"http://{address}")  # type: ignore[arg-type]
    return SandboxWorkshop(nothing, part, nothing, nothing, amazon)


KINDS = {
    "registry": ("me", "p:ss word", {"type": "registry", "username": "me", "password": "p:ss word"}),
    "gcp": ("_json_key", SERVICE_ACCOUNT, {"type": "gcp", "serviceAccountJson": SERVICE_ACCOUNT}),
    "aws": ("AWS", "given-for-hours", {"type": "aws", "awsAccessKeyId": KEY_ID, "awsSecretAccessKey": SECRET, "awsRegion": "eu-central-1"}),
}


def credentials(sent: dict[str, str]) -> dict[str, str]:
    return requests.registry_credentials(requests.Registry.model_validate(sent))


@pytest.mark.parametrize("kind", KINDS)
async def test_an_image_is_pulled_with_each_kind_of_account(store: Store, ours: Team, tmp_path: Path, kind: str) -> None:
    user, password, sent = KINDS[kind]
    layout = oci.Image([oci.layer(oci.Entry("etc/from-image", b"yes\n"))], {"Env": ["WORD=one"]}).write(tmp_path / "image")
    hub = Hub(layout, user, password)
    with serving(hub) as address:
        shop = workshop(store, tmp_path, address)
        pulled = await shop.pull(f"registry:{address}/team/app:one", Caller(ours, client(ours)), credentials(sent), lambda *_: None)
    assert pulled.env == ("WORD=one",)
    assert is_whole(tmp_path / "images", pulled.image)
    assert (sum(line.startswith("POST") for line in hub.seen) == 1) is (kind == "aws")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_account_is_refused_and_not_repeated(store: Store, ours: Team, tmp_path: Path, kind: str) -> None:
    user, password, sent = KINDS[kind]
    layout = oci.Image([oci.layer(oci.Entry("a", b""))]).write(tmp_path / "image")
    secret = {"registry": "password", "gcp": "serviceAccountJson", "aws": "awsSecretAccessKey"}[kind]
    with serving(Hub(layout, user, password)) as address:
        shop = workshop(store, tmp_path, address)
        with pytest.raises(Refused) as refused:
            given = credentials({**sent, secret: "wrong-" + sent[secret]})
            await shop.pull(f"registry:{address}/team/app:one", Caller(ours, client(ours)), given, lambda *_: None)
    assert refused.value.code is Code.IMAGE_ACCESS_DENIED
    assert "wrong-" not in str(refused.value)
    assert not list((tmp_path / "images").glob("blobs/sha256/*"))
