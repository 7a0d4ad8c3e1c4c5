"""What examples/ shows works, with nothing but the public package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EVERYTHING = Path(__file__).parents[2] / "examples" / "everything.py"


def _run(product, *words: str) -> str:
    environment = {**os.environ, **product.environment}
    environment.pop("E2B_DEBUG", None)
    ran = subprocess.run([sys.executable, EVERYTHING, *words], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-8000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


def test_everything(product) -> None:
    said = _run(product, "-full_disk")
    assert said.endswith("everything works\n")
    assert said.count("\nok ") >= 20


@pytest.mark.long
def test_a_full_disk(product) -> None:
    assert _run(product, "full_disk").startswith("ok ")
