"""What one control process is told when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.control.wellknown import Joining
from atoll.domain.deployment import Deployment

if TYPE_CHECKING:
    from atoll.control.artifacts.machines import MachineSource
    from atoll.control.builds.port import Workshop
    from atoll.control.builds.workshop import Connect
    from atoll.control.replicas.peers import Line
    from atoll.images.bucket_settings import BucketSettings


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What an instance or operator decides. `secrets` is a directory: sealing.key, token.key (base64), guest-ed25519 (PEM), edge.token."""

    database: Path
    secrets: Path
    artifacts: Path
    """Folder of ready images: `<name>/current/manifest.json`."""
    install_id: str
    domain: str
    version: str
    images: Path | None = None
    """Where blobs of imported images and uploads are kept; None: nothing is imported."""
    image_program: Path | None = None
    """`atoll-io`."""
    machines: MachineSource | None = None
    """What virtual machines of the deployment are to boot by, as this machine's set-up has it; None: it has nothing to say of that."""
    bucket: BucketSettings | None = None
    """Where images and uploads are kept besides; None: in `images` alone."""
    moments: bool | None = None
    """Whether hosts send what they save there; None: as soon as another host could go on from it."""
    registries: Mapping[str, Any] = field(default_factory=dict)
    """Mirrors, and who is spoken to in clear, as `atoll-io image pull` is told."""
    inside: Connect | None = None
    """How builds speak to the inside of their sandboxes; None: nothing is built."""
    workshop: Workshop | None = None
    """In place of sandboxes, for tests of builds."""
    bootstrap: Path | None = None
    boot_id: str | None = None
    """Of this machine's kernel; None: steps of the wall clock between two processes are not looked for."""
    stepped_s: Callable[[], float] = lambda: 0.0
    """How far this machine's wall clock was set since `clock` began to go on by itself. *Units*: seconds."""
    deployment: Deployment = field(default_factory=Deployment)
    """What applies until an operator has applied a document."""
    address: str = "http://127.0.0.1:0"
    """Where other replicas reach this process."""
    line: Line | None = None
    """How this process reaches other replicas; None: it does not."""
    machine: str = ""
    """This machine's name, for people."""
    auto_activate: bool = True
    api: bool = True
    """False: people's APIs are not made, which takes a while; `hot` and `service` are there. For simulations."""
    records_kept_s: float = 24 * 3600.0
    """Of sandboxes that have ended, with their events."""
    joining: Joining = field(default_factory=Joining)
    audit_kept_s: float = 90 * 86400.0
    alerts_kept_s: float = 30 * 86400.0
    """From when they were cleared."""
    telemetry: Mapping[str, str] = field(default_factory=dict)
    """OpenTelemetry's environment variables: where to send metrics and traces, if anywhere."""
    events_kept_s: float = 30 * 86400.0
    """Of hosts and alerts."""
