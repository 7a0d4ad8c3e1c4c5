"""What E2B's clients send, read strictly: an option that this release cannot honour is refused by name, never dropped."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from atoll.base.errors import Code, Refused
from atoll.domain.spec import NetworkSpec
from atoll.planning.resolve import CreateRequest

INT32_MAX: Final = 2**31 - 1
V1_TIMEOUT_S: Final = 15
V2_TIMEOUT_S: Final = 300
ALL_TRAFFIC: Final = "0.0.0.0/0"
_NETWORK_ENTRIES_MAX: Final = 256
_DOMAIN: Final = re.compile(r"(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z][A-Za-z0-9-]{0,62}")
_MASK_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:(\d{1,5}|\$\{PORT\}))?")
_REQUEST_ID: Final = re.compile(r"[a-z0-9-]{1,255}")


def _whole(value: object) -> object:
    # JSON has one kind of number: 30.0 is an integer there, but neither true nor "30" is.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Seconds = Annotated[int, BeforeValidator(_whole), Field(ge=-INT32_MAX, le=INT32_MAX)]
Reference = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]*$")]


class Message(BaseModel):
    """Unknown members are kept, to be refused by name."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class AutoResume(Message):
    enabled: bool


class Network(Message):
    allow_public_traffic: bool | None = Field(default=None, alias="allowPublicTraffic")
    allow_out: list[str] | None = Field(default=None, alias="allowOut")
    deny_out: list[str] | None = Field(default=None, alias="denyOut")
    mask_request_host: str | None = Field(default=None, alias="maskRequestHost")


class NewSandbox(Message):
    """Body of create, on both routes; v2 has no `secure`."""

    template_id: Reference = Field(alias="templateID")
    timeout: Seconds | None = None
    secure: bool | None = None
    auto_pause: bool | None = Field(default=None, alias="autoPause")
    auto_pause_memory: bool | None = Field(default=None, alias="autoPauseMemory")
    auto_resume: AutoResume | None = Field(default=None, alias="autoResume")
    allow_internet_access: bool | None = None
    network: Network | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = Field(default=None, alias="envVars")


class Connect(Message):
    timeout: Seconds | None = None
    memory: bool | None = None


class Timeout(Message):
    timeout: Seconds


class Refresh(Message):
    duration: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=3600)] | None = None


class NewKey(Message):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]*$")]


def _unsupported(option: str, why: str = "") -> Refused:
    return Refused(Code.NOT_SUPPORTED, f"option {option!r} is not supported by this release{why}", option=option)


def _says_nothing(value: Any) -> bool:
    # What clients send for "I did not ask for this". An object with an empty one in it may ask for something: `mcp: {"x": {}}` does.
    return value is None or value is False or value == [] or value == {} or value == "" or value == {"tokens": {}}


def refuse_unknown(message: Message, where: str = "") -> None:
    """*Errors*: NOT_SUPPORTED, with the name of a member that we do not know and that asks for something."""
    for name, value in (message.model_extra or {}).items():
        if not _says_nothing(value):
            raise _unsupported(where + name[:64])


def _addresses(name: str, entries: list[str]) -> tuple[str, ...]:
    """The IPv4 entries, canonical where they are networks. *Errors*: INVALID_REQUEST, NOT_SUPPORTED."""
    if len(entries) > _NETWORK_ENTRIES_MAX:
        raise Refused(Code.INVALID_REQUEST, f"{name} has {len(entries)} entries, at most {_NETWORK_ENTRIES_MAX} are allowed")
    kept: list[str] = []
    for entry in entries:
        network = _network(entry)
        if network is None:
            raise Refused(Code.INVALID_REQUEST, f"{name}: {entry[:80]!r} is not an IP address or a CIDR block")
        if network.version == 4:
            kept.append(str(network) if "/" in entry else entry)
        elif name == "allowOut":
            raise _unsupported("network.allowOut", " for IPv6: sandboxes have IPv4 egress only")
        # A denied IPv6 range is denied already: there is no IPv6 egress to cut.
    return tuple(kept)


def _network(entry: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def network_spec(network: Network | None, *, internet: bool | None, secured: bool) -> NetworkSpec:
    """Egress and ingress as asked for. *Errors*: INVALID_REQUEST, NOT_SUPPORTED."""
    if network is None:
        return NetworkSpec(internet=internet is not False)
    refuse_unknown(network, "network.")
    denied = network.deny_out or []
    if any(_network(entry) is None and _DOMAIN.fullmatch(entry) for entry in denied):
        raise Refused(Code.INVALID_REQUEST, "denyOut takes IP addresses and CIDR blocks only, not domains")
    allowed = network.allow_out or []
    if any(_network(entry) is None and _DOMAIN.fullmatch(entry) for entry in allowed):
        if ALL_TRAFFIC not in denied and internet is not False:
            raise Refused(Code.INVALID_REQUEST, f'domains in allowOut need denyOut ["{ALL_TRAFFIC}"], to close everything else')
        raise _unsupported("network.allowOut", " for domains: use IP addresses and CIDR blocks")
    public = network.allow_public_traffic is not False
    if not public and not secured:
        raise Refused(Code.INVALID_REQUEST, "allowPublicTraffic=false needs a sandbox with secure=true")
    mask = network.mask_request_host
    if mask is not None and not _MASK_HOST.fullmatch(mask):
        raise Refused(Code.INVALID_REQUEST, "maskRequestHost is not a host name with an optional port")
    return NetworkSpec(
        internet=internet is not False,
        allow_out=_addresses("allowOut", allowed),
        deny_out=_addresses("denyOut", denied),
        public_traffic=public,
        mask_request_host=mask,
    )


def _check_lifecycle(body: NewSandbox) -> None:
    if body.auto_pause:
        raise _unsupported("autoPause", ": sandboxes are killed at their timeout")
    if body.auto_pause_memory is False:
        raise Refused(Code.INVALID_REQUEST, "autoPauseMemory=false needs autoPause=true", option="autoPauseMemory")
    if body.auto_resume is not None and body.auto_resume.enabled:
        raise _unsupported("autoResume")


def create_request(body: NewSandbox, *, v2: bool, request_id: str | None) -> CreateRequest:
    """What create asks for, in our words. *Errors*: INVALID_REQUEST, NOT_SUPPORTED."""
    _check_lifecycle(body)
    refuse_unknown(body)
    if body.auto_resume is not None:
        refuse_unknown(body.auto_resume, "autoResume.")
    secured = v2 or bool(body.secure)
    default_s = V2_TIMEOUT_S if v2 else V1_TIMEOUT_S
    return CreateRequest(
        template=body.template_id,
        timeout_s=default_s if body.timeout is None else body.timeout,
        metadata=body.metadata or {},
        env=body.env_vars or {},
        request_id=request_id,
        network=network_spec(body.network, internet=body.allow_internet_access, secured=secured),
        secured=secured,
        wait=True,
        e2b_env=True,
    )


def idempotency_key(raw: bytes | None) -> str | None:
    """The `Idempotency-Key` header. *Errors*: INVALID_REQUEST."""
    if raw is None:
        return None
    key = raw.decode("latin-1")
    if not _REQUEST_ID.fullmatch(key):
        raise Refused(Code.INVALID_REQUEST, "Idempotency-Key takes 1 to 255 characters of a-z, 0-9 and -")
    return key
