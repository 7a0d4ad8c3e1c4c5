"""`atoll control listen`: write down where control answers other machines, with a certificate of the operator's, or one that is made here."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.base.errors import Code, Refused
from atoll.programs import certificates, control_config, instance
from atoll.programs.control_config import ControlConfig, Listener
from atoll.programs.files import exclusive
from atoll.programs.layout import Layout
from atoll.programs.users import account, require_root


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the operator asks for."""

    address: str
    names: tuple[str, ...]
    certificate: Path | None
    key: Path | None
    authority: Path | None
    urls: tuple[str, ...]
    region: str
    auto_activate: bool


def listen(place: Layout, wanted: Wanted) -> dict[str, Any]:
    """Write `control.toml`. *Idempotency*: again, a made authority is kept, and a certificate for the names is issued anew.

    *Errors*: Refused NOT_RUNNING (there is no instance), INVALID_REQUEST, SETUP_FAILED.
    """
    from atoll.agent.trust import check_url, fingerprint

    require_root("atoll control listen")
    config = instance.load(place)
    try:
        host, port = control_config.address(wanted.address)
    except ValueError as error:
        raise Refused(Code.INVALID_REQUEST, str(error)) from error
    names = wanted.names or _own_names(host)
    with exclusive(place.home):
        listener = _yours(wanted, host, port) if wanted.certificate is not None else _made(place, config, host, port, names)
        urls = tuple(check_url(url) for url in wanted.urls) or tuple(f"https://{_in_url(name)}:{port}" for name in names[:1])
        registries = control_config.load(place).registries
        control_config.save(place, ControlConfig(listener, urls, wanted.region, wanted.auto_activate, registries))
    return {
        "listen": f"{_in_url(host)}:{port}",
        "urls": list(urls),
        "names": list(names) if wanted.certificate is None else [],
        "pin": fingerprint(listener.authority.read_text()) if listener.authority is not None else None,
    }


def close(place: Layout) -> None:
    """Take the listener out of `control.toml`; certificates stay. *Errors*: as `listen`."""
    require_root("atoll control close")
    instance.load(place)
    with exclusive(place.home):
        control_config.save(place, replace(control_config.load(place), listener=None, urls=()))


def _yours(wanted: Wanted, host: str, port: int) -> Listener:
    import ssl

    if wanted.certificate is None or wanted.key is None:
        raise Refused(Code.INVALID_REQUEST, "a certificate needs its key: --certificate and --key")
    certificate, key = wanted.certificate.absolute(), wanted.key.absolute()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise Refused(Code.SETUP_FAILED, f"{certificate} and {key} cannot be used: {error}") from error
    return Listener(host, port, certificate, key, wanted.authority.absolute() if wanted.authority is not None else None)


def _made(place: Layout, config: instance.Config, host: str, port: int, names: tuple[str, ...]) -> Listener:
    user, now = account(), dt.datetime.now(dt.UTC)
    listener = Listener(host, port, place.secrets / "tls.crt", place.secrets / "tls.key", place.tls_authority)
    assert listener.authority is not None
    certificates.ensure_authority(listener.authority, place.tls_authority_key, name=config.install_id, now=now)
    certificates.issue(
        listener.certificate,
        listener.key,
        authority=listener.authority,
        authority_key=place.tls_authority_key,
        names=names,
        owner=user.owner if user is not None and os.geteuid() == 0 else None,
        now=now,
    )
    return listener


def _own_names(host: str) -> tuple[str, ...]:
    """By what this machine is reached: the address that it listens on, or its name and the address of its way out."""
    try:
        known = ipaddress.ip_address(host)
    except ValueError:
        return (host,)
    if not known.is_unspecified:
        return (host,)
    found = [socket.getfqdn()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: the kernel says from which address it would be.
            probe.connect(("192.0.2.1", 9))
            found.insert(0, probe.getsockname()[0])
        except OSError:
            pass
    return tuple(dict.fromkeys(found))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
