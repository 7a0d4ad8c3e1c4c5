"""Scenario: everything that a world's fate and its clients are going to do, as data that follows from a seed.

Theory of operation. A fault and a client's step each have a time, so that either can be left out without moving the others: that is what
`shrink` lives on. Not every world knows every fault: each seed draws which kinds there are, because faults that come together hide each
other. What chance decides while a world runs (delays, which message is lost) comes from dice of the part that it concerns.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final


class Kind(StrEnum):
    """What can go wrong. In brackets: what `share` and `word` mean."""

    CONTROL_CRASH = "control_crash"
    """A replica ends after a number of its own steps. [share: of STEPS_MAX]"""
    CONTROL_FREEZE = "control_freeze"
    HINTS_LOST = "hints_lost"
    """A replica does not hear the others, nor they it, until its connection is mended."""
    AGENT_CRASH = "agent_crash"
    """[share: of STEPS_MAX; word: `disk` when its database is gone afterwards]"""
    AGENT_FREEZE = "agent_freeze"
    """Its machine's time goes on without it."""
    REBOOT = "reboot"
    """The machine starts anew: no guest is running any more. [word: `wiped` when nothing is left of them at all]"""
    VANISH = "vanish"
    """The machine is off. [word: `off` an operator says so, `fence` one waits for the lease, `back` it comes back]"""
    LOSSY = "lossy"
    """Messages are lost on either way. [share: how many]"""
    REPEATED = "repeated"
    """Messages are delivered once more, later, to any replica. [share: how many]"""
    SLOW = "slow"
    """Messages take up to some seconds, and so overtake each other. [share: of SLOW_S_MAX]"""
    PARTITION = "partition"
    """[word: `both`, `requests` or `answers`: what does not arrive]"""
    STORE_RACES = "store_races"
    """Transactions fail to serialize and are run again. [share: how many]"""
    STORE_FORGETS = "store_forgets"
    """A commit is on disk and its caller hears an error. [share: how many]"""
    STORE_LATE = "store_late"
    """Of several replicas: transactions read now and write later, when others have written. [share: how many]"""
    STORE_DOWN = "store_down"
    STORE_SLOW = "store_slow"
    """[share: of a second]"""
    RESTORE = "restore"
    """The store is taken back to a backup. At most once; the backup is made at `at_s`, and taken back to after `for_s`."""
    CLOCK_STEP = "clock_step"
    """A machine's wall clock is set. [share: of +-STEP_S_MAX around 0.5]"""
    GUEST_EXITS = "guest_exits"
    """[share: which one; word: `unseen` when its agent is not told]"""
    GUEST_MUTE = "guest_mute"
    """Guests that start meanwhile never answer."""
    DRIVER_FAILS = "driver_fails"
    """[word: `VERB once|after|always`]"""
    DRIVER_HANGS = "driver_hangs"
    """[word: the verb]"""
    DISK_FULL = "disk_full"
    JOURNAL_REFUSES = "journal_refuses"
    STUCK = "stuck"
    """Something of a placement does not go away. [share: which one]"""
    DRAIN = "drain"
    MOMENTS_AWAY = "moments_away"
    """The artifact store does not answer."""
    MOMENTS_LOSSY = "moments_lossy"
    """Calls of it fail, or their answers are lost. [share: how many]"""
    MOMENTS_SLOW = "moments_slow"
    """[share: of SLOW_S_MAX]"""
    MOMENT_SPOILT = "moment_spoilt"
    """Something in it is not what it was. [share: which one]"""


CONTROL: Final = frozenset({Kind.CONTROL_CRASH, Kind.CONTROL_FREEZE, Kind.HINTS_LOST})
STORE: Final = frozenset({Kind.STORE_RACES, Kind.STORE_FORGETS, Kind.STORE_DOWN, Kind.STORE_SLOW, Kind.STORE_LATE})
MOMENTS: Final = frozenset({Kind.MOMENTS_AWAY, Kind.MOMENTS_LOSSY, Kind.MOMENTS_SLOW, Kind.MOMENT_SPOILT})
REPLICAS: Final = frozenset({Kind.STORE_LATE, Kind.HINTS_LOST})
"""What can only go wrong between several."""
STEPS_MAX: Final = 200
MOVES_MAX: Final = 16
"""Steps of a client whose sandboxes come and go."""
KEPT_MAX: Final = 6
"""Snapshots and forks of one world."""
WARMED_MAX: Final = 12
"""What an operator changes about what is kept warm in one world, and crowds that come for it."""
CROWD_MAX: Final = 6
MEMORY_MIB: Final = 512
"""Of a sandbox that nobody wants bigger."""
SLOW_S_MAX: Final = 8.0
STEP_S_MAX: Final = 7200.0
VERBS: Final = ("prepare", "start", "stop", "remove", "inspect", "adopt", "held", "probe", "pause", "resume", "save", "restore", "discard")


class Wish(StrEnum):
    """What a client does."""

    CREATE = "create"
    RELEASE = "release"
    EXTEND = "extend"
    REPEAT = "repeat"
    """The same create once more."""
    PAUSE = "pause"
    SUSPEND = "suspend"
    RESUME = "resume"
    SNAPSHOT = "snapshot"
    FORK = "fork"
    AUTHORIZE = "authorize"
    """Whatever of its sandboxes waits for a word before it is replaced gets that word."""
    WARM = "warm"
    """An operator has `count` guests kept ready; with 0, none any more."""
    REBUILD = "rebuild"
    """The template gets a new build."""
    CROWD = "crowd"
    """`count` creates at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. *Units*: virtual seconds."""

    at_s: float
    kind: Kind
    target: int = 0
    """Which host, or which replica; modulo how many there are."""
    for_s: float = 0.0
    share: float = 0.0
    word: str = ""

    def __str__(self) -> str:
        extras = [f"for {self.for_s:.1f} s"] if self.for_s else []
        extras += [f"share {self.share:.2f}"] if self.share else []
        return f"{self.at_s:8.2f}  {self.kind:16} on {self.target} {self.word} {', '.join(extras)}".rstrip()


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a client does when its time has come and it has done what was before. *Units*: seconds."""

    at_s: float
    client: int
    wish: Wish
    timeout_s: int = 0
    pick: float = 0.0
    """Which of its sandboxes, as a share of them."""
    count: int = 0
    memory_mib: int = MEMORY_MIB

    def __str__(self) -> str:
        of = f"timeout {self.timeout_s} s" if self.timeout_s else f"pick {self.pick:.2f}"
        of += f", {self.count} of {self.memory_mib} MiB" if self.wish in (Wish.WARM, Wish.CROWD) else ""
        return f"{self.at_s:8.2f}  client {self.client}: {self.wish} ({of})"


@dataclass(frozen=True, slots=True)
class Plan:
    """How big worlds are. *Units*: virtual seconds."""

    hosts_max: int = 3
    replicas_max: int = 3
    clients_max: int = 4
    fate_s: float = 400.0
    faults_max: int = 24
    steps_max: int = 40


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world's story, as far as it can be known before."""

    seed: int
    hosts: int
    replicas: int
    fate_s: float
    skews_s: tuple[float, ...] = ()
    """How far the wall clock of each machine is off: first the replicas', then the hosts'."""
    on_lease_expiry: str = "end"
    on_exit: str = "release"
    on_loss: str = "end"
    stored: bool = False
    """Whether what is saved goes to an artifact store that all hosts share."""
    local_s: float = 60.0
    """How long a host keeps its copy then."""
    faults: tuple[Fault, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def clients(self) -> int:
        """How many there are."""
        return 1 + max((step.client for step in self.steps), default=0)

    def without(self, faults: frozenset[Fault], steps: frozenset[Step]) -> Scenario:
        """The same with less."""
        return replace(
            self,
            faults=tuple(f for f in self.faults if f not in faults),
            steps=tuple(s for s in self.steps if s not in steps),
        )

    def to_json(self) -> str:
        """For a file; `from_json` reads it."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """What `to_json` wrote."""
        raw: dict[str, Any] = json.loads(text)
        raw["faults"] = tuple(Fault(**{**f, "kind": Kind(f["kind"])}) for f in raw["faults"])
        raw["steps"] = tuple(Step(**{**s, "wish": Wish(s["wish"])}) for s in raw["steps"])
        raw["skews_s"] = tuple(raw["skews_s"])
        return cls(**raw)


def generate(seed: int, plan: Plan | None = None) -> Scenario:
    """The story of this seed."""
    plan = plan or Plan()
    dice = random.Random(f"{seed}/scenario")
    hosts = dice.randint(1, plan.hosts_max)
    replicas = dice.randint(1, plan.replicas_max)
    # By dice of their own, below: what a seed tells otherwise stays as it was.
    kinds = [kind for kind in Kind if kind not in MOMENTS]
    known = [kind for kind in kinds if dice.random() < 0.45] or [dice.choice(kinds)]
    faults = _possible([_fault(dice, dice.choice(known), plan.fate_s) for _ in range(dice.randint(1, plan.faults_max))])
    clients = dice.randint(1, plan.clients_max)
    steps = [_step(dice, dice.randrange(clients), plan.fate_s) for _ in range(dice.randint(4, plan.steps_max))]
    # By dice of their own: what a seed tells otherwise stays as it was.
    kept = random.Random(f"{seed}/kept")
    if kept.random() < 0.5:
        steps += [_kept(kept, kept.randrange(clients), plan.fate_s) for _ in range(kept.randint(1, KEPT_MAX))]
        faults += [_fault_of_keeping(kept, plan.fate_s) for _ in range(kept.randint(0, 2))]
    away = random.Random(f"{seed}/stored")
    stored = away.random() < 0.6
    if stored:
        steps += _moved(away, away.randrange(clients), plan.fate_s)
        faults += [_fault_of_storing(away, plan.fate_s) for _ in range(away.randint(0, 4))]
    warm = random.Random(f"{seed}/warm")
    if warm.random() < 0.5:
        steps += _warmed(warm, clients, plan.fate_s)
    skewed = dice.random() < 0.5
    return Scenario(
        seed=seed,
        hosts=hosts,
        replicas=replicas,
        fate_s=plan.fate_s,
        skews_s=tuple(round(dice.uniform(-2.0, 2.0), 3) if skewed else 0.0 for _ in range(replicas + hosts)),
        on_lease_expiry=dice.choice(("end", "end", "suspend", "keep")),
        on_exit=dice.choice(("release", "release", "restart")),
        on_loss=dice.choice(("end", "replace")),
        stored=stored,
        local_s=away.choice((1.0, 20.0, 100.0)),
        faults=tuple(sorted(faults, key=lambda f: f.at_s)),
        steps=tuple(sorted(steps, key=lambda s: s.at_s)),
    )


def _possible(faults: list[Fault]) -> list[Fault]:
    """One restore; and where there is one no agent loses its database: what neither side remembers is nobody's to find."""
    restore = next((fault for fault in faults if fault.kind is Kind.RESTORE), None)
    if restore is None:
        return faults
    kept = [fault for fault in faults if fault.kind is not Kind.RESTORE or fault is restore]
    return [replace(fault, word="") if fault.kind is Kind.AGENT_CRASH else fault for fault in kept]


def _fault(dice: random.Random, kind: Kind, fate_s: float) -> Fault:
    at_s = round(dice.uniform(1.0, fate_s), 3)
    # Mostly short; now and then longer than a lease.
    for_s = round(dice.choice((2.0, 10.0, 10.0, 60.0, 60.0, 400.0)) * dice.random(), 3)
    share = round(dice.random(), 3)
    word = ""
    match kind:
        case Kind.AGENT_CRASH:
            word = dice.choice(("", "", "", "disk"))
        case Kind.REBOOT:
            word = dice.choice(("", "wiped"))
        case Kind.VANISH:
            word = dice.choice(("off", "fence", "back"))
        case Kind.PARTITION:
            word = dice.choice(("both", "requests", "answers"))
        case Kind.GUEST_EXITS:
            word = dice.choice(("", "unseen"))
        case Kind.DRIVER_FAILS:
            word = f"{dice.choice(VERBS)} {dice.choice(('once', 'after', 'always'))}"
        case Kind.DRIVER_HANGS:
            word = dice.choice(VERBS)
        case Kind.STORE_DOWN | Kind.STORE_FORGETS:
            for_s = round(for_s / 10, 3)
        case _:
            pass
    return Fault(at_s, kind, target=dice.randrange(12), for_s=for_s, share=share, word=word)


def _kept(dice: random.Random, client: int, fate_s: float) -> Step:
    wish = dice.choice((Wish.SNAPSHOT, Wish.FORK, Wish.FORK))
    return Step(round(dice.uniform(10.0, fate_s), 3), client, wish, timeout_s=dice.choice((60, 300)), pick=round(dice.random(), 3))


def _fault_of_keeping(dice: random.Random, fate_s: float) -> Fault:
    verb, how = dice.choice(("snapshot", "drop")), dice.choice(("once", "after", "always"))
    for_s = round(60.0 * dice.random(), 3)
    return Fault(round(dice.uniform(1.0, fate_s), 3), Kind.DRIVER_FAILS, target=dice.randrange(12), for_s=for_s, word=f"{verb} {how}")


def _moved(dice: random.Random, client: int, fate_s: float) -> list[Step]:
    """Some sandboxes that are suspended and resumed, over and over, at times between which what is saved may or may not get into the store."""
    found: list[Step] = []
    at_s = dice.uniform(0.0, fate_s / 3)
    for _ in range(dice.randint(1, 2)):
        found.append(Step(round(at_s, 3), client, Wish.CREATE, timeout_s=1000))
    while at_s < fate_s and len(found) < MOVES_MAX:
        at_s += dice.choice((2.0, 20.0, 60.0)) * dice.random() + 1.0
        found.append(Step(round(at_s, 3), client, Wish.SUSPEND, pick=round(dice.random(), 3)))
        at_s += dice.choice((2.0, 40.0, 120.0)) * dice.random()
        found.append(Step(round(at_s, 3), client, Wish.RESUME, timeout_s=1000, pick=round(dice.random(), 3)))
    return found


def _warmed(dice: random.Random, client: int, fate_s: float) -> list[Step]:
    """An operator who keeps guests ready and changes his mind, a template that is built anew, and crowds that want more than there is."""
    found = [Step(round(dice.uniform(0.0, fate_s / 4), 3), client, Wish.WARM, count=dice.randint(1, 4))]
    for _ in range(dice.randint(3, WARMED_MAX)):
        at_s, count = round(dice.uniform(0.0, fate_s), 3), dice.randint(0, 4)
        # Mostly of the size that other creates have; of another one it only takes room.
        memory_mib = dice.choice((MEMORY_MIB, MEMORY_MIB, MEMORY_MIB, 2 * MEMORY_MIB))
        match dice.choice((Wish.WARM, Wish.REBUILD, Wish.CROWD, Wish.CROWD, Wish.CROWD)):
            case Wish.WARM:
                found.append(Step(at_s, client, Wish.WARM, count=count, memory_mib=memory_mib))
            case Wish.REBUILD:
                found.append(Step(at_s, client, Wish.REBUILD))
            case crowd:
                of, timeout_s = client + 1 + dice.randrange(2), dice.choice((20, 60, 300))
                found.append(Step(at_s, of, crowd, timeout_s=timeout_s, count=1 + dice.randrange(CROWD_MAX), memory_mib=memory_mib))
    return found


def _fault_of_storing(dice: random.Random, fate_s: float) -> Fault:
    kind = dice.choice((*sorted(MOMENTS), Kind.DRAIN, Kind.DRAIN, Kind.VANISH))
    word = dice.choice(("off", "fence", "back")) if kind is Kind.VANISH else ""
    for_s = round(dice.choice((5.0, 30.0, 120.0)) * dice.random(), 3)
    at_s, share = round(dice.uniform(5.0, fate_s), 3), round(dice.random(), 3)
    return Fault(at_s, kind, target=dice.randrange(12), for_s=for_s, share=share, word=word)


_REST: Final = (Wish.PAUSE, Wish.SUSPEND, Wish.RESUME, Wish.RESUME)


def _step(dice: random.Random, client: int, fate_s: float) -> Step:
    wish = dice.choice((Wish.CREATE, Wish.CREATE, Wish.CREATE, Wish.RELEASE, Wish.EXTEND, Wish.REPEAT, Wish.AUTHORIZE, *_REST))
    timeout_s = dice.choice((20, 60, 120, 300, 1000)) if wish in (Wish.CREATE, Wish.EXTEND, Wish.RESUME) else 0
    return Step(round(dice.uniform(0.0, fate_s), 3), client, wish, timeout_s=timeout_s, pick=round(dice.random(), 3))
