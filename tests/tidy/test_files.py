"""What linters cannot see: sizes, shapes of packages, links of documents, locks without addresses, modules that nobody imports."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 600
FUNCTION_LINES_MAX = 60

# Modules that are started or found by name. Anything else that nobody imports is dead.
ENTRIES = re.compile(r"^atoll\.(programs\.\w+|cli\.reference|store\.migrations\..+|testing\..+|.*__main__)$")


@cache
def tracked() -> tuple[Path, ...]:
    """The files of the project: what git knows, or would know after the next commit."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return tuple(path for name in listing.split("\0") if name and (path := ROOT / name).is_file())


def below(directory: str, *suffixes: str) -> list[Path]:
    return [path for path in tracked() if path.is_relative_to(ROOT / directory) and path.suffix in suffixes]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_source_file_is_too_long() -> None:
    sources = [*below("src", ".py"), *below("native", ".go"), *below("scripts", ".py"), *below("tests", ".py"), *below("bench", ".py")]
    long = {name(path): count for path in sources if (count := path.read_text().count("\n")) > LINES_MAX}
    assert not long, f"split these along a seam (limit {LINES_MAX} lines): {long}"


def test_no_function_is_too_long() -> None:
    long = {}
    for path in below("src", ".py"):
        if "migrations/versions" in name(path):
            continue  # a schema is a table, and cutting it would hide its shape
        for function in functions(ast.parse(path.read_text())):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > FUNCTION_LINES_MAX:
                long[f"{name(path)}:{function.lineno} {function.name}"] = length
    assert not long, f"these do more than one thing (limit {FUNCTION_LINES_MAX} lines): {long}"


def test_every_module_opens_with_what_it_is() -> None:
    silent = [name(path) for path in [*below("src", ".py"), *below("scripts", ".py")] if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, f"these modules have no docstring: {silent}"


def test_package_files_hold_only_a_docstring() -> None:
    busy = [name(path) for path in below("src", ".py") if path.name == "__init__.py" and len(ast.parse(path.read_text()).body) > 1]
    assert not busy, f"code in __init__ runs on every import of the package, move it into a module: {busy}"


def test_no_open_point_hides_in_a_comment() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{name(path)}:{number}"
        for path in [*below("src", ".py"), *below("native", ".go"), *below("scripts", ".py", ".sh")]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"an open point belongs in an issue: {found}"


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for document in [path for path in tracked() if path.suffix == ".md"]:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            place = target.partition("#")[0]
            if place and "://" not in place and not place.startswith("mailto:") and not (document.parent / place).exists():
                broken.append(f"{name(document)}: {target}")
    assert not broken, f"links that lead nowhere: {broken}"


def test_the_readme_names_only_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in ("README.md", "AGENTS.md"):
        used = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / document).read_text(), flags=re.MULTILINE))
        assert used <= targets, f"{document} names {used - targets}"


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_python_locks_have_hashes_and_no_addresses(lock: Path) -> None:
    text = lock.read_text()
    assert not re.search(r"https?://|file:|--find-links|--index-url|--extra-index-url|--trusted-host", text)
    pinned = re.findall(r"^[a-zA-Z0-9_.\[\]-]+==", text, flags=re.MULTILINE)
    requirements = re.findall(r"^[a-zA-Z0-9]", text, flags=re.MULTILINE)
    assert len(pinned) == len(requirements) > 0
    assert text.count("--hash=sha256:") >= len(pinned)


def test_the_development_lock_holds_the_runtime_lock() -> None:
    def pins(lock: str) -> set[str]:
        return set(re.findall(r"^\S+==\S+", (ROOT / "requirements" / lock).read_text(), flags=re.MULTILINE))

    assert pins("runtime.txt") <= pins("dev.txt"), "make up and make test would run different versions: make lock"


def test_the_javascript_lock_has_hashes_and_no_addresses() -> None:
    text = (ROOT / "tests/e2e/js/package-lock.json").read_text()
    assert '"resolved"' not in text
    assert '"integrity": "sha512-' in text


def test_every_directory_of_tests_belongs_to_a_suite() -> None:
    """`make test` runs named directories: one that no suite names would never fail."""
    named = set(re.findall(r'"tests/(\w+)"', (ROOT / "scripts/suite.py").read_text()))
    present = {path.relative_to(ROOT / "tests").parts[0] for path in below("tests", ".py") if path.name.startswith("test_")}
    assert present <= named, f"scripts/suite.py does not run tests/{sorted(present - named)}"


def test_programs_can_be_executed() -> None:
    programs = [path for path in tracked() if path.read_bytes()[:2] == b"#!"]
    assert ROOT / ".ci/run" in programs
    assert not [name(path) for path in programs if not path.stat().st_mode & 0o100]


def test_every_module_is_imported_by_another() -> None:
    modules = {module_name(path): path for path in below("src", ".py") if path.name != "__init__.py"}
    # Only what ships counts: a module is not kept alive by its own tests.
    used = {module for path in below("src", ".py") for module in imports(path) - {module_name(path)}}
    dead = sorted(module for module in modules if module not in used and not ENTRIES.match(module))
    assert not dead, f"nothing that ships imports these: {dead}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Every module that a file may mean: `from a.b import c` can be the module a.b or a.b.c."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found
