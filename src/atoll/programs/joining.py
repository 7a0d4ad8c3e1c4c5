"""`atoll agent join` and what belongs to it: from a machine with the programs on it to a host of somebody's deployment.

Theory of operation. In this order, each step durable before the next: the well-known document is read (over a verified connection; an
authority that the operator has only named by its fingerprint is fetched, compared and kept); a range of addresses is claimed that no other
host has; `host.toml` is written; the machine enrols (`agent/enrollment.py`, which keeps a draft of its own). A run that ends in between is
followed by one that keeps what is there. A machine that is a host already only has its credential looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.base.secret import Secret
from atoll.domain.inventory import Overcommit
from atoll.programs import agent_main, agent_socket, hosting, subnets
from atoll.programs.files import exclusive, read_json, write_whole
from atoll.programs.hosting import DriverName, HostConfig, Reserve
from atoll.programs.identity import boot_id
from atoll.programs.layout import Layout
from atoll.programs.users import ensure_account, require_root

if TYPE_CHECKING:
    from aiohttp import StreamReader

    from atoll.agent.enrollment import Admit
    from atoll.wire.agent import Registration
    from atoll.wire.wellknown import WellKnown

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,126}[a-z0-9])?")
_PIN: Final = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an operator asks of a machine that is to become a host."""

    url: str
    name: str
    region: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    authority: Path | None = None
    pin: str | None = None
    reserve: Reserve = hosting.NO_RESERVE
    overcommit: Overcommit = hosting.OVERCOMMIT
    slots: int = hosting.SLOTS
    subnet: int | None = None
    driver: DriverName = DriverName.OCI


@dataclass(frozen=True, slots=True)
class Outcome:
    """`new`: this run has made it a host; else it was one, and its credential is good."""

    host_id: str
    name: str
    install_id: str
    new: bool
    slots: str | None


def setup(place: Layout, wanted: Wanted) -> HostConfig:
    """Prepare this machine: everything but the enrolment. *Errors*: those of `join`."""
    require_root("atoll agent setup")
    _check(wanted)
    with _of_this_machine(), exclusive(place.home):
        config, _ = asyncio.run(_setup(place, wanted))
    return config


def join(place: Layout, wanted: Wanted, token: Secret | None) -> Outcome:
    """Make this machine a host, or see that it is one.

    *Idempotency*: again after whatever end of an earlier run, with the same token. *Errors*: Refused TLS_REQUIRED, PROTOCOL_UNSUPPORTED,
    ENROLLMENT_TOKEN_INVALID, ENROLLMENT_CONFLICT, CREDENTIAL_REVOKED, SETUP_FAILED; Unavailable CONTROL_UNTRUSTED, CONTROL_UNAVAILABLE.
    """
    from atoll.agent.enrollment import by_token

    if token is None:
        return _become(place, wanted, None)
    return _become(place, wanted, lambda: by_token(token))


def register(place: Layout, wanted: Wanted, *, api_url: str, key: Secret) -> Outcome:
    """The same by an operator's key instead of a token. *Errors*: as `join`, and those of the API."""
    return _become(place, wanted, lambda: _by_key(api_url, key, authority=hosting.load(place).authority))


def _become(place: Layout, wanted: Wanted, admit: Callable[[], Admit] | None) -> Outcome:
    require_root("atoll agent join")
    _check(wanted)
    with _of_this_machine(), exclusive(place.home):
        return asyncio.run(_enrolled(place, wanted, admit))


@contextlib.contextmanager
def _of_this_machine() -> Iterator[None]:
    """What the machine refuses (a full disk...) is a setup that failed, and can be run again."""
    try:
        yield
    except OSError as error:
        raise Refused(Code.SETUP_FAILED, str(error), hint="Mend what the message names (space, permissions) and run it again.") from error


async def _enrolled(place: Layout, wanted: Wanted, admit: Callable[[], Admit] | None) -> Outcome:
    from atoll.agent.config import load_identity

    known = load_identity(place.credential)
    config, _ = await _setup(place, wanted)
    if known is not None:
        told = await _look(config, known.credential)
        if told is not None:
            _same(config, wanted, told.name)
            return Outcome(told.host_id, told.name, told.install_id, False, config.slot_cidr)
        if admit is None:
            raise Refused(Code.CREDENTIAL_REVOKED, "this machine's credential is not good any more: the host was disabled or enrolled anew")
        # Worth nothing any more, and the operator has made a new token after the reset of the host.
        place.credential.unlink(missing_ok=True)
        config, _ = await _setup(place, wanted)
    settings = agent_main.agent_config(place, config)
    obtained = await agent_main.enroll(place, config, settings, admit() if admit is not None else _nobody, within_s=30.0)
    who = obtained.identity
    return Outcome(who.host_id, obtained.name, who.install_id, obtained.new, config.slot_cidr)


async def _nobody(_registrar: object, _registration: Registration) -> None:
    raise Refused(Code.ENROLLMENT_TOKEN_INVALID, "this machine is no host yet, and there is no token")


def _by_key(api_url: str, key: Secret, *, authority: Path | None) -> Admit:
    async def admit(_registrar: object, registration: Registration) -> None:
        from atoll.client.api import Api
        from atoll.client.target import Target

        target = Target(api_url, key, api_url, "--key-file", authority=authority)

        def ask() -> None:
            with Api(target) as api:
                api.register_host(registration.name, _body(registration))

        await asyncio.to_thread(ask)

    return admit


def _body(registration: Registration) -> dict[str, Any]:
    facts, over = registration.facts, registration.overcommit

    def amount(vector: Any) -> dict[str, int]:
        return {"cpuMillis": vector.cpu_millis, "memoryMib": vector.memory_mib, "diskMib": vector.disk_mib, "slots": vector.slots}

    body: dict[str, Any] = {
        "credentialDigest": registration.credential_digest,
        "arch": facts.arch,
        "inventory": {"cpuCount": facts.cpu_count, "memoryMib": facts.memory_mib, "diskMib": facts.disk_mib},
        "capacity": amount(registration.capacity),
        "slots": registration.slots,
        "region": registration.region,
        "labels": dict(registration.labels),
    }
    if registration.reserve is not None:
        body["reserve"] = amount(registration.reserve)
    if over is not None:
        body["overcommit"] = {"cpu": over.cpu, "memory": over.memory, "disk": over.disk}
    return body


def _check(wanted: Wanted) -> None:
    from atoll.agent.trust import check_url

    check_url(wanted.url)
    if not _NAME.fullmatch(wanted.name):
        raise Refused(Code.INVALID_REQUEST, f"{wanted.name[:64]!r} is no name for a host: use a to z, 0 to 9, dots and dashes")
    if wanted.pin is not None and not _PIN.fullmatch(wanted.pin):
        raise Refused(Code.INVALID_REQUEST, "a pin is `sha256:` and 64 hex digits, as `atoll host enrollment-token create` prints it")
    if wanted.pin is not None and wanted.authority is not None:
        raise Refused(Code.INVALID_REQUEST, "give the authority's file or its pin, not both")


async def _setup(place: Layout, wanted: Wanted) -> tuple[HostConfig, WellKnown]:
    """Write down how this machine is a host. *Errors*: as `join`."""
    if place.config.exists():
        raise Refused(
            Code.SETUP_FAILED,
            f"{place.home} is an instance of its own: it has control, and its own host",
            hint="Choose another ATOLL_HOME for a host of another deployment.",
        )
    before = hosting.load(place) if place.host_config.exists() else None
    authority, pem = await _authority(place, wanted, before)
    document = await _document(wanted.url, authority)
    if before is not None and before.install_id != document.install_id:
        raise Refused(
            Code.SETUP_FAILED,
            f"{place.home} is a host of install {before.install_id}, and {wanted.url} is {document.install_id}",
            hint="Choose another ATOLL_HOME, or remove that one after its host was disabled.",
        )
    from atoll.images.trust import KEYS_FILE, keep_keys

    hosting.ensure_directories(place)
    if wanted.driver is DriverName.OCI:
        # The resolver of sandboxes runs as this user.
        ensure_account()
    if document.image_keys is not None and not (place.agent / KEYS_FILE).exists():
        # Once: what comes later counts only when it is signed by what came now.
        document.image_keys.usable()
        keep_keys(place.agent, document.image_keys)
    if pem is not None:
        write_whole(place.authority, pem, mode=0o644)
        authority = place.authority
    subnet = _subnet(place, wanted, before, document)
    config = _config(wanted, document, subnet=subnet, authority=authority)
    if before is not None and place.credential.exists():
        # What was registered stays as it was registered; only the way to control may be another.
        config = replace(before, control=config.control, authority=config.authority)
    hosting.save(place, config)
    return config, document


async def _authority(place: Layout, wanted: Wanted, before: HostConfig | None) -> tuple[Path | None, str | None]:
    """Who signs control's certificate: the file to verify with now, and what of it is to be kept."""
    from atoll.agent.trust import context, fingerprint

    if wanted.authority is not None:
        context(wanted.authority)
        pem = wanted.authority.read_text()
        return wanted.authority, pem
    if wanted.pin is None:
        return (before.authority if before is not None else None), None
    pem = await _unverified_authority(wanted.url)
    if fingerprint(pem) != wanted.pin:
        raise Refused(
            Code.CONTROL_UNTRUSTED,
            f"the authority that {wanted.url} shows is {fingerprint(pem)}, not the one that was pinned",
            hint="Somebody is in between, or the pin is of another deployment: print it again with `atoll host enrollment-token create`.",
        )
    hosting.ensure_directories(place)
    fetched = place.run / "authority.fetched.pem"
    write_whole(fetched, pem, mode=0o644)
    return fetched, pem


async def _unverified_authority(url: str) -> str:
    """The authority as the other end says it is: worth nothing until it was compared with the pin."""
    import ssl

    import aiohttp

    from atoll.wire.wellknown import BYTES_MAX, PATH, WellKnown

    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15.0)) as session,
            session.get(url.rstrip("/") + PATH, ssl=unverified, allow_redirects=False) as answer,
        ):
            document = WellKnown.model_validate_json(await _body_of(answer.content, limit=BYTES_MAX))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Refused(Code.CONTROL_UNAVAILABLE, f"{url} does not answer as Atoll does: {type(error).__name__}") from error
    if document.ca_pem is None:
        raise Refused(Code.CONTROL_UNTRUSTED, f"{url} names no authority of its own", hint="Leave --ca-pin out, or give --ca FILE.")
    return document.ca_pem


async def _body_of(content: StreamReader, *, limit: int) -> bytes:
    """*Errors*: ValueError when it is longer than any document of ours."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > limit:
            raise ValueError(f"longer than {limit} bytes")
    return bytes(body)


async def _document(url: str, authority: Path | None) -> WellKnown:
    from atoll.agent.transport import HttpTransport
    from atoll.wire.agent import PROTOCOL

    control = HttpTransport(url, authority=authority)
    try:
        document = await control.well_known()
    finally:
        await control.close()
    if not document.protocol.min <= PROTOCOL <= document.protocol.max:
        speaks = f"{document.protocol.min} to {document.protocol.max}"
        raise Refused(Code.PROTOCOL_UNSUPPORTED, f"control speaks protocol {speaks}, this agent {PROTOCOL}")
    return document


def _subnet(place: Layout, wanted: Wanted, before: HostConfig | None, document: WellKnown) -> int | None:
    if wanted.driver is DriverName.FAKE:
        return None
    chosen = wanted.subnet if wanted.subnet is not None else before.subnet if before is not None else None
    taken = {index for index in map(subnets.index_of, document.slots_taken) if index is not None}
    return subnets.claim(place.home, document.install_id, wanted=chosen, avoid=taken)


def _config(wanted: Wanted, document: WellKnown, *, subnet: int | None, authority: Path | None) -> HostConfig:
    urls = [wanted.url.rstrip("/"), *document.agents_urls]
    return HostConfig(
        install_id=document.install_id,
        name=wanted.name,
        control=tuple(dict.fromkeys(urls)),
        subnet=subnet,
        region=wanted.region or document.region,
        labels=dict(wanted.labels),
        reserve=wanted.reserve,
        overcommit=wanted.overcommit,
        slots=wanted.slots,
        authority=authority,
        driver=wanted.driver,
        joined=True,
    )


async def _look(config: HostConfig, credential: Secret) -> Any:
    """Who a credential is; None when it is nobody's any more."""
    control = agent_main.transport(config, credential)
    try:
        return await control.identity()
    except Refused as error:
        if error.code is Code.CREDENTIAL_REVOKED:
            return None
        raise
    finally:
        await control.close()


def _same(config: HostConfig, wanted: Wanted, name: str) -> None:
    """*Errors*: Refused ENROLLMENT_CONFLICT when the machine is a host with another configuration than the one that is asked for now."""
    other = [
        what
        for what, now, then in (
            ("name", wanted.name, name),
            ("region", wanted.region or config.region, config.region),
            ("labels", dict(wanted.labels), dict(config.labels)),
            ("reserve", wanted.reserve, config.reserve),
            ("overcommit", wanted.overcommit, config.overcommit),
            ("slots", wanted.slots, config.slots),
            ("subnet", wanted.subnet if wanted.subnet is not None else config.subnet, config.subnet),
        )
        if now != then
    ]
    if other:
        raise Refused(
            Code.ENROLLMENT_CONFLICT,
            f"this machine is host {name!r} already, with another {', '.join(other)}",
            hint=f"To change that: `atoll host disable {name}`, `atoll host reset {name}`, and join with a new token.",
        )


def leave(place: Layout) -> list[str]:
    """Be no host any more: remove what is left of sandboxes, then credential and configuration; the placements that were removed.

    *Errors*: Refused NOT_RUNNING (it is none), AGENT_LOCKED (its agent runs), CLEANUP_FAILED names what is still there.
    """
    from atoll.images.trust import KEYS_FILE

    require_root("atoll agent leave")
    with _of_this_machine(), exclusive(place.home):
        config = hosting.load(place)
        if not config.joined:
            raise Refused(Code.SETUP_FAILED, f"{place.home} is an instance of its own", hint="`atoll down` stops it.")
        removed = asyncio.run(agent_main.sweep(place, config))
        for path in (place.credential, place.agent / "enrollment.draft", place.agent / KEYS_FILE, place.host_config):
            path.unlink(missing_ok=True)
        if config.subnet is not None:
            subnets.release(config.install_id)
    return removed


def status(place: Layout) -> dict[str, Any]:
    """This machine as a host, without asking control. *Errors*: Refused NOT_RUNNING when it is none there."""
    from atoll.agent.config import load_identity
    from atoll.agent.report import of_journal

    config = hosting.load(place)
    known = load_identity(place.credential) if os.access(place.agent, os.R_OK) else None
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    held = agent_socket.ask(place.agent_socket)
    if held is None:
        with contextlib.suppress(AtollError, OSError), agent_main.agent_stopped(place):
            held = of_journal(place.agent / "agent.db", now_boot=now, boot_id=boot_id())
    heard = read_json(place.agent_health) or {}
    return {
        "home": str(place.home),
        "name": config.name,
        "hostId": known.host_id if known is not None else None,
        "installId": config.install_id,
        "control": list(config.control),
        "driver": config.driver.value,
        "slots": config.slot_cidr,
        "running": (held or {}).get("pid") is not None,
        "pid": (held or {}).get("pid"),
        "epoch": (held or {}).get("epoch"),
        "answeredSecondsAgo": round(now - float(heard["boot_s"]), 1) if "boot_s" in heard else None,
        "leaseLeftSeconds": (held or {}).get("leaseLeftSeconds"),
        "problem": heard.get("problem") or "",
        "isolations": heard.get("isolations") or [],
        "placements": (held or {}).get("placements") or [],
    }
