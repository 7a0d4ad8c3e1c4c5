"""What operators and clients are shown of a running product: measurements of real guests, figures, events as they come."""

from __future__ import annotations

import datetime as dt
import json
import time

import pytest
from e2b import AsyncSandbox, NotFoundException, Sandbox

BUSY = "timeout 6 python3 -c 'held = bytearray(120 << 20)\nwhile True: pass'"


def _until_busy(sandbox: Sandbox, within_s: float = 30.0) -> list:
    deadline = time.monotonic() + within_s
    while True:
        found = sandbox.get_metrics()
        if found and found[-1].cpu_used_pct > 30 and found[-1].mem_used > 100 << 20:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(1.1)


def test_what_a_guest_uses_is_measured(sandbox) -> None:
    working = sandbox.commands.run(BUSY, background=True, timeout=60)
    found = _until_busy(sandbox)
    last = found[-1]
    assert (last.cpu_count, last.mem_total, last.disk_total > 0) == (1, 512 << 20, True)
    assert last.cpu_used_pct <= 100
    assert last.mem_used <= last.mem_total
    assert abs((dt.datetime.now(dt.UTC) - last.timestamp).total_seconds()) < 10
    assert [point.timestamp for point in found] == sorted(point.timestamp for point in found)
    working.kill()
    assert Sandbox.get_metrics(sandbox.sandbox_id)
    assert sandbox.get_metrics(start=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)) == []
    assert sandbox.get_metrics(end=dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)) == []


def test_what_is_written_is_seen_on_its_disk(sandbox) -> None:
    before = sandbox.get_metrics()[-1].disk_used
    sandbox.commands.run("head -c 60000000 /dev/urandom > /home/user/written && sync")
    deadline = time.monotonic() + 20
    while (after := sandbox.get_metrics()[-1].disk_used) < before + 50_000_000:
        assert time.monotonic() < deadline, (before, after)
        time.sleep(1.1)
    sandbox.commands.run("rm /home/user/written")


async def test_the_asynchronous_sdk_reads_them(sandbox) -> None:
    twin = await AsyncSandbox.connect(sandbox.sandbox_id)
    found = await twin.get_metrics()
    assert found[-1].mem_used > 0
    assert await AsyncSandbox.get_metrics(sandbox.sandbox_id)


def test_of_many_the_newest(product, sandbox) -> None:
    answer = product.call("GET", f"/sandboxes/metrics?sandbox_ids={sandbox.sandbox_id},{'i' + '0' * 20}")
    assert answer.status_code == 200
    assert list(answer.json()["sandboxes"]) == [sandbox.sandbox_id]


def test_of_none_that_there_is(make, stranger) -> None:
    gone = make()
    with pytest.raises(NotFoundException):
        Sandbox.get_metrics(gone.sandbox_id, api_key=stranger)
    gone.kill()
    with pytest.raises(NotFoundException):
        gone.get_metrics()


def test_the_page_counts_what_happens(product, make) -> None:
    make()
    text = product.call("GET", "/metrics").text
    ready = [line for line in text.splitlines() if line.startswith("atoll_sandboxes_ready_total{")]
    assert ready
    assert float(ready[0].split()[-1]) >= 1
    assert 'atoll_hosts{admin="active",health="healthy"} 1.0' in text


def test_events_come_through_the_edge_as_they_happen(product, make) -> None:
    with product.http.stream("GET", product.url + "/v1/operations/events/stream", headers={"X-API-KEY": product.key}) as answer:
        assert answer.status_code == 200
        lines = (json.loads(line) for line in answer.iter_lines() if line)
        began = time.monotonic()
        made = make()
        seen = []
        for event in lines:
            if event["sandboxId"] == made.sandbox_id:
                seen.append(event["type"])
                if event["type"] == "sandbox.ready":
                    break
        assert seen == ["sandbox.accepted", "sandbox.placed", "sandbox.ready"]
        assert time.monotonic() - began < 15


def test_a_sandboxs_stream_ends_with_it(product, make) -> None:
    made = make()
    path = f"/v1/sandboxes/{made.sandbox_id}/events/stream"
    with product.http.stream("GET", product.url + path, headers={"X-API-KEY": product.key}) as answer:
        made.kill()
        last = [json.loads(line)["type"] for line in answer.iter_lines() if line][-1]
    assert last == "sandbox.released"


def test_who_did_what_is_on_record(product, make) -> None:
    made = make()
    made.kill()
    found = product.call("GET", f"/v1/operations/audit?subject={made.sandbox_id}").json()["items"]
    assert [(one["action"], one["result"]) for one in found] == [("sandbox.create", "done"), ("sandbox.release", "done")]
    assert {one["address"] for one in found} == {"127.0.0.1"}
