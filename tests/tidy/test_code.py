"""Habits of the house that a linter has no rule for."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lines(directory: str, pattern: str) -> list[str]:
    wanted = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / directory).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if wanted.search(line)
    ]


def test_nobody_waits_in_a_way_that_swallows_cancellation() -> None:
    """Python 3.11's `wait_for` returns a result that came in the same moment as a cancellation, and the cancellation is lost: a loop that
    was told to end goes on for ever. `asyncio.timeout` does not.
    """
    assert not lines("src", r"asyncio\.wait_for\(")


def test_only_programs_take_real_clocks_and_dice() -> None:
    """Everything below is given them, so that the same code runs in a simulation."""
    pure = ("base", "domain", "planning", "wire", "store", "control", "agent")
    real = {"time.time", "time.clock_gettime", "time.monotonic", "datetime.now", "os.urandom", "uuid.uuid4", "random.random"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for package in pure
        for path in sorted((ROOT / "src" / "atoll" / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in real
    ]
    # A nonce that could ever come twice would break the seal: it is not for simulations to choose.
    assert [place.split(":")[0] for place in found] == ["src/atoll/store/sealing.py"], found


def test_state_is_changed_only_by_stepping() -> None:
    """Whoever replaces the state of a sandbox or snapshot, or the holding of a placement, asks the table."""
    for path in sorted((ROOT / "src" / "atoll" / "planning").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "replace"):
                continue
            for keyword in node.keywords:
                if keyword.arg in ("state", "holding"):
                    assert ast.unparse(keyword.value).startswith(("sb.step(", "sn.step(")), (
                        f"{path.name}:{node.lineno} {ast.unparse(keyword.value)}"
                    )
