"""Builds as E2B's objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from atoll.control.api.e2b.answers import Json, cpu_count
from atoll.control.api.moment import timestamp
from atoll.domain.building import Build, Line, State
from atoll.wire.guest import ENVD_VERSION

STATUS: Final[Mapping[State, str]] = {
    State.WAITING: "waiting",
    State.BUILDING: "building",
    State.READY: "ready",
    State.FAILED: "error",
}
"""In E2B's words."""


def build(one: Build) -> Json:
    """E2B's `TemplateBuild`."""
    updated_at = one.finished_at or one.started_at or one.created_at
    shown: Json = {
        "buildID": one.id,
        "status": STATUS[one.state],
        "createdAt": timestamp(one.created_at),
        "updatedAt": timestamp(updated_at),
        "cpuCount": cpu_count(one.cpu_millis),
        "memoryMB": one.memory_mib,
        "diskSizeMB": one.disk_mib,
        "envdVersion": ENVD_VERSION,
    }
    return shown if one.finished_at is None else {**shown, "finishedAt": timestamp(one.finished_at)}


def build_line(line: Line) -> Json:
    """E2B's `BuildLogEntry`."""
    shown: Json = {"timestamp": timestamp(line.at), "message": line.message, "level": line.level}
    return shown if line.step is None else {**shown, "step": line.step}


def build_info(one: Build, lines: Sequence[Line], last: Sequence[Line]) -> Json:
    """E2B's `TemplateBuildInfo`; `last`: the end of the log of what failed."""
    shown: Json = {
        "templateID": one.template_id,
        "buildID": one.id,
        "status": STATUS[one.state],
        "logs": [line.message for line in lines],
        "logEntries": [build_line(line) for line in lines],
    }
    if one.state is State.FAILED:
        reason: Json = {"message": one.message or one.code or "the build failed", "logEntries": [build_line(line) for line in last]}
        shown["reason"] = reason if one.failed_step is None else {**reason, "step": one.failed_step}
    return shown
