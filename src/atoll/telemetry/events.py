"""Names of log events, append-only. Form: thing, then what happened to it. INFO = a state changed, DEBUG = steady work,
WARNING = someone may have to act, ERROR = a promise was broken.
"""

from __future__ import annotations

from typing import Final

# a program's own life
PROCESS_STARTED: Final = "process.started"
PROCESS_STOPPING: Final = "process.stopping"
PROCESS_STOPPED: Final = "process.stopped"
PROCESS_FAILED: Final = "process.failed"

# the supervisor and its children
CHILD_STARTED: Final = "child.started"
CHILD_ADOPTED: Final = "child.adopted"
CHILD_READY: Final = "child.ready"
CHILD_NOT_READY: Final = "child.not_ready"
CHILD_ENDED: Final = "child.ended"
CHILD_KILLED: Final = "child.killed"
LOG_ROTATED: Final = "log.rotated"

# sandboxes and hosts, as control sees them
SANDBOX_STATE_CHANGED: Final = "sandbox.state.changed"
SANDBOX_DEADLINE_MISSED: Final = "sandbox.deadline.missed"
SANDBOX_NO_ELIGIBLE_HOST: Final = "sandbox.no_eligible_host"
PLACEMENT_OBSERVED: Final = "placement.observed"
HOST_ENROLLED: Final = "host.enrolled"
HOST_SESSION_STARTED: Final = "host.session.started"
HOST_HEALTH_CHANGED: Final = "host.health.changed"
HOST_UNSCHEDULABLE: Final = "host.unschedulable"
HOST_RECOUNTED: Final = "host.recounted"
HOST_ADMIN_CHANGED: Final = "host.admin.changed"

# the agent
CONTROL_LOST: Final = "control.lost"
CONTROL_FOUND: Final = "control.found"
COMMAND_STARTED: Final = "command.started"
COMMAND_DONE: Final = "command.done"
COMMAND_FAILED: Final = "command.failed"
HEAD_START_FAILED: Final = "head_start.failed"
PLACEMENT_ADOPTED: Final = "placement.adopted"
PLACEMENT_QUARANTINED: Final = "placement.quarantined"
MOMENT_STORED: Final = "moment.stored"
CHECK_FAILED: Final = "check.failed"
COMMAND_REFUSED: Final = "command.refused"
BOOTSTRAP_REFUSED: Final = "bootstrap.refused"
FIREWALL_MENDED: Final = "firewall.mended"
CLEANUP_FAILED: Final = "cleanup.failed"
END_DECIDED: Final = "end.decided"
JOURNAL_REFUSED: Final = "journal.refused"
HOST_FENCED: Final = "host.fenced"
EPOCH_BEGUN: Final = "epoch.begun"
AGENT_SUPERSEDED: Final = "agent.superseded"

# control's listener for other machines
LISTENER_STARTED: Final = "listener.started"
LISTENER_FAILED: Final = "listener.failed"
CERTIFICATE_LOADED: Final = "certificate.loaded"

# upkeep
CONFIG_FOLLOWED: Final = "config.followed"
CLOCK_STEPPED: Final = "clock.stepped"
SNAPSHOT_CHANGED: Final = "snapshot.changed"
SNAPSHOT_DEADLINE: Final = "snapshot.deadline"
COPY_GIVEN_UP: Final = "copy.given_up"
RETENTION_FAILED: Final = "retention.failed"
ROUTES_FOLLOWED: Final = "routes.followed"
STORE_RESTORED: Final = "store.restored"
HOST_SETTLED: Final = "host.settled"
REPLICA_LOST: Final = "replica.lost"
HINTS_LOST: Final = "hints.lost"
HINTS_FOLLOWED: Final = "hints.followed"
TEMPLATE_REGISTERED: Final = "template.registered"
TEMPLATE_REMOVED: Final = "template.removed"
TEMPLATE_REFUSED: Final = "template.refused"
MANIFEST_SIGNED: Final = "manifest.signed"
MANIFEST_REFUSED: Final = "manifest.refused"
IMAGE_REFUSED: Final = "image.refused"
IMAGE_KEYS_FOLLOWED: Final = "image.keys_followed"
IMAGE_MACHINE_FOLLOWED: Final = "image.machine_followed"
ARTIFACTS_NOT_COLLECTED: Final = "artifacts.not_collected"
MOMENTS_FOUND: Final = "moments.found"
BUILD_FAILED: Final = "build.failed"
BUILD_TAKEN_OVER: Final = "build.taken_over"
WARM_NOT_KEPT: Final = "warm.not_kept"

# what operators are told
ALERT_RAISED: Final = "alert.raised"
ALERT_CLEARED: Final = "alert.cleared"
ALERTS_NOT_KEPT: Final = "alerts.not_kept"
TELEMETRY_NOT_SENT: Final = "telemetry.not_sent"

# what libraries say
LIBRARY_SPOKE: Final = "library.spoke"

# requests
REQUEST_DONE: Final = "request.done"
REQUEST_FAILED: Final = "request.failed"

ALL: Final[frozenset[str]] = frozenset(value for name, value in list(globals().items()) if name.isupper() and isinstance(value, str))
