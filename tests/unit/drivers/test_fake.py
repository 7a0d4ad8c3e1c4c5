"""The fake driver's weather: latencies and faults, before and after the work."""

from dataclasses import replace

import pytest

from atoll.base.errors import Code, OutcomeUnknown, Refused, Unavailable
from atoll.domain.spec import Isolation, Spec
from atoll.drivers.fake.driver import FakeDriver, FakeMachine, Weather
from atoll.drivers.port import Mark, Order, Power

MARK = Mark("ins_1", "hst_1")
MACHINE_IMAGE = FakeMachine().images[0]
SPEC = Spec("default", "tpl", MACHINE_IMAGE.digest, MACHINE_IMAGE.name, Isolation.GVISOR, 1000, 512, 1024, 256, 300)
ORDER = Order("plc_1", "i1", 1, SPEC, "nonce", "key", "box")


async def test_faults_come_once_each_and_in_order():
    weather = Weather(fail={"prepare": [Unavailable(Code.OUTCOME_UNKNOWN, "later"), Refused(Code.HOST_DISK_FULL, "full")]})
    driver = FakeDriver(MARK, weather=weather)
    with pytest.raises(Unavailable):
        await driver.prepare(ORDER)
    with pytest.raises(Refused):
        await driver.prepare(ORDER)
    assert (await driver.inspect("plc_1")).power is Power.ABSENT, "it failed before it did anything"
    await driver.prepare(ORDER)
    assert (await driver.inspect("plc_1")).power is Power.PREPARED


async def test_an_unknown_outcome_may_have_done_the_work():
    driver = FakeDriver(MARK, weather=Weather(fail_after={"start": [OutcomeUnknown(Code.OUTCOME_UNKNOWN, "no answer")]}))
    with pytest.raises(OutcomeUnknown):
        await driver.start(ORDER)
    assert (await driver.inspect("plc_1")).power is Power.RUNNING


async def test_latency_is_the_given_clocks():
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    driver = FakeDriver(MARK, weather=Weather(delay_s={"start": 0.25}), sleep=sleep)
    await driver.prepare(ORDER)
    await driver.start(ORDER)
    assert slept == [0.25]


async def test_a_full_disk_and_a_part_that_does_not_go():
    driver = FakeDriver(MARK)
    driver.machine.disk_full = True
    with pytest.raises(Refused) as caught:
        await driver.start(ORDER)
    assert caught.value.code is Code.HOST_DISK_FULL
    assert [probe.id for probe in await driver.probe() if not probe.ok] == ["disk.space"]
    driver.machine.disk_full = False
    await driver.start(ORDER)
    driver.machine.placements["plc_1"].stuck = True
    with pytest.raises(Refused) as caught:
        await driver.remove("plc_1")
    assert caught.value.code is Code.CLEANUP_FAILED
    assert (await driver.inspect("plc_1")).power is Power.STOPPED
    driver.machine.placements["plc_1"].stuck = False
    await driver.remove("plc_1")
    assert (await driver.inspect("plc_1")).power is Power.ABSENT


async def test_an_image_by_name_alone():
    driver = FakeDriver(MARK)
    await driver.prepare(replace(ORDER, spec=replace(SPEC, image="", image_name="base")))
    assert (await driver.inspect("plc_1")).power is Power.PREPARED


async def test_no_handshake_is_declared():
    assert not FakeDriver(MARK).capabilities.guest_handshake
