"""A guest that was to begin from a moment which its host does not have whole: booted where that is a head start, refused where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.placement import Observed
from atoll.domain.spec import Origin, SaveMode
from tests.agent.conftest import SPEC

A = "plc_" + "a" * 20
ORIGIN = Origin("snp_" + "s" * 20, SaveMode.FULL, or_boot=True)


@pytest.mark.parametrize("verb", ["prepare", "start"])
@pytest.mark.parametrize("code", [Code.SNAPSHOT_UNAVAILABLE, Code.START_FAILED, Code.RESUME_FAILED])
async def test_a_head_start_that_cannot_be_had_is_booted_and_told(world, verb, code):
    world.control.spec = replace(SPEC, origin=ORIGIN)
    world.boot()
    world.driver.fail[verb] = [Refused(code, "it is not as long as it was")]
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.machine.started[A] == 1
    assert [name for name, _ in world.machine.history if name in ("prepare", "start")][-2:] == ["prepare", "start"]
    seen = world.control.seen(A)
    assert (seen.observed, seen.reason) == (Observed.RUNNING, Code.SNAPSHOT_UNAVAILABLE)
    assert seen.detail == f"{code}: it is not as long as it was"


@pytest.mark.parametrize(
    ("origin", "code"),
    [(replace(ORIGIN, or_boot=False), Code.SNAPSHOT_UNAVAILABLE), (ORIGIN, Code.HOST_DISK_FULL), (None, Code.START_FAILED)],
    ids=["a snapshot", "another reason", "none"],
)
async def test_what_is_no_head_start_or_fails_for_another_reason_is_refused(world, origin, code):
    world.control.spec = replace(SPEC, origin=origin)
    world.boot()
    world.driver.fail["start"] = [Refused(code, "no")]
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.ERROR)
    assert world.control.seen(A).reason == code
    assert A not in world.machine.started


async def test_one_that_begins_with_it_says_nothing(world):
    world.control.spec = replace(SPEC, origin=ORIGIN)
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    assert (world.control.seen(A).reason, world.control.seen(A).detail) == (None, None)
