"""How long it takes to choose a host among ten thousand; without a database, since a decision needs none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from atoll.base.ids import HostId
from atoll.base.units import ZERO, Vector
from atoll.domain.host import Admin, Host
from atoll.domain.spec import Isolation, PlacementPolicy, Spec
from atoll.planning import placing
from atoll.planning.fleet import Fleet
from atoll.planning.placing import Advert
from bench.findings import Finding, Verdict
from bench.stats import Sample, figure
from bench.world import World

HOSTS: Final = 10_000
ALLOWED_S: Final = 0.008
NOW: Final = 1_800_000_000.0
IMAGE: Final = "sha256:" + "0" * 64
CAPACITY: Final = Vector(64_000, 262_144, 2_097_152, 256)
SPEC: Final = Spec(
    class_name="default",
    template_id="base",
    image=IMAGE,
    image_name="base",
    isolation=Isolation.GVISOR,
    cpu_millis=1000,
    memory_mib=512,
    disk_mib=2048,
    pids_max=4096,
    timeout_s=300,
)
NOBODY: Final = replace(SPEC, labels=(("rack", "none"),))


async def measure(world: World) -> Finding:
    """Each situation, and the same decision by looking at every host."""
    finding = Finding(
        name="placing",
        title=f"Choosing a host among {HOSTS:,} (ms)",
        columns=["", "p50", "p95", "p99", "n"],
        about=(
            "One decision from the directory in memory: filters, score and order, without asking the host. `by looking at all` is the same "
            "answer from the plain rule that the tests hold it to. `sum`: why none fits, which is said at most once a second."
        ),
    )
    worst = 0.0
    for label, fleet, spec in _situations():
        sample = decisions(fleet, spec, world.count(2000, 200))
        finding.rows.append([label, *sample.cells()])
        finding.keep(label, sample)
        worst = max(worst, sample.p99)
    mixed = _fleet(_used)
    plain = Sample()
    for number in range(world.count(20, 3)):
        began = time.perf_counter()
        placing.candidates(mixed.adverts(), SPEC, sandbox_id=f"i{number}", now=NOW)
        plain.add(time.perf_counter() - began)
    finding.rows.append(["half full, by looking at all", *plain.cells()])
    finding.rows += [
        ["sum", *_sums(mixed, world.count(50, 5)).cells()],
        ["a host's use changed", *_changes(mixed, world.count(5000, 500)).cells()],
    ]
    finding.verdicts.append(
        Verdict(
            f"a decision among {HOSTS:,} hosts, worst situation, p99: at most {ALLOWED_S * 1e3:.0f} ms",
            f"{figure(worst * 1e3)} ms",
            f"{ALLOWED_S * 1e3:.0f} ms",
            worst <= ALLOWED_S,
        )
    )
    return finding


def decisions(fleet: Fleet, spec: Spec, count: int) -> Sample:
    """So many, each for another sandbox."""
    sample = Sample()
    fleet.choose(spec, sandbox_id="warm", now=NOW)
    for number in range(count):
        began = time.perf_counter()
        fleet.choose(spec, sandbox_id=f"i{number}", now=NOW)
        sample.add(time.perf_counter() - began)
    return sample


def _situations() -> list[tuple[str, Fleet, Spec]]:
    mixed = _fleet(_used)
    without_cpu = _fleet(lambda dice: Vector(CAPACITY.cpu_millis, dice.randrange(0, CAPACITY.memory_mib, 512), 0, 0))
    lost = _fleet(_used, seen_at=NOW - 60)
    spread = PlacementPolicy.SPREAD
    return [
        ("half full", mixed, SPEC),
        ("half full, spread", mixed, replace(SPEC, placement_policy=spread)),
        ("all empty and alike", _fleet(lambda _: ZERO), SPEC),
        ("nobody has the image", mixed, replace(SPEC, image="another")),
        ("one rack of forty", mixed, replace(SPEC, labels=(("rack", "7"),))),
        ("no host has the label", mixed, NOBODY),
        ("memory everywhere, CPU nowhere", without_cpu, SPEC),
        ("memory everywhere, CPU nowhere, spread", without_cpu, replace(SPEC, placement_policy=spread)),
        ("no host is healthy", lost, SPEC),
        ("each host has a label of its own", _fleet(_used, own_label=True), replace(SPEC, labels=(("name", "9999"),))),
    ]


def _used(dice: random.Random) -> Vector:
    share = dice.random()
    return Vector(
        *(int(whole * share) // 512 * 512 for whole in (CAPACITY.cpu_millis, CAPACITY.memory_mib, CAPACITY.disk_mib)), dice.randrange(256)
    )


def _fleet(used: Callable[[random.Random], Vector], *, seen_at: float = NOW, own_label: bool = False) -> Fleet:
    dice = random.Random(1)
    fleet = Fleet()
    for number in range(HOSTS):
        host = Host(
            id=HostId(f"hst_{number:020}"),
            revision=1,
            name=f"host-{number}",
            admin=Admin.ACTIVE,
            capacity=CAPACITY,
            arch="x86_64",
            region="local",
            labels={"name": str(number)} if own_label else {"rack": str(number % 40)},
            seen_at=seen_at,
            isolations=frozenset({"gvisor"}),
            images=frozenset({IMAGE}) if number % 3 else frozenset(),
        )
        fleet.put(Advert(host, used(dice)))
    return fleet


def _sums(fleet: Fleet, count: int) -> Sample:
    sample = Sample()
    for _ in range(count):
        began = time.perf_counter()
        fleet.summary(NOBODY, now=NOW)
        sample.add(time.perf_counter() - began)
    return sample


def _changes(fleet: Fleet, count: int) -> Sample:
    sample = Sample()
    known = list(fleet.adverts())
    for number in range(count):
        advert = known[number % len(known)]
        changed = Advert(advert.host, advert.used + Vector(number % 7, number % 5, 0, 0))
        began = time.perf_counter()
        fleet.put(changed)
        sample.add(time.perf_counter() - began)
    return sample
