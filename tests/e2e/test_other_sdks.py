"""The oldest Python SDK that we promise, and the JavaScript one: each in its own process, unmodified."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLD_PYTHON = ROOT / "build" / "venv-e2b-2.45" / "bin" / "python"
NODE = ROOT / "build" / "tools" / "node"
JAVASCRIPT = sorted((HERE / "js").glob("*.mjs"))


def _run(command: list[str | Path], product) -> None:
    environment = {**os.environ, **product.environment, "ATOLL_DOMAIN": product.domain}
    environment.pop("E2B_DEBUG", None)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-8000:]}\n{ran.stderr[-8000:]}"


@pytest.mark.parametrize("script", sorted((HERE / "old_sdk").glob("*.py")), ids=lambda path: path.stem)
def test_oldest_python_sdk(product, script) -> None:
    if not OLD_PYTHON.exists():
        pytest.skip(f"e2b 2.45 is not in {OLD_PYTHON.parents[1]}; `make test` makes that environment")
    _run([OLD_PYTHON, script], product)


@pytest.mark.parametrize("script", JAVASCRIPT, ids=lambda path: path.stem)
def test_javascript_sdk(product, script) -> None:
    node = NODE if NODE.exists() else shutil.which("node")
    if node is None or not (HERE / "js" / "node_modules" / "e2b").exists():
        pytest.skip("node or the JavaScript packages are not here; `make test` installs both")
    _run([node, "--test", script], product)


def test_there_is_something_to_run() -> None:
    assert JAVASCRIPT
    assert list((HERE / "old_sdk").glob("*.py"))
