"""Amazon's registries: keys of an account become the user and password of a registry, for some hours.

Source: Amazon ECR API, GetAuthorizationToken; AWS Signature Version 4.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import httpx

from atoll.base.clock import Clock
from atoll.base.errors import Code, Refused

REGION: Final = re.compile(r"[a-z]{2}(?:-[a-z]{2,10}){1,2}-[0-9]{1,2}")
SERVICE: Final = "ecr"
TARGET: Final = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"
TIMEOUT_S: Final = 30.0
KEYS: Final = ("awsAccessKeyId", "awsSecretAccessKey", "awsRegion")


def endpoint(region: str) -> str:
    """Where a region's tokens are asked for."""
    return f"https://api.ecr.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


@dataclass(frozen=True, slots=True)
class Amazon:
    """Asks for tokens. `endpoint(region)` is a base URL."""

    clock: Clock
    transport: httpx.AsyncBaseTransport | None = None
    endpoint: Callable[[str], str] = field(default=endpoint)

    async def login(self, given: Mapping[str, str]) -> dict[str, str]:
        """User and password for `KEYS`. *Errors*: Refused INVALID_REQUEST (no region), IMAGE_ACCESS_DENIED, IMAGE_UNAVAILABLE (no answer)."""
        key_id, secret, region = (given[name] for name in KEYS)
        if REGION.fullmatch(region) is None:
            raise Refused(Code.INVALID_REQUEST, f"{region[:40]!r} is no region of Amazon's")
        base, body = self.endpoint(region).rstrip("/"), b"{}"
        headers = {
            "content-type": "application/x-amz-json-1.1",
            "host": httpx.URL(base).netloc.decode(),
            "x-amz-date": datetime.fromtimestamp(self.clock.now(), UTC).strftime("%Y%m%dT%H%M%SZ"),
            "x-amz-target": TARGET,
        }
        signed = sign("POST", "/", headers, body, key_id=key_id, secret=secret, region=region, service=SERVICE)
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, transport=self.transport) as http:
                answer = await http.post(f"{base}/", content=body, headers={**headers, "authorization": signed})
        except httpx.HTTPError as error:
            raise Refused(Code.IMAGE_UNAVAILABLE, f"Amazon did not answer for its registries in {region}") from error
        return _login(answer)


def _login(answer: httpx.Response) -> dict[str, str]:
    try:
        said = answer.json()
        if answer.status_code == httpx.codes.OK:
            clear = base64.b64decode(said["authorizationData"][0]["authorizationToken"], validate=True).decode()
            user, colon, password = clear.partition(":")
            if colon and user and password:
                return {"username": user, "password": password}
        kind = str(said.get("__type", "")).rpartition("#")[2]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        kind = ""
    # Its message may repeat what was signed: its kind says enough.
    raise Refused(Code.IMAGE_ACCESS_DENIED, f"Amazon gave no token for its registry: status {answer.status_code} {kind[:80]}".rstrip())


def sign(method: str, path: str, headers: Mapping[str, str], body: bytes, *, key_id: str, secret: str, region: str, service: str) -> str:
    """The Authorization header of a request without a query. `headers`: lower-case names, with host and x-amz-date."""
    names = sorted(headers)
    signed = ";".join(names)
    lines = [method, path, "", *(f"{name}:{headers[name].strip()}" for name in names), "", signed, hashlib.sha256(body).hexdigest()]
    at = headers["x-amz-date"]
    scope = f"{at[:8]}/{region}/{service}/aws4_request"
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{digest}".encode(), hashlib.sha256).hexdigest()
    return f"AWS4-HMAC-SHA256 Credential={key_id}/{scope}, SignedHeaders={signed}, Signature={signature}"
