"""Control, put together: settings in, an ASGI application and its background loops out.

The only place in `control` that knows every part. Start order: store and schema, bootstrap, directory and routes from rows, loops; the
application answers from then on. Stop order is the reverse.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final

from atoll.base.clock import Clock, ShiftedClock
from atoll.base.errors import AtollError, Bug, Code
from atoll.base.ids import Dice, Prefix, TeamId, new_id
from atoll.control import bootstrap, routes, wellknown
from atoll.control.api import archives, registry, uploads
from atoll.control.api.app import build_app
from atoll.control.api.settings import ApiSettings
from atoll.control.artifacts.collecting import Collecting
from atoll.control.artifacts.giving import Giving
from atoll.control.artifacts.machines import Machines
from atoll.control.artifacts.manifests import Manifests
from atoll.control.artifacts.moments import Moments
from atoll.control.artifacts.rests import Rests
from atoll.control.artifacts.templates import Templates
from atoll.control.asgi import Receive, Scope, Send
from atoll.control.builds.amazon import Amazon
from atoll.control.builds.builds import Builds
from atoll.control.builds.workshop import SandboxWorkshop
from atoll.control.configuration import Configuration
from atoll.control.counting import Counted
from atoll.control.facade import Facade
from atoll.control.hosts.directory import Directory
from atoll.control.hosts.enrollment import Enrollment
from atoll.control.hosts.hosts import Hosts
from atoll.control.keys import Keys
from atoll.control.loops import deadlines, doubts, refresh, retention
from atoll.control.loops.alerts import Alerts
from atoll.control.loops.fencing import Fencing
from atoll.control.loops.following import Following
from atoll.control.loops.reconcile import Reconciler
from atoll.control.loops.relief import Relief
from atoll.control.loops.replicas import Replicas
from atoll.control.loops.waiting import Waiting
from atoll.control.loops.warming import WarmKeeper
from atoll.control.loops.watch import Watch
from atoll.control.metering import Meter
from atoll.control.opening import artifacts_of, clock_of, imports_of, key_of, own_registry_of, signing_of, store_of
from atoll.control.records import Records
from atoll.control.replicas.hub import Hub
from atoll.control.replicas.peer_calls import PeerCalls
from atoll.control.replicas.peers import PREFIX as PEERS
from atoll.control.replicas.peers import Peers
from atoll.control.sandboxes.ends import Ends
from atoll.control.sandboxes.resting import Resting
from atoll.control.sandboxes.sandboxes import Sandboxes
from atoll.control.sandboxes.snapshots import Snapshots
from atoll.control.sandboxes.usages import Usages
from atoll.control.sandboxes.warming import Warming
from atoll.control.sandboxes.whys import Whys
from atoll.control.service import ReplicaView
from atoll.control.sessions import agents
from atoll.control.sessions.captures import Captures
from atoll.control.sessions.consoles import Consoles
from atoll.control.sessions.holdings import Wants
from atoll.control.sessions.orders import Orders
from atoll.control.sessions.sessions import Sessions
from atoll.control.settings import ControlSettings
from atoll.control.tokens import Tokens
from atoll.control.wellknown import WellKnown
from atoll.domain.sandbox import Sandbox
from atoll.images.artifacts import Artifacts
from atoll.store import restoring, schema, tenancy, timeline
from atoll.store import sandboxes as stored
from atoll.store.engine import Observable, SqliteStore, Store
from atoll.store.hints import EVERYTHING, Hints, Shared
from atoll.store.replicas import Replica
from atoll.store.sealing import Sealer
from atoll.telemetry import events as names
from atoll.telemetry.log import get_logger
from atoll.telemetry.otlp import Export

LOG = get_logger()

_STAGGER_S_MAX: Final = 0.2


Served = Callable[[Scope, Receive, Send], Awaitable[None]]


class Control:
    """One control process. `start`, then serve `app`, then `stop`."""

    def __init__(self, settings: ControlSettings, *, clock: Clock, dice: Dice, store: Store | None = None) -> None:
        """`store`: an opened one to use instead of the settings' database; for simulations."""
        self.settings = settings
        self._clock = clock
        self._dice = dice
        self._tasks: list[asyncio.Task[None]] = []
        self._started = False
        self._app: Any = None
        self.hot: list[tuple[str, Served]] = []
        """Path prefixes of agents and edges, with what answers there."""
        self.outlived = asyncio.Event()
        """The store was restored from a backup under this process: what it remembers is of another world, and it should end."""
        self._incarnation = ""
        self._store = store
        self._following: Following | None = None
        self._replicas: Replicas | None = None
        self.artifacts: Artifacts | None = artifacts_of(settings)
        self.machines: Machines | None = None

    async def start(self) -> None:
        """Open the store and begin. *Errors*: Refused STORE_LOCKED; Unavailable STORE_*; Bug when it is another install's."""
        try:
            await self._begin()
        except BaseException:
            # A start that failed keeps no lock: the next one may come from this very process.
            for task in self._tasks:
                task.cancel()
            if self._store is not None:
                await self._store.close()
            raise

    async def _begin(self) -> None:
        store, incarnation = await self._opened()
        settings, clock, dice = self.settings, self._clock, self._dice
        self._tokens = tokens = Tokens(root=key_of(settings.secrets / "token.key"), signing=signing_of(settings.secrets / "guest-ed25519"))
        self._routes = routes.Routes(tokens, edge_token=(settings.secrets / "edge.token").read_text().strip(), incarnation=incarnation)
        hub, directory = Hub(), Directory()
        orders = Orders(store=store, sealer=Sealer(key_of(settings.secrets / "sealing.key")), tokens=tokens, clock=clock)
        shared = store if isinstance(store, Shared) else None
        self.meter = meter = self._metering(store)
        self.reconciler = reconciler = Reconciler(
            store=store,
            clock=clock,
            dice=dice,
            hub=hub,
            directory=directory,
            routes=self._routes,
            ends=Ends(moved=lambda moved: shared.tell(Hints(ends=moved))) if shared is not None else Ends(),
            wants=Wants(store, clock),
            deadlines=asyncio.Event(),
            meter=meter,
        )
        self.alerts = Alerts(
            store=store, clock=clock, dice=dice, hub=hub, directory=directory, meter=meter, process=f"control-{dice(4).hex()}"
        )
        self.peers = of_others = (
            None if shared is None else Peers(tokens, clock, incarnation, settings.address, settings.line, wake=hub.wake_host)
        )
        self.consoles = consoles = Consoles(hub=hub, dice=dice, peers=of_others)
        captures = self._captures(hub)
        self.snapshots = Snapshots(store=store, clock=clock, dice=dice, reconciler=reconciler)
        self.waiting = Waiting(reconciler, clock, stagger_s=_STAGGER_S_MAX * dice(1)[0] / 255 if shared is not None else 0.0)
        self.relief = Relief(reconciler=reconciler, directory=directory, snapshots=self.snapshots, clock=clock)
        self.fencing = Fencing(reconciler, directory, clock, lost=self.snapshots.lost)
        self.watch = Watch(reconciler, directory, clock)
        self.sessions = Sessions(
            store=store,
            clock=clock,
            hub=hub,
            directory=directory,
            reconciler=reconciler,
            orders=orders,
            consoles=consoles,
            fencing=self.fencing,
            incarnation=incarnation,
            captures=captures,
            peers=of_others,
            stepped_s=settings.stepped_s,
            snapshots=self.snapshots,
            takes_moments=self._takes_moments,
            moment_bytes_max=self._moment_bytes_max,
        )
        self.configuration = configuration = Configuration(store=store, clock=clock, built_in=settings.deployment)
        await configuration.follow()
        await self._admit(store, directory, configuration)
        if shared is not None:
            await self._follow(shared)
        await self._load(store)
        self.service = self._facade(store, tokens=tokens, hub=hub, orders=orders, consoles=consoles)
        await self._resume(store)
        self._serve()

    async def _admit(self, store: Store, directory: Directory, configuration: Configuration) -> None:
        """Hosts and clients may come; those that this machine brings with it are there."""
        settings, clock, dice = self.settings, self._clock, self._dice
        self.enrollment = Enrollment(
            store=store,
            clock=clock,
            dice=dice,
            directory=directory,
            install_id=settings.install_id,
            auto_activate=settings.auto_activate,
            configuration=configuration,
        )
        self.keys = Keys(store=store, clock=clock, dice=dice, configuration=configuration)
        if settings.bootstrap is not None:
            await bootstrap.apply(settings.bootstrap, keys=self.keys, enrollment=self.enrollment)
        await bootstrap.register_templates(settings.artifacts, store=store, clock=clock, dice=dice)

    async def _load(self, store: Store) -> None:
        self.rests, self.moments = None, None
        if self.artifacts is not None:
            self.rests = Rests(store, self.artifacts, self._clock.now, self.reconciler.event_id)
            self.moments = Moments(store, self.artifacts, self._clock.now, self.rests, self._moment_bytes_max)
            await self.rests.begin()
        await store.read(self.reconciler.directory.load)
        await self.waiting.load()
        self._routes.load(await store.read(stored.reachable))
        await self._join(store)

    async def _resume(self, store: Store) -> None:
        alone = isinstance(store, SqliteStore)
        await self.imports.open(alone=alone)
        await self.builds.open(alone=alone)

    def _metering(self, store: Store) -> Meter:
        meter = Meter()
        self._export = Export(meter.metrics, process="control", version=self.settings.version, environ=self.settings.telemetry)
        meter.export = self._export if self._export.with_traces else None
        if isinstance(store, Observable):
            store.observer = meter.stored
        return meter

    async def _opened(self) -> tuple[Store, str]:
        """The store at the newest schema, and its incarnation. *Errors*: Bug when it is another install's."""
        if self._store is None:
            self._store = store_of(self.settings, self._dice)
        store = self._store
        self._clock = await clock_of(store, self._clock)
        new, now = restoring.first(chance=self._dice), self._clock.now()
        await store.write(schema.migrate)
        install_id, incarnation = await store.write(
            lambda conn: schema.deployment(conn, install_id=self.settings.install_id, incarnation=new, now=now)
        )
        if install_id != self.settings.install_id:
            raise Bug(Code.INTERNAL, f"this database belongs to install {install_id}, not {self.settings.install_id}")
        # Where other replicas use the store, too, nobody may move its rows.
        if self.settings.boot_id is not None and not isinstance(self._clock, ShiftedClock):
            await self._carry_over(store, self.settings.boot_id)
        self._incarnation = incarnation
        return store, incarnation

    async def _carry_over(self, store: Store, boot_id: str) -> None:
        zero_at = self._clock.now() - self._clock.boot()
        step_s = await store.write(lambda conn: timeline.carry_over(conn, boot_id=boot_id, zero_at=zero_at))
        if step_s:
            LOG.warning(names.CLOCK_STEPPED, step_s=round(step_s, 3))

    async def _follow(self, shared: Shared) -> None:
        """Hear the other replicas before what they change is read."""
        self._following = following = Following(shared, self.reconciler, self._routes, self.fencing, self.keys, self.waiting)
        self._spawn(shared.follow(following.heard))
        await following.begun()

    async def _join(self, store: Store) -> Replicas:
        """Be one of the replicas."""
        settings, now, following = self.settings, self._clock.now(), self._following
        me = Replica(new_id(Prefix.REPLICA, self._dice), settings.address, settings.machine, settings.version, now, now)
        on_lost = (lambda: following.heard(EVERYTHING)) if following is not None else (lambda: None)
        self._replicas = replicas = Replicas(store, self._clock, me, shared=following is not None, on_lost=on_lost)
        replicas.incarnation, replicas.on_outlived = self._incarnation, self.outlived.set
        await replicas.beat()
        self.keys.replicas = lambda: replicas.heard
        if self.peers is not None:
            self.peers.others, self.peers.parked = replicas.others, self.sessions.parked
        return replicas

    def _replica_views(self) -> list[ReplicaView]:
        assert self._replicas is not None
        mine = self._replicas.me.id
        return [
            ReplicaView(one.id, one.address, one.machine, one.version, one.started_at, one.seen_at, healthy, one.id == mine)
            for one, healthy in self._replicas.everyone()
        ]

    def _facade(self, store: Store, *, tokens: Tokens, hub: Hub, orders: Orders, consoles: Consoles) -> Facade:
        templates = Templates(store)
        self.manifests = None if self.artifacts is None else Manifests(self.settings.secrets, self.artifacts)
        self._own_registry = own_registry_of(
            self.settings, clock=self._clock, dice=self._dice, public=lambda: self.configuration.current.public_repositories
        )
        self.imports = imports_of(self.settings, self._own_registry, self.artifacts, store=store, clock=self._clock, dice=self._dice)
        hosts = Hosts(
            store=store,
            clock=self._clock,
            dice=self._dice,
            hub=hub,
            directory=self.reconciler.directory,
            enrollment=self.enrollment,
            fencing=self.fencing,
            configuration=self.configuration,
        )
        warming = self._warming(store, orders=orders, templates=templates)
        sandboxes = Sandboxes(
            warming=warming,
            store=store,
            clock=self._clock,
            dice=self._dice,
            hub=hub,
            reconciler=self.reconciler,
            orders=orders,
            templates=templates,
            consoles=consoles,
            tokens=tokens,
            usages=Usages(clock=self._clock, consoles=consoles),
            configuration=self.configuration,
            snapshots=self.snapshots,
            manifests=self.manifests,
        )
        self._routes.wake = Resting(sandboxes).wake
        self.builds = self._builds(store, orders=orders, templates=templates, sandboxes=sandboxes)
        self.uploads = uploads.Uploads(
            tokens, self._clock, self.builds.archive, request_id=lambda: self._dice(8).hex(), library=self.imports.library
        )
        whys = Whys(
            store=store,
            clock=self._clock,
            directory=self.reconciler.directory,
            templates=templates,
            configuration=self.configuration,
        )
        return Facade(
            keys=self.keys,
            sandboxes=sandboxes,
            templates=templates,
            imports=self.imports,
            builds=self.builds,
            hosts=hosts,
            tokens=tokens,
            configuration=self.configuration,
            whys=whys,
            warming=warming,
        )

    def _warming(self, store: Store, *, orders: Orders, templates: Templates) -> Warming:
        self.warming = Warming(
            store=store,
            clock=self._clock,
            dice=self._dice,
            reconciler=self.reconciler,
            orders=orders,
            templates=templates,
            configuration=self.configuration,
            manifests=self.manifests,
        )
        self.reconciler.shortage = self._short
        self._spawn(WarmKeeper(self.warming, self._clock).run())
        return self.warming

    def _short(self, sandbox: Sandbox) -> None:
        """No host has room for it: what only makes starts quicker goes first."""
        self.warming.shortage(sandbox)
        self.relief.shortage(sandbox)

    def _captures(self, hub: Hub) -> Captures | None:
        images = self.settings.images
        self.captures = None if images is None else Captures(hub=hub, dice=self._dice, store=images, peers=self.peers)
        return self.captures

    def _builds(self, store: Store, *, orders: Orders, templates: Templates, sandboxes: Sandboxes) -> Builds:
        settings, workshop = self.settings, self.settings.workshop
        if workshop is None and settings.inside is not None and self.captures is not None and self.imports.carrier is not None:
            workshop = SandboxWorkshop(sandboxes, self.imports, self.captures, settings.inside, Amazon(self._clock))
        return Builds(
            store=store,
            clock=self._clock,
            dice=self._dice,
            sealer=orders.sealer,
            templates=templates,
            workshop=workshop,
            uploads=self.imports.uploads,
            own=self._own_registry,
            owner=new_id(Prefix.REPLICA, self._dice),
            limits=lambda: self.configuration.current.builds,
        )

    def _registry_tokens(self) -> registry.RegistryTokens:
        async def owned(team_id: TeamId, template_ids: Collection[str]) -> Collection[str]:
            return await self.reconciler.store.read(lambda conn: tenancy.owned(conn, team_id, template_ids))

        return registry.RegistryTokens(self.service, self.operations, self._own_registry, clock=self._clock, owned=owned)

    def _serve(self) -> None:
        settings = self.settings
        reconciler, shared = self.reconciler, not isinstance(self.reconciler.store, SqliteStore)
        self.operations = Records(
            store=reconciler.store,
            clock=self._clock,
            hub=reconciler.hub,
            directory=reconciler.directory,
            routes=self._routes,
            meter=self.meter,
            watching=self.alerts,
            version=settings.version,
            shared=shared,
            images_kept=self.sessions.image_caches.all,
            collecting=Collecting(self.imports, self.moments),
        )
        giving = self._giving()
        of_agents = Counted(agents.Agents(self.sessions, self.enrollment, self._clock, giving=giving, moments=self.moments), self.meter)
        self.hot = [(agents.PREFIX, of_agents), (routes.PREFIX, self._routes), (wellknown.PREFIX, self._well_known())]
        if self.peers is not None:
            self.hot.append((PEERS, PeerCalls(self.peers, self.consoles, self.captures, self.sessions.image_caches)))
        if settings.api:
            self._app = build_app(
                self.service,
                operations=self.operations,
                meter=self.meter,
                settings=ApiSettings(domain=settings.domain, install_id=settings.install_id, version=settings.version),
                ready=lambda: self._started,
                replicas=self._replica_views,
                dice=self._dice,
                building=(self.builds, self.uploads),
                extra=[
                    *self.hot,
                    (uploads.PREFIX, self.uploads),
                    (registry.PREFIX, self._registry_tokens()),
                    (archives.PREFIX, self._archives()),
                ],
            )
        stagger_s = 0.0 if self._following is None else _STAGGER_S_MAX * self._dice(1)[0] / 255
        self._spawn(deadlines.run(self.reconciler, self._clock, stagger_s=stagger_s))
        self._spawn(doubts.run(self.reconciler))
        if self._following is not None and self._replicas is not None:
            self._spawn(self._following.run())
            self._spawn(self._replicas.run())
        self._spawn(self.fencing.run())
        self._spawn(self.waiting.run())
        self._spawn(self.watch.run())
        self._spawn(self.builds.run())
        self._spawn(self.snapshots.run())
        self._spawn(self.relief.run())
        if self.manifests is not None:
            self._spawn(self.manifests.run())
        self._spawn(refresh.run(reconciler.store, configuration=self.configuration, directory=reconciler.directory if shared else None))
        self._spawn(self.alerts.run())
        if self._export.on:
            self._spawn(self._export.run())
        self._keep_house()
        self._started = True

    def _giving(self) -> Giving | None:
        """What hosts are given; None: this control keeps no images."""
        settings = self.settings
        if settings.images is None or self.artifacts is None or self.manifests is None:
            return None
        self.machines = Machines(self.manifests, self.artifacts, self.imports.library, settings.machines)
        return Giving(settings.images, self.artifacts, self.manifests, self.machines)

    def _keep_house(self) -> None:
        """What nobody needs any more goes, now and then."""
        settings = self.settings
        kept = retention.Kept(settings.records_kept_s, settings.audit_kept_s, settings.alerts_kept_s, settings.events_kept_s)
        self._spawn(retention.run(self.reconciler.store, self._clock, kept))
        if self.moments is not None:
            self._spawn(self.moments.run())
        if self.rests is not None:
            self._spawn(self.rests.run())
        if self.machines is not None:
            self._spawn(self.machines.run())

    def _archives(self) -> archives.Archives:
        return archives.Archives(self.service, self.imports.uploads, request_id=lambda: self._dice(8).hex(), library=self.imports.library)

    def _well_known(self) -> WellKnown:
        settings = self.settings
        return WellKnown(
            joining=settings.joining,
            install_id=settings.install_id,
            version=settings.version,
            guest_public_key=self._tokens.guest_public_key,
            directory=self.reconciler.directory,
            clock=self._clock,
            image_keys=self.manifests.current if self.manifests is not None else None,
        )

    async def stop(self) -> None:
        """End loops and streams, then close the store; what was committed stays, whatever was under way is taken up by the next start."""
        self._started = False
        self._routes.close()
        await self.imports.close()
        await self.builds.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._replicas is not None:
            # A database that is away keeps nobody from ending.
            with contextlib.suppress(AtollError):
                await self._replicas.leave()
        if self._store is not None:
            await self._store.close()

    def kill(self) -> None:
        """End as a killed process does: nothing is told, nothing is finished. For simulations."""
        self._started = False
        for task in self._tasks:
            task.cancel()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI; `start` must have returned."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        await self._app(scope, receive, send)

    def _moment_bytes_max(self) -> int:
        """0: there is no limit."""
        return (self.configuration.current.deployment.moment_mib or 0) << 20

    def _takes_moments(self) -> bool:
        asked, elsewhere = self.settings.moments, self.settings.bucket is not None or self.reconciler.directory.has_several()
        return asked if asked is not None else self.artifacts is not None and elsewhere

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))


async def _lifespan(receive: Receive, send: Send) -> None:
    """The server's start and stop are not ours: `start` and `stop` are called around it."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
