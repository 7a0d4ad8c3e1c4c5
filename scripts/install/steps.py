"""Which steps there are, for what, and in which order."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from typing import Final

from install import base_template, environments, native, packages
from install import machines as machine_files
from install.progress import Reporter, Step

USER: Final = "atoll"

# Steps that change the machine outside this checkout.
NEED_ROOT: Final = frozenset({"packages", "user", "base", "machines"})
PURPOSES: Final = ("run", "check", "test")


def steps_for(purpose: str) -> tuple[Step, ...]:
    """The steps for running the product (`run`), for `make check` (`check`), or for the whole test suite (`test`)."""
    lock = "runtime" if purpose == "run" else "dev"
    wanted = packages.TO_TEST if purpose == "test" else packages.TO_RUN
    python = Step("python", "Python environment", _with(environments.ensure_product, lock=lock), after=("packages",))
    if purpose == "check":
        return (python,)
    common = (
        Step("packages", "Debian packages", lambda reporter: packages.ensure(reporter, wanted)),
        Step("user", "system user", ensure_user, after=("packages",)),
        python,
        Step("base", "base template", base_template.ensure, after=("packages", "user")),
        Step("go", "Go toolchain", native.ensure_go, after=("packages",)),
        Step("programs", "guest and traffic programs", native.ensure_programs, after=("go",)),
        Step("runsc", "runsc", native.ensure_runsc, after=("go",)),
        Step("registry", "registry", native.ensure_registry, after=("go",)),
    )
    machines = Step("machines", "QEMU and a kernel for virtual machines", machine_files.ensure, after=("packages",))
    if purpose == "run":
        # Only where the operator wants them: they are as large as all the rest.
        return (*common, machines) if os.environ.get("ATOLL_MACHINES", "off") != "off" else common
    return (
        *common,
        machines,
        Step("s3server", "S3 server for tests", native.ensure_s3server, after=("go",)),
        Step("sdk", "old Python SDK", environments.ensure_old_sdk, after=("python",)),
        Step("clients", "registry clients", native.ensure_clients, after=("go",)),
        Step("node", "Node and the JavaScript SDK", environments.ensure_node, after=("sdk",)),
    )


def ensure_user(reporter: Reporter) -> str:
    """Have the system user that control runs as: no shell, no home of its own, no right to anything but its state directory."""
    try:
        found = pwd.getpwnam(USER)
    except KeyError:
        reporter.run(
            ["useradd", "--system", "--user-group", "--home-dir", "/nonexistent", "--no-create-home", "--shell", "/usr/sbin/nologin", USER],
            todo=f"make the user by hand: useradd --system --user-group --shell /usr/sbin/nologin {USER}",
        )
        return f"made {USER}, uid {pwd.getpwnam(USER).pw_uid}"
    return f"have {USER}, uid {found.pw_uid}"


def _with(act: Callable[..., str], **arguments: str) -> Callable[[Reporter], str]:
    return lambda reporter: act(reporter, **arguments)
