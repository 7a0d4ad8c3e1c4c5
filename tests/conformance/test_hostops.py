"""Root primitives on this machine, in namespaces of their own."""

import os
import socket
from pathlib import Path

import pytest

from atoll.hostops import conntrack, links, loopdisk, mounts, namespaces, syscalls
from atoll.hostops.netlink import Socket
from atoll.hostops.nft import Nft, NftError

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root (run the tests with sudo)")]


def in_a_new_network(work):
    def go():
        fd = namespaces.new_network_namespace()
        try:
            with Socket() as route:
                lo = links.find(route, "lo")
                route.ask(links.set_up(lo.index))
            return work()
        finally:
            os.close(fd)

    return namespaces.in_fresh_thread(go)


def test_a_change_of_nftables_is_made_whole_or_not_at_all():
    def work():
        nft = Nft()
        nft.run("table inet mine {\n set addresses { type ipv4_addr; }\n}")
        assert nft.tables() == ["inet mine"]
        with pytest.raises(NftError) as caught:
            nft.run("add element inet mine addresses { 192.0.2.1 }\nadd element inet mine missing { 192.0.2.2 }")
        assert "missing" in str(caught.value)
        assert nft.elements("inet mine", "addresses") == []
        nft.run("add element inet mine addresses { 192.0.2.1, 192.0.2.2 }")
        assert sorted(nft.elements("inet mine", "addresses")) == ["192.0.2.1", "192.0.2.2"]
        with pytest.raises(NftError):
            nft.elements("inet mine", "other")
        nft.close()
        with pytest.raises(NftError):
            nft.tables()

    in_a_new_network(work)


def test_only_the_connections_of_an_address_are_forgotten():
    def tracked():
        text = Path("/proc/thread-self/net/nf_conntrack").read_text()
        return sorted(word for line in text.splitlines() for word in line.split()[:12] if word.startswith("src=127.0.0."))

    def work():
        # Connections are tracked only where a rule asks for them.
        nft = Nft()
        nft.run("table inet t {\n chain c {\n type filter hook output priority 0; policy accept;\n ct state new counter accept\n }\n}")
        ends = {}
        for address in ("127.0.0.7", "127.0.0.8", "127.0.0.9"):
            ends[address] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            ends[address].bind((address, 0))
        for source, target in (("127.0.0.7", "127.0.0.8"), ("127.0.0.9", "127.0.0.8"), ("127.0.0.7", "127.0.0.9")):
            ends[source].sendto(b"x", ends[target].getsockname())
        before = tracked()
        conntrack.forget(["127.0.0.9"])
        after = tracked()
        for end in ends.values():
            end.close()
        nft.close()
        return before, after

    before, after = in_a_new_network(work)
    assert len(before) >= 3
    assert 1 <= len(after) < len(before)
    assert "src=127.0.0.9" not in after


def test_a_pairs_far_end_is_born_elsewhere_and_goes_with_its_namespace():
    def work():
        fd, inner = namespaces.in_fresh_thread(lambda: (namespaces.new_network_namespace(), Socket()))
        with Socket() as route, inner:
            route.ask(links.add_veth(links.End("near0", "02:00:00:00:00:01"), links.End("far0", "02:00:00:00:00:02"), fd))
            route.ask(links.set_alias("near0", "plc_1"))
            assert links.find(route, "near0").alias == "plc_1"
            assert links.find(route, "far0") is None
            assert links.find(inner, "far0") is not None
            route.ask(links.delete_link("near0"))
            route.ask(links.delete_link("near0"))
            assert links.find(route, "near0") is None
            assert links.find(inner, "far0") is None
        os.close(fd)

    in_a_new_network(work)


def test_a_loop_disk_frees_its_device_when_its_last_mount_goes(tmp_path):
    image, point = tmp_path / "disk.img", tmp_path / "point"
    point.mkdir()
    loopdisk.make(image, 64)

    def work():
        namespaces.new_mount_namespace()
        device, fd = loopdisk.attach(image)
        syscalls.mount(device, str(point), "ext4", syscalls.MS_NODEV)
        os.close(fd)
        assert mounts.below(tmp_path) == [str(point)]
        (point / "file").write_text("x")
        with pytest.raises(OSError):
            (point / "large").write_bytes(b"x" * (65 << 20))
        assert loopdisk.users(tmp_path)
        mounts.unmount_below(tmp_path)
        assert mounts.below(tmp_path) == []

    namespaces.in_fresh_thread(work)
    assert mounts.below(tmp_path) == [], "never seen outside"
    for _ in range(100):
        if not loopdisk.users(tmp_path):
            break
        os.sync()
    assert loopdisk.users(tmp_path) == []
