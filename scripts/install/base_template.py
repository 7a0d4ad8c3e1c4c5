"""The `base` template: a Debian tree, bootstrapped once per recipe into a cache that every instance on this machine shares.

Theory of operation. The tree's place is decided by its recipe: CACHE/templates/base/RECIPE_SHA256/{rootfs,manifest.json}. It is built in a
directory beside that (`.unfinished-*`), inside mount and process namespaces of its own which end with this process, and appears under its
final name by one rename after it and its manifest are on the disk. A run that was killed therefore leaves an unfinished directory and
nothing else, and the next run, holding the same lock, removes it. A tree that no longer matches its manifest is moved to `quarantine/`
and built again. `current` beside the trees points at the one of this checkout's recipe; older ones stay, sandboxes may stand on them.
The hash's directory is closed to everybody but root and, for the manifest, control's group: the tree holds set-uid programs that no
other local user should reach.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import importlib.util
import json
import os
import platform
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from install.progress import REPOSITORY, Reporter, StepFailed
from install.stamps import digest_of_files, files_below

RECIPE: Final = REPOSITORY / "deploy" / "templates" / "base"
# Raised when this builder makes another tree from the same recipe.
BUILDER_VERSION: Final = 1
# The group of the user that control runs as (the step `user` makes both).
GROUP: Final = "atoll"
FREE_BYTES_MIN: Final = 2 << 30
DEBIAN_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Tree:
    """What a walk over a tree saw. `digest` is empty when contents were not read."""

    entries: int
    size_bytes: int
    digest: str


def cache_directory() -> Path:
    """Where trees are kept: ATOLL_CACHE, or /var/cache/atoll."""
    return Path(os.environ.get("ATOLL_CACHE") or "/var/cache/atoll")


def recipe_digest(recipe: Path = RECIPE) -> str:
    """The version of a recipe: all its files, the architecture and the builder's version."""
    extra = f"builder {BUILDER_VERSION} {platform.machine()}"
    return digest_of_files(recipe, files_below(recipe, wanted=lambda path: path.suffix in {".toml", ".sh"}), extra=extra)


def template_directory(cache: Path | None = None, recipe: Path = RECIPE) -> Path:
    """Where the tree of this recipe is, or will be."""
    return (cache or cache_directory()) / "templates" / "base" / recipe_digest(recipe)


def walk(root: Path, *, contents: bool) -> Tree:
    """Count a tree, and with `contents` also digest it.

    The digest is SHA-256 over one line per entry in the order of their paths' bytes: type, mode, uid, gid, path, then the SHA-256 of a
    file's content, the target of a link, or the numbers of a device. Times are left out: they differ between two equal builds.
    """
    whole = hashlib.sha256()
    size_bytes = 0
    linked: set[int] = set()
    entries = sorted(_entries(os.fsencode(root)))
    prefix = len(os.fsencode(root)) + 1
    for path in entries:
        info = os.lstat(path)
        if stat.S_ISREG(info.st_mode) and info.st_ino not in linked:
            size_bytes += info.st_size
            if info.st_nlink > 1:
                linked.add(info.st_ino)
        if contents:
            head = f"{stat.S_IFMT(info.st_mode):o} {stat.S_IMODE(info.st_mode):o} {info.st_uid} {info.st_gid} ".encode()
            whole.update(head + path[prefix:] + b"\0" + _payload(path, info) + b"\n")
    return Tree(len(entries), size_bytes, f"sha256:{whole.hexdigest()}" if contents else "")


def _entries(root: bytes) -> Iterator[bytes]:
    with os.scandir(root) as found:
        for entry in found:
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path)


def _payload(path: bytes, info: os.stat_result) -> bytes:
    if stat.S_ISREG(info.st_mode):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest().encode()
    if stat.S_ISLNK(info.st_mode):
        return os.readlink(path)
    if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
        return f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}".encode()
    return b""


def verify(directory: Path, *, full: bool = False) -> str | None:
    """None when the tree there is whole, else what is wrong with it. `full` reads every byte; otherwise counts and sizes are compared."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
    except FileNotFoundError:
        return "it has no manifest"
    except ValueError as error:
        return f"its manifest cannot be read: {error}"
    if manifest.get("recipe_sha256") != directory.name:
        return "its manifest is of another recipe"
    rootfs = directory / "rootfs"
    if not rootfs.is_dir():
        return "it has no tree"
    seen = walk(rootfs, contents=full)
    if (seen.entries, seen.size_bytes) != (manifest.get("entries"), manifest.get("size_bytes")):
        return f"it has {seen.entries} entries of {seen.size_bytes} bytes, its manifest says {manifest.get('entries')} of {manifest.get('size_bytes')}"
    if full and seen.digest != manifest.get("digest"):
        return f"its content is {seen.digest}, its manifest says {manifest.get('digest')}"
    return None


def ensure(reporter: Reporter) -> str:
    """Have the tree of the current recipe in the cache: look, and build it where it is missing or broken."""
    final = template_directory()
    if final.is_dir() and verify(final) is None:
        _make_current(final)
        return f"have {final}"
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent / ".lock", reporter):
        _clean(final.parent, reporter)
        if final.exists():
            problem = verify(final)
            if problem is None:
                _make_current(final)
                return f"have {final}"
            _quarantine(final, problem, reporter)
        _require_room(final.parent)
        unfinished = final.parent / f".unfinished-{final.name[:12]}-{os.getpid()}"
        unfinished.mkdir(mode=0o700)
        try:
            _bootstrap(unfinished / "rootfs", reporter)
            manifest = _publish(unfinished, final)
        except StepFailed:
            _remove(unfinished)
            raise
        _make_current(final)
    return f"{manifest['size_bytes'] >> 20} MiB at {final}"


def _publish(unfinished: Path, final: Path) -> dict[str, Any]:
    tree = walk(unfinished / "rootfs", contents=True)
    manifest = {
        "name": "base",
        "recipe_sha256": final.name,
        "digest": tree.digest,
        "size_bytes": tree.size_bytes,
        "entries": tree.entries,
        "arch": platform.machine(),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    # The rename must never reach the disk before what it names.
    subprocess.run(["sync", "--file-system", unfinished], check=True)
    unfinished.rename(final)
    subprocess.run(["sync", final.parent], check=True)
    return manifest


def _make_current(final: Path) -> None:
    """Let control read the manifest, and let `current` name this tree; nothing is written when that is so already."""
    with contextlib.suppress(KeyError):
        group = grp.getgrnam(GROUP).gr_gid
        if final.stat().st_gid != group:
            os.chown(final, 0, group)
            final.chmod(0o750)
    current = final.parent / "current"
    if current.is_symlink() and str(current.readlink()) == final.name:
        return
    unfinished = final.parent / f".current.{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(final.name)
    unfinished.replace(current)


def _bootstrap(rootfs: Path, reporter: Reporter) -> None:
    made_by = _bootstrapper()
    recipe = made_by.recipe()
    sources, keyring_problem = _sources(recipe)
    options = made_by.options(recipe, _architecture(), _proxy_settings())
    private = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = ["nice", *private, "mmdebstrap", "--mode=root", "--format=directory", *options, recipe["suite"], rootfs, *sources]
    reporter.run(
        command,
        todo=f"check that the Debian mirror answers ({sources[0]}){keyring_problem}, then run this again: it starts afresh",
        env={"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
        drop_env=("TMPDIR",),
    )
    reporter.run([*private, RECIPE / "customize.sh", rootfs], todo="deploy/templates/base/customize.sh fits its package list no longer")


def _bootstrapper() -> Any:
    """The recipe's own program, which builds in sandboxes run, too."""
    spec = importlib.util.spec_from_file_location("bootstrap", RECIPE / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _architecture() -> str:
    try:
        return DEBIAN_ARCHITECTURES[platform.machine()]
    except KeyError:
        known = ", ".join(DEBIAN_ARCHITECTURES)
        raise StepFailed(f"no base template is known for {platform.machine()}", f"use a machine of one of: {known}") from None


def _sources(recipe: dict[str, Any]) -> tuple[list[str], str]:
    """Sources lines for the recipe's suite on the mirrors that this machine itself uses, else on Debian's own."""
    suite, components = recipe["suite"], " ".join(recipe["components"])
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)", "Created-By: Packages"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    mirrors: dict[str, str] = {}
    for line in listing.splitlines():
        uri, release, component, *_ = [*line.split(), "", "", ""]
        kind = release.partition("-")[2] or "main"
        if component == "main" and "/debian" in uri and kind in {"main", "updates", "security"}:
            mirrors.setdefault(kind, uri)
    base = mirrors.get("main", "http://deb.debian.org/debian")
    security = mirrors.get("security", "" if "main" in mirrors else "http://deb.debian.org/debian-security")
    lines = [f"deb {base} {suite} {components}", f"deb {mirrors.get('updates', base)} {suite}-updates {components}"]
    if security:
        lines.append(f"deb {security} {suite}-security {components}")
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    return lines, "" if keyring.exists() else f" and that debian-archive-keyring is installed ({keyring} is missing)"


def _proxy_settings() -> list[str]:
    """How this machine reaches its mirrors: its proxy and certificate settings, taken out again by customize.sh."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    wanted = ("Proxy", "CaInfo", "CAInfo", "Verify-Peer", "Verify-Host", "SslCert", "SslKey")
    lines = [line for line in dump.splitlines() if line.startswith("Acquire::http") and not line.endswith('"";')]
    return [line.rstrip(";") for line in lines if any(name in line.split(" ")[0] for name in wanted)]


@contextlib.contextmanager
def _locked(path: Path, reporter: Reporter) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.say("another run is building it, waiting for that")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _clean(directory: Path, reporter: Reporter) -> None:
    """Remove what a killed run left. Only under the lock: an unfinished directory of a living run is not ours to remove."""
    for leftover in directory.glob(".unfinished-*"):
        reporter.say(f"removing {leftover.name}, left by a run that was cut short")
        _remove(leftover)


def _remove(directory: Path) -> None:
    """Remove a tree, its mounts first. It never descends into another file system: a mount of /dev may be below it."""
    text = Path("/proc/self/mountinfo").read_text()
    points = [line.split(" ")[4].encode().decode("unicode_escape") for line in text.splitlines()]
    for point in sorted((point for point in points if Path(point).is_relative_to(directory)), reverse=True):
        subprocess.run(["umount", "--lazy", point], check=True)
    for attempt in range(5):
        # A process that is still dying may yet write below it: look again a few times.
        if subprocess.run(["rm", "-rf", "--one-file-system", "--", directory], check=False).returncode == 0:
            return
        time.sleep(0.2 * (attempt + 1))
    raise StepFailed(f"{directory} cannot be removed", f"see what holds it (findmnt, fuser -m), then: rm -rf --one-file-system {directory}")


def _quarantine(directory: Path, problem: str, reporter: Reporter) -> None:
    """Put a broken tree aside, whole, for whoever wants to know why; the one before it goes."""
    place = directory.parent / "quarantine"
    place.mkdir(mode=0o700, exist_ok=True)
    for earlier in place.iterdir():
        _remove(earlier)
    reporter.say(f"the cached tree is broken ({problem}): moved to {place}, building it again")
    directory.rename(place / f"{directory.name}-{int(time.time())}")


def _require_room(directory: Path) -> None:
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < FREE_BYTES_MIN:
        have = free.f_bavail * free.f_frsize >> 20
        raise StepFailed(f"{directory} has {have} MiB free, the build needs {FREE_BYTES_MIN >> 20}", "free some space, or set ATOLL_CACHE")
