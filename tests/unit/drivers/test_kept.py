"""A fake machine that outlives whoever drives it."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.drivers.fake.driver import FakeDriver
from atoll.drivers.fake.kept import KeptMachine
from atoll.drivers.port import Image, Mark, Order, Power
from tests.builders import IMAGE, sandbox

MARK = Mark("ins_1", "hst_1")
IMAGES = [Image(IMAGE, "base")]
ORDER = Order("plc_1", "i1", 1, sandbox().spec, "nonce", "key", "name")


async def driven(path: Path) -> FakeDriver:
    driver = FakeDriver(MARK, machine=KeptMachine(path, images=IMAGES))

    async def on_exit(_placement: str, _reason: str) -> None:
        return

    await driver.open(on_exit)
    return driver


async def test_what_runs_goes_on_when_its_driver_is_gone(tmp_path: Path) -> None:
    first = await driven(tmp_path)
    await first.prepare(ORDER)
    assert (await (await driven(tmp_path)).inspect("plc_1")).power is Power.PREPARED
    await first.start(ORDER)
    second = await driven(tmp_path)
    assert [held.placement_id for held in await second.held()] == ["plc_1"]
    assert (await second.adopt("plc_1")).power is Power.RUNNING
    assert second.machine.placements["plc_1"].order == ORDER
    await second.stop("plc_1")
    third = await driven(tmp_path)
    assert (await third.inspect("plc_1")).power is Power.STOPPED
    await third.remove("plc_1")
    assert (await (await driven(tmp_path)).inspect("plc_1")).power is Power.ABSENT
    assert list(tmp_path.iterdir()) == []


async def test_half_a_file_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "plc_2.json").write_text(json.dumps({"power": "running"}))
    (tmp_path / "plc_3.json").write_text("{")
    (tmp_path / "plc_4.new").write_text("")
    assert await (await driven(tmp_path)).held() == []
