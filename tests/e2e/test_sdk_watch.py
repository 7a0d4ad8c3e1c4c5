"""Watching directories through the unmodified SDK, in both forms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from e2b import AsyncSandbox, FilesystemEventType, InvalidArgumentException, NotFoundException, SandboxException


def _collect(handle: Any, enough: Callable[[list[Any]], bool], within_s: float = 10) -> list[Any]:
    seen: list[Any] = []
    deadline = time.monotonic() + within_s
    while not enough(seen):
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
        seen += handle.get_new_events()
    return seen


def test_a_new_file_gives_three_events(sandbox, directory) -> None:
    handle = sandbox.files.watch_dir(directory)
    sandbox.files.write(f"{directory}/new.txt", "content")
    seen = _collect(handle, lambda events: len(events) >= 3)
    time.sleep(0.3)
    seen += handle.get_new_events()
    assert [(event.name, event.type) for event in seen] == [
        ("new.txt", FilesystemEventType.CREATE),
        ("new.txt", FilesystemEventType.CHMOD),
        ("new.txt", FilesystemEventType.WRITE),
    ]
    assert handle.get_new_events() == []
    handle.stop()
    with pytest.raises(SandboxException):
        handle.get_new_events()


def test_change_rename_remove(sandbox, directory) -> None:
    sandbox.files.write(f"{directory}/f", "1")
    handle = sandbox.files.watch_dir(directory)
    sandbox.commands.run("echo 2 >> f; chmod 600 f; mv f g; rm g", cwd=directory)
    seen = _collect(handle, lambda events: any(one.type is FilesystemEventType.REMOVE for one in events))
    kinds = {(event.name, event.type) for event in seen}
    assert {
        ("f", FilesystemEventType.WRITE),
        ("f", FilesystemEventType.CHMOD),
        ("f", FilesystemEventType.RENAME),
        ("g", FilesystemEventType.REMOVE),
    } <= kinds
    handle.stop()


def test_recursive_also_below_what_is_new(sandbox, directory) -> None:
    sandbox.files.make_dir(f"{directory}/old")
    handle = sandbox.files.watch_dir(directory, recursive=True)
    sandbox.files.write(f"{directory}/old/a", "x")
    _collect(handle, lambda events: any(one.name == "old/a" for one in events))
    sandbox.files.make_dir(f"{directory}/fresh")
    _collect(handle, lambda events: any(one.name == "fresh" for one in events))
    time.sleep(0.3)
    sandbox.files.write(f"{directory}/fresh/b", "x")
    _collect(handle, lambda events: any(one.name == "fresh/b" for one in events))
    handle.stop()
    flat = sandbox.files.watch_dir(directory)
    sandbox.files.write(f"{directory}/old/c", "x")
    sandbox.files.write(f"{directory}/end", "x")
    seen = _collect(flat, lambda events: any(one.name == "end" for one in events))
    assert not [event for event in seen if "c" in event.name]
    flat.stop()


def test_entries_when_asked_for(sandbox, directory) -> None:
    handle = sandbox.files.watch_dir(directory, include_entry=True)
    sandbox.files.write(f"{directory}/entry", "12345")
    seen = _collect(handle, lambda events: any(one.type is FilesystemEventType.WRITE for one in events))
    written = next(event for event in seen if event.type is FilesystemEventType.WRITE)
    assert (written.entry.name, written.entry.path, written.entry.owner) == ("entry", f"{directory}/entry", "user")
    handle.stop()
    without = sandbox.files.watch_dir(directory)
    sandbox.files.write(f"{directory}/plain", "1")
    assert all(event.entry is None for event in _collect(without, lambda events: len(events) >= 3))
    without.stop()


def test_what_cannot_be_watched(sandbox, directory) -> None:
    sandbox.files.write(f"{directory}/file", "x")
    with pytest.raises(NotFoundException):
        sandbox.files.watch_dir(f"{directory}/none")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.watch_dir(f"{directory}/file")


async def test_the_streamed_form(sandbox, directory) -> None:
    twin = await AsyncSandbox.connect(sandbox.sandbox_id)
    seen: list[Any] = []
    ended: list[Any] = []
    handle = await twin.files.watch_dir(directory, on_event=seen.append, on_exit=ended.append, recursive=True, include_entry=True)
    await twin.files.write(f"{directory}/streamed", "x")
    async with asyncio.timeout(10):
        while len(seen) < 3:
            await asyncio.sleep(0.05)
    assert [event.type for event in seen[:3]] == [FilesystemEventType.CREATE, FilesystemEventType.CHMOD, FilesystemEventType.WRITE]
    assert seen[2].entry.path == f"{directory}/streamed"
    await handle.stop()
    count = len(seen)
    await twin.files.write(f"{directory}/after", "x")
    await asyncio.sleep(0.5)
    assert len(seen) == count
    assert ended == [None]


async def test_the_streamed_form_ends_with_its_time(sandbox, directory) -> None:
    twin = await AsyncSandbox.connect(sandbox.sandbox_id)
    ended: list[Any] = []
    await twin.files.watch_dir(directory, on_event=lambda _: None, on_exit=ended.append, timeout=1)
    async with asyncio.timeout(10):
        while not ended:
            await asyncio.sleep(0.05)
    with pytest.raises((NotFoundException, SandboxException)):
        await twin.files.watch_dir(f"{directory}/none", on_event=lambda _: None)
