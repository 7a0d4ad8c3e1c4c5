"""Pushing an image to an OCI registry: ours, or anybody's. *Source*: the distribution specification, version 1.1."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any, Final, Self
from urllib.parse import urlsplit

import httpx

from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
CHUNK_BYTES: Final = 1 << 20
UPLOAD_S: Final = 600.0
_REFERENCE: Final = re.compile(
    r"(?P<address>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-f:]+\](?::[0-9]{1,5})?)/"
    r"(?P<name>[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
)
_PARAMETER: Final = re.compile(r'([a-z]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Place:
    """Where an image is pushed to: `ADDRESS/NAME:TAG`."""

    address: str
    name: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Place:
        """*Errors*: Refused INVALID_REQUEST. A name without an address is none: nothing is pushed to a registry that nobody has named."""
        found = _REFERENCE.fullmatch(text)
        if found is None or not (set(found["address"]) & set(".:") or found["address"] == "localhost"):
            raise Refused(Code.INVALID_REQUEST, f"{text[:200]!r} does not say where to push: REGISTRY/REPOSITORY:TAG")
        return cls(found["address"], found["name"], found["tag"] or "latest")

    def __str__(self) -> str:
        return f"{self.address}/{self.name}:{self.tag}"


@dataclass(frozen=True, slots=True)
class Blob:
    """Part of an image. *Units*: bytes."""

    kind: str
    digest: str
    size: int


class Registry:
    """One repository of a registry, to which one account pushes. Plain HTTP is spoken with this machine only."""

    def __init__(
        self, place: Place, *, username: str = "", password: Secret | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._place = place
        self._basic = httpx.BasicAuth(username, password.reveal()) if password is not None else None
        self._authorization: str | None = None
        self._also = ""
        """A scope besides the repository's own."""
        scheme = "http" if _here(urlsplit(f"//{place.address}").hostname or "") else "https"
        timeout = httpx.Timeout(60.0, write=UPLOAD_S, read=UPLOAD_S)
        self._http = httpx.Client(base_url=f"{scheme}://{place.address}", transport=transport, timeout=timeout, trust_env=scheme == "https")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def has(self, digest: str) -> bool:
        """Whether the repository has a blob."""
        return self._ask("HEAD", f"/v2/{self._place.name}/blobs/{digest}", allowed=(200, 404)).status_code == 200

    @property
    def repository(self) -> str:
        """`ADDRESS/NAME`."""
        return f"{self._place.address}/{self._place.name}"

    def mount(self, digest: str, other: str) -> bool:
        """Have a blob of another repository of this registry in this one, without sending it; whether the registry did so."""
        self._also = f"repository:{other}:pull"
        self._authorization = None
        path = f"/v2/{self._place.name}/blobs/uploads/"
        answer = self._ask("POST", path, allowed=(201, 202, 401, 403, 404), params={"mount": digest, "from": other})
        if answer.status_code == 202:
            # It has begun an upload instead, which nobody goes on with.
            where = self._http.base_url.join(answer.headers["location"])
            if (where.host, where.port) == (self._http.base_url.host, self._http.base_url.port):
                self._send("DELETE", str(where), headers=self._shown())
        return answer.status_code == 201

    def blob(self, blob: Blob, content: IO[bytes] | bytes) -> None:
        """Have a blob in the repository. *Idempotency*: what is there is not sent. *Errors*: Refused IMAGE_ACCESS_DENIED, IMAGE_UNAVAILABLE."""
        if self.has(blob.digest):
            return
        begun = self._ask("POST", f"/v2/{self._place.name}/blobs/uploads/", allowed=(202,))
        where = self._http.base_url.join(begun.headers["location"])
        if where.scheme != "https" and not _here(where.host):
            raise Refused(Code.IMAGE_UNAVAILABLE, f"{self._place.address} wants the image sent in clear to {where.host}")
        own = (where.host, where.port) == (self._http.base_url.host, self._http.base_url.port)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        if own:
            headers |= self._shown()
        done = self._send("PUT", str(where.copy_add_param("digest", blob.digest)), headers=headers, content=_pieces(content))
        self._check(done, allowed=(201,))

    def manifest(self, config: Blob, layers: list[Blob]) -> str:
        """Name the image; answers its digest."""
        described = [{"mediaType": one.kind, "digest": one.digest, "size": one.size} for one in (config, *layers)]
        document = httpx.Request(
            "PUT", "http://nowhere", json={"schemaVersion": 2, "mediaType": MANIFEST, "config": described[0], "layers": described[1:]}
        ).content
        path = f"/v2/{self._place.name}/manifests/{self._place.tag}"
        self._ask("PUT", path, allowed=(201,), headers={"Content-Type": MANIFEST}, content=document)
        return "sha256:" + hashlib.sha256(document).hexdigest()

    def _ask(self, method: str, path: str, *, allowed: tuple[int, ...], **options: Any) -> httpx.Response:
        headers = options.pop("headers", {})
        answer = self._send(method, path, headers={**headers, **self._shown()}, **options)
        if answer.status_code == 401 and self._authorize(answer.headers.get("www-authenticate", "")):
            answer = self._send(method, path, headers={**headers, **self._shown()}, **options)
        self._check(answer, allowed=allowed)
        return answer

    def _shown(self) -> dict[str, str]:
        return {"Authorization": self._authorization} if self._authorization else {}

    def _authorize(self, challenge: str) -> bool:
        """Get what the registry asks for; whether there is anything new to show."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._basic is not None:
            request = next(self._basic.auth_flow(httpx.Request("GET", "http://nowhere")))
            before, self._authorization = self._authorization, request.headers["Authorization"]
            return before != self._authorization
        if scheme.lower() != "bearer":
            return False
        said = dict(_PARAMETER.findall(rest))
        realm = httpx.URL(said.get("realm", ""))
        if realm.scheme != "https" and not (realm.scheme == "http" and _here(realm.host)):
            raise Refused(Code.IMAGE_ACCESS_DENIED, f"{self._place.address} wants a password sent in clear to {realm.host[:100]!r}")
        asked = {"scope": f"repository:{self._place.name}:pull,push {self._also}".strip()} | (
            {"service": said["service"]} if "service" in said else {}
        )
        answer = self._send("GET", str(realm.copy_merge_params(asked)), auth=self._basic)
        self._check(answer, allowed=(200,))
        token = answer.json().get("token") or answer.json().get("access_token")
        self._authorization = f"Bearer {token}"
        return bool(token)

    def _send(self, method: str, target: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, target, **options)
        except httpx.TransportError as error:
            raise Refused(Code.IMAGE_UNAVAILABLE, f"the registry {self._place.address} cannot be reached: {error}") from error

    def _check(self, answer: httpx.Response, *, allowed: tuple[int, ...]) -> None:
        status = answer.status_code
        if status in allowed:
            return
        code = Code.IMAGE_ACCESS_DENIED if status in (401, 403) else Code.IMAGE_UNAVAILABLE
        raise Refused(code, f"the registry {self._place.address} answered {status}{_why(answer)}")


def _why(answer: httpx.Response) -> str:
    try:
        first = answer.json()["errors"][0]
        return f": {first['code']}: {first.get('message', '')}"[:500]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ""


def _here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1")


def _pieces(content: IO[bytes] | bytes) -> Iterable[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    while piece := content.read(CHUNK_BYTES):
        yield piece
