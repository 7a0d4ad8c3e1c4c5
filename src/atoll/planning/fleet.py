"""The fleet: every host that is known, kept so that a decision over ten thousand of them looks at a few.

Theory of operation. Hosts lie in one list by (free memory, free CPU, place on the circle): `pack` begins where the memory suffices and takes
the first that fits; among equals it begins behind the sandbox's own place on the circle. What a host is (arch, labels, isolations...) is
interned as a trait, and what a class asks of hosts is asked of each trait once. Hosts that hold an image are known by image, so that they
can be asked first. `spread` draws from a list that is ordered by the circle. In each case the answer is that of `placing.candidates`, which the tests hold it
to. Nothing here grants anything, and nothing here knows the time or chance.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from atoll.domain.host import SUSPECT_AFTER_S, Host
from atoll.domain.spec import PlacementPolicy, Spec
from atoll.planning import placing
from atoll.planning.placing import Advert, Filter

_FEW: Final = 8
"""Hosts that hold the image are looked at one by one where they are at most one in this many."""
_Key = tuple[int, int, int, str]
"""Free memory, free CPU, place on the circle, id."""
_Fits = Callable[[str], bool]
_Shape = tuple[object, ...]
"""What a spec asks of a host whatever it has free: classes and templates give a few dozen of them."""
_SHAPES_MAX: Final = 256
_TRAITS_SPARE: Final = 64


@dataclass(slots=True)
class _Entry:
    advert: Advert
    key: _Key
    trait: int
    disk_mib: int
    slots: int
    seen_at: float | None


class Fleet:
    """In memory, by host id."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._order: list[_Key] = []
        self._circle: list[tuple[int, str]] = []
        self._holders: dict[str, set[str]] = {}
        self._names: dict[str, str] = {}
        self._traits: dict[tuple[object, ...], int] = {}
        self._of_trait: list[Host] = []
        """One host of each trait: all of them get the same lasting objections."""
        self._suited: dict[_Shape, tuple[int, set[int]]] = {}
        """For each shape: how many traits were asked, and those that suit."""

    def __len__(self) -> int:
        return len(self._entries)

    def adverts(self) -> Iterator[Advert]:
        """Every host that is known."""
        return (entry.advert for entry in self._entries.values())

    def get(self, host_id: str) -> Advert | None:
        """One host as last told."""
        entry = self._entries.get(host_id)
        return entry.advert if entry is not None else None

    def put(self, advert: Advert) -> None:
        """A host is new, or something about it is other than before. Cost: two searches of a sorted list."""
        host, free = advert.host, advert.free
        known = self._entries.get(host.id)
        place = known.key[2] if known is not None else placing.ring(host.id)
        key = (free.memory_mib, free.cpu_millis, place, host.id)
        if known is None:
            insort(self._circle, (place, host.id))
            insort(self._order, key)
        elif known.key != key:
            del self._order[bisect_left(self._order, known.key)]
            insort(self._order, key)
        before = known.advert.host if known is not None else None
        if before is None or before.images != host.images:
            self._hold(host.id, before.images if before is not None else frozenset(), host.images)
        if before is None or before.name != host.name:
            if before is not None:
                self._names.pop(before.name, None)
            self._names[host.name] = host.id
        if len(self._of_trait) > 2 * len(self._entries) + _TRAITS_SPARE:
            self._forget_traits()
        trait = self._trait(host)
        self._entries[host.id] = _Entry(advert, key, trait, free.disk_mib, free.slots, host.seen_at)

    def remove(self, host_id: str) -> None:
        """A host is known no more. *Idempotency*: as is one that never was."""
        entry = self._entries.pop(host_id, None)
        if entry is None:
            return
        del self._order[bisect_left(self._order, entry.key)]
        del self._circle[bisect_left(self._circle, (entry.key[2], host_id))]
        self._hold(host_id, entry.advert.host.images, frozenset())
        if self._names.get(entry.advert.host.name) == host_id:
            del self._names[entry.advert.host.name]

    def load(self, adverts: Iterable[Advert]) -> None:
        """These and no others."""
        wanted = {advert.host.id: advert for advert in adverts}
        for host_id in [known for known in self._entries if known not in wanted]:
            self.remove(host_id)
        for advert in wanted.values():
            if self.get(advert.host.id) != advert:
                self.put(advert)

    def choose(self, spec: Spec, *, sandbox_id: str, now: float, excluded: Collection[str] = (), origin: str | None = None) -> str | None:
        """The host to ask first; None when no host fits."""
        if not self._suitable(spec):
            return None
        fits = self._fits(spec, now=now, excluded=frozenset(excluded))
        if spec.require_host is not None:
            named = spec.require_host if spec.require_host in self._entries else self._names.get(spec.require_host)
            return named if named is not None and fits(named) else None
        if origin is not None and origin in self._entries and fits(origin):
            return origin
        if spec.placement_policy is PlacementPolicy.SPREAD:
            return self._spread(spec, fits, sandbox_id)
        return self._pack(spec, fits, sandbox_id)

    def summary(self, spec: Spec, *, now: float) -> str:
        """As `placing.explain` sums up, without a word for each host."""
        return placing.summary(len(self._entries), self.removed(spec, now=now))

    def removed(self, spec: Spec, *, now: float) -> dict[Filter, int]:
        """How many hosts each filter removes."""
        need = spec.vector()
        combined: Counter[tuple[int, bool, bool, bool, bool, bool, bool]] = Counter()
        for host_id, entry in self._entries.items():
            memory_mib, cpu_millis, _, _ = entry.key
            combined[
                entry.trait,
                _fresh(entry, now),
                spec.require_host in (None, host_id, entry.advert.host.name),
                cpu_millis >= need.cpu_millis,
                memory_mib >= need.memory_mib,
                entry.disk_mib >= need.disk_mib,
                entry.slots >= need.slots,
            ] += 1
        removed: Counter[Filter] = Counter()
        for (trait, *passed), count in combined.items():
            for one in placing.lasting(self._of_trait[trait], spec):
                removed[one.filter] += count
            for name, passes in zip(_PASSING, passed, strict=True):
                removed[name] += 0 if passes else count
        return {name: count for name, count in removed.items() if count}

    # Who fits, and in which order they are looked at.

    def _fits(self, spec: Spec, *, now: float, excluded: frozenset[str]) -> _Fits:
        need, entries, suited = spec.vector(), self._entries, self._suitable(spec)

        def fits(host_id: str) -> bool:
            entry = entries[host_id]
            memory_mib, cpu_millis, _, _ = entry.key
            return (
                entry.trait in suited
                and cpu_millis >= need.cpu_millis
                and memory_mib >= need.memory_mib
                and entry.disk_mib >= need.disk_mib
                and entry.slots >= need.slots
                and _fresh(entry, now)
                and host_id not in excluded
            )

        return fits

    def _suitable(self, spec: Spec) -> set[int]:
        """The traits that nothing lasting speaks against."""
        shape = (spec.arch, spec.regions, spec.labels, spec.isolation)
        asked, suited = self._suited.get(shape) or (0, set())
        if asked < len(self._of_trait):
            suited.update(
                number for number in range(asked, len(self._of_trait)) if next(placing.lasting(self._of_trait[number], spec), None) is None
            )
            if len(self._suited) >= _SHAPES_MAX:
                self._suited.clear()
            self._suited[shape] = (len(self._of_trait), suited)
        return suited

    def _pack(self, spec: Spec, fits: _Fits, sandbox_id: str) -> str | None:
        """By image, memory left, CPU left and distance."""
        place = placing.ring(sandbox_id)
        holders: Collection[str] = self._holders.get(spec.image, ())
        few = len(holders) * _FEW <= len(self._entries)
        if few:
            keys = (self._entries[host_id].key for host_id in holders if fits(host_id))
            best = min(keys, key=lambda key: (key[0], key[1], (key[2] - place) % 2**64), default=None)
            if best is not None:
                return best[3]
        second: str | None = None
        for host_id in self._in_order(spec, place):
            if not fits(host_id):
                continue
            if few or host_id in holders:
                return host_id
            second = second or host_id
        return second

    def _in_order(self, spec: Spec, place: int) -> Iterator[str]:
        """Hosts whose memory suffices, by memory, CPU and distance; those that lack CPU are left out."""
        order, cpu_millis = self._order, spec.cpu_millis
        at, end = bisect_left(order, (spec.memory_mib,)), len(order)
        while at < end:
            memory, cpu, _, host_id = order[at]
            after = at + 1
            if after < end and order[after][0] == memory and order[after][1] == cpu:
                after = bisect_left(order, (memory, cpu + 1), after, end)
                if cpu >= cpu_millis:
                    begin = bisect_left(order, (memory, cpu, place), at, after)
                    for number in chain(range(begin, after), range(at, begin)):
                        yield order[number][3]
            elif cpu >= cpu_millis:
                yield host_id
            at = after

    def _spread(self, spec: Spec, fits: _Fits, sandbox_id: str) -> str | None:
        drawn: list[str] = []
        for number in placing.drawing(len(self._circle), sandbox_id):
            host_id = self._circle[number][1]
            if fits(host_id):
                drawn.append(host_id)
                if len(drawn) == spec.placement_choices:
                    break
        return min(drawn, key=lambda one: placing.score(self._entries[one].advert, spec, sandbox_id=sandbox_id), default=None)

    def _hold(self, host_id: str, before: frozenset[str], after: frozenset[str]) -> None:
        for image in before - after:
            holders = self._holders[image]
            holders.discard(host_id)
            if not holders:
                del self._holders[image]
        for image in after - before:
            self._holders.setdefault(image, set()).add(host_id)

    def _forget_traits(self) -> None:
        """Of hosts that have gone or become others; otherwise they would outnumber the living in time."""
        self._traits, self._of_trait, self._suited = {}, [], {}
        for entry in self._entries.values():
            entry.trait = self._trait(entry.advert.host)

    def _trait(self, host: Host) -> int:
        """Everything that `placing.lasting` asks a host for."""
        said = (
            host.admin,
            host.problems,
            host.arch,
            host.region,
            frozenset(host.labels.items()),
            host.protocol_min,
            host.protocol_max,
            host.isolations,
        )
        number = self._traits.get(said)
        if number is None:
            number = self._traits[said] = len(self._of_trait)
            self._of_trait.append(host)
        return number


_PASSING: Final = (
    Filter.HOST_NOT_HEALTHY,
    Filter.OTHER_HOST_REQUIRED,
    Filter.INSUFFICIENT_CPU,
    Filter.INSUFFICIENT_MEMORY,
    Filter.INSUFFICIENT_DISK,
    Filter.INSUFFICIENT_SLOTS,
)


def _fresh(entry: _Entry, now: float) -> bool:
    """Whether the host is healthy: `domain.host.health` without an object for each look."""
    return entry.seen_at is not None and now - entry.seen_at < SUSPECT_AFTER_S
