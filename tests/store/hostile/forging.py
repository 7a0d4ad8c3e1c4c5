"""Archives, compressed streams and layouts that say what they are told to say, true or not."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ARCH: Final = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
TAR: Final = "application/vnd.oci.image.layer.v1.tar"
GZIP: Final = f"{TAR}+gzip"
ZSTD: Final = f"{TAR}+zstd"
OUTSIDE: Final = "{out}"
"""Stands in names and links for the directory outside of the tree that they are after."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an archive."""

    name: str
    body: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    more: Json = field(default_factory=dict)
    """Further attributes of the TarInfo."""

    def pack(self, outside: str) -> bytes:
        info = tarfile.TarInfo(self.name.replace(OUTSIDE, outside))
        info.type, info.linkname, info.size, info.mode = self.kind, self.link.replace(OUTSIDE, outside), len(self.body), 0o644
        for key, value in self.more.items():
            setattr(info, key, value)
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + self.body + bytes(-len(self.body) % 512)


@dataclass(frozen=True, slots=True)
class Packed(Entry):
    """An entry whose bytes are given."""

    content: bytes = b""

    def pack(self, outside: str) -> bytes:
        return self.content


def directory(name: str) -> Entry:
    return Entry(name, kind=tarfile.DIRTYPE, more={"mode": 0o755})


def symlink(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.SYMTYPE, link=target)


def hardlink(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.LNKTYPE, link=target)


def attribute(name: str, value: str, on: str = "file") -> Entry:
    return Entry(on, b"x", more={"pax_headers": {f"SCHILY.xattr.{name}": value}})


def archive(*entries: Entry, outside: str = "") -> bytes:
    return b"".join(one.pack(outside) for one in entries) + bytes(1024)


def sparse_of_old(real: int) -> Entry:
    """A file of GNU's older form whose header says that it has `real` bytes, one of them in the archive."""
    header = bytearray(tarfile.TarInfo("sparse").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"00000000001\0"
    header[156:157] = b"S"
    header[386:410] = _number(real - 1) + _number(1)
    header[483:495] = _number(real)
    return Packed("sparse", content=_summed(header) + b"x".ljust(512, b"\0"))


def sparse_of_pax(real: int) -> Entry:
    """The same in the form of PAX."""
    data = f"1\n{real - 1}\n1\n".encode().ljust(512, b"\0") + b"x"
    records = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "sparse", "GNU.sparse.realsize": str(real)}
    return Entry("sparse", data, more={"pax_headers": records})


def sized(name: str, size: int) -> Entry:
    """A file whose header says that it has so many bytes, and that has none."""
    info = tarfile.TarInfo(name)
    info.size = size
    return Packed(name, content=info.tobuf(tarfile.GNU_FORMAT))


def raw_name(name: bytes, records: bytes) -> Entry:
    """A file with PAX records as they are given."""
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = b"x", len(records)
    header = info.tobuf(tarfile.USTAR_FORMAT)
    return Packed("raw", content=header + records + bytes(-len(records) % 512) + Entry(name.decode()).pack(""))


def record(key: str, value: bytes) -> bytes:
    """One PAX record."""
    rest = b" " + key.encode() + b"=" + value + b"\n"
    size = len(rest)
    while len(str(size)) + len(rest) != size:
        size = len(str(size)) + len(rest)
    return str(size).encode() + rest


def _number(value: int) -> bytes:
    return b"\x80" + value.to_bytes(11, "big")


def _summed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


@dataclass(frozen=True, slots=True)
class Layer:
    """A blob and what its manifest says of it; what is not said is true of it."""

    blob: bytes
    media_type: str = TAR
    diff_id: str = ""
    digest: str = ""


Make = Callable[[str], Sequence[Layer]]
"""Makes an image's layers, given the directory outside."""


def one(*entries: Entry) -> Make:
    """A single layer of a plain tar."""
    return several(entries)


def several(*layers: Sequence[Entry]) -> Make:
    """Layers of plain tars."""
    return lambda outside: [Layer(archive(*entries, outside=outside)) for entries in layers]


def blobs(*layers: Layer) -> Make:
    """Layers as they are."""
    return lambda _outside: layers


def squeezed(content: bytes) -> Layer:
    return Layer(gzip.compress(content, 6, mtime=0), GZIP, digest_of(content))


def gzip_of_zeros(mib: int) -> Layer:
    """A tar with one file of zeros, squeezed as far as deflate can."""
    squeeze, total, out = zlib.compressobj(9, wbits=31), hashlib.sha256(), []
    for part in (sized("zeros", mib << 20).pack(""), *([bytes(1 << 20)] * mib), bytes(1024)):
        total.update(part)
        out.append(squeeze.compress(part))
    return Layer(b"".join([*out, squeeze.flush()]), GZIP, f"sha256:{total.hexdigest()}")


def zstd(*blocks: tuple[str, bytes, int], window: int = 0x50) -> bytes:
    """A zstd frame made by hand: `raw` blocks, and `rle` blocks, which are one byte that stands for up to 128 KiB of it. RFC 8878."""
    out = struct.pack("<IBB", 0xFD2FB528, 0, window)
    for number, (kind, content, size) in enumerate(blocks):
        last = number == len(blocks) - 1
        out += (int(last) | {"raw": 0, "rle": 1}[kind] << 1 | size << 3).to_bytes(3, "little") + content
    return out


def zstd_of_zeros(mib: int) -> Layer:
    """The same in 8 blocks of 4 bytes for each MiB: deflate reaches a factor of 1032, this one of 32768."""
    header, step = sized("zeros", mib << 20).pack(""), 128 << 10
    blob = zstd(("raw", header, len(header)), *([("rle", b"\0", step)] * (8 * mib)), ("rle", b"\0", 1024))
    total = hashlib.sha256(header)
    for part in (*([bytes(1 << 20)] * mib), bytes(1024)):
        total.update(part)
    return Layer(blob, ZSTD, f"sha256:{total.hexdigest()}")


def zstd_with_a_window(exponent: int) -> Layer:
    """A frame that asks for a window of so many bytes, as a power of two."""
    content = archive(Entry("file", b"x"))
    return Layer(zstd(("raw", content, len(content)), window=exponent - 10 << 3), ZSTD, digest_of(content))


def zipped() -> bytes:
    """What is no layer at all, though it has many files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for number in range(50):
            file.writestr(f"../../file{number}", "x" * 100)
    return out.getvalue()


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


class Layout:
    """An OCI layout, which is a folder of an object store, too."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs" / "sha256").mkdir(parents=True)

    def put(self, content: bytes, kind: str, *, name: str = "") -> Json:
        """A descriptor of a blob; `name`: the digest that it has the place of."""
        digest = name or digest_of(content)
        self.root.joinpath("blobs", "sha256", digest.removeprefix("sha256:")).write_bytes(content)
        return {"mediaType": kind, "digest": digest, "size": len(content)}

    def document(self, layers: Sequence[Layer]) -> tuple[Json, Json]:
        """Manifest (without its configuration) and configuration of these layers."""
        described = [self.put(layer.blob, layer.media_type, name=layer.digest) for layer in layers]
        diff_ids = [layer.diff_id or digest_of(layer.blob) for layer in layers]
        config = {"os": "linux", "architecture": ARCH, "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
        return {"schemaVersion": 2, "mediaType": MANIFEST, "layers": described}, config

    def finish(self, pointers: Sequence[Json]) -> None:
        """Write `index.json`."""
        self.root.joinpath("oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        self.root.joinpath("index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": list(pointers)}))
