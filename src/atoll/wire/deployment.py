"""The deployment document: how an operator writes down a `domain.deployment.Deployment`, version 1.

Theory of operation. `read` goes over the text three times: as YAML (`document.py`), field by field (the models below), and as a whole
(`_contradictions`), and reports everything that it finds with line and hint, not only the first. What is left out is as in the built-in
document, class by class from `WorkloadClass`'s own defaults. `normal_form.py` goes the other way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from atoll.domain.deployment import BuildLimits, Deployment, DeploymentLimits, Range, Rate, TeamLimits, WorkloadClass
from atoll.domain.spec import Ingress, Isolation, OnExit, OnLeaseExpiry, OnLoss, PlacementPolicy
from atoll.wire import quantities as q
from atoll.wire.document import Document, NotADocument, Path, Problem, closest
from atoll.wire.document import read as read_document

UNLIMITED: Final = "unlimited"
CLASSES_MAX: Final = 200
TEAMS_MAX: Final = 2000
LIST_MAX: Final = 64
REPOSITORIES_MAX: Final = 1000
COUNT_MAX: Final = 2**31 - 1
TIMEOUT_S_MAX: Final = 86400.0

_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")
_WORD: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_REPOSITORY: Final = re.compile(
    r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*/(?:\*|[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)"
)
_TEMPLATE: Final = re.compile(r"([a-z0-9][a-z0-9_-]{0,127}/)?[A-Za-z0-9][A-Za-z0-9_-]{0,127}(:[a-z0-9._-]{1,128})?")


def _like(pattern: re.Pattern[str], what: str) -> Any:
    def check(value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"{str(value)[:40]!r} is no {what}")
        return value

    return BeforeValidator(check)


def _once(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) != len(values):
        raise ValueError("names one thing twice")
    return values


def _label_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]} is not text; put it into quotes")  # noqa: TRY004 - pydantic collects this kind
    if not _LABEL.fullmatch(value):
        raise ValueError(f"{value[:40]!r} is no label: letters, digits, '.', '_', '-' and '/', at most 128")
    return value


def _count(value: object) -> int | None:
    if value == UNLIMITED:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{str(value)[:40]!r} is no number; write a whole one, or {UNLIMITED}")  # noqa: TRY004 - pydantic collects this kind
    if not 0 <= value <= COUNT_MAX:
        raise ValueError(f"must be within 0..{COUNT_MAX}")
    return value


def _mib_or_none(value: object) -> int | None:
    return None if value == UNLIMITED else q.size_mib(value)


def _rate_or_none(value: object) -> float | None:
    return None if value == UNLIMITED else q.per_second(value)


Name = Annotated[str, _like(_NAME, "name: small letters, digits, '.', '_' and '-', at most 64")]
Word = Annotated[str, _like(_WORD, "word: letters, digits, '.', '_' and '-', at most 64")]
Repository = Annotated[str, _like(_REPOSITORY, "repository: TEAM/NAME, or TEAM/NAME/* for all below it, in small letters")]
Reference = Annotated[str, _like(_TEMPLATE, "template: [namespace/]name[:tag]")]
Label = Annotated[str, BeforeValidator(_label_text)]
Limit = Annotated[int | None, BeforeValidator(_count)]
Timeout = Annotated[q.Duration, Field(gt=0, le=TIMEOUT_S_MAX)]


class Part(BaseModel):
    """A part of the document: a key that nobody knows is refused, and no value is bent into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CpuRange(Part):
    min: q.CpuMillis | None = None
    max: q.CpuMillis | None = None
    default: q.CpuMillis | None = None


class MibRange(Part):
    min: q.SizeMib | None = None
    max: q.SizeMib | None = None
    default: q.SizeMib | None = None


class Size(Part):
    cpu: CpuRange = CpuRange()
    memory: MibRange = MibRange()
    disk: MibRange = MibRange()
    processes: Annotated[int, Field(ge=8, le=4_000_000)] | None = None


class Lifetime(Part):
    default: q.WholeSeconds | None = None
    max: q.WholeSeconds | None = None


class Timeouts(Part):
    """How long each state may last; see the table of deadlines in docs/STATES.md."""

    reserve: Timeout | None = None
    image: Timeout | None = None
    guest_ready: Timeout | None = None
    start: Timeout | None = None
    bootstrap: Timeout | None = None
    release: Timeout | None = None
    no_capacity: Timeout | None = None
    patience: Timeout | None = None
    pause: Timeout | None = None
    resume: Timeout | None = None
    save: Timeout | None = None
    local: Timeout | None = None


class Placement(Part):
    policy: PlacementPolicy | None = Field(default=None, strict=False)
    choices: Annotated[int, Field(ge=2, le=16)] | None = None


class RequestLimits(Part):
    metadata_pairs: Annotated[int, Field(ge=0, le=64)] | None = None
    metadata_bytes: Annotated[int, Field(ge=0, le=16384)] | None = None
    environment_pairs: Annotated[int, Field(ge=0, le=512)] | None = None
    environment_bytes: Annotated[int, Field(ge=0, le=65536)] | None = None


class Class(Part):
    description: Annotated[str, Field(max_length=500)] = ""
    isolation: Isolation | None = Field(default=None, strict=False)
    or_stronger: bool | None = None
    template: Reference | None = None
    templates: Annotated[tuple[Reference, ...], Field(max_length=LIST_MAX, strict=False), AfterValidator(_once)] = ()
    size: Size = Size()
    lifetime: Lifetime = Lifetime()
    timeouts: Timeouts = Timeouts()
    attempts: Annotated[int, Field(ge=1, le=10)] | None = None
    ingress: Ingress | None = Field(default=None, strict=False)
    internet: bool | None = None
    arch: Literal["x86_64", "aarch64"] | None = None
    regions: Annotated[tuple[Word, ...], Field(max_length=LIST_MAX, strict=False), AfterValidator(_once)] = ()
    labels: Annotated[dict[Label, Label], Field(max_length=LIST_MAX)] = Field(default_factory=dict)
    placement: Placement = Placement()
    on_exit: OnExit | None = Field(default=None, strict=False)
    on_lease_expiry: OnLeaseExpiry | None = Field(default=None, strict=False)
    on_loss: OnLoss | None = Field(default=None, strict=False)
    requests: RequestLimits = RequestLimits()


class ClientPart(Part):
    """`unlimited` is None; what is not written at all is not in `model_fields_set`."""

    request_rate: Annotated[float | None, BeforeValidator(_rate_or_none)] = None
    burst: Annotated[int, Field(ge=1, le=COUNT_MAX)] | None = None
    sandboxes: Limit = None


class TeamPart(ClientPart):
    records: Limit = None
    registry: Annotated[int | None, BeforeValidator(_mib_or_none)] = None


class DeploymentPart(ClientPart):
    records: Limit = None
    registered_hosts: Limit = None
    active_hosts: Limit = None
    warm_guests: Limit = None
    moment: Annotated[int | None, BeforeValidator(_mib_or_none)] = None


class Limits(Part):
    client: ClientPart = ClientPart()
    team: TeamPart = TeamPart()
    deployment: DeploymentPart = DeploymentPart()


class Registry(Part):
    public: Annotated[tuple[Repository, ...], Field(max_length=REPOSITORIES_MAX, strict=False), AfterValidator(_once)] = ()


class Builds(Part):
    whole: Timeout | None = None
    step: Timeout | None = None
    start: Timeout | None = None


class Whole(Part):
    version: Literal[1]
    default_class: Name | None = None
    limits: Limits = Limits()
    builds: Builds = Builds()
    registry: Registry = Registry()
    teams: Annotated[dict[str, TeamPart], Field(max_length=TEAMS_MAX)] = Field(default_factory=dict)
    classes: Annotated[dict[Name, Class], Field(min_length=1, max_length=CLASSES_MAX)]


def read(text: str) -> Deployment:
    """What the document says. *Errors*: NotADocument with everything that is wrong with it."""
    document = read_document(text)
    if document.tree == {}:
        raise NotADocument([Problem(0, 0, "", "the document is empty", "`atoll config show` prints one to begin with")])
    try:
        whole = Whole.model_validate(document.tree)
    except ValidationError as error:
        raise NotADocument([_problem(document, one) for one in error.errors(include_url=False)]) from None
    deployment = _meant(whole)
    wrong = [document.problem(path, message, hint) for path, message, hint in _contradictions(whole, deployment)]
    if wrong:
        raise NotADocument(wrong)
    return deployment


# From pydantic's findings to sentences.

_TYPES: Final = {
    "missing": "is missing",
    "model_type": "wants names with values below it",
    "dict_type": "wants names with values below it",
    "tuple_type": "wants a list",
    "string_type": "wants text",
    "int_type": "wants a whole number",
    "bool_type": "wants true or false",
    "float_type": "wants a number",
}


_REGISTERED: Final = "a host registers it: `atoll agent join --%s-cpu ...`, or `atoll agent register`; `atoll host get` shows it"
_ELSEWHERE: Final = {
    "overcommit": _REGISTERED % "overcommit",
    "over_commit": _REGISTERED % "overcommit",
    "reserve": _REGISTERED % "reserve",
    "capacity": "a host's machine says it, less its reserve and times its overcommit: `atoll host get`",
    "hosts": "hosts enrol themselves: `atoll host enrollment-token create`",
}
"""What one may look for here, and where it is said instead."""


def _problem(document: Document, found: Mapping[str, Any]) -> Problem:
    path: Path = tuple(part for part in found["loc"] if part != "[key]")
    kind, given = str(found["type"]), found.get("input")
    if kind == "extra_forbidden":
        if (where := _ELSEWHERE.get(str(path[-1]).lower())) is not None:
            return document.problem(path, "is not said in this document", where)
        return document.problem(path, "is not known here", closest(str(path[-1]), _known(path[:-1])))
    if kind == "enum":
        expected = [word.strip("' ") for word in str(found.get("ctx", {}).get("expected", "")).replace(" or ", ", ").split(",")]
        return document.problem(path, f"{str(given)[:40]!r} is not known", closest(str(given), expected))
    if kind == "literal_error":
        return document.problem(path, f"{str(given)[:40]!r} is not known", f"expected {found['ctx']['expected']}")
    message = _TYPES.get(kind) or str(found["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return document.problem(path, message[:1].lower() + message[1:] if message[1:2].islower() else message)


def _known(path: Path) -> list[str]:
    """The keys that the part at `path` may have."""
    model: type[BaseModel] = Whole
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # a name of the operator's: of a class or a team
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                model = inner
    return list(model.model_fields)


# From words to what they mean.


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _range(part: CpuRange | MibRange, own: Range) -> Range:
    return replace(own, **_given(min=part.min, max=part.max, default=part.default))


def _class(name: str, part: Class) -> WorkloadClass:
    own = WorkloadClass(name=name)
    size, life, times, requests = part.size, part.lifetime, part.timeouts, part.requests
    longest = life.max if life.max is not None else own.timeout_s_max
    return replace(
        own,
        description=part.description,
        templates=part.templates,
        cpu_millis=_range(size.cpu, own.cpu_millis),
        memory_mib=_range(size.memory, own.memory_mib),
        disk_mib=_range(size.disk, own.disk_mib),
        timeout_s_default=life.default if life.default is not None else min(own.timeout_s_default, longest),
        timeout_s_max=longest,
        regions=part.regions,
        labels=tuple(sorted(part.labels.items())),
        **_given(
            isolation=part.isolation,
            or_stronger=part.or_stronger,
            template=part.template,
            pids_max=size.processes,
            attempts_max=part.attempts,
            ingress=part.ingress,
            internet=part.internet,
            arch=part.arch,
            placement_policy=part.placement.policy,
            placement_choices=part.placement.choices,
            on_exit=part.on_exit,
            on_lease_expiry=part.on_lease_expiry,
            on_loss=part.on_loss,
            reserve_s=times.reserve,
            image_s=times.image,
            guest_ready_s=times.guest_ready,
            start_s=times.start,
            bootstrap_s=times.bootstrap,
            pause_s=times.pause,
            resume_s=times.resume,
            save_s=times.save,
            local_s=times.local,
            release_s=times.release,
            no_capacity_s=times.no_capacity,
            create_patience_s=times.patience,
            metadata_pairs_max=requests.metadata_pairs,
            metadata_bytes_max=requests.metadata_bytes,
            env_pairs_max=requests.environment_pairs,
            env_bytes_max=requests.environment_bytes,
        ),
    )


def _written(part: Part, *names: str) -> dict[str, Any]:
    """What the document says, `unlimited` too; nothing of what it leaves out."""
    return {name: getattr(part, name) for name in names if name in part.model_fields_set}


def _rate(part: ClientPart, own: Rate | None) -> Rate | None:
    if "request_rate" not in part.model_fields_set:
        return own
    if part.request_rate is None:
        return None
    return Rate(part.request_rate, float(part.burst) if part.burst is not None else None)


def _team(part: TeamPart, own: TeamLimits) -> TeamLimits:
    storage = {"registry_mib": part.registry} if "registry" in part.model_fields_set else {}
    return replace(own, requests=_rate(part, own.requests), **_written(part, "sandboxes", "records"), **storage)


def _builds(part: Builds) -> BuildLimits:
    own = replace(BuildLimits(), **_given(whole_s=part.whole))
    return replace(
        own,
        step_s=part.step if part.step is not None else min(own.step_s, own.whole_s),
        start_s=part.start if part.start is not None else min(own.start_s, own.whole_s),
    )


def _meant(whole: Whole) -> Deployment:
    own = Deployment()
    client, team, total = whole.limits.client, whole.limits.team, whole.limits.deployment
    every_team = _team(team, own.team)
    return Deployment(
        classes={name: _class(name, part) for name, part in whole.classes.items()},
        default_class=whole.default_class or ("default" if "default" in whole.classes else next(iter(whole.classes))),
        client=replace(own.client, requests=_rate(client, own.client.requests), **_written(client, "sandboxes")),
        team=every_team,
        deployment=replace(
            own.deployment,
            requests=_rate(total, own.deployment.requests),
            **_written(total, "sandboxes", "records", "registered_hosts", "active_hosts", "warm_guests"),
            **({"moment_mib": total.moment} if "moment" in total.model_fields_set else {}),
        ),
        builds=_builds(whole.builds),
        teams={name: _team(part, every_team) for name, part in whole.teams.items()},
        public_repositories=whole.registry.public,
    )


# What each line allows and the whole does not.

_Wrong = tuple[Path, str, str]


def _contradictions(whole: Whole, meant: Deployment) -> Iterator[_Wrong]:
    if meant.default_class not in meant.classes:
        yield ("default_class",), f"there is no class {meant.default_class!r}", closest(meant.default_class, list(meant.classes))
    for name in whole.teams:
        if not 0 < len(name) <= 128:
            yield ("teams", name), "a team's name has 1 to 128 characters", ""
    for name, policy in meant.classes.items():
        yield from _of_class(("classes", name), policy, whole.classes[name])
    yield from _of_limits(whole, meant)
    yield from _of_builds(whole.builds, meant.builds)


def _of_class(path: Path, policy: WorkloadClass, part: Class) -> Iterator[_Wrong]:
    for name, kind, written in (
        ("cpu", policy.cpu_millis, q.write_cpu),
        ("memory", policy.memory_mib, q.write_mib),
        ("disk", policy.disk_mib, q.write_mib),
    ):
        where = (*path, "size", name)
        if kind.min > kind.max:
            yield (*where, "max"), f"the least ({written(kind.min)}) is more than the most ({written(kind.max)})", ""
        elif kind.max == 0:
            yield (*where, "max"), "nobody could have a sandbox of that size", ""
        elif kind.default is not None and not kind.min <= kind.default <= kind.max:
            yield (*where, "default"), f"{written(kind.default)} is outside {written(kind.min)}..{written(kind.max)}", ""
    if policy.timeout_s_default > policy.timeout_s_max:
        most = q.write_duration(policy.timeout_s_max)
        yield (*path, "lifetime", "default"), f"longer than the longest lifetime ({most})", "raise lifetime.max or lower this"
    if policy.templates and policy.template is not None and policy.template not in policy.templates:
        yield (*path, "template"), f"{policy.template!r} is not among this class's templates", "add it there or name another"
    if policy.templates and policy.template is None:
        yield (*path, "templates"), "a request that names no template would be refused", "say which one `template:` is for those"
    if part.placement.choices is not None and policy.placement_policy is PlacementPolicy.PACK:
        yield (*path, "placement", "choices"), "means something only with policy spread", "leave it out, or say policy: spread"
    if policy.create_patience_s > policy.no_capacity_s:
        yield (*path, "timeouts", "patience"), "longer than no_capacity, which ends the create first", "raise no_capacity or lower this"


def _of_limits(whole: Whole, meant: Deployment) -> Iterator[_Wrong]:
    for path, part in _limit_parts(whole):
        if part.burst is not None and part.request_rate is None:
            yield (*path, "burst"), "means nothing without a request_rate", "say request_rate, too"
    total = meant.deployment
    # Only what somebody wrote is contradicted: a default that is never reached does no harm.
    yield from _never(whole.limits.client, ("limits", "client"), "sandboxes", meant.team.sandboxes, "its team's")
    for path, part in _limit_parts(whole):
        if isinstance(part, TeamPart):
            yield from _never(part, path, "sandboxes", total.sandboxes, "the deployment's")
            yield from _never(part, path, "records", total.records, "the deployment's")
    yield from _never(whole.limits.deployment, ("limits", "deployment"), "active_hosts", total.registered_hosts, "registered_hosts")
    yield from _fewer_records(("limits", "team"), meant.team)
    yield from _fewer_records(("limits", "deployment"), total)
    for name, limits in meant.teams.items():
        yield from _fewer_records(("teams", name), limits)


def _of_builds(part: Builds, meant: BuildLimits) -> Iterator[_Wrong]:
    whole = q.write_duration(meant.whole_s)
    for name, written in (("step", part.step), ("start", part.start)):
        if written is not None and written > meant.whole_s:
            yield ("builds", name), f"is never reached: the whole build has {whole}", f"lower it to {whole}, or raise builds.whole"


def _limit_parts(whole: Whole) -> Iterator[tuple[Path, ClientPart]]:
    yield ("limits", "client"), whole.limits.client
    yield ("limits", "team"), whole.limits.team
    yield ("limits", "deployment"), whole.limits.deployment
    for name, part in whole.teams.items():
        yield ("teams", name), part


def _never(part: ClientPart, path: Path, name: str, outer: int | None, whose: str) -> Iterator[_Wrong]:
    inner = getattr(part, name)
    if inner is not None and outer is not None and inner > outer:
        yield (*path, name), f"{inner} is never reached: {whose} limit is {outer}", f"lower it to {outer}, or raise the other"


def _fewer_records(path: Path, limits: TeamLimits | DeploymentLimits) -> Iterator[_Wrong]:
    if limits.records is not None and (limits.sandboxes is None or limits.records < limits.sandboxes):
        yield (*path, "records"), "fewer records than sandboxes, of which each has one", "raise records or lower sandboxes"
