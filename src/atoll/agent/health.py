"""Health: what polls say of the host, from the doctor's checks and the drivers.

Theory of operation. Cheap looks are made when a poll is composed and they are older than a few seconds; the drivers' probes, which
start real guests, at start-up, while one fails, and after a failure that points at the runtime. Nothing runs between polls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Final

from atoll.agent.config import AgentConfig
from atoll.agent.doctor import Finding, Registry, driver_checks, host_checks
from atoll.agent.facts import free_mib
from atoll.agent.inventory import Quarantine
from atoll.base.clock import Clock
from atoll.base.errors import AtollError, Code
from atoll.domain.spec import Isolation
from atoll.drivers.port import Driver
from atoll.telemetry import events
from atoll.telemetry.log import get_logger
from atoll.wire.agent import Check, DriverState, HostHealth, ImageCacheState

log = get_logger()

LOOK_EVERY_S: Final = 5.0
PROBE_AGAIN_S: Final = 60.0
IMAGES_MAX: Final = 250
MOMENT_KINDS_MAX: Final = 16
SUSPICIOUS: Final = frozenset({Code.RUNTIME_MISSING, Code.START_FAILED, Code.GUEST_BOOT_TIMEOUT, Code.IMAGE_CORRUPT})
"""Failures of one placement that may be the host's."""


class Health:
    """Composes HostHealth."""

    def __init__(
        self,
        config: AgentConfig,
        drivers: Mapping[Isolation, Driver],
        quarantine: Quarantine,
        clock: Clock,
        *,
        recalled: Collection[str] = (),
        remember: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> None:
        """`recalled`: isolations that passed in an earlier run of this boot; they count until this run's own probes are done."""
        self._config = config
        self.recalled = frozenset(recalled) & {str(isolation) for isolation in drivers}
        self._remember = remember
        self._drivers = drivers
        self._quarantine = quarantine
        self._clock = clock
        self._cheap = Registry(host_checks(state_directory=config.state_directory, clock=clock, disk_reserve_mib=config.disk_reserve_mib))
        self._host: list[Finding] = []
        self._probed: dict[Isolation, list[Finding]] = {}
        self._images: list[str] = []
        self._cache: ImageCacheState | None = None
        self._looked_at: float | None = None
        self._probed_at: float | None = None
        self._suspicious = False
        self._moments: list[str] = []
        self.fetches = False
        """Whether this host has a way to the store of moments."""
        self._doubt = asyncio.Event()
        self._mended = asyncio.Event()
        """A check that failed is fine again, so what the probes met may be gone, too."""
        self._failed: frozenset[str] = frozenset()

    async def probe(self, isolations: Collection[Isolation] = ()) -> None:
        """Run these drivers' probes, or every one's. What one has found counts at once: a machine that is emulated boots for as long as ten containers."""
        self._suspicious = False
        self._probed_at = self._clock.boot()
        await asyncio.gather(*(self._probe(isolation) for isolation in isolations or self._drivers))
        self._tell()
        if self._remember is not None:
            await self._remember(self._isolations())

    async def _probe(self, isolation: Isolation) -> None:
        found = await Registry(driver_checks({isolation: self._drivers[isolation]})).run()
        self._probed = {i: found if i is isolation else self._probed[i] for i in self._drivers if i is isolation or i in self._probed}

    def suspect(self, code: Code) -> None:
        """A placement failed in a way that may be the host's fault: probe again soon."""
        if code in SUSPICIOUS:
            self._suspicious = True
            self._doubt.set()

    async def keep_probing(self) -> None:
        """Probe again after suspicious failures and while a probe fails, until cancelled.

        At most once in PROBE_AGAIN_S, and once when a check of the host comes right: probes of a full disk fail.
        """
        while True:
            if not self._doubtful():
                self._doubt.clear()
                await self._doubt.wait()
                self._mended.clear()
            assert self._probed_at is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._probed_at + PROBE_AGAIN_S - self._clock.boot())):
                    await self._mended.wait()
            self._mended.clear()
            await self.probe(() if self._suspicious else self._failing())

    def _failing(self) -> list[Isolation]:
        """A guest that boots for half a minute is not booted again because another driver's does not."""
        return [isolation for isolation, found in self._probed.items() if any(not f.ok for f in found)]

    def _doubtful(self) -> bool:
        return self._suspicious or any(not f.ok for found in self._probed.values() for f in found)

    async def compose(self) -> HostHealth:
        """What the next poll says."""
        await self._look()
        findings = [*self._host, *self._quarantine_finding(), *(f for found in self._probed.values() for f in found)]
        # What a single driver lacks only takes its isolation away; the host stays schedulable while one driver works.
        works = self._isolations()
        checks = [
            Check(id=f.id, ok=f.ok, detail=f.detail[:500], fix=f.fix[:500], fatal=f.fatal and not (works and self._of_driver(f)))
            for f in findings
        ]
        return HostHealth(
            checks=checks,
            isolations=works,
            drivers=self._drivers_of(works),
            images=self._images[:IMAGES_MAX],
            quarantined=self._quarantine.names()[:100],
            disk_free_mib=free_mib(self._config.state_directory),
            moments=self._moments[:MOMENT_KINDS_MAX],
            image_cache=self._cache,
        )

    async def _look(self) -> None:
        now = self._clock.boot()
        if self._looked_at is not None and now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        failed = {finding.id for finding in self._host if not finding.ok}
        self._host = await self._cheap.run()
        if failed & {finding.id for finding in self._host if finding.ok}:
            self._mended.set()
        digests: dict[str, None] = {}
        kinds: dict[str, None] = {}
        for driver in {id(d): d for d in self._drivers.values()}.values():
            try:
                digests.update((image.digest, None) for image in await driver.images())
                if self.fetches and driver.capabilities.portable:
                    kinds.update(dict.fromkeys(await driver.kinds()))
            except (AtollError, OSError) as error:
                log.warning(events.CHECK_FAILED, check="images", detail=f"{type(error).__name__}: {error}")
        self._images, self._moments = list(digests), list(kinds)
        if self._config.image_cache is not None:
            try:
                self._cache = await asyncio.to_thread(self._config.image_cache)
            except (AtollError, OSError) as error:
                log.warning(events.CHECK_FAILED, check="image_cache", detail=f"{type(error).__name__}: {error}")
        self._tell()

    def _isolations(self) -> list[str]:
        probed = [str(i) for i, found in self._probed.items() if all(f.ok or not f.fatal for f in found)]
        return sorted([*probed, *(self.recalled - {str(i) for i in self._probed})])

    def _drivers_of(self, works: Sequence[str]) -> list[DriverState]:
        named = ((isolation, driver.capabilities) for isolation, driver in self._drivers.items() if isolation in works)
        return [DriverState(isolation=i, name=can.name, saves=None if can.saves is None else can.saves.value) for i, can in named]

    def _of_driver(self, finding: Finding) -> bool:
        return any(finding in found for found in self._probed.values())

    def _quarantine_finding(self) -> Sequence[Finding]:
        names = self._quarantine.names()
        detail = f"{len(names)} unexplained: {', '.join(names[:5])}" if names else "nothing unexplained is held"
        return [Finding("host.quarantine", "quarantine", not names, detail, fatal=True)]

    def _tell(self) -> None:
        """Log failures once, when they begin."""
        findings = [*self._host, *(f for found in self._probed.values() for f in found)]
        failed = {f.id: f for f in findings if not f.ok}
        for id_, finding in failed.items():
            if id_ not in self._failed:
                log.warning(events.CHECK_FAILED, check=id_, detail=finding.detail, hint=finding.fix)
        self._failed = frozenset(failed)
