"""The fleet: every host that is known, kept so that a decision over ten thousand of them looks at a few.

Theory of operation. Hosts lie in one list by (free memory, free CPU, place on the circle): `pack` begins where the memory suffices and takes
the first that fits; equals lie side by side, and are looked at in the order of their turns. What a host is (arch, labels, isolations...) is
interned as a trait, and what a class asks of hosts is asked of each trait once. Hosts that hold an image are known by image, so that they
can be asked first. `spread` draws from a list that is ordered by the circle. In each case the answer is that of `placing.candidates`, which the tests hold it
to. Nothing here grants anything, and nothing here knows the time or chance.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from atoll.base.records import replace
from atoll.domain.host import SUSPECT_AFTER_S, Host
from atoll.domain.spec import Isolation, PlacementPolicy, Spec
from atoll.planning import placing
from atoll.planning.placing import Advert, Filter, fetched_kind

_FEW: Final = 8
"""Hosts of which there are at most one in this many are looked at one by one, whatever their order."""
_Shape = tuple[object, ...]
"""What a spec asks of a host whatever it has free: classes and templates give a few dozen of them."""
_SHAPES_MAX: Final = 256
_TRAITS_SPARE: Final = 64


@dataclass(slots=True, eq=False)
class _Entry:
    advert: Advert
    place: int
    """On the circle."""
    trait: int
    memory_mib: int
    cpu_millis: int
    disk_mib: int
    slots: int
    """Free, all four."""
    fresh_until: float
    """Healthy before this: `domain.host.health` without an object for each look."""

    @property
    def key(self) -> _Key:
        return self.memory_mib, self.cpu_millis, self.place, self.advert.host.id, self


_Key = tuple[int, int, int, str, _Entry]
"""Free memory, free CPU, place on the circle, id. No two hosts have one id, so that entries are never compared."""
_Fits = Callable[[_Entry], bool]


class Fleet:
    """In memory, by host id."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._order: list[_Key] = []
        self._circle: list[tuple[int, str, _Entry]] = []
        self._holders: dict[str, set[str]] = {}
        self._names: dict[str, str] = {}
        self._traits: dict[tuple[object, ...], int] = {}
        self._of_trait: list[Host] = []
        """One host of each trait: all of them get the same lasting objections."""
        self._members: list[set[str]] = []
        """The hosts of each trait."""
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
        """A host is new, or something about it is other than before. Cost: a few searches of sorted lists."""
        host, free = advert.host, advert.free
        known = self._entries.get(host.id)
        if known is None and len(self._of_trait) > 2 * len(self._entries) + _TRAITS_SPARE:
            self._forget_traits()
        entry = _Entry(
            advert,
            known.place if known is not None else placing.ring(host.id),
            self._trait(host),
            free.memory_mib,
            free.cpu_millis,
            free.disk_mib,
            free.slots,
            -math.inf if host.seen_at is None else host.seen_at + SUSPECT_AFTER_S,
        )
        if known is not None:
            self._take_out(known)
        insort(self._order, entry.key)
        insort(self._circle, (entry.place, host.id, entry))
        self._members[entry.trait].add(host.id)
        for image in host.images:
            self._holders.setdefault(image, set()).add(host.id)
        self._names[host.name] = host.id
        self._entries[host.id] = entry

    def remove(self, host_id: str) -> None:
        """A host is known no more. *Idempotency*: as is one that never was."""
        entry = self._entries.pop(host_id, None)
        if entry is not None:
            self._take_out(entry)

    def _take_out(self, entry: _Entry) -> None:
        host = entry.advert.host
        del self._order[bisect_left(self._order, entry.key)]
        del self._circle[bisect_left(self._circle, (entry.place, host.id))]
        self._members[entry.trait].discard(host.id)
        for image in host.images:
            holders = self._holders[image]
            holders.discard(host.id)
            if not holders:
                del self._holders[image]
        if self._names.get(host.name) == host.id:
            del self._names[host.name]

    def load(self, adverts: Iterable[Advert]) -> None:
        """These and no others."""
        wanted = {advert.host.id: advert for advert in adverts}
        for host_id in [known for known in self._entries if known not in wanted]:
            self.remove(host_id)
        for advert in wanted.values():
            if self.get(advert.host.id) != advert:
                self.put(advert)

    def choose(self, spec: Spec, *, sandbox_id: str, now: float, excluded: Collection[str] = ()) -> str | None:
        """The host to ask first; None when no host fits."""
        suited = self._suitable(spec)
        fits = _fitting(spec, suited, now=now, excluded=frozenset(excluded))
        pinned = spec.require_host if spec.require_host is not None else spec.prefer_host
        if pinned is not None:
            entry = self._entries.get(pinned) or self._entries.get(self._names.get(pinned, ""))
            if entry is not None and fits(entry):
                return entry.advert.host.id
            if spec.require_host is not None:
                return None
        few = self._few(suited)
        if few is not None:
            return self._of_few([entry for entry in few if fits(entry)], spec, sandbox_id)
        if spec.placement_policy is PlacementPolicy.SPREAD:
            return self._spread(spec, fits, sandbox_id)
        return self._pack(spec, fits, sandbox_id)

    def rung(self, spec: Spec, rungs: Sequence[Isolation], *, now: float) -> Isolation:
        """The first of these isolations that a host offers which lives and could take the spec; the last one where none does.

        A host that is full offers it all the same: nobody gets a weaker one because the stronger is in demand.
        """

        def offered(one: Isolation) -> bool:
            traits = self._suitable(spec if one is spec.isolation else replace(spec, isolation=one))
            return any(now < self._entries[host_id].fresh_until for trait in traits for host_id in self._members[trait])

        return next((one for one in rungs[:-1] if offered(one)), rungs[-1])

    def summary(self, spec: Spec, *, now: float) -> str:
        """As `placing.explain` sums up, without a word for each host."""
        return placing.summary(len(self._entries), self.removed(spec, now=now))

    def removed(self, spec: Spec, *, now: float) -> dict[Filter, int]:
        """How many hosts each filter removes."""
        need, pinned = spec.vector(), spec.require_host
        combined: dict[int, int] = {}
        for memory_mib, cpu_millis, _, host_id, entry in self._order:
            key = (
                entry.trait << 6
                | (now < entry.fresh_until) << 5
                | (pinned is None or pinned in (host_id, entry.advert.host.name)) << 4
                | (cpu_millis >= need.cpu_millis) << 3
                | (memory_mib >= need.memory_mib) << 2
                | (entry.disk_mib >= need.disk_mib) << 1
                | (entry.slots >= need.slots)
            )
            combined[key] = combined.get(key, 0) + 1
        removed: Counter[Filter] = Counter()
        for key, count in combined.items():
            for one in placing.lasting(self._of_trait[key >> 6], spec):
                removed[one.filter] += count
            for number, name in enumerate(_PASSING):
                if not key >> (5 - number) & 1:
                    removed[name] += count
        return {name: count for name, count in removed.items() if count}

    # Who fits, and in which order they are looked at.

    def _suitable(self, spec: Spec) -> set[int]:
        """The traits that nothing lasting speaks against."""
        shape = (spec.arch, spec.regions, spec.labels, spec.isolation, fetched_kind(spec))
        asked, suited = self._suited.get(shape) or (0, set())
        if asked < len(self._of_trait):
            suited.update(
                number for number in range(asked, len(self._of_trait)) if next(placing.lasting(self._of_trait[number], spec), None) is None
            )
            if len(self._suited) >= _SHAPES_MAX:
                self._suited.clear()
            self._suited[shape] = (len(self._of_trait), suited)
        return suited

    def _few(self, suited: set[int]) -> list[_Entry] | None:
        """The hosts of these traits where they are few; None where they are not."""
        most, found = len(self._entries) // _FEW, 0
        for trait in suited:
            found += len(self._members[trait])
            if found > most:
                return None
        return [self._entries[host_id] for trait in suited for host_id in self._members[trait]]

    def _of_few(self, fit: list[_Entry], spec: Spec, sandbox_id: str) -> str | None:
        if spec.placement_policy is PlacementPolicy.SPREAD and fit:
            turn, circle = placing.turns(len(self._circle), sandbox_id), self._circle
            fit.sort(key=lambda entry: turn(bisect_left(circle, (entry.place, entry.advert.host.id))))
            return self._best_drawn(fit, spec)
        held = [entry for entry in fit if spec.image in entry.advert.host.images]
        return self._fullest(held or fit, sandbox_id)

    def _fullest(self, fit: list[_Entry], sandbox_id: str) -> str | None:
        """Of these, the one with the least memory, then CPU left; among equals, whose turn is first among all that have as much."""
        if not fit:
            return None
        least = min((entry.memory_mib, entry.cpu_millis) for entry in fit)
        equal = [entry for entry in fit if entry.memory_mib == least[0] and entry.cpu_millis == least[1]]
        order, (memory, cpu, *_) = self._order, equal[0].key
        first = bisect_left(order, (memory, cpu))
        after = bisect_left(order, (memory, cpu + 1), first)
        turn = placing.turns(after - first, sandbox_id)
        best = min(
            equal, key=lambda entry: turn(bisect_left(order, (memory, cpu, entry.place, entry.advert.host.id), first, after) - first)
        )
        return best.advert.host.id

    def _pack(self, spec: Spec, fits: _Fits, sandbox_id: str) -> str | None:
        """By image, memory left, CPU left and turn."""
        holders: Collection[str] = self._holders.get(spec.image, ())
        few = len(holders) * _FEW <= len(self._entries)
        if few:
            held = (self._entries[host_id] for host_id in holders)
            best = self._fullest([entry for entry in held if fits(entry)], sandbox_id)
            if best is not None:
                return best
        order, second = self._order, -1
        for at in range(bisect_left(order, (spec.vector().memory_mib,)), len(order)):
            entry = order[at][4]
            if not fits(entry):
                continue
            if few or order[at][3] in holders:
                return self._among_equals(at, fits if few else lambda one: one.advert.host.id in holders and fits(one), sandbox_id)
            second = at if second < 0 else second
        return self._among_equals(second, fits, sandbox_id) if second >= 0 else None

    def _among_equals(self, at: int, fits: _Fits, sandbox_id: str) -> str:
        """Of those with as much free as the one at `at`, the one that fits whose turn is first."""
        order, (memory, cpu, _, host_id, _) = self._order, self._order[at]
        first = bisect_left(order, (memory, cpu))
        after = bisect_left(order, (memory, cpu + 1), at)
        for number in placing.drawing(after - first, sandbox_id):
            if fits(order[first + number][4]):
                return order[first + number][3]
        return host_id

    def _spread(self, spec: Spec, fits: _Fits, sandbox_id: str) -> str | None:
        circle = self._circle
        drawn = (circle[number][2] for number in placing.drawing(len(circle), sandbox_id))
        return self._best_drawn((entry for entry in drawn if fits(entry)), spec)

    @staticmethod
    def _best_drawn(fit: Iterable[_Entry], spec: Spec) -> str | None:
        """Of the first that were drawn; equals in the order in which they were."""
        drawn = enumerate(islice(fit, spec.placement_choices))
        best = min(drawn, key=lambda one: placing.score(one[1].advert, spec, turn=one[0]), default=None)
        return best[1].advert.host.id if best is not None else None

    def _forget_traits(self) -> None:
        """Of hosts that have gone or become others; otherwise they would outnumber the living in time."""
        self._traits, self._of_trait, self._members, self._suited = {}, [], [], {}
        for host_id, entry in self._entries.items():
            entry.trait = self._trait(entry.advert.host)
            self._members[entry.trait].add(host_id)

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
            host.moments,
        )
        number = self._traits.get(said)
        if number is None:
            number = self._traits[said] = len(self._of_trait)
            self._of_trait.append(host)
            self._members.append(set())
        return number


def _fitting(spec: Spec, suited: set[int], *, now: float, excluded: frozenset[str]) -> _Fits:
    need = spec.vector()
    memory_mib, cpu_millis, disk_mib, slots = need.memory_mib, need.cpu_millis, need.disk_mib, need.slots

    def fits(entry: _Entry) -> bool:
        return (
            entry.cpu_millis >= cpu_millis
            and now < entry.fresh_until
            and entry.trait in suited
            and entry.memory_mib >= memory_mib
            and entry.disk_mib >= disk_mib
            and entry.slots >= slots
            and entry.advert.host.id not in excluded
        )

    return fits


_PASSING: Final = (
    Filter.HOST_NOT_HEALTHY,
    Filter.OTHER_HOST_REQUIRED,
    Filter.INSUFFICIENT_CPU,
    Filter.INSUFFICIENT_MEMORY,
    Filter.INSUFFICIENT_DISK,
    Filter.INSUFFICIENT_SLOTS,
)
