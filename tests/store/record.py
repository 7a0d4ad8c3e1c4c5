"""Record the schema of a step together with rows that this release writes: `python -m tests.store.record`, once, when a step is released.

The rows come from a whole control: sandboxes in every state that it can bring about, hosts, keys, events, payloads. `test_migrations.py`
brings each record to the newest schema and has the present code read and go on with it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from atoll.domain.placement import Observed
from atoll.store import schema
from tests.sim.world import World, failing, silent

DIRECTORY = Path(__file__).parent / "released"


async def live(world: World) -> None:
    """Something of everything."""
    agent = await world.agent()
    async with agent.at_work():
        ready = await world.create(template="base", timeoutSeconds=600, env={"A": "secret"}, metadata={"who": "ü"}, clientRequestId="r1")
        ended = await world.create(template="base")
        await world.release(ended["id"])
        await world.until(ended["id"], "released")
        agent.script = failing("START_FAILED")
        broken = await world.accept(template="base")
        await world.until(broken, "failed")
    agent.script = silent
    await world.accept(template="base")
    await agent.wanted()
    agent.see(
        next(p for p, (of, _) in agent.generations.items() if of == ready["id"]), observed=Observed.RUNNING, ready=True, address="10.64.0.2"
    )
    await agent.observe()
    going = await world.accept(template="base")
    await agent.wanted()
    await world.release(going)
    await world.team("theirs")
    other = await world.agent("other", token=await world.token("other"))
    await world.call("POST", f"/v1/hosts/{other.host_id}/disable", json={})
    await world.token("unused")
    await world.call("POST", f"/v1/hosts/{agent.host_id}/drain")
    await world.accept(template="base")


def dump(conn: sa.Connection) -> dict[str, Any]:
    """Columns and rows of every table."""
    found = sa.MetaData()
    found.reflect(conn)
    tables: dict[str, Any] = {}
    for table in found.sorted_tables:
        rows = [{name: plain(value) for name, value in row.items()} for row in conn.execute(sa.select(table)).mappings()]
        columns = [[column.name, str(column.type), bool(column.nullable)] for column in table.columns]
        tables[table.name] = {"columns": columns, "rows": rows}
    return tables


def plain(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory))
        await world.start()
        try:
            await live(world)
            tables = await world.store.read(dump)
        finally:
            await world.stop()
    target = DIRECTORY / f"{schema.newest()}.json"
    target.write_text(json.dumps(tables, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    print(f"{target}: {sum(len(table['rows']) for table in tables.values())} rows", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
