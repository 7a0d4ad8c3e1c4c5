"""Modules of a kernel are gathered in an order in which each finds what it needs."""

import pytest

from install import machines


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
