"""What must be true whoever was killed."""

import asyncio

from atoll.drivers.port import Power


async def can_be_removed(stand, order):
    await stand.driver.remove(order.placement_id)
    assert (await stand.driver.inspect(order.placement_id)).power is Power.ABSENT
    assert not await stand.driver.held()
    # A killed run's namespaces are taken away by the kernel in its own time.
    for _ in range(100):
        if not (left := stand.traces(order)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(left)
