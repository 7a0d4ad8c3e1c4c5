"""The list of hostile images: what each tries, and what becomes of it.

`python -m tests.store.hostile.cases` prints the table of docs/guides/hostile-images.md, which a test compares with this list.
"""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.base.errors import Code
from tests.store.hostile.forging import (
    CONFIG,
    GZIP,
    INDEX,
    MANIFEST,
    ZSTD,
    Entry,
    Json,
    Layer,
    Layout,
    Make,
    archive,
    attribute,
    blobs,
    directory,
    gzip_of_zeros,
    hardlink,
    one,
    raw_name,
    record,
    several,
    sized,
    sparse_of_old,
    sparse_of_pax,
    squeezed,
    symlink,
    zipped,
    zstd_of_zeros,
    zstd_with_a_window,
)

BYTES_MAX: Final = 512 << 20
ENTRIES_MAX: Final = 1000
"""What the tests allow an image, so that a bomb need not be large to be one. The product's limits: `native/internal/images/unpack/limits.go`."""
REFUSED, CORRUPT, UNAVAILABLE = Code.IMAGE_REFUSED, Code.IMAGE_CORRUPT, Code.IMAGE_UNAVAILABLE
FILE: Final = Entry("file", b"x")
GOOD: Final = one(FILE)
ZEROS: Final = "0" * 64

Check = Callable[[Path], None]
"""Is given the tree."""
Change = Callable[[Json, Json], None]
"""Spoils manifest and configuration."""


@dataclass(frozen=True, slots=True)
class Case:
    """`code` None: it is harmless, and `check` says how its tree looks. `index` makes a layout's index of the manifest's descriptor: such a
    case is for pulls alone, since hosts ask by the image's own digest; so is `only_pull`."""

    name: str
    about: str
    code: Code | None
    make: Make = GOOD
    check: Check | None = None
    change: Change | None = None
    raw: Callable[[bytes], bytes] | None = None
    index: Callable[[Layout, Json], Sequence[Json]] | None = None

    @property
    def when_pulled(self) -> Code | None:
        """What control says, which makes no tree."""
        return None if self.name in ONLY_TREES_TELL else self.code

    def write(self, layout: Layout, outside: str) -> str:
        """The image's digest."""
        manifest, config = layout.document(self.make(outside))
        if self.change is not None:
            self.change(manifest, config)
        if "config" not in manifest:
            manifest["config"] = layout.put(json.dumps(config).encode(), CONFIG)
        content = json.dumps(manifest).encode()
        pointer = layout.put(self.raw(content) if self.raw else content, MANIFEST)
        layout.finish(self.index(layout, pointer) if self.index else [pointer])
        return str(pointer["digest"])


def holds(**files: str | None) -> Check:
    """Files by content; None: it is not there. `__` stands for a slash."""

    def check(tree: Path) -> None:
        for name, content in files.items():
            path = tree / name.replace("__", "/")
            if content is None:
                assert not os.path.lexists(path), f"{path} is there"
            else:
                assert not path.is_symlink(), f"{path} is a link"
                assert path.read_text() == content, path

    return check


def kind(name: str, wanted: Callable[[int], bool]) -> Check:
    def check(tree: Path) -> None:
        assert wanted((tree / name).lstat().st_mode), name

    return check


def no_attributes(tree: Path) -> None:
    assert not set(os.listxattr(tree / "file", follow_symlinks=False)) - {"security.selinux"}


def has_holes(tree: Path) -> None:
    found = (tree / "sparse").stat()
    assert (found.st_size, found.st_blocks * 512 < 1 << 20) == (64 << 20, True)


def said(**what: object) -> Change:
    return lambda manifest, _config: manifest.update(what)


def of_layer(**what: object) -> Change:
    return lambda manifest, _config: manifest["layers"][0].update(what)


def times(count: int) -> Change:
    def change(manifest: Json, config: Json) -> None:
        manifest["layers"] *= count
        config["rootfs"]["diff_ids"] *= count

    return change


def diff_ids(*names: str) -> Change:
    return lambda _manifest, config: config["rootfs"].update(diff_ids=list(names))


def nested(depth: int) -> Callable[[Layout, Json], Sequence[Json]]:
    def index(layout: Layout, pointer: Json) -> Sequence[Json]:
        for _ in range(depth):
            pointer = layout.put(json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [pointer]}).encode(), INDEX)
        return [pointer]

    return index


def loop(layout: Layout, _pointer: Json) -> Sequence[Json]:
    """An index that names itself cannot have its digest: whoever does not look would go round for ever."""
    pointer = {"mediaType": INDEX, "digest": f"sha256:{ZEROS}", "size": 1}
    layout.put(json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [pointer]}).encode(), INDEX, name=f"sha256:{ZEROS}")
    return [pointer]


ONLY_TREES_TELL: Final = frozenset(
    {
        "base-of-no-image",
        "file-as-parent",
        "hardlink-by-an-earlier-layer",
        "hardlink-by-symlink",
        "hardlink-to-a-directory",
        "hardlink-to-itself",
        "hardlink-to-nothing",
        "symlink-absolute",
        "symlink-by-proc",
        "symlink-chain",
        "symlink-in-place-of-a-directory",
        "symlink-in-place-within",
        "symlink-loop",
        "symlink-of-an-earlier-layer",
        "xattr-broken-capability",
        "xattr-large",
        "xattr-long-name",
    }
)
"""What a check lets pass that writes nothing: a host refuses it."""

TRAVERSAL: Final = (
    Case("name-parent", "`../escaped`", REFUSED, one(Entry("../escaped", b"x"))),
    Case("name-parent-within", "`a/../../escaped`", REFUSED, one(Entry("a/../../escaped", b"x"))),
    Case("name-parent-harmless", "`a/../b`, which would stay inside", REFUSED, one(Entry("a/../b", b"x"))),
    Case("name-parent-of-a-directory", "a directory `../escaped/`", REFUSED, one(directory("../escaped"))),
    Case("name-absolute", "the full name of a place outside", REFUSED, one(Entry("{out}/escaped", b"x"))),
    Case("name-many-slashes", "`//etc/escaped`", REFUSED, one(Entry("//etc/escaped", b"x"))),
    Case("name-empty", "a file without a name", REFUSED, one(raw_name(b"x", record("path", b"./")))),
    Case("name-with-nul", "a name with a zero byte in it", CORRUPT, one(raw_name(b"x", record("path", b"a\0b")))),
    Case(
        "name-not-text",
        "a name that is not UTF-8",
        None,
        one(Entry("\udcff\udcfe", b"x")),
        lambda tree: _exists(os.fsencode(tree) + b"/\xff\xfe"),
    ),
    Case("name-root-as-link", "the root as a link", REFUSED, one(symlink(".", "{out}"))),
    Case("name-root-as-file", "the root as a file", REFUSED, one(Entry("."))),
    Case("name-long-part", "a part of 300 bytes", REFUSED, one(Entry("n" * 300))),
    Case("name-long", "a name of more than 4 KiB", REFUSED, one(Entry("long/" * 1000 + "x"))),
    Case("name-deep", "300 directories in each other", REFUSED, one(Entry("d/" * 300 + "x"))),
    Case("name-record-of-megabytes", "a name of 2 MiB in a PAX record", CORRUPT, one(raw_name(b"x", record("path", b"n" * (2 << 20))))),
    Case("record-broken", "a PAX record whose length lies", CORRUPT, one(raw_name(b"x", b"99999 path=x\n"))),
    Case("record-negative-size", "a PAX record that says a negative size", CORRUPT, one(raw_name(b"x", record("size", b"-1")))),
)

LINKS: Final = (
    Case(
        "symlink-absolute",
        "a link to a place outside, then a file through it",
        REFUSED,
        one(symlink("way", "{out}"), Entry("way/escaped", b"x")),
    ),
    Case(
        "symlink-absolute-within",
        "a link to `/etc`, which the image has, then a file through it",
        None,
        one(directory("etc"), symlink("way", "/etc"), Entry("way/escaped", b"x")),
        holds(etc__escaped="x"),
    ),
    Case(
        "symlink-of-an-earlier-layer-within",
        "the same over two layers",
        None,
        several([directory("etc"), symlink("way", "/etc")], [Entry("way/escaped", b"x")]),
        holds(etc__escaped="x"),
    ),
    Case(
        "symlink-relative",
        "`../../..`, then a file through it",
        None,
        one(symlink("way", "../../../.."), Entry("way/x", b"x")),
        holds(x="x"),
    ),
    Case(
        "symlink-below-root",
        "a directory below a link to `/`",
        None,
        one(symlink("way", "/"), directory("way/a"), Entry("way/a/x", b"x")),
        holds(a__x="x"),
    ),
    Case(
        "symlink-of-an-earlier-layer",
        "a link in one layer, a file through it in the next",
        REFUSED,
        several([symlink("way", "{out}")], [Entry("way/escaped", b"x")]),
    ),
    Case(
        "symlink-in-place-of-a-directory",
        "a directory, a link in its place in the next layer, a file below it in the last",
        REFUSED,
        several([directory("d"), Entry("d/x", b"1")], [symlink("d", "{out}")], [Entry("d/escaped", b"2")]),
    ),
    Case(
        "symlink-in-place-within",
        "a directory, then a link in its place and a file below it, in one layer",
        REFUSED,
        one(directory("d"), symlink("d", "{out}"), Entry("d/escaped", b"2")),
    ),
    Case(
        "symlink-chain",
        "links that lead to each other and out at last",
        REFUSED,
        one(symlink("a", "b"), symlink("b", "c"), symlink("c", "{out}"), Entry("a/escaped", b"x")),
    ),
    Case(
        "symlink-to-a-victim",
        "a link to a file outside, and a file of its name: it is not written through",
        None,
        several([symlink("file", "{out}/victim")], [FILE]),
        holds(file="x"),
    ),
    Case(
        "symlink-by-proc",
        "`/proc/self/root` and `/proc/self/cwd`",
        REFUSED,
        one(symlink("a", "/proc/self/root"), symlink("b", "/proc/self/cwd"), Entry("a/{out}/escaped", b"x")),
    ),
    Case(
        "symlink-loop", "a file below two links that lead to each other", REFUSED, one(symlink("a", "b"), symlink("b", "a"), Entry("a/x"))
    ),
    Case("symlink-to-nothing", "a link without a target", REFUSED, one(symlink("a", ""))),
    Case("symlink-long", "a target of more than 4 KiB", REFUSED, one(symlink("a", "t/" * 2100))),
    Case("file-as-parent", "a file below a file", REFUSED, one(Entry("a", b"x"), Entry("a/b", b"x"))),
    Case("hardlink-parent", "a hard link to `../victim`", REFUSED, one(hardlink("a", "../victim"))),
    Case("hardlink-absolute", "a hard link to a file outside, by its full name", REFUSED, one(hardlink("a", "{out}/victim"))),
    Case(
        "hardlink-by-symlink",
        "a hard link to a file outside, through a link",
        REFUSED,
        one(symlink("way", "{out}"), hardlink("a", "way/victim")),
    ),
    Case(
        "hardlink-by-an-earlier-layer",
        "the same, with the link in the layer below",
        REFUSED,
        several([symlink("way", "{out}")], [hardlink("a", "way/victim")]),
    ),
    Case(
        "hardlink-to-a-symlink",
        "a hard link to a link that leads out, then a file of its name",
        None,
        one(symlink("l", "{out}/victim"), hardlink("file", "l"), FILE),
        holds(file="x"),
    ),
    Case("hardlink-to-a-directory", "a hard link to a directory", REFUSED, one(directory("d"), hardlink("a", "d"))),
    Case("hardlink-to-the-root", "a hard link to the root", REFUSED, one(hardlink("a", "."))),
    Case("hardlink-to-nothing", "a hard link to what is not there", REFUSED, one(hardlink("a", "nothing"))),
    Case("hardlink-to-itself", "a hard link to its own name", REFUSED, one(hardlink("a", "a"))),
    Case(
        "hardlink-changes-the-layer-below",
        "a hard link to a file of the layer below, written to: the other name keeps its content",
        None,
        several([Entry("a", b"1")], [hardlink("b", "a"), Entry("b", b"2")]),
        holds(a="1", b="2"),
    ),
)

KINDS: Final = (
    Case(
        "device-character",
        "a character device (`mem`)",
        None,
        one(Entry("mem", kind=tarfile.CHRTYPE, more={"devmajor": 1, "devminor": 1})),
        holds(mem=None),
    ),
    Case(
        "device-block",
        "a block device (the host's disk)",
        None,
        one(Entry("sda", kind=tarfile.BLKTYPE, more={"devmajor": 8})),
        holds(sda=None),
    ),
    Case(
        "device-in-place-of-a-file",
        "a device where the layer below has a file",
        None,
        several([FILE], [Entry("file", kind=tarfile.CHRTYPE)]),
        holds(file="x"),
    ),
    Case(
        "whiteout-as-device",
        "a whiteout of overlay's form, a device 0:0",
        None,
        several([FILE], [Entry("file", kind=tarfile.CHRTYPE, more={"devmajor": 0, "devminor": 0})]),
        holds(file="x"),
    ),
    Case(
        "fifo", "a FIFO: nobody opens it while it is unpacked", None, one(Entry("pipe", kind=tarfile.FIFOTYPE)), kind("pipe", stat.S_ISFIFO)
    ),
    Case("fifo-in-place", "a FIFO, then a file of its name", None, one(Entry("file", kind=tarfile.FIFOTYPE), FILE), holds(file="x")),
    Case("kind-unknown", "an entry of a kind that nobody knows", REFUSED, one(Entry("a", kind=b"Z"))),
    Case(
        "owner-out-of-range",
        "an owner beyond 32 bits",
        REFUSED,
        one(Entry("a", more={"uid": 1 << 32, "pax_headers": {"uid": str(1 << 32)}})),
    ),
    Case("owner-negative", "a negative owner", REFUSED, one(raw_name(b"a", record("uid", b"-5")))),
    Case("time-absurd", "a time 300,000 years from now", None, one(Entry("file", b"x", more={"mtime": 10**13})), holds(file="x")),
    Case(
        "time-negative",
        "a time before all files",
        None,
        one(Entry("file", b"x", more={"pax_headers": {"mtime": "-99999999999"}})),
        holds(file="x"),
    ),
    Case("twice-a-file", "a file twice: the last one holds", None, one(Entry("file", b"1"), Entry("file", b"2")), holds(file="2")),
    Case(
        "twice-a-file-and-a-directory",
        "a directory with content, then a file of its name",
        None,
        one(directory("file"), Entry("file/a", b"1"), FILE),
        holds(file="x"),
    ),
    Case(
        "twice-a-link-and-a-file",
        "a link that leads out, then a file of its name",
        None,
        one(symlink("file", "{out}/victim"), FILE),
        holds(file="x"),
    ),
    Case(
        "twice-by-other-names",
        "`file`, `./file` and `.//file`",
        None,
        one(Entry("file", b"1"), Entry("./file", b"2"), Entry(".//file", b"3")),
        holds(file="3"),
    ),
)

WHITEOUTS: Final = (
    Case("whiteout-of-the-parent", "`a/.wh...`", REFUSED, several([FILE], [directory("a"), Entry("a/.wh...")])),
    Case("whiteout-of-itself", "`a/.wh..`", REFUSED, several([FILE], [directory("a"), Entry("a/.wh..")])),
    Case("whiteout-of-nothing", "`.wh.`", REFUSED, one(Entry(".wh."))),
    Case("whiteout-as-a-parent", "a file below a whiteout", REFUSED, one(Entry(".wh.a/b"))),
    Case(
        "whiteout-by-symlink", "a whiteout below a link that leads out", None, several([symlink("way", "{out}")], [Entry("way/.wh.victim")])
    ),
    Case(
        "whiteout-opaque-by-symlink",
        "an opaque directory below a link that leads out",
        None,
        several([symlink("way", "{out}")], [Entry("way/.wh..wh..opq")]),
    ),
    Case(
        "whiteout-of-a-link",
        "a whiteout of a link takes the link, not where it leads",
        None,
        several([symlink("way", "{out}")], [Entry(".wh.way")]),
        holds(way=None),
    ),
    Case("whiteout-of-its-own-layer", "a whiteout of what its own layer has made", None, one(FILE, Entry(".wh.file")), holds(file="x")),
    Case("whiteout-as-a-directory", "a whiteout that is a directory, with content", REFUSED, one(directory(".wh.a"), Entry(".wh.a/x"))),
    Case(
        "whiteout-with-content",
        "a whiteout that is a file of 1 MiB",
        None,
        several([FILE], [Entry(".wh.file", bytes(1 << 20))]),
        holds(file=None),
    ),
    Case("whiteout-of-aufs", "aufs' own notes", None, one(Entry(".wh..wh.plnk", b"x"), FILE), holds(file="x")),
)

ATTRIBUTES: Final = (
    Case("xattr-of-overlay", "`trusted.overlay.redirect`", None, one(attribute("trusted.overlay.redirect", "/etc")), no_attributes),
    Case("xattr-of-overlay-by-user", "`user.overlay.opaque`", None, one(attribute("user.overlay.opaque", "y")), no_attributes),
    Case("xattr-of-a-security-module", "`security.ima`", None, one(attribute("security.ima", "x")), no_attributes),
    Case("xattr-of-acls", "`system.posix_acl_access`", None, one(attribute("system.posix_acl_access", "x")), no_attributes),
    Case("xattr-without-a-name", "an attribute without a name", None, one(attribute("", "x")), no_attributes),
    Case("xattr-broken-capability", "`security.capability` that is none", REFUSED, one(attribute("security.capability", "junk"))),
    Case("xattr-long-name", "an attribute's name of 300 bytes", REFUSED, one(attribute("user." + "n" * 300, "x"))),
    Case("xattr-large", "an attribute of 80 KiB", REFUSED, one(attribute("user.large", "v" * (80 << 10)))),
)

BOMBS: Final = (
    Case("bomb-gzip", "gzip that grows a thousand times", REFUSED, lambda _out: [gzip_of_zeros(300)]),
    Case("bomb-zstd", "zstd that grows thirty thousand times", REFUSED, lambda _out: [zstd_of_zeros(300)]),
    Case("bomb-zstd-window", "a zstd frame that asks for 2 GiB of memory", CORRUPT, lambda _out: [zstd_with_a_window(31)]),
    Case("bomb-size", "a file whose header says 1 TiB", REFUSED, one(sized("big", 1 << 40))),
    Case("bomb-sizes", "files that are too much together", REFUSED, several(*[[sparse_of_pax(BYTES_MAX // 2 + 1)]] * 2)),
    Case("bomb-entries", "too many entries", REFUSED, one(*(Entry(f"f{number}") for number in range(ENTRIES_MAX + 1)))),
    Case(
        "bomb-entries-of-all-layers",
        "too many entries in several layers together",
        REFUSED,
        several(*([Entry(f"f{n}{i}") for i in range(300)] for n in range(4))),
    ),
    Case("bomb-sparse", "a sparse file of 1 TiB (GNU's form)", REFUSED, one(sparse_of_old(1 << 40))),
    Case("bomb-sparse-pax", "a sparse file of 1 TiB (PAX form)", REFUSED, one(sparse_of_pax(1 << 40))),
    Case("sparse-kept", "a sparse file of 64 MiB stays one", None, one(sparse_of_pax(64 << 20)), has_holes),
    Case("bomb-trailing", "zeros behind the archive's end", REFUSED, lambda _out: [_trailing()]),
)

BROKEN: Final = (
    Case("digest-wrong", "another blob than its digest says", CORRUPT, blobs(Layer(archive(FILE), digest=f"sha256:{ZEROS}"))),
    Case("diff-id-wrong", "another tar than the configuration says", CORRUPT, change=diff_ids(f"sha256:{ZEROS}")),
    Case("diff-ids-missing", "fewer DiffIDs than layers", CORRUPT, change=diff_ids()),
    Case("diff-ids-too-many", "more DiffIDs than layers", CORRUPT, change=diff_ids(f"sha256:{ZEROS}", f"sha256:{ZEROS}")),
    Case("diff-id-no-digest", "a DiffID that is none", REFUSED, change=diff_ids("../../etc/passwd")),
    Case("size-too-small", "a layer that is larger than the manifest says", CORRUPT, change=of_layer(size=700)),
    Case("size-too-large", "a layer that is smaller than the manifest says", CORRUPT, change=of_layer(size=1 << 20)),
    Case("size-negative", "a layer of negative size", REFUSED, change=of_layer(size=-1)),
    Case("truncated-tar", "a tar that ends within a file", CORRUPT, blobs(Layer(archive(Entry("file", b"x" * 5000))[:2000]))),
    Case("truncated-header", "a tar that ends within a header", CORRUPT, blobs(Layer(archive(FILE)[:300]))),
    Case(
        "truncated-gzip", "a gzip stream that breaks off", CORRUPT, lambda _out: [_cut(squeezed(archive(Entry("file", os.urandom(5000)))))]
    ),
    Case("gzip-junk-behind", "junk behind the gzip stream", CORRUPT, lambda _out: [_more(squeezed(archive(FILE)))]),
    Case("gzip-checksum", "a gzip stream whose checksum is wrong", CORRUPT, lambda _out: [_flipped(squeezed(archive(FILE)))]),
    Case("zip", "a zip archive as a tar", CORRUPT, blobs(Layer(zipped()))),
    Case("zip-as-gzip", "a zip archive as gzip", CORRUPT, blobs(Layer(zipped(), GZIP))),
    Case("gzip-as-zstd", "gzip as zstd", CORRUPT, lambda _out: [Layer(squeezed(archive(FILE)).blob, ZSTD)]),
    Case("program-as-tar", "a program as a tar", CORRUPT, blobs(Layer(b"\x7fELF" + b"\x90" * 4000))),
    Case("nothing-as-gzip", "an empty blob as gzip", CORRUPT, blobs(Layer(b"", GZIP))),
    Case(
        "nothing-as-tar",
        "an empty blob as a tar: a layer with nothing in it",
        None,
        blobs(Layer(archive(FILE)), Layer(b"")),
        holds(file="x"),
    ),
    Case("header-checksum", "a header whose checksum is wrong", CORRUPT, blobs(Layer(b"y" + archive(FILE)[1:]))),
)

DOCUMENTS: Final = (
    Case("layers-too-many", "129 layers", REFUSED, change=times(129)),
    Case("layers-by-the-thousand", "10,000 layers", REFUSED, change=times(10_000)),
    Case("manifest-large", "a manifest of more than 4 MiB", REFUSED, change=said(annotations={"a": "x" * (5 << 20)})),
    Case("manifest-no-json", "a manifest that is not JSON", CORRUPT, raw=lambda _content: b"{" * 1000),
    Case("manifest-nested", "JSON with 100,000 arrays in each other", CORRUPT, raw=lambda _content: b'{"layers":' + b"[" * 100_000),
    Case("manifest-of-version-1", "a manifest of schema version 1", REFUSED, change=said(schemaVersion=1)),
    Case("manifest-and-index", "an index and an image at once", REFUSED, change=said(manifests=[{"digest": f"sha256:{ZEROS}", "size": 1}])),
    Case(
        "config-large",
        "a configuration of more than 4 MiB",
        REFUSED,
        change=said(config={"mediaType": CONFIG, "digest": f"sha256:{ZEROS}", "size": 5 << 20}),
    ),
    Case("config-missing", "no configuration", REFUSED, change=said(config={})),
    Case(
        "config-of-another-machine",
        "for a processor that the host has not",
        UNAVAILABLE,
        change=lambda _manifest, config: config.update(architecture="s390x"),
    ),
    Case("digest-as-a-path", "a layer's digest that is a path", REFUSED, change=of_layer(digest="sha256:../../../../etc/passwd")),
    Case("digest-of-another-kind", "a layer's digest by SHA-512", REFUSED, change=of_layer(digest="sha512:" + "0" * 128)),
    Case(
        "foreign-layer",
        "a layer to be fetched from an address that the manifest names",
        REFUSED,
        change=of_layer(urls=["http://169.254.169.254/"]),
    ),
    Case(
        "foreign-type",
        "Docker's kind of layer from elsewhere",
        REFUSED,
        change=of_layer(mediaType="application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"),
    ),
    Case("layer-of-no-kind", "a layer that is a picture", REFUSED, change=of_layer(mediaType="image/png")),
    Case("index-nested", "indexes in each other", REFUSED, index=nested(6)),
    Case("index-loop", "an index that names itself", CORRUPT, index=loop),
    Case(
        "index-of-nothing",
        "an index with nothing for this machine",
        UNAVAILABLE,
        index=lambda _layout, pointer: [{**pointer, "platform": {"os": "plan9", "architecture": "mips"}}] * 2,
    ),
    Case(
        "base-of-no-image",
        "an annotation that names a ready-made image that the host has not",
        UNAVAILABLE,
        change=said(annotations={"dev.atoll.base": f"sha256:{ZEROS}"}),
    ),
    Case(
        "outside-out-of-range",
        "an annotation that counts more layers than there are",
        REFUSED,
        change=said(annotations={"dev.atoll.outside": "7"}),
    ),
)

GROUPS: Final = {
    "Names": TRAVERSAL,
    "Links": LINKS,
    "Kinds, owners, times, entries that come twice": KINDS,
    "Whiteouts": WHITEOUTS,
    "Extended attributes": ATTRIBUTES,
    "Bombs": BOMBS,
    "Broken": BROKEN,
    "Manifests and indexes": DOCUMENTS,
}
CASES: Final = tuple(case for group in GROUPS.values() for case in group)


def _exists(path: bytes) -> None:
    assert os.path.lexists(path)


def _cut(layer: Layer) -> Layer:
    return Layer(layer.blob[: len(layer.blob) // 2], layer.media_type, layer.diff_id)


def _more(layer: Layer) -> Layer:
    return Layer(layer.blob + b"junk", layer.media_type, layer.diff_id)


def _flipped(layer: Layer) -> Layer:
    return Layer(layer.blob[:-6] + bytes([layer.blob[-6] ^ 1]) + layer.blob[-5:], layer.media_type, layer.diff_id)


def _trailing() -> Layer:
    content = archive(FILE) + bytes(300 << 20)
    return squeezed(content)


def table() -> Iterator[str]:
    """The list as Markdown."""
    for title, cases in GROUPS.items():
        yield from (f"## {title}", "", "| | what it tries | what becomes of it |", "|---|---|---|")
        for case in cases:
            yield f"| {case.name} | {case.about} | {'harmless' if case.code is None else f'`{case.code}`'} |"
        yield ""


if __name__ == "__main__":
    print("\n".join(table()).rstrip())
