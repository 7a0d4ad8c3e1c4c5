"""Modules of a kernel are gathered in an order in which each finds what it needs."""

import gzip
import lzma
import struct

import pytest

from install import machines
from install.progress import StepFailed


def test_each_module_comes_after_what_it_needs():
    needs = {"net": ["ring", "core", "failover"], "ring": [], "core": ["ring"], "failover": ["base"], "base": [], "unused": []}
    order = machines.in_order(("net", "core", "built_in"), needs)
    assert order.index("ring") < order.index("core") < order.index("net")
    assert order.index("base") < order.index("failover") < order.index("net")
    assert len(order) == len(set(order))
    assert "unused" not in order
    assert "built_in" not in order, "what is no file is in the kernel"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\x7fELF..\0license=GPL\0depends=virtio,virtio-ring\0name=x\0", ["virtio", "virtio_ring"]),
        (b"\0depends=\0", []),
        (b"nothing", []),
    ],
)
def test_a_module_says_what_it_needs(tmp_path, content, found):
    (tmp_path / "x.ko").write_bytes(content)
    assert machines.depends(tmp_path / "x.ko") == found


def bz_image(packed, size):
    """A bzImage with one setup sector before its payload."""
    head = bytearray(1024)
    head[0x1F1] = 1
    struct.pack_into("<II", head, 0x248, 16, len(packed) + 4)
    return bytes(head) + b"x" * 16 + packed + struct.pack("<I", size) + b"rest"


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
def test_the_kernel_itself_is_unpacked(pack):
    kernel = b"\x7fELF" + bytes(range(256)) * 100
    assert machines.unpacked_kernel(bz_image(pack(kernel), len(kernel))) == kernel


@pytest.mark.parametrize("packed", [b"what?", lzma.compress(b"\x7fELF short"), lzma.compress(b"no kernel of this length")])
def test_what_is_no_kernel_is_refused(packed):
    with pytest.raises(StepFailed):
        machines.unpacked_kernel(bz_image(packed, 24))
