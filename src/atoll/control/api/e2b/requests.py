"""What E2B's clients send, read strictly: an option that this release cannot honour is refused by name, never dropped."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from atoll.base.errors import Code, Refused
from atoll.control.api.egress import network_spec, unsupported
from atoll.domain.building import Mount, MountKind, Recipe, Stage, Step, StepKind
from atoll.domain.spec import NetworkSpec, OnEnd, SaveMode
from atoll.planning.resolve import CreateRequest

SECRET_BYTES_MAX: Final = 500_000
INT32_MAX: Final = 2**31 - 1
V1_TIMEOUT_S: Final = 15
V2_TIMEOUT_S: Final = 300
_REQUEST_ID: Final = re.compile(r"[a-z0-9-]{1,255}")


def _whole(value: object) -> object:
    # JSON has one kind of number: 30.0 is an integer there, but neither true nor "30" is.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Seconds = Annotated[int, BeforeValidator(_whole), Field(ge=-INT32_MAX, le=INT32_MAX)]
Reference = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]*$")]


class Message(BaseModel):
    """Unknown members are kept, to be refused by name."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class AutoResume(Message):
    enabled: bool


class Network(Message):
    allow_public_traffic: bool | None = Field(default=None, alias="allowPublicTraffic")
    allow_out: list[str] | None = Field(default=None, alias="allowOut")
    deny_out: list[str] | None = Field(default=None, alias="denyOut")
    mask_request_host: str | None = Field(default=None, alias="maskRequestHost")


class NewSandbox(Message):
    """Body of create, on both routes; v2 has no `secure`."""

    template_id: Reference = Field(alias="templateID")
    timeout: Seconds | None = None
    secure: bool | None = None
    auto_pause: bool | None = Field(default=None, alias="autoPause")
    auto_pause_memory: bool | None = Field(default=None, alias="autoPauseMemory")
    auto_resume: AutoResume | None = Field(default=None, alias="autoResume")
    allow_internet_access: bool | None = None
    network: Network | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = Field(default=None, alias="envVars")


class Connect(Message):
    timeout: Seconds | None = None
    memory: bool | None = None


class Pause(Message):
    memory: bool | None = None
    require_healthy_guest: bool | None = Field(default=None, alias="requireHealthyGuest")


class NewSnapshot(Message):
    name: Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f]*$")] | None = None
    memory: bool | None = None


class Fork(Message):
    timeout: Seconds | None = None
    count: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=100)] | None = None


class Resume(Message):
    """Body of the older route that only resumes."""

    timeout: Seconds | None = None
    auto_pause: bool | None = Field(default=None, alias="autoPause")
    memory: bool | None = None


class Timeout(Message):
    timeout: Seconds


class Refresh(Message):
    duration: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=3600)] | None = None


class NewKey(Message):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]*$")]


def _says_nothing(value: Any) -> bool:
    # What clients send for "I did not ask for this". An object with an empty one in it may ask for something: `mcp: {"x": {}}` does.
    return value is None or value is False or value in ([], {}, "", {"tokens": {}})


def refuse_unknown(message: Message, where: str = "") -> None:
    """*Errors*: NOT_SUPPORTED, with the name of a member that we do not know and that asks for something."""
    for name, value in (message.model_extra or {}).items():
        if not _says_nothing(value):
            raise unsupported(where + name[:64])


def _network(network: Network | None, *, internet: bool | None, secured: bool) -> NetworkSpec:
    if network is None:
        return NetworkSpec(internet=internet is not False)
    refuse_unknown(network, "network.")
    public = network.allow_public_traffic is not False
    if not public and not secured:
        raise Refused(Code.INVALID_REQUEST, "allowPublicTraffic=false needs a sandbox with secure=true")
    return network_spec(
        internet=internet is not False,
        allow_out=network.allow_out or (),
        deny_out=network.deny_out or (),
        public_traffic=public,
        mask_request_host=network.mask_request_host,
    )


def _check_lifecycle(body: NewSandbox) -> None:
    if body.auto_pause_memory is False and not body.auto_pause:
        raise Refused(Code.INVALID_REQUEST, "autoPauseMemory=false needs autoPause=true", option="autoPauseMemory")
    if body.auto_pause_memory is False and body.auto_resume is not None and body.auto_resume.enabled:
        raise Refused(Code.INVALID_REQUEST, "autoResume needs memory: what is booted anew is resumed by connect", option="autoResume")


def create_request(body: NewSandbox, *, v2: bool, request_id: str | None) -> CreateRequest:
    """What create asks for, in our words. *Errors*: INVALID_REQUEST, NOT_SUPPORTED."""
    _check_lifecycle(body)
    refuse_unknown(body)
    if body.auto_resume is not None:
        refuse_unknown(body.auto_resume, "autoResume.")
    secured = v2 or bool(body.secure)
    default_s = V2_TIMEOUT_S if v2 else V1_TIMEOUT_S
    return CreateRequest(
        template=body.template_id,
        timeout_s=default_s if body.timeout is None else body.timeout,
        metadata=body.metadata or {},
        env=body.env_vars or {},
        request_id=request_id,
        on_end=OnEnd.SUSPEND if body.auto_pause else OnEnd.KILL,
        auto_resume=body.auto_resume is not None and body.auto_resume.enabled,
        end_mode=SaveMode.FILES if body.auto_pause_memory is False else SaveMode.FULL,
        network=_network(body.network, internet=body.allow_internet_access, secured=secured),
        secured=secured,
        wait=True,
        e2b_env=True,
    )


def idempotency_key(raw: bytes | None) -> str | None:
    """The `Idempotency-Key` header. *Errors*: INVALID_REQUEST."""
    if raw is None:
        return None
    key = raw.decode("latin-1")
    if not _REQUEST_ID.fullmatch(key):
        raise Refused(Code.INVALID_REQUEST, "Idempotency-Key takes 1 to 255 characters of a-z, 0-9 and -")
    return key


class NewBuild(Message):
    """Body of POST /v3/templates and of its predecessor; `alias` is the older word for `name`."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    alias: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tags: list[str] | None = None
    team_id: str | None = Field(default=None, alias="teamID")
    cpu_count: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1024)] | None = Field(default=None, alias="cpuCount")
    memory_mb: Annotated[int, BeforeValidator(_whole), Field(ge=128, le=1 << 24)] | None = Field(default=None, alias="memoryMB")
    min_free_disk_mb: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=1 << 24)] | None = Field(default=None, alias="minFreeDiskMb")


class PushedBuild(Message):
    """Body of POST /templates and /templates/{id}: the image is built and pushed by the client; the Dockerfile only tells of it."""

    alias: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    dockerfile: Annotated[str, Field(max_length=1 << 20)]
    start_cmd: str | None = Field(default=None, alias="startCmd")
    ready_cmd: str | None = Field(default=None, alias="readyCmd")
    team_id: str | None = Field(default=None, alias="teamID")
    cpu_count: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1024)] | None = Field(default=None, alias="cpuCount")
    memory_mb: Annotated[int, BeforeValidator(_whole), Field(ge=128, le=1 << 24)] | None = Field(default=None, alias="memoryMB")


class BuildMount(Message):
    """Atoll's own: what is at a place while a RUN runs."""

    target: str
    source: str | None = None
    files_hash: Annotated[str, Field(max_length=64)] | None = Field(default=None, alias="filesHash")
    from_stage: int | None = Field(default=None, alias="fromStage")
    owner: str = ""
    mode: str = ""
    kind: MountKind = MountKind.FILES
    id: Annotated[str, Field(max_length=256)] = ""
    env: Annotated[str, Field(max_length=256)] = ""
    required: bool = False


class BuildStep(Message):
    """`fromStage`, `mounts` and the type ADD are Atoll's own; no client of E2B's says them."""

    type: Annotated[str, Field(max_length=32)]
    args: list[str] = Field(default_factory=list)
    files_hash: Annotated[str, Field(max_length=64)] | None = Field(default=None, alias="filesHash")
    force: bool | None = None
    force_upload: bool | None = Field(default=None, alias="forceUpload")
    from_stage: int | None = Field(default=None, alias="fromStage")
    mounts: list[BuildMount] = Field(default_factory=list)


class Registry(Message):
    """One of three kinds; nothing of it is ever repeated."""

    type: Annotated[str, Field(max_length=32)]
    username: str | None = Field(default=None, repr=False)
    password: str | None = Field(default=None, repr=False)
    aws_access_key_id: str | None = Field(default=None, alias="awsAccessKeyId", repr=False)
    aws_secret_access_key: str | None = Field(default=None, alias="awsSecretAccessKey", repr=False)
    aws_region: str | None = Field(default=None, alias="awsRegion")
    service_account_json: str | None = Field(default=None, alias="serviceAccountJson", repr=False)


class BuildBeginning(Message):
    """What a stage begins with, and its steps."""

    from_image: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x20]*$")] | None = Field(
        default=None, alias="fromImage"
    )
    from_template: Reference | None = Field(default=None, alias="fromTemplate")
    from_stage: int | None = Field(default=None, alias="fromStage")
    steps: list[BuildStep] | None = None


class BuildStage(BuildBeginning):
    """Atoll's own: a stage before the one that becomes the template."""

    name: Annotated[str, Field(max_length=256)]


class BuildStart(BuildBeginning):
    """Body of POST /v2/templates/{id}/builds/{id}."""

    from_image_registry: Registry | None = Field(default=None, alias="fromImageRegistry", repr=False)
    secrets: dict[str, str] = Field(default_factory=dict, max_length=64, repr=False)
    """Atoll's own: what mounts of the kinds `secret` and (`ssh:ID`) `ssh` are to have, in base64. Kept in memory until the build has ended."""
    force: bool | None = None
    stages: list[BuildStage] | None = None
    start_cmd: str | None = Field(default=None, alias="startCmd")
    ready_cmd: str | None = Field(default=None, alias="readyCmd")


class TagsOf(Message):
    """Body of the tags' routes: `target` where they are assigned, `name` where they are removed."""

    target: Reference | None = None
    name: Reference | None = None
    tags: list[str]


class TemplateChange(Message):
    public: bool | None = None


def recipe(body: BuildStart) -> Recipe:
    """What is to be built, in our words. *Errors*: INVALID_REQUEST, NOT_SUPPORTED."""
    refuse_unknown(body)
    stages = []
    for stage in body.stages or ():
        refuse_unknown(stage, f"stages.{stage.name}.")
        stages.append(Stage(stage.name, stage.from_image, stage.from_template, stage.from_stage, _steps(stage, f"stages.{stage.name}.")))
    return Recipe(
        from_image=body.from_image or None,
        from_template=body.from_template or None,
        from_stage=body.from_stage,
        stages=tuple(stages),
        steps=_steps(body, ""),
        force=bool(body.force),
        start_command=body.start_cmd or None,
        ready_command=body.ready_cmd or None,
    )


def _steps(beginning: BuildBeginning, where: str) -> tuple[Step, ...]:
    steps = []
    for number, one in enumerate(beginning.steps or (), 1):
        refuse_unknown(one, f"{where}steps.{number}.")
        if one.type not in StepKind.__members__:
            raise Refused(Code.INVALID_REQUEST, f"step {number}: {one.type!r} is none of {', '.join(StepKind)}")
        for mount in one.mounts:
            refuse_unknown(mount, f"{where}steps.{number}.mounts.")
        mounts = tuple(
            Mount(it.target, it.source, it.files_hash, it.from_stage, it.owner, it.mode, it.kind, it.id, it.env, it.required)
            for it in one.mounts
        )
        steps.append(Step(StepKind(one.type), tuple(one.args), one.files_hash, bool(one.force), one.from_stage, mounts))
    return tuple(steps)


def secrets(body: BuildStart) -> dict[str, bytes]:
    """What mounts are to have. *Errors*: INVALID_REQUEST, in which nothing of it is."""
    found = {}
    for name, text in body.secrets.items():
        try:
            found[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise Refused(Code.INVALID_REQUEST, f"secret {name[:80]!r} is not in base64") from None
        if len(found[name]) > SECRET_BYTES_MAX:
            raise Refused(Code.INVALID_REQUEST, f"secret {name[:80]!r} has more than {SECRET_BYTES_MAX} bytes")
    return found


def registry_credentials(registry: Registry | None) -> dict[str, str]:
    """What the image program is told, or is exchanged for it. *Errors*: INVALID_REQUEST."""
    if registry is None:
        return {}
    match registry.type:
        case "registry" if registry.username is not None and registry.password is not None:
            return {"username": registry.username, "password": registry.password}
        case "gcp" if registry.service_account_json is not None:
            # Google's registries take the key itself as the password of this user.
            return {"username": "_json_key", "password": registry.service_account_json}
        case "aws" if registry.aws_access_key_id and registry.aws_secret_access_key and registry.aws_region:
            # Sealed as they are, and exchanged when the build pulls: what Amazon gives for them is good for hours only.
            return {
                "awsAccessKeyId": registry.aws_access_key_id,
                "awsSecretAccessKey": registry.aws_secret_access_key,
                "awsRegion": registry.aws_region,
            }
    raise Refused(Code.INVALID_REQUEST, "fromImageRegistry has a type of registry, aws or gcp, and that type's members")
