"""A PostgreSQL server for tests: the distribution's package, a directory and a socket of its own, no TCP."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest

USER = "postgres"


def binaries() -> Path:
    """Where initdb and postgres are; skips when they are not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    return found[-1].parent


@dataclass
class Server:
    """A running server. `database` gives the URL of a new database: empty, or `like` another one that nobody uses."""

    directory: Path
    process: subprocess.Popen[bytes]
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    whole: str | None = None
    """The database that `tests/store/whole.py` copies."""

    @classmethod
    def start(cls, directory: Path) -> Server:
        if os.geteuid() != 0:
            pytest.skip("PostgreSQL is started as its own user, which needs root")
        programs, account = binaries(), pwd.getpwnam(USER)
        # Below /tmp and short: a socket's path has at most 107 characters; and its user must reach it.
        home = Path(f"/tmp/atoll-pg-{os.getpid()}")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(mode=0o700)
        os.chown(home, account.pw_uid, account.pw_gid)
        demoted: Any = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": "/"}
        subprocess.run(
            [programs / "initdb", "-D", home / "data", "-A", "trust", "-U", USER, "-E", "UTF8", "--no-sync"],
            check=True, capture_output=True, **demoted,
        )  # fmt: skip
        settings = {"listen_addresses": "", "unix_socket_directories": str(home), "fsync": "off", "max_connections": "100"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        process = subprocess.Popen([programs / "postgres", "-D", home / "data", *options], stderr=subprocess.DEVNULL, **demoted)
        server = cls(home, process)
        until = time.monotonic() + 30
        while subprocess.run([programs / "pg_isready", "-q", "-h", home], check=False).returncode != 0:
            assert process.poll() is None, "PostgreSQL did not start"
            assert time.monotonic() < until, "PostgreSQL did not start in time"
            time.sleep(0.05)
        return server

    async def database(self, *, like: str | None = None) -> str:
        name = f"t{next(self.numbers)}"
        connection = await asyncpg.connect(host=str(self.directory), user=USER, database="postgres")
        try:
            await connection.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {like}" if like else ""))
        finally:
            await connection.close()
        return f"postgresql+asyncpg://{USER}@/{name}?host={self.directory}"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        shutil.rmtree(self.directory, ignore_errors=True)
