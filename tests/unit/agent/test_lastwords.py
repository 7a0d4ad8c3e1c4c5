"""Few, small, and nobody else's to read."""

from __future__ import annotations

import os
import stat

from atoll.agent.lastwords import BYTES, KEPT, LastWords


def test_kept_and_bounded(tmp_path):
    words = LastWords(tmp_path / "consoles")
    words.keep("plc_1", b"a" + b"x" * BYTES)
    assert words.read("plc_1") == b"x" * BYTES
    path = tmp_path / "consoles" / "plc_1.log"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.utime(path, (1, 1))
    for n in range(KEPT):
        words.keep(f"plc_n{n}", b"y")
    assert words.read("plc_1") is None
    assert len(list((tmp_path / "consoles").iterdir())) == KEPT


def test_nothing_is_written_elsewhere(tmp_path):
    words = LastWords(tmp_path / "consoles")
    words.keep("../plc_1", b"y")
    words.keep("plc_1", b"")
    assert not list(tmp_path.iterdir())
    assert words.read("../plc_1") is None
