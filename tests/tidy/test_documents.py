"""Documents that follow from the code say what the code says, and what has once been promised stays promised."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import generate_docs
from atoll.base.errors import HINTS, Code
from atoll.domain import history
from atoll.domain.operations import Alert
from atoll.telemetry import events, metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted(generate_docs.documents()), ids=lambda path: path.name)
def test_a_made_document_is_up_to_date(path: Path) -> None:
    assert path.exists(), "run .venv/bin/python scripts/generate_docs.py"
    assert path.read_text() == generate_docs.documents()[path], "stale: run .venv/bin/python scripts/generate_docs.py"


def test_no_published_code_is_gone() -> None:
    assert generate_docs.locked_codes(), "the lock is empty"
    assert not generate_docs.removed_codes()


def test_the_lock_of_codes_has_only_grown() -> None:
    """Each version that git knows begins with all of the one before."""
    name = str(generate_docs.LOCK.relative_to(ROOT))
    log = subprocess.run(["git", "log", "--format=%H", "--reverse", "--", name], cwd=ROOT, capture_output=True, text=True, check=False)
    if log.returncode != 0:
        pytest.skip("git's history is missing here: run in a clone")
    before: list[str] = []
    for commit in log.stdout.split():
        shown = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=False)
        if shown.returncode != 0:
            continue  # the file was moved in this commit
        now = codes(shown.stdout)
        assert now[: len(before)] == before, f"{commit} changed what was published before"
        before = now
    assert codes(generate_docs.LOCK.read_text())[: len(before)] == before


def codes(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("code", Code)
def test_every_code_has_its_own_name_and_a_hint(code: Code) -> None:
    assert code.name == code.value
    assert re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*", code)
    hint = HINTS[code]
    assert len(hint) > 10
    assert hint[0] == "`" or hint[0].isupper()
    assert hint.endswith("."), "a hint is a sentence"


def test_hints_belong_to_codes() -> None:
    assert set(HINTS) == set(Code)


@pytest.mark.parametrize("module", [history, events], ids=["recorded", "logged"])
def test_event_names_have_one_form(module: object) -> None:
    names = {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, str)}
    assert names
    assert len(set(names.values())) == len(names), "one name for two things"
    for name, value in names.items():
        assert re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", value), value
        assert name == value.replace(".", "_").upper(), f"{name} = {value}"


def test_each_code_names_a_test_that_produces_it() -> None:
    named = generate_docs.producing_tests()
    missing = sorted(set(Code.__members__) - set(named))
    assert not missing, f"add to tests/errors.toml which test produces {missing}"
    assert set(named) == set(Code.__members__), "a code that there is not"
    silent = []
    for code, test in named.items():
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        found = [
            node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        lines = source.splitlines()
        # With its decorators: parameters may name the code.
        texts = ["\n".join(lines[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno]) for node in found]
        if not any(re.search(rf"\b{code}\b", text) for text in texts):
            silent.append(f"{code}: {test}")
    assert not silent, f"tests that are not there, or do not speak of their code: {silent}"


# Alerts and metrics.


def test_each_kind_of_alert_has_its_section_in_the_runbook() -> None:
    """And the link that an alert carries leads there."""
    text = (ROOT / "docs" / "RUNBOOK.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n\n(.+?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert list(sections) == [kind.value for kind in Alert]
    for kind, section in sections.items():
        assert re.match(r"(Info|Warning|Critical)\b", section), f"{kind} does not begin with how bad it is"
        assert re.search(r"^1\. ", section, flags=re.MULTILINE), f"{kind} does not say what to do"
    for kind in Alert:
        path, _, anchor = kind.runbook.partition("#")
        assert (ROOT / path).is_file()
        # What a heading's anchor is where Markdown is shown: points go, underscores stay.
        assert anchor in {re.sub(r"[^a-z0-9_-]", "", heading) for heading in sections}


def test_every_metric_of_the_edge_is_documented() -> None:
    written = set(re.findall(r'"(atoll_edge_\w+|process_\w+|go_\w+)"', generate_docs.EDGE.read_text()))
    assert written == {name for name, _, _ in generate_docs.edge_metrics()}
    assert len(written) > 10


def test_metrics_have_one_form() -> None:
    for spec in metrics.COUNTERS:
        assert spec.name.endswith("_total"), f"{spec.name} is a counter"
    for spec in (*metrics.GAUGES, *metrics.HISTOGRAMS):
        assert not spec.name.endswith("_total"), f"{spec.name} is no counter"
    known = (*metrics.COUNTERS, *metrics.HISTOGRAMS, *metrics.GAUGES)
    assert len({spec.name for spec in known}) == len(known)
    for spec in known:
        assert re.fullmatch(r"(atoll|process)_[a-z_]+", spec.name)
        assert spec.help.endswith(".")
        assert not {name for name in spec.label_names if name.endswith("id")}, f"{spec.name}: an id is no label"


# Tests that documents name.

NAMED = re.compile(r"`((?:tests|src/atoll/testing)/[\w/.-]+\.py)::(\w+)`|`(native/[\w/.-]+_test\.go)::(\w+)`")


@cache
def defined(path: Path) -> frozenset[str]:
    if path.suffix == ".go":
        return frozenset(re.findall(r"^func (\w+)\(", path.read_text(), flags=re.MULTILINE))
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )


def test_tests_that_documents_name_exist() -> None:
    missing = []
    for document in sorted((ROOT / "docs").rglob("*.md")):
        for python, python_test, go, go_test in NAMED.findall(document.read_text()):
            path, test = ROOT / (python or go), python_test or go_test
            if not path.is_file() or test not in defined(path):
                missing.append(f"{document.relative_to(ROOT)}: {python or go}::{test}")
    assert not missing, f"a promise that no test proves: {missing}"


def test_each_promise_names_its_test() -> None:
    """SPEC.md: a row that names no test must say so in words, not by silence."""
    specification = (ROOT / "docs" / "SPEC.md").read_text()
    silent = [
        line
        for line in specification.splitlines()
        if line.startswith("| ") and not line.startswith(("| promise", "|---")) and not NAMED.search(line)
    ]
    assert not silent, f"rows without a test: {silent}"


def test_source_paths_that_documents_name_exist() -> None:
    missing = []
    for document in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "AGENTS.md", ROOT / "README.md"]:
        for path in re.findall(r"`((?:src|scripts|native|bench|deploy|docs)/[\w./-]+)`", document.read_text()):
            if not (ROOT / path).exists():
                missing.append(f"{document.relative_to(ROOT)}: {path}")
    assert not missing, f"paths that lead nowhere: {missing}"


# Decision records.

RECORDS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
ADR_LINES_MAX = 60


def test_no_number_of_a_decision_record_is_given_twice() -> None:
    """Numbers are given out before a record is written, so one may come later than the next."""
    numbers = [int(record.name[:4]) for record in RECORDS]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 1


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_decision_record_is_short_and_whole(record: Path) -> None:
    text = record.read_text()
    assert text.count("\n") <= ADR_LINES_MAX
    assert re.fullmatch(r"# \d{4} .+", text.splitlines()[0])
    assert text.splitlines()[0][2:6] == record.name[:4]
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert headings == ["Context", "Decision", "Alternatives", "Consequences", "How we would notice that it was wrong"]


def test_code_names_only_decision_records_that_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"docs/adr/([\w-]+(?:\.md)?)", path.read_text())
        if not any(record.name.startswith(name) for record in RECORDS)
    ]
    assert not missing
