"""A placement's life under one run of the agent."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import pytest

from atoll.base.errors import Code, Refused
from atoll.domain.command import Kind
from atoll.domain.placement import Observed
from atoll.drivers.port import Power
from atoll.wire.agent import Collect

A, B = "plc_aaaaaaaaaaaaaaaaaaaa", "plc_bbbbbbbbbbbbbbbbbbbb"


async def test_ready_after_handshake_and_init_then_absent(world):
    world.boot()
    world.control.want(A, env={"SECRET": "x"})
    await world.control.until_ready(A)
    seen = world.control.seen(A)
    assert (seen.observed, seen.applied_revision, seen.address, seen.guest_version) == (Observed.RUNNING, 1, "10.64.0.2", "1")
    assert [p.env for p in world.machine.things[A].inits] == [{"SECRET": "x"}]
    assert world.verbs(A) == ["prepare", "start"]
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert world.machine.things == {}
    assert world.control.seen(A).applied_revision == 2
    assert world.control.seen(A).ended_by == "command"
    assert not world.control.seen(A).ready
    await world.control.next_poll()
    assert any(poll.tombstones == [A] and A not in poll.holds for poll in world.control.polls)
    assert (await world.control.next_poll()).tombstones == []


async def test_a_tombstone_can_be_confirmed_at_once(world):
    world.control.forget_at_once = True
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert (await world.control.next_poll()).tombstones == []


async def test_ready_is_sent_beside_the_poll(world):
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 2)
    world.control.want(A)
    await world.control.until_ready(A)
    assert world.control.observe_calls >= 1
    assert not any(o.ready for poll in world.control.polls for o in poll.observations)


async def test_removal_overtakes_a_start_under_way(world):
    world.boot()
    world.driver.gate["start"] = asyncio.Event()
    world.control.want(A)
    await world.control.until(lambda: ("start", A) in world.machine.history)
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert world.machine.things == {}
    assert world.machine.started == {}


async def test_removal_overtakes_a_handshake(world):
    world.boot()
    world.guests.gate = asyncio.Event()
    world.control.want(A)
    await world.control.until(lambda: A in world.machine.started)
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert not any(o.ready for o in world.control.heard)


@pytest.mark.parametrize(
    ("verb", "code"),
    [("prepare", Code.IMAGE_UNAVAILABLE), ("prepare", Code.HOST_DISK_FULL), ("start", Code.START_FAILED), ("start", Code.RUNTIME_MISSING)],
)
async def test_a_failed_start_is_said_once_and_not_retried(world, verb, code):
    world.boot()
    world.driver.fail[verb] = [Refused(code, "it did not work")]
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.ERROR)
    seen = world.control.seen(A)
    assert (seen.reason, seen.detail, seen.ready) == (code, "it did not work", False)
    await asyncio.sleep(0.05)
    assert world.verbs(A).count(verb) == 1
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert world.machine.things == {}


async def test_a_full_disk_has_its_own_code(world):
    world.boot()
    world.driver.fail["prepare"] = [OSError(28, "No space left on device", "/disk")]
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.ERROR)
    assert world.control.seen(A).reason == Code.HOST_DISK_FULL


async def test_another_guest_in_its_place(world):
    world.boot()
    world.guests.error = Refused(Code.GUEST_IDENTITY_MISMATCH, "nonce differs")
    world.control.want(A)
    await world.control.until(lambda: (o := world.control.seen(A)) is not None and o.observed is Observed.ERROR)
    assert world.control.seen(A).reason == Code.GUEST_IDENTITY_MISMATCH
    assert not any(o.ready for o in world.control.heard)


async def test_cleanup_goes_on_until_it_is_gone(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.driver.fail["remove"] = [Refused(Code.CLEANUP_FAILED, "mount busy")] * 2
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    errors = [o for o in world.control.heard if o.observed is Observed.ERROR]
    assert {(o.reason, o.detail) for o in errors} == {(Code.CLEANUP_FAILED, "cleanup: mount busy")}
    assert len({o.seq for o in errors}) == 1
    assert world.verbs(A).count("remove") == 3


@pytest.mark.parametrize("verb", ["stop", "remove", "inspect"])
async def test_a_removal_takes_each_step_though_another_fails(world, verb):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    before = len(world.machine.history)
    world.driver.fail[verb] = [OSError(5, "no")]
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    first = [name for name, _ in world.machine.history[before:]][:3]
    assert first == ["stop", "remove", "inspect"], "a step was left out because another failed"
    assert world.machine.things == {}


async def test_a_step_that_failed_and_left_nothing_is_no_reason_to_wait(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.driver.fail["stop"] = [OSError(5, "no")]
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert not any(o.observed is Observed.ERROR for o in world.control.heard)


async def test_absence_is_looked_at_not_assumed(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    real = world.driver.remove
    calls = []

    async def forgetful(placement_id):
        calls.append(placement_id)
        if len(calls) > 1:
            await real(placement_id)

    world.driver.remove = forgetful
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert len(calls) == 2
    assert any(o.detail == "cleanup: disk" for o in world.control.heard)


async def test_a_guest_that_ends_by_itself_is_removed(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.machine.things[A].power = Power.STOPPED
    await world.driver.on_exit(A, "exit 1")
    await world.control.until_absent(A)
    seen = world.control.seen(A)
    assert (seen.reason, seen.detail, seen.ended_by) == (Code.GUEST_EXITED, "exit 1", "exit")
    assert world.machine.things == {}


async def test_delete_of_what_the_agent_never_knew(world):
    world.boot()
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    assert world.verbs(A) == ["stop", "remove", "inspect"]


async def test_one_id_with_two_contents_changes_nothing(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    world.control.wants[A].content = "other"
    agent_epoch = world.agent.epoch
    command = world.control.command(A, agent_epoch)
    session = world.agent._session
    await session._accept(command, {})
    await world.control.until(lambda: world.control.seen(A).reason == Code.COMMAND_CONFLICT)
    seen = world.control.seen(A)
    assert (seen.observed, seen.ready, seen.applied_revision) == (Observed.RUNNING, True, 1)
    assert world.verbs(A) == ["prepare", "start"]


async def test_a_command_of_another_run_is_dropped(world):
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 1)
    world.control.want(A)
    command = world.control.command(A, "epo_other")
    assert await world.agent._session._accept(command, {}) is False
    await world.control.until_ready(A)


async def test_parallel_starts_are_bounded(world):
    world.boot()
    ids = [f"plc_{n:020d}" for n in range(40)]
    for i in ids:
        world.control.want(i)
    await world.control.until_ready(*ids)
    assert 1 < world.driver.running_max <= 8


async def test_lost_messages_are_said_again(world):
    world.boot()
    await world.control.until(lambda: len(world.control.polls) >= 1)
    world.control.lose_answers = 3
    world.control.want(A)
    await world.control.until_ready(A)
    await world.control.until(lambda: world.control.lose_answers == 0)
    world.control.want(A, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A)
    await world.control.next_poll()
    assert (await world.control.next_poll()).tombstones == []


async def test_nothing_happens_between_polls(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    await asyncio.sleep(0.2)
    before = len(world.control.polls)
    await asyncio.sleep(0.5)
    assert len(world.control.polls) - before <= 1


async def read_console(world, placement_id):
    world.control.collect.append(Collect(id="col_1", placement_id=placement_id))
    count = len(world.control.collected_messages)
    world.control.news.set()
    await world.control.until(lambda: len(world.control.collected_messages) > count)
    answer = world.control.collected_messages[-1]
    return answer.code or base64.b64decode(answer.console_base64)


async def test_the_console_is_handed_in_when_somebody_reads_it(world):
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    assert await read_console(world, A) == b"hello from " + A.encode()
    assert await read_console(world, B) == Code.PLACEMENT_LOST


async def test_last_words_outlive_a_guest_that_ended_by_itself_and_no_other(world):
    world.boot()
    for placement_id in (A, B):
        world.control.want(placement_id)
    await world.control.until_ready(A, B)
    await world.driver.on_exit(A, "exit 1")
    world.control.want(B, Kind.ENSURE_ABSENT)
    await world.control.until_absent(A, B)
    assert await read_console(world, A) == b"hello from " + A.encode()
    assert await read_console(world, B) == Code.PLACEMENT_LOST


async def test_secrets_are_not_in_the_journal(world, tmp_path):
    world.boot()
    world.control.want(A, env={"K": "very-secret-value"})
    await world.control.until_ready(A)
    await world.halt()
    content = b"".join(path.read_bytes() for path in (tmp_path / "agent").iterdir())
    assert b"very-secret-value" not in content
    assert b"token of" not in content
    assert f"nonce of {A}".encode() in content


async def test_what_is_not_supported_is_said(world):
    world.boot()
    world.driver.capabilities = replace(world.driver.capabilities, pauses=False)
    world.control.want(A)
    await world.control.until_ready(A)
    world.control.want(A, Kind.ENSURE_PAUSED)
    await world.control.until(lambda: world.control.seen(A).reason == Code.NOT_SUPPORTED)
    assert world.control.seen(A).ready
    world.control.want(A, Kind.ENSURE_RUNNING)
    await world.control.until(lambda: world.control.seen(A).applied_revision == 3)
    assert world.machine.started[A] == 1


async def test_a_command_that_comes_after_a_confirmed_absence_starts_nothing(world):
    """It was on its way, in the answer of a poll that was sent before: the tombstone must still be there to refuse it."""
    world.control.forget_at_once = True
    world.boot()
    world.control.want(A)
    await world.control.until_ready(A)
    await world.control.until(lambda: world.control.parked)
    session = world.agent._session
    late = world.control.command(A, world.agent.epoch).model_copy(update={"desired_revision": 2, "id": f"{A}:1:2", "digest": "other"})
    await world.driver.on_exit(A, "exit 1")
    await world.control.until_absent(A)
    await world.control.until(lambda: A in session._confirmed)
    await session._accept(late, {})
    await asyncio.sleep(0.05)
    assert world.machine.started == {A: 1}
    assert world.machine.things == {}
    world.control.wants[A].kind = Kind.ENSURE_ABSENT
    await world.control.next_poll()
    await world.control.next_poll()
    await world.control.until(lambda: session._host.ledger.get(A) is None)
