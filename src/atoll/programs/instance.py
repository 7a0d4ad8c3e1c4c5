"""One instance: its directory, configuration and secrets. Made by `up`, read by everything else.

Theory of operation. `config.toml` is written once, last among what makes the instance unique, and only its port follows ATOLL_PORT
later. Secrets are made once each and never again, so that tokens and sealed columns stay valid over restarts: a missing one is made,
an existing one is left alone. The operator key and the enrolment token exist in clear only in root's files here; control gets their
digests through `control/bootstrap.json`, which it reads at each start.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import socket
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.base.ids import Prefix, is_id, new_id
from atoll.client.target import PORT_DEFAULT
from atoll.domain.tenancy import key_digest
from atoll.images import signing
from atoll.images.signing import CHAIN_FILE, KEY_FILE
from atoll.programs import subnets
from atoll.programs.files import make_directory, read_json, write_whole
from atoll.programs.layout import Layout
from atoll.programs.machines import Machines
from atoll.programs.users import Account, closed_on_the_way

KEY_PREFIX: Final = "e2b_"
KEY_BYTES: Final = 20
TOKEN_FRESH_S: Final = 1800.0
SEALING_KEY: Final = "sealing.key"
TOKEN_KEY: Final = "token.key"  # noqa: S105 - a file's name
GUEST_KEY: Final = "guest-ed25519"
EDGE_TOKEN: Final = "edge.token"  # noqa: S105 - a file's name
SECRETS: Final = (SEALING_KEY, TOKEN_KEY, GUEST_KEY, EDGE_TOKEN, KEY_FILE, CHAIN_FILE)
SEALS: Final = (SEALING_KEY, TOKEN_KEY, GUEST_KEY, EDGE_TOKEN)
"""Those that a database belongs to: what is in it is of no use with others. Keys of images may be others, and are, after a rotation."""


@dataclass(frozen=True, slots=True)
class Config:
    """What `config.toml` says. The edge listens on `port`, control on the next, the edge's admin side on the one after."""

    install_id: str
    port: int
    subnet: int
    host_name: str
    machines: Machines = Machines.OFF

    @property
    def domain(self) -> str:
        return f"localhost:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control_port(self) -> int:
        return self.port + 1

    @property
    def admin_port(self) -> int:
        return self.port + 2

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.control_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def slot_cidr(self) -> str:
        return subnets.cidr(self.subnet)

    def ports(self) -> dict[str, int]:
        """Every port of the instance with its purpose."""
        return {"the edge": self.port, "control": self.control_port, "the edge's admin side": self.admin_port}


def load(layout: Layout) -> Config:
    """*Errors*: Refused NOT_RUNNING (no instance there), SETUP_FAILED (its configuration is broken)."""
    try:
        raw = tomllib.loads(layout.config.read_text())
        machines = Machines(str(raw.get("machines", Machines.OFF)))
        config = Config(str(raw["install_id"]), int(raw["port"]), int(raw["subnet"]), str(raw["host_name"]), machines)
    except FileNotFoundError:
        raise Refused(Code.NOT_RUNNING, f"there is no instance in {layout.home}") from None
    except (OSError, KeyError, ValueError, TypeError, tomllib.TOMLDecodeError) as error:
        raise Refused(
            Code.SETUP_FAILED,
            f"{layout.config} cannot be used: {type(error).__name__} {error}",
            hint="Mend the file; an instance cannot live without its install id.",
        ) from error
    if not is_id(Prefix.INSTALL, config.install_id) or not 0 <= config.subnet < subnets.COUNT:
        raise Refused(Code.SETUP_FAILED, f"{layout.config} has an install id or a subnet that is none")
    return config


def port_wanted(environ: os._Environ[str] | dict[str, str] = os.environ) -> int | None:
    """ATOLL_PORT. *Errors*: Refused INVALID_REQUEST."""
    text = environ.get("ATOLL_PORT")
    if not text:
        return None
    if not text.isdigit() or not 1 <= int(text) <= 65533:
        raise Refused(
            Code.INVALID_REQUEST,
            f"ATOLL_PORT={text} is not a port (1..65533: it and the next two are used)",
            hint="Set ATOLL_PORT to a free one; `scripts/free_ports.py 3` names the first of three.",
        )
    return int(text)


def ensure_config(
    layout: Layout, *, port: int | None, dice: Callable[[int], bytes], may_move: bool = True, machines: Machines | None = None
) -> Config:
    """Have the instance's configuration: make it, or read it and follow a changed port or another word on virtual machines.

    `may_move`: while nothing runs.
    """
    try:
        config = load(layout)
    except Refused as error:
        if error.code is not Code.NOT_RUNNING:
            raise
        install_id = new_id(Prefix.INSTALL, dice)
        # Claimed before the file exists: a crash in between leaves a claim whose home has no such configuration, which counts for nothing.
        subnet = subnets.claim(layout.home, install_id)
        config = Config(install_id, port or PORT_DEFAULT, subnet, machine_name(), machines or Machines.OFF)
        write_config(layout, config)
        return config
    subnets.claim(layout.home, config.install_id, wanted=config.subnet)
    following = replace(config, port=port or config.port, machines=machines or config.machines)
    if following != config and may_move:
        config = following
        write_config(layout, config)
    return config


def write_config(layout: Layout, config: Config) -> None:
    """Write `config.toml`, whole or not at all."""
    text = (
        "# Written by `atoll up`. The install id marks everything on this machine that belongs to this instance: never change it.\n"
        f"install_id = {json.dumps(config.install_id)}\n"
        "# The edge listens here; control on the next port, the edge's admin side on the one after. ATOLL_PORT changes it.\n"
        f"port = {config.port}\n"
        "# Slots of sandboxes have addresses in 10.(64 + subnet).0.0/16.\n"
        f"subnet = {config.subnet}\n"
        f"domain = {json.dumps(config.domain)}\n"
        f"host_name = {json.dumps(config.host_name)}\n"
        "# Virtual machines: off, kvm, or emulated (without hardware virtualization, too). ATOLL_MACHINES changes it.\n"
        f"machines = {json.dumps(config.machines.value)}\n"
    )
    write_whole(layout.config, text, mode=0o644)


def machine_name() -> str:
    """This machine's name, as a host's."""
    name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")
    return name[:40] or "local"


def ensure_directories(layout: Layout, user: Account) -> None:
    """Have every directory with the right owner. The agent's are root's, control's are the user's, logs can be read by both."""
    root = (0, 0)
    make_directory(layout.home, mode=0o755, owner=root)
    make_directory(layout.secrets, mode=0o700, owner=user.owner)
    make_directory(layout.control, mode=0o700, owner=user.owner)
    make_directory(layout.agent, mode=0o700, owner=root)
    make_directory(layout.sandboxes, mode=0o711, owner=root)
    make_directory(layout.run, mode=0o755, owner=root)
    make_directory(layout.log, mode=0o750, owner=(0, user.gid))


def ensure_secrets(layout: Layout, user: Account, dice: Callable[[int], bytes]) -> None:
    """Have control's secrets, each made once.

    `sealing.key` and `token.key`: 32 bytes in base64 with a newline. `guest-ed25519`: PKCS 8 in PEM. `edge.token`: 64 hex digits with a newline.
    `image-ed25519`: PKCS 8 in PEM, and `image-keys.json`, public, which keys count for images (`images/signing.py`).
    """
    makers: dict[str, Callable[[], bytes]] = {
        SEALING_KEY: lambda: base64.b64encode(dice(32)) + b"\n",
        TOKEN_KEY: lambda: base64.b64encode(dice(32)) + b"\n",
        GUEST_KEY: _new_guest_key,
        EDGE_TOKEN: lambda: dice(32).hex().encode() + b"\n",
        KEY_FILE: signing.new_key,
        CHAIN_FILE: lambda: signing.first_chain((layout.secrets / KEY_FILE).read_bytes()),
    }
    for name, make in makers.items():
        path = layout.secrets / name
        if not path.exists() or path.stat().st_size == 0:
            write_whole(path, make(), mode=0o600, owner=user.owner)


def _new_guest_key() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def ensure_operator_key(layout: Layout) -> str:
    """Have the first operator key of team `default`, in a file that only root reads."""
    try:
        key = layout.operator_key.read_text().strip()
    except FileNotFoundError:
        key = ""
    if not re.fullmatch(r"e2b_[0-9a-f]{40}", key):
        key = KEY_PREFIX + secrets.token_hex(KEY_BYTES)
        write_whole(layout.operator_key, key + "\n", mode=0o600)
    return key


def ensure_bootstrap(layout: Layout, user: Account, config: Config) -> None:
    """Tell control, by digests alone, the operator's key and, until this host has its credential, a one-use enrolment token.

    *Idempotency*: a token that is on the disk is used again while it is fresh, so that a run cut short between the files does no harm.
    """
    key = ensure_operator_key(layout)
    record: dict[str, str] = {
        "operator_key_digest": key_digest(key),
        "operator_key_hint": key[-4:],
        "host_name": config.host_name,
    }
    if not layout.credential.exists():
        token = _fresh_token(layout.enrollment_token)
        if not token:
            token = secrets.token_hex(32)
            write_whole(layout.enrollment_token, token + "\n", mode=0o600)
        record["enrollment_token_digest"] = key_digest(token)
    if read_json(layout.bootstrap) != record:
        write_whole(layout.bootstrap, json.dumps(record, indent=2) + "\n", mode=0o600, owner=user.owner)


def _fresh_token(path: Path) -> str:
    """The token in the file; empty when there is none, or control may have let it expire (after an hour) before it is used."""
    try:
        token = path.read_text().strip()
        return token if time.time() - path.stat().st_mtime < TOKEN_FRESH_S else ""
    except FileNotFoundError:
        return ""


def home_problem(layout: Layout, user: Account) -> Refused | None:
    """Why this place cannot hold an instance: control, which is not root, must be able to get there."""
    closed = closed_on_the_way(layout.home, user)
    if closed is None:
        return None
    return Refused(
        Code.SETUP_FAILED,
        f"user {user.name}, which control runs as, cannot pass {closed}, so it cannot use {layout.home}",
        hint=f"Choose another ATOLL_HOME, or `chmod o+x {closed}`.",
    )
