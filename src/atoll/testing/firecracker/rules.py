"""The order of things: what a machine's process takes in which state, and what its description does not say. Pure.

Source: Firecracker's description ("pre-boot only", "post-boot only") and its documents: a snapshot only of a machine that stands still; a load
only by a process that has been told nothing but logger and metrics; a difference only where dirty pages are followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class State(StrEnum):
    """As `GET /` has it."""

    NOT_STARTED = "Not started"
    RUNNING = "Running"
    PAUSED = "Paused"


class Do(StrEnum):
    """What a request that is allowed comes to."""

    NOTHING = "nothing"
    START = "start"
    HALT = "halt"
    GO_ON = "go on"
    SNAPSHOT = "snapshot"
    LOAD = "load"


BEFORE_BOOT: Final = ("/boot-source", "/machine-config", "/vsock", "/entropy", "/serial", "/cpu-config", "/mmds/config")
WORDS_FREE: Final = ("/logger", "/metrics")


class Fault(Exception):
    """A request is refused, with these words."""


@dataclass(slots=True)
class Told:
    """All that a process has been told."""

    state: State = State.NOT_STARTED
    by_path: dict[str, dict[str, Any]] = field(default_factory=dict)
    loaded: bool = False
    follows: bool = False
    """Dirty pages are followed."""

    def drives(self) -> list[dict[str, Any]]:
        """The root first, as Firecracker attaches them."""
        found = [body for path, body in self.by_path.items() if path.startswith("/drives/")]
        return sorted(found, key=lambda drive: not drive["is_root_device"])

    def networks(self) -> list[dict[str, Any]]:
        return [body for path, body in self.by_path.items() if path.startswith("/network-interfaces/")]


def allow(told: Told, method: str, path: str, body: dict[str, Any]) -> Do:
    """What a request comes to. It changes nothing; `note` does, once it is done. *Errors*: Fault."""
    match path:
        case "/actions":
            return _action(told, body)
        case "/vm":
            return _turn(told, body)
        case "/snapshot/create":
            return _snapshot(told, body)
        case "/snapshot/load":
            return _load(told, body)
        case "/logger" | "/metrics":
            return _words(told, path)
        case _:
            return _device(told, method, path, body)


def _words(told: Told, path: str) -> Do:
    if path == "/metrics" and path in told.by_path:
        raise Fault("the metrics system is initialised already")
    return Do.NOTHING


def _device(told: Told, method: str, path: str, body: dict[str, Any]) -> Do:
    started, named = told.state is not State.NOT_STARTED, path.startswith(("/drives/", "/network-interfaces/"))
    if not named and path not in BEFORE_BOOT:
        raise Fault(f"{path} is not a part of this Firecracker")
    if named and method == "PATCH":
        if not started or path not in told.by_path:
            raise Fault("what is there can be changed, after the start")
        return Do.NOTHING
    if started:
        raise Fault("the operation is not supported after starting the machine")
    _configuration(told, path, body)
    return Do.NOTHING


def _turn(told: Told, body: dict[str, Any]) -> Do:
    if told.state is State.NOT_STARTED:
        raise Fault("the machine does not run yet")
    return Do.HALT if body["state"] == "Paused" else Do.GO_ON


def note(told: Told, method: str, path: str, body: dict[str, Any], done: Do) -> None:
    """Remember what was done."""
    match done:
        case Do.START:
            told.state = State.RUNNING
            told.follows = bool(told.by_path["/machine-config"].get("track_dirty_pages"))
        case Do.HALT:
            told.state = State.PAUSED
        case Do.GO_ON:
            told.state = State.RUNNING
        case Do.LOAD:
            told.loaded, told.follows = True, bool(body.get("track_dirty_pages") or body.get("enable_diff_snapshots"))
            told.state = State.RUNNING if body.get("resume_vm") else State.PAUSED
        case Do.SNAPSHOT:
            pass
        case Do.NOTHING:
            told.by_path[path] = {**told.by_path.get(path, {}), **body} if method == "PATCH" else body


def _action(told: Told, body: dict[str, Any]) -> Do:
    started = told.state is not State.NOT_STARTED
    if body["action_type"] != "InstanceStart":
        if not started:
            raise Fault("the machine does not run yet")
        return Do.NOTHING
    if started:
        raise Fault("the machine was started already")
    missing = [path for path in ("/boot-source", "/machine-config") if path not in told.by_path]
    if missing:
        raise Fault(f"cannot start without {', '.join(missing)}")
    return Do.START


def _configuration(told: Told, path: str, body: dict[str, Any]) -> None:
    if path == "/machine-config" and body.get("smt") and body["vcpu_count"] > 1 and body["vcpu_count"] % 2:
        raise Fault("with threads, the number of cores is 1 or even")
    if path.startswith("/drives/"):
        roots = [
            drive for other, drive in told.by_path.items() if other.startswith("/drives/") and other != path and drive["is_root_device"]
        ]
        if body["is_root_device"] and roots:
            raise Fault("there is a root device already")
        if "socket" in body or "path_on_host" not in body or "is_read_only" not in body:
            raise Fault("a drive is a file, and says whether it is only read")
    if path.startswith("/network-interfaces/"):
        taken = [one["host_dev_name"] for other, one in told.by_path.items() if other.startswith("/network-interfaces/") and other != path]
        if body["host_dev_name"] in taken:
            raise Fault("that device is another interface's")


def _snapshot(told: Told, body: dict[str, Any]) -> Do:
    if told.state is not State.PAUSED:
        raise Fault("a snapshot is taken of a machine that stands still")
    if body.get("snapshot_type") == "Diff" and not told.follows:
        raise Fault("differences are not followed: track_dirty_pages was not set")
    return Do.SNAPSHOT


def _load(told: Told, body: dict[str, Any]) -> Do:
    if told.state is not State.NOT_STARTED or told.loaded or set(told.by_path) - set(WORDS_FREE):
        raise Fault("a snapshot is loaded by a process that was told nothing but logger and metrics")
    if ("mem_backend" in body) == ("mem_file_path" in body):
        raise Fault("exactly one of mem_backend and mem_file_path names the memory")
    if body.get("mem_backend", {}).get("backend_type", "File") != "File":
        raise Fault("this one has no userfaultfd")
    return Do.LOAD
