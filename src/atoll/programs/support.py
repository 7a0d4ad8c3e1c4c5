"""`atoll support bundle`: what somebody who is to help needs to see of an instance, in one file, without a secret.

Theory of operation. What is packed holds no secret by its making: keys, credentials and tokens are kept as digests or in files of their
own, which are not packed; environment values are sealed in the database, which is not packed; logs and events never get any. Clients' own
words about sandboxes (metadata) are left out, too: nobody knows what they put there. On top of that every text is searched for the
secrets of this instance and for what has the form of one; what is found is masked, and the bundle says how often. A part that cannot be
had is named with the reason, and the rest is packed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform
import re
import sqlite3
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from atoll.base.errors import AtollError, Code, Refused
from atoll.client.api import Api
from atoll.client.target import of_instance
from atoll.programs import instance, layout
from atoll.programs.layout import PROCESSES, Layout
from atoll.store import schema

LOG_BYTES: Final = 1 << 20
"""Of the end of each log."""
RECORDS: Final = 1000
"""Of events, and of entries of the audit: the last ones."""
MASK: Final = b"***"
SECRET_LENGTH_MIN: Final = 12
"""Shorter than any of ours: a short text would be found everywhere."""
_FORMS: Final = re.compile(
    rb"(?:sk_)?e2b_[0-9a-f]{40}|\bhk_[0-9a-f]{32,}|\bet_[0-9a-f]{32,}|\b[et]a_[0-9a-f]{40}"
    rb"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
    rb"|[a-z+]+://[^\s:/@\"]+:[^\s@\"]+@"
)
"""Keys, host credentials, enrolment tokens, access tokens, signed tokens, private keys, addresses with passwords."""
_NO_SECRETS: Final = (b"-----", b"hst_", b"ins_", b"epo_", b"{")
_WORD: Final = re.compile(rb"[a-z_]{1,24}")
"""Names of fields, in files that hold more than the secret."""


@dataclass(slots=True)
class Bundle:
    """The parts by name, and why others are missing."""

    secrets: list[bytes]
    parts: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    masked: int = 0

    def add(self, name: str, make: Callable[[], Any]) -> None:
        """Have this part, or say why not."""
        try:
            made = make()
        except (AtollError, OSError, ValueError, sqlite3.Error, subprocess.SubprocessError) as error:
            self.missing[name] = f"{type(error).__name__}: {error}"
            return
        raw = (
            made
            if isinstance(made, bytes)
            else made.encode()
            if isinstance(made, str)
            else json.dumps(made, indent=2, default=str).encode()
        )
        self.parts[name] = self._clean(raw)

    def _clean(self, raw: bytes) -> bytes:
        for secret in self.secrets:
            self.masked += raw.count(secret)
            raw = raw.replace(secret, MASK)
        raw, count = _FORMS.subn(MASK, raw)
        self.masked += count
        return raw


def collect(place: Layout) -> Bundle:
    """Everything that can be had now. *Errors*: Refused NOT_RUNNING when there is no instance."""
    from atoll.programs import doctor, status

    config = instance.load(place)
    bundle = Bundle(secrets=sorted(_forms_of(known_secrets(place)), key=len, reverse=True))
    bundle.add("versions.json", versions)
    bundle.add("status.json", lambda: status.collect(place))
    bundle.add("doctor.json", lambda: doctor.examine(place))
    bundle.add("config.toml", place.config.read_bytes)
    bundle.add("agent.health.json", place.agent_health.read_bytes)
    bundle.add("database.json", lambda: database(place))
    _from_control(bundle, place)
    bundle.add("metrics/edge.txt", lambda: _fetched(f"{config.admin_url}/metrics"))
    for name in (*PROCESSES, "supervisor"):
        bundle.add(f"log/{name}.log", lambda name=name: tail(place.log_file(name)))  # type: ignore[misc]
    return bundle


def _from_control(bundle: Bundle, place: Layout) -> None:
    try:
        api = Api(of_instance(place.home), timeout_s=20.0)
    except AtollError as error:
        bundle.missing["control"] = str(error)
        return
    with api:
        bundle.add("deployment.json", api.config)
        bundle.add("hosts.json", api.hosts)
        bundle.add("templates.json", api.templates)
        bundle.add("alerts.json", lambda: api.alerts(state="all", limit=RECORDS))
        bundle.add("events.json", lambda: api.deployment_events(newest=True, limit=RECORDS))
        bundle.add("audit.json", lambda: api.audit(newest=True, limit=RECORDS))
        bundle.add("sandboxes.json", lambda: [_without_words(one) for one in api.sandboxes(team="*", limit=RECORDS)])
        bundle.add("metrics/control.txt", api.metrics)


def _without_words(sandbox: dict[str, Any]) -> dict[str, Any]:
    """What clients say of a sandbox is theirs; names of metadata stay, to tell that there is any."""
    return {**sandbox, "metadata": sorted(sandbox.get("metadata") or {}), "clientRequestId": None}


def write(bundle: Bundle, target: Path) -> dict[str, Any]:
    """Write the file, for its owner only; what it holds. *Errors*: Refused INVALID_REQUEST when it is there already."""
    summary = {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": metadata.version("atoll"),
        "masked": bundle.masked,
        "missing": bundle.missing,
        "parts": {name: {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for name, raw in sorted(bundle.parts.items())},
    }
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Refused(Code.INVALID_REQUEST, f"{target} is there already", hint="Name a file that does not exist yet.") from None
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, raw in {"bundle.json": json.dumps(summary, indent=2).encode(), **bundle.parts}.items():
            entry = tarfile.TarInfo(f"atoll-support/{name}")
            entry.size, entry.mtime, entry.mode = len(raw), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(raw))
    return {"file": str(target), "bytes": target.stat().st_size, **summary}


def versions() -> dict[str, Any]:
    """Of everything that takes part."""
    packages = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    binaries = layout.bin_directory()
    return {
        "atoll": metadata.version("atoll"),
        "schema": schema.newest(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "system": _os_release(),
        "programs": {
            **{name: _said([str(binaries / name), *words]) for name, words in (("atoll-io", ["version"]), ("runsc", ["--version"]))},
            **{name: _said([name, "--version"]) for name in ("crun", "runc")},
        },
        "packages": dict(sorted(packages.items())),
    }


def _os_release() -> str:
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("PRETTY_NAME=")), "unknown")


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}"
    return (done.stdout or done.stderr).strip().splitlines()[0][:200] if (done.stdout or done.stderr).strip() else f"exit {done.returncode}"


def database(place: Layout) -> dict[str, Any]:
    """Which schema it has, and how large it and its tables are; nothing of what is in them."""
    if (place.secrets / "database.url").exists():
        return {"kind": "postgresql", "code_schema": schema.newest()}
    with sqlite3.connect(f"file:{place.database}?mode=ro", uri=True, timeout=5.0) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")]
        rows = {table: connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0] for table in tables}  # noqa: S608 - its own names
        version = connection.execute(f"SELECT version_num FROM {schema.VERSIONS}").fetchall()  # noqa: S608 - a constant
    sizes = {path.name: path.stat().st_size for path in sorted(place.control.glob("atoll.db*"))}
    return {"kind": "sqlite", "schema": [row[0] for row in version], "code_schema": schema.newest(), "rows": rows, "bytes": sizes}


def _fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5.0) as answer:  # noqa: S310 - the edge's admin side on loopback
        return bytes(answer.read(LOG_BYTES))


def tail(path: Path) -> bytes:
    """Whole lines of a log's end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        raw = file.read()
    return raw if size <= LOG_BYTES else raw.partition(b"\n")[2]


def known_secrets(place: Layout) -> Iterator[bytes]:
    """What must not be in any bundle, as far as this user may read it."""
    files = [place.operator_key, place.enrollment_token, place.credential]
    for directory in (place.secrets, place.agent):
        if os.access(directory, os.R_OK | os.X_OK):
            files += [path for path in directory.iterdir() if path.is_file() and not path.name.startswith("agent.db")]
    for path in files:
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        yield raw.strip()
        yield from (line.strip() for line in raw.splitlines())
        yield from re.findall(rb'"([^"\\]{%d,})"' % SECRET_LENGTH_MIN, raw)
        yield from re.findall(rb"://[^\s:/@]+:([^\s@]+)@", raw)
    key = os.environ.get("ATOLL_API_KEY")
    if key:
        yield key.encode()


def _forms_of(secrets: Iterable[bytes]) -> set[bytes]:
    """Each as it is and as it would look encoded; without what is no secret because everybody knows it."""
    found: set[bytes] = set()
    for secret in secrets:
        if len(secret) < SECRET_LENGTH_MIN or secret.startswith(_NO_SECRETS) or _WORD.fullmatch(secret):
            continue
        found |= {secret, base64.b64encode(secret), secret.hex().encode()}
    return found
