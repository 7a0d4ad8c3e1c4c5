"""The well-known document: everything that a joining machine needs, and no secret."""

from __future__ import annotations

import base64
import json

from atoll.control.wellknown import Joining
from atoll.wire import wellknown
from tests.sim.test_enrollment import form
from tests.sim.world import EDGE_TOKEN, Agent, World


async def document(world: World) -> dict[str, object]:
    answer = await world.call("GET", "/.well-known/atoll", key="")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_everybody_may_read_it_and_it_is_whole(world: World) -> None:
    world.changes["joining"] = Joining(urls=("https://a.example:3443", "https://b.example:3443"), region="north", ca_pem="PEM")
    await world.restart()
    raw = await document(world)
    assert set(raw) == set(wellknown.WellKnown.model_fields), "a field that the schema does not know, or the other way round"
    found = wellknown.WellKnown.model_validate(raw, strict=True)
    assert (found.install_id, found.region, found.form, found.ca_pem) == (world.install_id, "north", wellknown.FORM, "PEM")
    assert found.agents_urls == ["https://a.example:3443", "https://b.example:3443"]
    assert (found.protocol.min, found.protocol.max, found.rules.lease_s, found.rules.clock_skew_s_max) == (1, 1, 300.0, 5.0)
    assert len(base64.b64decode(found.keys[0].public_key)) == 32
    assert abs(found.now - world.clock.now()) < 5


async def test_there_is_no_secret_in_it(world: World) -> None:
    agent = await world.agent()
    said = json.dumps(await document(world))
    for secret in (EDGE_TOKEN, agent.credential, *(path.read_text() for path in (world.path / "secrets").glob("*.key"))):
        assert secret not in said


async def test_it_says_which_addresses_other_hosts_have(world: World) -> None:
    for number, name in enumerate(("a", "b")):
        await Agent(world, name=name).enroll(await world.token(name), **form(name, slots=f"10.{70 + number}.0.0/16"))
    assert (await document(world))["slots_taken"] == ["10.70.0.0/16", "10.71.0.0/16"]
    await world.call("POST", "/v1/hosts/a/disable", json={})
    assert (await document(world))["slots_taken"] == ["10.71.0.0/16"]


async def test_there_is_nothing_beside_it(world: World) -> None:
    for method, path in (("GET", "/.well-known/atollx"), ("GET", "/.well-known/atoll/x"), ("POST", "/.well-known/atoll")):
        answer = await world.call(method, path, key="")
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_REQUEST")
