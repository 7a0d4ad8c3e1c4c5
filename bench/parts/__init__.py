"""One module for each kind of table; `PARTS` is all of them in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from atoll.drivers.oci.config import RuntimeKind
from bench.findings import Finding
from bench.parts import (
    ahead,
    alone,
    creates,
    deletes,
    dense,
    docker,
    idle,
    images,
    inside,
    machines,
    many,
    moments,
    placing,
    rest,
    stores,
    warm,
)
from bench.world import World


@dataclass(frozen=True, slots=True)
class Part:
    """Something that can be asked for by name."""

    name: str
    about: str
    measure: Callable[[World], Awaitable[Finding]]


PARTS: Final = (
    Part("create-runsc", "one at a time, gVisor", lambda world: creates.one_at_a_time(world, RuntimeKind.RUNSC)),
    Part("create-crun", "one at a time, shared kernel", lambda world: creates.one_at_a_time(world, RuntimeKind.CRUN)),
    Part("at-once-runsc", "4 and 16 at once, gVisor", lambda world: creates.at_once(world, RuntimeKind.RUNSC)),
    Part("at-once-crun", "4 and 16 at once, shared kernel", lambda world: creates.at_once(world, RuntimeKind.CRUN)),
    Part("docker", "docker run of the same root", docker.measure),
    Part("calls-runsc", "commands and small files, gVisor", lambda world: inside.calls(world, RuntimeKind.RUNSC)),
    Part("calls-crun", "commands and small files, shared kernel", lambda world: inside.calls(world, RuntimeKind.CRUN)),
    Part("streams-runsc", "bulk, gVisor", lambda world: inside.streams(world, RuntimeKind.RUNSC)),
    Part("streams-crun", "bulk, shared kernel", lambda world: inside.streams(world, RuntimeKind.CRUN)),
    Part("rest", "suspend and resume", rest.measure),
    Part("ahead", "start commands that are kept as they run", ahead.measure),
    Part("moments", "to the artifact store and back", moments.measure),
    Part("machines", "machines saved, restored, cloned", machines.measure),
    Part("warm", "guests made ahead", warm.measure),
    Part("images-builds", "rebuilds of a template", images.builds),
    Part("images-pulls", "pull and unpack, beside skopeo and umoci", images.pulls),
    Part("images-layered", "starts by number of layers", images.layered),
    Part("deletes", "until answered, until gone", deletes.measure),
    Part("idle", "memory and CPU of what stands still", idle.measure),
    Part("dense", "200 small sandboxes", dense.measure),
    Part("placing", "a host among ten thousand", placing.measure),
    Part("alone", "control and agent with a driver that does nothing", alone.measure),
    Part("stores", "commits, and pairs by store", stores.measure),
    Part("many", "fifty thousand idle sandboxes", many.measure),
)
