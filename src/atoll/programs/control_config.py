"""`control.toml`: what the operator decides about control's process: where hosts of other machines reach it, and how they join; from where images are pulled,
and where they are kept.

Optional, and never written by `up`: without it control answers on loopback only. `atoll control listen` writes it, or an operator does.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import Code, Refused
from atoll.images.bucket_settings import BucketSettings
from atoll.programs.files import write_whole
from atoll.programs.layout import Layout

PORT_DEFAULT: Final = 3443


@dataclass(frozen=True, slots=True)
class Listener:
    """Where control answers over TLS, and what it shows there."""

    host: str
    port: int
    certificate: Path
    key: Path
    authority: Path | None = None
    """Who signed the certificate, where machines do not know it: told to those that join."""


@dataclass(frozen=True, slots=True)
class Registries:
    """How images are pulled."""

    mirrors: Mapping[str, str] = field(default_factory=dict)
    """By a registry's name (Docker's own is `index.docker.io`): `HOST[:PORT][/PREFIX]`, which is asked first, without credentials."""
    plain_http: tuple[str, ...] = ()
    """`HOST:PORT` of registries and mirrors besides those on this machine that are spoken to in clear."""

    def options(self) -> dict[str, Any]:
        """As `atoll-io image pull` is told."""
        return {"mirrors": dict(self.mirrors), "plainHttp": list(self.plain_http)}


NO_REGISTRIES: Final = Registries()


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The file, or what holds without it."""

    listener: Listener | None = None
    urls: tuple[str, ...] = ()
    """Where agents dial, every replica."""
    region: str = "local"
    auto_activate: bool = True
    registries: Registries = NO_REGISTRIES
    artifacts: BucketSettings | None = None
    """None: in control's own folder."""


def load(place: Layout) -> ControlConfig:
    """*Errors*: Refused SETUP_FAILED when the file is broken."""
    try:
        raw = tomllib.loads(place.control_config.read_text())
        found = _of(place, raw.get("agents", {}), _registries(raw.get("images", {})))
        return replace(found, artifacts=_artifacts(place, raw.get("artifacts", {})))
    except FileNotFoundError:
        return ControlConfig()
    except (OSError, KeyError, ValueError, TypeError, AttributeError, tomllib.TOMLDecodeError) as error:
        raise Refused(
            Code.SETUP_FAILED,
            f"{place.control_config} cannot be used: {type(error).__name__} {error}",
            hint="Mend the file, or write it anew with `atoll control listen`.",
        ) from error


def _of(place: Layout, raw: Mapping[str, Any], registries: Registries) -> ControlConfig:
    unknown = set(raw) - {"listen", "certificate", "key", "authority", "urls", "region", "auto_activate"}
    if unknown:
        raise ValueError(f"[agents] has no {', '.join(sorted(unknown))}")
    listener = None
    if raw.get("listen"):
        host, port = address(str(raw["listen"]))
        authority = raw.get("authority")
        listener = Listener(
            host,
            port,
            place.home / str(raw["certificate"]),
            place.home / str(raw["key"]),
            place.home / str(authority) if authority else None,
        )
    return ControlConfig(
        listener,
        tuple(str(url).rstrip("/") for url in raw.get("urls", [])),
        str(raw.get("region", "local")),
        bool(raw.get("auto_activate", True)),
        registries,
    )


def _registries(raw: Mapping[str, Any]) -> Registries:
    unknown = set(raw) - {"mirrors", "plain_http"}
    if unknown:
        raise ValueError(f"[images] has no {', '.join(sorted(unknown))}")
    return Registries(
        {str(name): str(place) for name, place in raw.get("mirrors", {}).items()}, tuple(str(one) for one in raw.get("plain_http", []))
    )


def _artifacts(place: Layout, raw: Mapping[str, Any]) -> BucketSettings | None:
    unknown = set(raw) - {"kind", "bucket", "region", "endpoint", "prefix", "credentials", "path_style", "plain_http"}
    if unknown:
        raise ValueError(f"[artifacts] has no {', '.join(sorted(unknown))}")
    kind = str(raw.get("kind", "folder"))
    if kind == "folder":
        if set(raw) - {"kind"}:
            raise ValueError('[artifacts] says more than a folder needs: is kind = "s3" meant?')
        return None
    if kind != "s3":
        raise ValueError(f'[artifacts] kind = "{kind}" is none: folder, s3')
    endpoint = str(raw["endpoint"]).rstrip("/") if raw.get("endpoint") else None
    plain = bool(raw.get("plain_http", False))
    if endpoint is not None and not endpoint.startswith("https://") and not (plain and endpoint.startswith("http://")):
        raise ValueError("[artifacts] endpoint is https://HOST[:PORT]; in clear only with plain_http = true")
    credentials = raw.get("credentials")
    return BucketSettings(
        bucket=str(raw["bucket"]),
        region=str(raw.get("region", "us-east-1")),
        endpoint=endpoint,
        prefix=str(raw.get("prefix", "")),
        credentials=place.home / str(credentials) if credentials else None,
        path_style=bool(raw.get("path_style", True)),
        plain_http=plain,
    )


def address(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT, [V6]:PORT or :PORT. *Errors*: ValueError."""
    host, sign, port = text.rpartition(":")
    if not sign or text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        host, port = text, str(PORT_DEFAULT)
    host = host.removeprefix("[").removesuffix("]") or "0.0.0.0"
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no address: give HOST:PORT")
    return host, int(port)


def save(place: Layout, config: ControlConfig) -> None:
    """Write the file, whole or not at all."""
    listener = config.listener
    lines = [
        "# What `atoll control listen` wrote; it may be edited. Certificates are read again when their files change, the rest at a start.",
        "[agents]",
    ]
    if listener is not None:
        host = f"[{listener.host}]" if ":" in listener.host else listener.host
        lines += [
            f"listen = {json.dumps(f'{host}:{listener.port}')}",
            f"certificate = {json.dumps(_shown(place, listener.certificate))}",
            f"key = {json.dumps(_shown(place, listener.key))}",
            *([f"authority = {json.dumps(_shown(place, listener.authority))}"] if listener.authority is not None else []),
        ]
    lines += [
        "# Where hosts of other machines dial: every replica of control.",
        f"urls = {json.dumps(list(config.urls))}",
        "# Of hosts that name none.",
        f"region = {json.dumps(config.region)}",
        "# Whether a host takes sandboxes as soon as it has enrolled, or when an operator activates it.",
        f"auto_activate = {'true' if config.auto_activate else 'false'}",
    ]
    if config.registries != NO_REGISTRIES:
        lines += [
            "[images]",
            "# Registries that are spoken to in clear, besides those on this machine.",
            f"plain_http = {json.dumps(list(config.registries.plain_http))}",
            "# Who is asked first in place of a registry; Docker's own is index.docker.io.",
            "[images.mirrors]",
            *(f"{json.dumps(name)} = {json.dumps(to)}" for name, to in sorted(config.registries.mirrors.items())),
        ]
    lines += _artifacts_lines(place, config.artifacts)
    write_whole(place.control_config, "\n".join(lines) + "\n", mode=0o644)


def _artifacts_lines(place: Layout, kept: BucketSettings | None) -> list[str]:
    if kept is None:
        return []
    values: dict[str, str | bool] = {"kind": "s3", "bucket": kept.bucket, "region": kept.region}
    if kept.endpoint is not None:
        values["endpoint"] = kept.endpoint
    if kept.prefix:
        values["prefix"] = kept.prefix
    if kept.credentials is not None:
        values["credentials"] = _shown(place, kept.credentials)
    values |= {"path_style": kept.path_style, "plain_http": kept.plain_http}
    return [
        "# Where images and uploads are kept. Credentials: a file with JSON for control's user, else AWS_ACCESS_KEY_ID and its like.",
        "[artifacts]",
        *(f"{name} = {json.dumps(value)}" for name, value in values.items()),
    ]


def _shown(place: Layout, path: Path) -> str:
    return str(path.relative_to(place.home)) if path.is_relative_to(place.home) else str(path)
