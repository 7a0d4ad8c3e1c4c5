"""Images for tests, made here: layers as tars of what the base template's tree has, packed as an OCI layout."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
BUSYBOX = shutil.which("busybox")
APPLETS = ("sh", "ls", "cat", "echo", "env", "id", "pwd", "true", "sleep", "test", "readlink", "stat")


@dataclass(frozen=True)
class Entry:
    """One entry of a layer; a link when `link` is given, a directory when `body` is None."""

    name: str
    body: bytes | None = b""
    link: str | None = None
    mode: int = 0o644
    uid: int = 0


def layer(*entries: Entry) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for one in entries:
            info = tarfile.TarInfo(one.name)
            info.mode, info.uid, info.gid = one.mode, one.uid, one.uid
            if one.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, one.link
            elif one.body is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(one.body)
            tar.addfile(info, io.BytesIO(one.body) if info.isreg() else None)
    return out.getvalue()


def busybox(*more: Entry) -> bytes:
    """A layer that can run: one static program under the names of its applets."""
    assert BUSYBOX is not None
    program = Entry("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755)
    return layer(program, *(Entry(f"bin/{name}", link="busybox") for name in APPLETS), *more)


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


@dataclass
class Image:
    layers: list[bytes]
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        """As an OCI layout; its layers' files can be spoilt afterwards."""
        (root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        packed = [gzip.compress(one, 1, mtime=0) for one in self.layers]
        config = {
            "os": "linux",
            "architecture": ARCH,
            "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": [digest(one) for one in self.layers]},
        }
        described = [self._blob(root, one, "application/vnd.oci.image.layer.v1.tar+gzip") for one in packed]
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self._blob(root, json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": described,
        }
        pointer = self._blob(root, json.dumps(manifest).encode(), manifest["mediaType"])
        (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        (root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [pointer]}))
        self.digests = [one["digest"] for one in described]
        return root

    @staticmethod
    def _blob(root: Path, content: bytes, kind: str) -> dict[str, Any]:
        name = digest(content)
        (root / "blobs" / "sha256" / name.removeprefix("sha256:")).write_bytes(content)
        return {"mediaType": kind, "digest": name, "size": len(content)}


def blob(root: Path, name: str) -> Path:
    return root / "blobs" / "sha256" / name.removeprefix("sha256:")
