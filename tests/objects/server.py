"""A real server that speaks S3, for tests: versitygw on a folder, pinned in native/s3server."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from atoll.images.bucket_settings import BucketSettings

PROGRAM = Path(__file__).resolve().parents[2] / "build" / "tools" / "versitygw"
BUCKET = "atoll"


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@dataclass
class S3Server:
    """`files` is what it keeps: a directory for each bucket. May be stopped and started again."""

    path: Path
    address: str = "127.0.0.1"
    port: int = 0
    access: str = field(default_factory=lambda: "access-" + secrets.token_hex(4))
    secret: str = field(default_factory=lambda: "secret-" + secrets.token_hex(12), repr=False)
    process: subprocess.Popen[bytes] | None = None

    @property
    def files(self) -> Path:
        return self.path / "files" / BUCKET

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def credentials(self) -> Path:
        return self.path / "credentials.json"

    def start(self) -> None:
        if not PROGRAM.exists():
            pytest.skip(f"not built: {PROGRAM}; `make test` builds it")
        self.port = self.port or free_port(self.address)
        for directory in (self.files, self.path / "meta"):
            directory.mkdir(parents=True, exist_ok=True)
        self.keep_credentials(self.credentials)
        words = [PROGRAM, "--port", f"{self.address}:{self.port}", "posix", "--sidecar", self.path / "meta", self.path / "files"]
        environment = {**os.environ, "ROOT_ACCESS_KEY": self.access, "ROOT_SECRET_KEY": self.secret}
        with (self.path / "log").open("ab") as log:
            self.process = subprocess.Popen(
                list(map(str, words)), env=environment, cwd=self.path, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 20
        while True:
            with socket.socket() as probe:
                probe.settimeout(0.5)
                if probe.connect_ex((self.address, self.port)) == 0:
                    return
            assert self.process.poll() is None, (self.path / "log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def keep_credentials(self, path: Path, *, secret: str | None = None, owner: tuple[int, int] | None = None) -> Path:
        path.write_text(json.dumps({"access_key_id": self.access, "secret_access_key": secret or self.secret}))
        path.chmod(0o600)
        if owner is not None:
            os.chown(path, *owner)
        return path

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
            self.process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.path, ignore_errors=True)

    def settings(self, **changes: object) -> BucketSettings:
        values: dict[str, object] = {
            "bucket": BUCKET, "endpoint": self.endpoint, "prefix": "one/two", "credentials": self.credentials, "plain_http": True,
        }  # fmt: skip
        return BucketSettings(**{**values, **changes})  # type: ignore[arg-type]

    def toml(self, credentials: str, *, prefix: str = "deployment") -> str:
        return "\n".join(
            [
                "[artifacts]", 'kind = "s3"', f'bucket = "{BUCKET}"', f'endpoint = "{self.endpoint}"', f'prefix = "{prefix}"',
                f'credentials = "{credentials}"', "plain_http = true", "",
            ]
        )  # fmt: skip
