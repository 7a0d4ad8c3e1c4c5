from __future__ import annotations

import gc
import subprocess
import sys

from atoll.programs.settling import SWITCH_S, settle_down


def test_what_is_there_is_frozen_and_threads_take_turns_sooner() -> None:
    before = sys.getswitchinterval()
    try:
        settle_down()
        assert gc.get_freeze_count() > 1000
        assert sys.getswitchinterval() == SWITCH_S
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)


def test_long_running_programs_load_no_terminal_library() -> None:
    """5 MiB in each of three processes, for a renderer that is never used."""
    code = "import sys, atoll.telemetry.log as log; log.configure('x'); print(sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'structlog'" in loaded
    assert "'rich'" not in loaded
    assert "'pygments'" not in loaded
