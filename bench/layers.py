"""Images for the benchmark, made here: the tree of the template `base` and bytes that cannot be compressed, in so many layers, as an OCI layout."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from atoll.images.cache import ImageCache
from atoll.programs.layout import cache_directory

ARCH: Final = {"x86_64": "amd64", "aarch64": "arm64"}
PIECE_BYTES: Final = 512 << 10
"""Of one file of data."""
CHUNK: Final = 1 << 20


@dataclass(slots=True)
class Layout:
    """An OCI layout that layers are added to. `finish` makes an image of them."""

    directory: Path
    layers: list[dict[str, Any]] = field(default_factory=list)
    diff_ids: list[str] = field(default_factory=list)
    digest: str = ""
    """The manifest's, when it is finished."""

    def __post_init__(self) -> None:
        (self.directory / "blobs" / "sha256").mkdir(parents=True)

    @property
    def bytes(self) -> int:
        """Of all layers, compressed."""
        return sum(int(layer["size"]) for layer in self.layers)

    def add(self, tree: Path | None, names: Sequence[str], *, data: tuple[str, int] | None = None) -> None:
        """One layer: these names of a tree, then files of data below `data[0]`, so many bytes in all."""
        unfinished = self.directory / "unfinished"
        plain = hashlib.sha256()
        with (
            unfinished.open("wb") as file,
            gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5, mtime=0, filename="") as squeezed,
            tarfile.open(fileobj=_Twice(squeezed, plain), mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name in names:
                assert tree is not None
                tar.add(tree / name, name, recursive=False)
            for name, content in _pieces(*data) if data is not None else ():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        name = self._take(unfinished)
        self.layers.append(
            {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": name, "size": self._path(name).stat().st_size}
        )
        self.diff_ids.append(f"sha256:{plain.hexdigest()}")

    def finish(self) -> None:
        """Write configuration, manifest and `index.json`."""
        config = {
            "os": "linux",
            "architecture": ARCH[os.uname().machine],
            "config": {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": self.diff_ids},
        }
        kind = "application/vnd.oci.image.manifest.v1+json"
        described = self._document("application/vnd.oci.image.config.v1+json", config)
        manifest = self._document(kind, {"schemaVersion": 2, "mediaType": kind, "config": described, "layers": self.layers})
        (self.directory / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        tagged = {**manifest, "annotations": {"org.opencontainers.image.ref.name": "made"}}
        (self.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [tagged]}))
        self.digest = str(manifest["digest"])

    def _document(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        unfinished = self.directory / "unfinished"
        unfinished.write_text(json.dumps(content))
        name = self._take(unfinished)
        return {"mediaType": kind, "digest": name, "size": self._path(name).stat().st_size}

    def _take(self, unfinished: Path) -> str:
        total = hashlib.sha256()
        with unfinished.open("rb") as file:
            while part := file.read(CHUNK):
                total.update(part)
        name = f"sha256:{total.hexdigest()}"
        unfinished.rename(self._path(name))
        return name

    def _path(self, name: str) -> Path:
        return self.directory / "blobs" / "sha256" / name.removeprefix("sha256:")


class _Twice(io.RawIOBase):
    """Writes to a file, and digests what it writes."""

    def __init__(self, file: Any, total: Any) -> None:
        self._file = file
        self._total = total

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._total.update(data)
        return len(data)


def _pieces(below: str, size: int) -> Iterator[tuple[str, bytes]]:
    """Files of bytes that nothing compresses, the same each time."""
    dice = random.Random(below)
    for number in range(size // PIECE_BYTES):
        yield f"{below}/{number:04d}", dice.randbytes(PIECE_BYTES)


def base_tree() -> Path:
    """The tree of the template `base` on this machine."""
    return ImageCache(cache_directory()).current("base").rootfs


def names_of(tree: Path) -> list[str]:
    """All names of a tree, a directory before what is in it."""
    found: list[str] = []
    for place, directories, files in os.walk(tree):
        directories.sort()
        here = Path(place).relative_to(tree)
        if here.parts:
            found.append(str(here))
        # Links to directories come as directories; nothing is below them here.
        found += [str(here / name) for name in sorted(files)]
        found += [str(here / name) for name in directories if (Path(place) / name).is_symlink()]
    return found


def in_parts(tree: Path, names: Sequence[str], count: int) -> list[list[str]]:
    """Names in so many runs of about as many bytes each."""
    sizes = [(tree / name).lstat().st_size for name in names]
    parts: list[list[str]] = [[] for _ in range(count)]
    total, passed = sum(sizes), 0
    for name, size in zip(names, sizes, strict=True):
        parts[min(count - 1, passed * count // max(1, total))].append(name)
        passed += size
    return parts
