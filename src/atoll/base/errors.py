"""What can go wrong, in four families, each failure with a stable code and a hint.

Theory of operation. `Refused`: the caller must change something. `Unavailable`: nothing happened, try again after `retry_after_s`.
`OutcomeUnknown`: sent, no answer; look before retrying. `Bug`: an invariant is broken. Codes are append-only: docs/ERRORS.md is
generated from this file and a test compares it with the lock file, so that no code is ever reused or removed. HTTP statuses and
E2B's shapes are given at the edge that speaks them (`control/api`), never here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Code(StrEnum):
    """Every stable code. Append only."""

    # what a caller asked for
    INVALID_REQUEST = "INVALID_REQUEST"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"
    SANDBOX_NOT_FOUND = "SANDBOX_NOT_FOUND"
    TEMPLATE_NOT_FOUND = "TEMPLATE_NOT_FOUND"
    HOST_NOT_FOUND = "HOST_NOT_FOUND"
    KEY_NOT_FOUND = "KEY_NOT_FOUND"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    CLASS_LIMIT = "CLASS_LIMIT"
    REQUEST_MISMATCH = "REQUEST_MISMATCH"
    REQUEST_IN_PROGRESS = "REQUEST_IN_PROGRESS"
    ILLEGAL_STATE = "ILLEGAL_STATE"
    REPLACEMENT_NOT_BLOCKED = "REPLACEMENT_NOT_BLOCKED"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    CONFIG_INVALID = "CONFIG_INVALID"
    CONFIG_CONFLICT = "CONFIG_CONFLICT"
    CONFIG_NOT_FOUND = "CONFIG_NOT_FOUND"
    REVISION_MISMATCH = "REVISION_MISMATCH"
    HOST_NOT_EMPTY = "HOST_NOT_EMPTY"
    # admission
    RATE_LIMITED = "RATE_LIMITED"
    TEAM_SANDBOX_QUOTA = "TEAM_SANDBOX_QUOTA"
    DEPLOYMENT_SANDBOX_QUOTA = "DEPLOYMENT_SANDBOX_QUOTA"
    RECORDS_QUOTA = "RECORDS_QUOTA"
    HOST_QUOTA = "HOST_QUOTA"
    CLIENT_SANDBOX_QUOTA = "CLIENT_SANDBOX_QUOTA"
    DEPLOYMENT_RECORDS_QUOTA = "DEPLOYMENT_RECORDS_QUOTA"
    ACTIVE_HOST_QUOTA = "ACTIVE_HOST_QUOTA"
    # placement and life
    NO_CAPACITY = "NO_CAPACITY"
    NO_HOSTS = "NO_HOSTS"
    HOST_NOT_ACTIVE = "HOST_NOT_ACTIVE"
    HOST_UNSUITABLE = "HOST_UNSUITABLE"
    INSUFFICIENT_CPU = "INSUFFICIENT_CPU"
    INSUFFICIENT_MEMORY = "INSUFFICIENT_MEMORY"
    INSUFFICIENT_DISK = "INSUFFICIENT_DISK"
    INSUFFICIENT_SLOTS = "INSUFFICIENT_SLOTS"
    START_TIMEOUT = "START_TIMEOUT"
    IMAGE_TIMEOUT = "IMAGE_TIMEOUT"
    GUEST_BOOT_TIMEOUT = "GUEST_BOOT_TIMEOUT"
    GUEST_IDENTITY_MISMATCH = "GUEST_IDENTITY_MISMATCH"
    IMAGE_UNAVAILABLE = "IMAGE_UNAVAILABLE"
    IMAGE_CORRUPT = "IMAGE_CORRUPT"
    START_FAILED = "START_FAILED"
    GUEST_EXITED = "GUEST_EXITED"
    END_REACHED = "END_REACHED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    RELEASE_REQUESTED = "RELEASE_REQUESTED"
    CREATE_TIMEOUT = "CREATE_TIMEOUT"
    HOST_DISK_FULL = "HOST_DISK_FULL"
    RUNTIME_MISSING = "RUNTIME_MISSING"
    CLEANUP_FAILED = "CLEANUP_FAILED"
    PLACEMENT_LOST = "PLACEMENT_LOST"
    BOOTSTRAP_DELIVERED = "BOOTSTRAP_DELIVERED"
    PAUSE_TIMEOUT = "PAUSE_TIMEOUT"
    PAUSE_FAILED = "PAUSE_FAILED"
    SAVE_TIMEOUT = "SAVE_TIMEOUT"
    SAVE_FAILED = "SAVE_FAILED"
    RESUME_TIMEOUT = "RESUME_TIMEOUT"
    RESUME_FAILED = "RESUME_FAILED"
    GUEST_UNRESPONSIVE = "GUEST_UNRESPONSIVE"
    HOST_QUARANTINED = "HOST_QUARANTINED"
    # agent protocol
    ENROLLMENT_TOKEN_INVALID = "ENROLLMENT_TOKEN_INVALID"  # noqa: S105 - a code, not a secret
    ENROLLMENT_CONFLICT = "ENROLLMENT_CONFLICT"
    OVERLAPPING_AGENT_SESSION = "OVERLAPPING_AGENT_SESSION"
    STALE_AGENT_EPOCH = "STALE_AGENT_EPOCH"
    STALE_POLL = "STALE_POLL"
    COMMAND_CONFLICT = "COMMAND_CONFLICT"
    PROTOCOL_UNSUPPORTED = "PROTOCOL_UNSUPPORTED"
    CREDENTIAL_REVOKED = "CREDENTIAL_REVOKED"
    TLS_REQUIRED = "TLS_REQUIRED"
    CONTROL_UNTRUSTED = "CONTROL_UNTRUSTED"
    # weather
    CONTROL_UNAVAILABLE = "CONTROL_UNAVAILABLE"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    STORE_FULL = "STORE_FULL"
    STORE_LOCKED = "STORE_LOCKED"
    STORE_NEWER = "STORE_NEWER"
    STORE_RESTORED = "STORE_RESTORED"
    BACKUP_INVALID = "BACKUP_INVALID"
    BACKUP_MISMATCH = "BACKUP_MISMATCH"
    HOST_UNKNOWN = "HOST_UNKNOWN"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    INTERNAL = "INTERNAL"
    # this machine
    NOT_ROOT = "NOT_ROOT"
    PORT_TAKEN = "PORT_TAKEN"
    ALREADY_RUNNING = "ALREADY_RUNNING"
    NOT_RUNNING = "NOT_RUNNING"
    AGENT_LOCKED = "AGENT_LOCKED"
    SETUP_FAILED = "SETUP_FAILED"
    # templates
    IMAGE_REFUSED = "IMAGE_REFUSED"
    IMAGE_ACCESS_DENIED = "IMAGE_ACCESS_DENIED"
    IMPORT_NOT_FOUND = "IMPORT_NOT_FOUND"
    IMPORT_INTERRUPTED = "IMPORT_INTERRUPTED"
    TEMPLATE_IN_USE = "TEMPLATE_IN_USE"
    BUILD_NOT_FOUND = "BUILD_NOT_FOUND"
    BUILD_FAILED = "BUILD_FAILED"
    BUILD_CANCELLED = "BUILD_CANCELLED"
    BUILD_INTERRUPTED = "BUILD_INTERRUPTED"
    BUILD_TIMEOUT = "BUILD_TIMEOUT"
    BUILD_QUOTA = "BUILD_QUOTA"
    START_COMMAND_FAILED = "START_COMMAND_FAILED"
    IMAGE_UNTRUSTED = "IMAGE_UNTRUSTED"
    ARTIFACT_NOT_FOUND = "ARTIFACT_NOT_FOUND"
    ARTIFACTS_UNAVAILABLE = "ARTIFACTS_UNAVAILABLE"
    ARTIFACTS_DENIED = "ARTIFACTS_DENIED"
    # snapshots
    SNAPSHOT_NOT_FOUND = "SNAPSHOT_NOT_FOUND"
    SNAPSHOT_IN_USE = "SNAPSHOT_IN_USE"
    SNAPSHOT_UNAVAILABLE = "SNAPSHOT_UNAVAILABLE"
    # machines
    RUNTIME_UNTRUSTED = "RUNTIME_UNTRUSTED"
    # guests made ahead
    WARM_OUTDATED = "WARM_OUTDATED"
    WARM_SURPLUS = "WARM_SURPLUS"
    WARM_GIVEN_UP = "WARM_GIVEN_UP"
    WARM_QUOTA = "WARM_QUOTA"
    # moments in the artifact store
    MOMENT_UNAVAILABLE = "MOMENT_UNAVAILABLE"
    MOMENT_CORRUPT = "MOMENT_CORRUPT"
    MOMENT_UNSUITABLE = "MOMENT_UNSUITABLE"
    MOMENT_INCOMPLETE = "MOMENT_INCOMPLETE"
    MOMENT_TOO_LARGE = "MOMENT_TOO_LARGE"


HINTS: Final[Mapping[Code, str]] = {
    Code.INVALID_REQUEST: "Correct the field that the message names and send the request again.",
    Code.UNAUTHENTICATED: "Send a valid key in X-API-KEY; `atoll key create` makes one.",
    Code.FORBIDDEN: "This key may not do that; use a key of the owning team or an operator key.",
    Code.SANDBOX_NOT_FOUND: "It has ended, or it belongs to another team; `atoll sandbox list` shows yours.",
    Code.TEMPLATE_NOT_FOUND: "`atoll template list` shows the templates you can use.",
    Code.HOST_NOT_FOUND: "`atoll host list` shows the hosts.",
    Code.KEY_NOT_FOUND: "`atoll key list` shows the keys of the team.",
    Code.NOT_SUPPORTED: "This release does not do that yet; leave the option out.",
    Code.CLASS_LIMIT: "Ask for less, or let the operator raise the limit of the class.",
    Code.REQUEST_MISMATCH: "This request id was used with another body; use a new one.",
    Code.REQUEST_IN_PROGRESS: "The first request with this id is still running; ask again in a moment.",
    Code.ILLEGAL_STATE: "Look at the sandbox's state and try again when it has settled.",
    Code.REPLACEMENT_NOT_BLOCKED: "Look at the sandbox's generation and conditions; only one with REPLACEMENT_BLOCKED needs your word.",
    Code.BODY_TOO_LARGE: "Send a smaller body.",
    Code.CONFIG_INVALID: "Mend the lines that are named; `atoll config check FILE` reads it without applying it.",
    Code.CONFIG_CONFLICT: "Somebody else applied a document meanwhile; look at `atoll config show` and apply yours again.",
    Code.CONFIG_NOT_FOUND: "`atoll config history` shows the revisions that there are.",
    Code.HOST_NOT_EMPTY: "Release its sandboxes (`atoll sandbox list --all-teams`) or wait longer.",
    Code.REVISION_MISMATCH: "Somebody else has changed it; look at it again and repeat the request with its new ETag.",
    Code.RATE_LIMITED: "Slow down; Retry-After says for how long.",
    Code.TEAM_SANDBOX_QUOTA: "Release sandboxes that you no longer need, or let the operator raise the team's quota.",
    Code.DEPLOYMENT_SANDBOX_QUOTA: "The deployment is full; try again later or let the operator raise its quota.",
    Code.RECORDS_QUOTA: "Too many ended sandboxes are still retained; try again later.",
    Code.HOST_QUOTA: "Disable a host that is not needed, or raise limits.deployment.registered_hosts (`atoll config`).",
    Code.CLIENT_SANDBOX_QUOTA: "Release sandboxes of this key, or let the operator raise limits.client.sandboxes.",
    Code.DEPLOYMENT_RECORDS_QUOTA: "Too many records are kept; try again later or let the operator raise limits.deployment.records.",
    Code.ACTIVE_HOST_QUOTA: "Drain or disable another host, or raise limits.deployment.active_hosts (`atoll config`).",
    Code.NO_CAPACITY: "No host has room; release sandboxes, add a host, or ask for less. `atoll host list` shows what is free.",
    Code.NO_HOSTS: "No active healthy host; `atoll status` and `atoll doctor` say why.",
    Code.HOST_NOT_ACTIVE: "Activate the host or wait until another has room.",
    Code.HOST_UNSUITABLE: "The host has become another since it was chosen; `atoll host why` says what speaks against it.",
    Code.INSUFFICIENT_CPU: "Ask for less CPU or wait until some is free.",
    Code.INSUFFICIENT_MEMORY: "Ask for less memory or wait until some is free.",
    Code.INSUFFICIENT_DISK: "Ask for less disk or wait until some is free.",
    Code.INSUFFICIENT_SLOTS: "Wait until another sandbox on this host ends.",
    Code.START_TIMEOUT: "The host has not begun to start it in time; `atoll host get` says whether its agent is heard of.",
    Code.IMAGE_TIMEOUT: "The host did not have the image ready in time; look at its disk and at where images come from.",
    Code.GUEST_BOOT_TIMEOUT: "The guest did not answer in time; `atoll sandbox logs` shows its console, `atoll doctor` tests the runtime.",
    Code.GUEST_IDENTITY_MISMATCH: "Something else answered in the guest's place; look at the host's agent log.",
    Code.IMAGE_UNAVAILABLE: "The host does not have this template; `atoll template list` shows what exists.",
    Code.IMAGE_CORRUPT: "The template's files do not match its manifest; run `make up` to rebuild it.",
    Code.START_FAILED: "The runtime refused to start; the event's detail and `atoll doctor` say why.",
    Code.GUEST_EXITED: "The guest ended by itself; `atoll sandbox logs` shows its last words.",
    Code.END_REACHED: "It reached its timeout; ask for a longer one or extend it in time.",
    Code.LEASE_EXPIRED: "Its host could not reach control for longer than its lease.",
    Code.RELEASE_REQUESTED: "Somebody asked for it.",
    Code.CREATE_TIMEOUT: "The sandbox was not ready in time and was released; try again.",
    Code.HOST_DISK_FULL: "Free space on the host's disk.",
    Code.RUNTIME_UNTRUSTED: "The host's operator names the digests of its programs; put these programs there, or name the digests of those that are.",
    Code.RUNTIME_MISSING: "Run `make up` to build or install the runtime.",
    Code.CLEANUP_FAILED: "Parts of the sandbox could not be removed; the agent goes on trying, its log says which.",
    Code.PLACEMENT_LOST: "The host no longer has this sandbox.",
    Code.PAUSE_TIMEOUT: "It goes on running; look at its host (`atoll host get`), then pause it again.",
    Code.PAUSE_FAILED: "It goes on running; the message says why its host could not freeze or stop it.",
    Code.SAVE_TIMEOUT: "It goes on running; a larger sandbox may need a longer `save` timeout in its class.",
    Code.SAVE_FAILED: "It goes on running and nothing of it is lost; the message says what its host could not save.",
    Code.RESUME_TIMEOUT: "It is still paused; look at its host (`atoll host get`), then resume it again.",
    Code.RESUME_FAILED: "It is still paused; the message says why. Resume it again, or delete it.",
    Code.GUEST_UNRESPONSIVE: "Its guest agent does not answer; pause it without requireHealthyGuest, or delete it.",
    Code.BOOTSTRAP_DELIVERED: "Its host may have handed its environment on before it lost track of it; create another one.",
    Code.HOST_QUARANTINED: "The host holds things that it cannot explain; `atoll doctor` lists them.",
    Code.ENROLLMENT_TOKEN_INVALID: "Make a new token with `atoll host enrollment-token create`.",
    Code.ENROLLMENT_CONFLICT: "This host is enrolled with other facts; disable and reset it first, or use another name.",
    Code.OVERLAPPING_AGENT_SESSION: "Another agent run holds this host; stop it or wait until its session is stale.",
    Code.STALE_AGENT_EPOCH: "A newer agent run has taken over this host; this one must end.",
    Code.STALE_POLL: "A newer poll of the same session exists; only that one is answered.",
    Code.COMMAND_CONFLICT: "The same command id came with other content; this is a fault of control.",
    Code.PROTOCOL_UNSUPPORTED: "Update the older of the two programs.",
    Code.CREDENTIAL_REVOKED: "The host was disabled; `atoll host reset` lets it enrol again.",
    Code.TLS_REQUIRED: "Use control's https:// address; plain HTTP is for addresses of this machine only.",
    Code.CONTROL_UNTRUSTED: "Give the authority that signed its certificate (--ca FILE or --ca-pin), and the name that the certificate is for.",
    Code.CONTROL_UNAVAILABLE: "Control is not reachable; try again, `atoll status` shows whether it runs.",
    Code.STORE_UNAVAILABLE: "The database did not answer; nothing was changed, try again.",
    Code.STORE_FULL: "The disk of the database is full; free space, nothing was changed.",
    Code.STORE_LOCKED: "Another control process uses this database; stop it first.",
    Code.STORE_NEWER: "Run the release that wrote it, or a later one; or restore a backup that this release made.",
    Code.STORE_RESTORED: "Control was taken back to a backup, and this was under way when it was made; ask again.",
    Code.BACKUP_INVALID: "Use another backup; this file was not made by `atoll backup create`, or is damaged.",
    Code.BACKUP_MISMATCH: "Restore it where it was made, with the keys that were kept with it.",
    Code.HOST_UNKNOWN: "Control was taken back to a backup that does not know this host's credential; enrol it again.",
    Code.OUTCOME_UNKNOWN: "Look at the object before you repeat the request.",
    Code.INTERNAL: "This is a fault of Atoll; the log of control has the details under the request id.",
    Code.NOT_ROOT: "Run it as root (sudo).",
    Code.PORT_TAKEN: "Stop the program that listens there or choose another with ATOLL_PORT.",
    Code.ALREADY_RUNNING: "This instance runs already; `atoll status` shows it.",
    Code.NOT_RUNNING: "Start it with `make up`.",
    Code.AGENT_LOCKED: "Another agent runs with this state directory.",
    Code.SETUP_FAILED: "The message names the step; mend it and run `make up` again.",
    Code.IMAGE_REFUSED: "The image holds what Atoll does not unpack; the message names it. Build the image without it.",
    Code.IMAGE_ACCESS_DENIED: "The registry wants other credentials; give --username and --password-stdin.",
    Code.IMPORT_NOT_FOUND: "It is another team's, or it ended long ago; `atoll template list` shows what there is.",
    Code.IMPORT_INTERRUPTED: "Control was stopped meanwhile; import again, what was fetched is kept.",
    Code.TEMPLATE_IN_USE: "Release its sandboxes first; `atoll sandbox list` shows them.",
    Code.BUILD_NOT_FOUND: "It is another template's or another team's, or it ended long ago.",
    Code.BUILD_FAILED: "A step of the template's build did not succeed; the build's log says what it wrote.",
    Code.BUILD_CANCELLED: "A newer build of the same template and tag took its place, or the template was deleted.",
    Code.BUILD_INTERRUPTED: "Control was stopped too often while it built; build again, the steps that were done are kept.",
    Code.BUILD_TIMEOUT: "Make the steps faster, or fewer; what was done is kept and found again by the next build.",
    Code.BUILD_QUOTA: "Wait until one of the team's builds has ended.",
    Code.START_COMMAND_FAILED: "The template's start command ended or never got ready; `atoll sandbox logs` shows what it wrote.",
    Code.IMAGE_UNTRUSTED: "No key that the host trusts has signed this image; compare `atoll image key show` on control with the host's.",
    Code.ARTIFACT_NOT_FOUND: "The artifact store does not have it any more; build or import the template again.",
    Code.ARTIFACTS_UNAVAILABLE: "The artifact store did not answer; look at [artifacts] in control.toml and at the store.",
    Code.ARTIFACTS_DENIED: "The artifact store refuses the credentials; mend [artifacts] in control.toml.",
    Code.SNAPSHOT_NOT_FOUND: "It was deleted, or it belongs to another team; `atoll snapshot list` shows yours.",
    Code.SNAPSHOT_IN_USE: "Release the sandboxes that began from it first; `atoll sandbox list` shows them.",
    Code.SNAPSHOT_UNAVAILABLE: "The host that keeps the snapshot does not have it whole; take another one.",
    Code.MOMENT_UNAVAILABLE: "It is still paused; the artifact store does not give what was saved. Look at the store and resume it again, or delete it.",
    Code.MOMENT_CORRUPT: "It is still paused; what the artifact store holds of it is not what was saved. Restore the store, or delete it.",
    Code.MOMENT_UNSUITABLE: "It is still paused; the host has another runtime or processor than the one that saved it. Resume it elsewhere.",
    Code.MOMENT_INCOMPLETE: "The host sends what the artifact store has lost once more, by itself; nothing is to be done.",
    Code.MOMENT_TOO_LARGE: "It stays on its host, and is resumed there; raise limits.deployment.moment (`atoll config`) if it is to be in the artifact store.",
    Code.WARM_OUTDATED: "It was made ahead of a build or a policy that does not apply any more; nobody need do anything.",
    Code.WARM_SURPLUS: "There were more guests made ahead than are wanted; nobody need do anything.",
    Code.WARM_GIVEN_UP: "A sandbox that somebody wanted needed its room; add a host, or keep fewer warm (`atoll template warm`).",
    Code.WARM_QUOTA: "Keep fewer guests warm, or raise limits.deployment.warm_guests (`atoll config`).",
}


class AtollError(Exception):
    """A failure with a stable `code`, a `message` for people and a `hint` that says what to do."""

    family = "bug"

    def __init__(self, code: Code, message: str, *, hint: str | None = None, **detail: str | float | None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint or HINTS[code]
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class Refused(AtollError):
    """The caller must change something; repeating the same request gives the same answer."""

    family = "refused"


class Unavailable(AtollError):
    """Nothing happened; the same request may succeed after `retry_after_s`."""

    family = "unavailable"

    def __init__(
        self, code: Code, message: str, *, retry_after_s: float = 1.0, hint: str | None = None, **detail: str | float | None
    ) -> None:
        super().__init__(code, message, hint=hint, **detail)
        self.retry_after_s = retry_after_s


class OutcomeUnknown(AtollError):
    """It was sent and no answer came: look before retrying."""

    family = "outcome_unknown"


class Bug(AtollError):
    """An invariant is broken; never the caller's fault."""

    family = "bug"
