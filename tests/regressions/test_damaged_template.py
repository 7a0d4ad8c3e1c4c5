"""A damaged manifest in the cache kept control from starting: one bad template took the whole instance down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.control.bootstrap import register_templates
from atoll.programs.clock import SystemClock
from atoll.store import schema, tenancy
from atoll.store.engine import SqliteStore
from tests.builders import seeded


def entry(artifacts: Path, name: str, content: bytes) -> None:
    directory = artifacts / name / "recipe"
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_bytes(content)
    (artifacts / name / "current").symlink_to("recipe")


@pytest.mark.parametrize("content", [b"", b'{"name": "torn", "dig', b"\xff\xfe", b"[]", b'{"name": "torn"}'])
async def test_a_damaged_manifest_is_left_out_and_the_others_are_registered(tmp_path: Path, content: bytes) -> None:
    artifacts = tmp_path / "templates"
    entry(artifacts, "a-torn-one", content)
    entry(artifacts, "whole", json.dumps({"name": "whole", "digest": "sha256:" + "0" * 64}).encode())
    (artifacts / "linked-nowhere").mkdir()
    (artifacts / "linked-nowhere" / "current").symlink_to("gone")
    store = SqliteStore(tmp_path / "atoll.db")
    await store.write(schema.migrate)
    await register_templates(artifacts, store=store, clock=SystemClock(), dice=seeded(1))
    found = await store.read(lambda conn: tenancy.templates_for(conn, ""))
    assert [template.name for template in found] == ["whole"]
    await store.close()
