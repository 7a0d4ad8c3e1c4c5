"""Operations: what operators are told (alerts) and what is kept of who did what (audit).

Theory of operation. An alert is a row per (kind, subject) while something is wrong; it is raised and cleared by what is on record and by
nothing else (`planning/alerting.py`), so that the same trouble is one alert however often it is seen. An audit entry is written in the
commit whose effect it tells of, and never changed. Kinds and actions are append-only: people filter by them, and each kind has its
section in docs/RUNBOOK.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Data = Mapping[str, str | int | float | None]


class Severity(StrEnum):
    """How soon somebody should look."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Alert(StrEnum):
    """Kinds of alerts. Append only."""

    SANDBOX_NO_ELIGIBLE_HOST = "sandbox.no_eligible_host"
    SANDBOX_CLEANUP_PENDING = "sandbox.cleanup_pending"
    SANDBOX_REPLACEMENT_BLOCKED = "sandbox.replacement_blocked"
    RELEASE_OVERDUE = "release.overdue"
    HOST_LOST = "host.lost"
    HOST_DISABLED = "host.disabled"
    HOST_CAPACITY_MISMATCH = "host.capacity_mismatch"
    HOST_QUARANTINE = "host.quarantine"
    HOST_CHECK_FAILED = "host.check_failed"
    DEPLOYMENT_NO_HOST = "deployment.no_host"
    STORE_SLOW = "store.slow"
    STORE_FULL = "store.full"
    IMAGE_REFUSED = "image.refused"
    WARM_SHORT = "warm.short"

    @property
    def runbook(self) -> str:
        """Where docs/RUNBOOK.md says what to do."""
        # A heading's anchor has no points in it.
        return "docs/RUNBOOK.md#" + self.value.replace(".", "")


@dataclass(frozen=True, slots=True)
class Raised:
    """What is wrong now. `subject`: the host's, class's or store's name for it; one alert for each kind and subject."""

    kind: Alert
    subject: str
    severity: Severity
    detail: str


class Action(StrEnum):
    """What the audit knows by name. Append only."""

    SANDBOX_CREATE = "sandbox.create"
    SANDBOX_RELEASE = "sandbox.release"
    SANDBOX_AUTHORIZE_REPLACEMENT = "sandbox.authorize_replacement"
    SANDBOX_PAUSE = "sandbox.pause"
    SANDBOX_SUSPEND = "sandbox.suspend"
    SANDBOX_RESUME = "sandbox.resume"
    SNAPSHOT_CREATE = "snapshot.create"
    SNAPSHOT_DELETE = "snapshot.delete"
    SANDBOX_FORK = "sandbox.fork"
    KEY_CREATE = "key.create"
    KEY_REVOKE = "key.revoke"
    HOST_ACTIVATE = "host.activate"
    HOST_DRAIN = "host.drain"
    HOST_DISABLE = "host.disable"
    HOST_ENROLL = "host.enroll"
    HOST_RESET = "host.reset"
    HOST_RECOUNT = "host.recount"
    ENROLLMENT_TOKEN_CREATE = "enrollment_token.create"  # noqa: S105 - an action, not a secret
    CONFIG_APPLY = "config.apply"
    TEMPLATE_CREATE = "template.create"
    TEMPLATE_BUILD = "template.build"
    TEMPLATE_IMPORT = "template.import"
    TEMPLATE_TAG = "template.tag"
    TEMPLATE_UNTAG = "template.untag"
    TEMPLATE_PUBLISH = "template.publish"
    TEMPLATE_UNPUBLISH = "template.unpublish"
    TEMPLATE_DELETE = "template.delete"
    REGISTRY_TOKEN = "registry.token"  # noqa: S105 - an action, not a secret
    ARTIFACTS_COLLECT = "artifacts.collect"
    TEMPLATE_WARM = "template.warm"


DONE = "done"
"""The result of what was carried out; of what was refused it is the code."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts: a client of a team, from an address, by one request."""

    team_id: str | None = None
    client_id: str | None = None
    address: str | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Act:
    """One entry of the audit. `subject` is an id. `data` never holds a secret."""

    actor: Actor
    action: Action
    subject: str
    result: str = DONE
    data: Data = field(default_factory=dict)
