"""What virtual machines need: QEMU and erofs-utils as packages, and a kernel of Debian's with the modules that a guest boots by.

Theory of operation. The kernel is downloaded as a package, which apt verifies, and unpacked, never installed: no boot loader hears of it. It is
kept in CACHE/kernels/VERSION/{vmlinuz,vmlinux,modules/NN-name.ko,manifest.json}, where the modules' names give the order in which each finds
what it depends on, and the manifest has every file's size and SHA-256. The directory appears by one rename; `current` beside it names it.
`vmlinux` is what is packed in `vmlinuz`: Firecracker boots nothing else.
QEMU and the kernel are the distribution's own files, run as separate programs; nothing of them is part of Atoll.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Final

from install import packages
from install.base_template import cache_directory
from install.progress import Reporter, StepFailed

PACKAGES: Final = ("qemu-system-x86", "erofs-utils", "lz4", "zstd")
KERNEL: Final = "linux-image-cloud-amd64"
"""Names the package of the newest kernel for virtual machines."""
MODULES: Final = (
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "overlay",
    "erofs",
    "vmw_vsock_virtio_transport",
    "virtio_rng",
    "tcp_diag",
)
"""What a guest boots by, and `tcp_diag`, by which it ends connections; what these depend on comes along. ext4 is built in."""
FORMAT: Final = 3
"""Of what is kept: raised when more of a kernel is wanted, so that one that is there is gathered again."""
_SETUP_SECTORS: Final = 0x1F1
_PAYLOAD: Final = 0x248
_LENGTH_BYTES: Final = 4
_DEPENDS: Final = re.compile(rb"\0depends=([^\0]*)\0")


def ensure(reporter: Reporter) -> str:
    """Have QEMU, mkfs.erofs and a kernel in the cache."""
    if platform.machine() != "x86_64":
        return f"no virtual machines on {platform.machine()} yet"
    packages.ensure(reporter, PACKAGES)
    name = _package(reporter)
    version = name.removeprefix("linux-image-")
    place = cache_directory() / "kernels"
    final = place / version
    if not _is_kept(final):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=place) as text:
            _unpack(name, Path(text), reporter)
            made = _gather(Path(text), version)
            shutil.rmtree(final, ignore_errors=True)
            made.rename(final)
    current, unfinished = place / "current", place / ".current"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(version)
    unfinished.replace(current)
    return f"kernel {version}"


def _is_kept(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / "manifest.json").read_text()).get("format") == FORMAT)
    except (OSError, ValueError):
        return False


def _package(reporter: Reporter) -> str:
    """The package that the kernel is in now: the one that there is, else what the distribution names."""
    there = cache_directory() / "kernels" / "current"
    if there.is_symlink() and (there / "manifest.json").exists():
        return f"linux-image-{there.readlink()}"
    reporter.run(["apt-get", "-o", "DPkg::Lock::Timeout=300", "update"], todo="see that this machine reaches its Debian mirror")
    said = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Depends: (linux-image-\S+)", said)
    if found is None:
        raise StepFailed(f"this distribution has no {KERNEL}", "use Debian 12 or later, or do without virtual machines")
    return found[1]


def _unpack(name: str, directory: Path, reporter: Reporter) -> None:
    # apt drops its rights to download, and gives up where it may not write.
    directory.chmod(0o755)
    (directory / "package").mkdir()
    reporter.run(
        ["sh", "-c", f'cd "$0" && apt-get -o APT::Sandbox::User=root -q download {name} && dpkg-deb --extract ./*.deb package', directory],
        todo=f"try by hand: apt-get download {name}",
    )


def _gather(directory: Path, version: str) -> Path:
    """The few files that are wanted, with their manifest, as the directory that is to appear."""
    made = directory / "made"
    (made / "modules").mkdir(parents=True)
    made.chmod(0o755)
    unpacked = directory / "package"
    shutil.copyfile(unpacked / "boot" / f"vmlinuz-{version}", made / "vmlinuz")
    (made / "vmlinux").write_bytes(unpacked_kernel((made / "vmlinuz").read_bytes()))
    there = {path.stem.replace("-", "_"): path for path in (unpacked / "lib" / "modules" / version).rglob("*.ko")}
    for number, name in enumerate(in_order(MODULES, {name: depends(path) for name, path in there.items()})):
        shutil.copyfile(there[name], made / "modules" / f"{number:02}-{name}.ko")
    for path in made.rglob("*"):
        # Machines run as users of their own, whatever the operator's umask is.
        path.chmod(0o755 if path.is_dir() else 0o644)
    files = {
        str(path.relative_to(made)): {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(made.rglob("*"))
        if path.is_file()
    }
    (made / "manifest.json").write_text(
        json.dumps({"format": FORMAT, "version": version, "arch": platform.machine(), "files": files}, indent=1) + "\n"
    )
    return made


def depends(module: Path) -> list[str]:
    """Which modules a module needs, as it says itself."""
    found = _DEPENDS.search(module.read_bytes())
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []


def in_order(wanted: tuple[str, ...], needs: dict[str, list[str]]) -> list[str]:
    """The modules that are wanted and those that they need, each after what it needs. What is not there is built into the kernel."""
    order: list[str] = []

    def take(name: str) -> None:
        if name in needs and name not in order:
            for other in needs[name]:
                take(other)
            if name not in order:
                order.append(name)

    for name in wanted:
        take(name)
    return order


def unpacked_kernel(image: bytes) -> bytes:
    """The kernel itself, an ELF file, out of a bzImage. *Errors*: StepFailed.

    Source: the kernel's Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length; the payload ends with its length unpacked.
    """
    start, length = struct.unpack_from("<II", image, _PAYLOAD)
    start += ((image[_SETUP_SECTORS] or 4) + 1) * 512
    packed, size = image[start : start + length - _LENGTH_BYTES], struct.unpack_from("<I", image, start + length - _LENGTH_BYTES)[0]
    kernel = _unpacked(packed)
    if len(kernel) != size or not kernel.startswith(b"\x7fELF"):
        raise StepFailed("the kernel in the package cannot be unpacked", "try another kernel: remove `kernels` from the cache")
    return kernel


def _unpacked(packed: bytes) -> bytes:
    if packed.startswith(b"\xfd7zXZ"):
        return lzma.LZMADecompressor().decompress(packed)
    if packed.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(wbits=31).decompress(packed)
    program = {b"\x02\x21": "lz4", b"\x28\xb5": "zstd"}.get(packed[:2])
    if program is None:
        raise StepFailed(f"the kernel is packed by something unknown ({packed[:4].hex()})", "try another kernel")
    return subprocess.run([program, "-d", "-c", "-q"], input=packed, capture_output=True, check=False).stdout
