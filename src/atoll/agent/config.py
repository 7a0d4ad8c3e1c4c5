"""Config and identity: where this host's agent keeps its things, and who it is to control."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field

from atoll.base.errors import Code, Refused
from atoll.base.secret import Secret
from atoll.domain.moment import HEAD_START_WAIT_S
from atoll.wire.agent import POLL_PARK_S_MAX, HostFacts, ImageCacheState

CREDENTIAL_FILE: Final = "credential"
JOURNAL_FILE: Final = "agent.db"
LOCK_FILE: Final = "lock"
LAST_WORDS_DIRECTORY: Final = "consoles"
LAYERS_DIRECTORY: Final = "layers"


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What the composition root decides. *Units*: seconds, MiB."""

    state_directory: Path
    """0700; credential, journal and lock are in it."""
    control_url: str
    """For people: where control is; the transport knows how to get there."""
    facts: HostFacts
    agent_version: str = ""
    park_s: float = POLL_PARK_S_MAX
    parallel: int = 0
    """How many placements may be prepared and started, and how many removed, at once; 0: four per core."""
    disk_reserve_mib: int = 512
    """With less free than this the host takes nothing new."""
    resolver: tuple[str, ...] = ()
    """Command line of the DNS forwarder, without `--listen`; empty: none is run."""
    image_cache: Callable[[], ImageCacheState] | None = None
    """What is said of the host's images; blocks. None: nothing."""
    upload_after_s: float = 2.0
    """How long something has to be saved before it is sent: what is wanted back at once costs nothing."""
    head_start_wait_s: float = HEAD_START_WAIT_S
    """How long a create waits for the moment that its start command has been kept in, from when its fetch began."""
    journal_inline: bool = False
    """Write the journal in the event loop's thread; for simulators."""

    @property
    def credential_path(self) -> Path:
        return self.state_directory / CREDENTIAL_FILE

    @property
    def journal_path(self) -> Path:
        return self.state_directory / JOURNAL_FILE

    @property
    def lock_path(self) -> Path:
        return self.state_directory / LOCK_FILE

    @property
    def last_words_path(self) -> Path:
        return self.state_directory / LAST_WORDS_DIRECTORY

    @property
    def layers_path(self) -> Path:
        """Where layers are written before control has them."""
        return self.state_directory / LAYERS_DIRECTORY

    @property
    def parallel_max(self) -> int:
        return self.parallel or 4 * self.facts.cpu_count


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is, as control gave it when the host was enrolled."""

    host_id: str
    install_id: str
    credential: Secret = field(repr=False)
    credential_version: int = 1


class _File(BaseModel):
    host_id: str
    install_id: str
    credential: str = Field(repr=False)
    credential_version: int = 1


def load_identity(path: Path) -> Identity | None:
    """The identity of an enrolled host; None when there is none yet. *Errors*: Refused SETUP_FAILED when the file cannot be read."""
    try:
        kept = _File.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Refused(Code.SETUP_FAILED, f"the credential file {path} cannot be read: {type(error).__name__}") from None
    return Identity(kept.host_id, kept.install_id, Secret(kept.credential), kept.credential_version)


def save_identity(path: Path, identity: Identity) -> None:
    """Write the credential file, 0600, whole or not at all."""
    content = {
        "host_id": identity.host_id,
        "install_id": identity.install_id,
        "credential": identity.credential.reveal(),
        "credential_version": identity.credential_version,
    }
    write_private(path, json.dumps(content).encode())


def write_private(path: Path, content: bytes) -> None:
    """Write a file for root alone (0600), whole or not at all, durable when it returns."""
    draft = path.with_name(f"{path.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        while content:
            content = content[os.write(fd, content) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
