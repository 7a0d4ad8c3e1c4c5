"""Netlink messages are built and read as the kernel has them, whatever arrives."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from atoll.hostops import links
from atoll.hostops.netlink import NLA_F_NESTED, attribute, attributes, messages, nested, only


def test_an_attribute_is_padded_but_its_length_is_not():
    assert attribute(3, b"lo\0") == struct.pack("=HH", 7, 3) + b"lo\0" + b"\0"


@given(st.lists(st.tuples(st.integers(1, 0x3FFF), st.binary(max_size=40))))
def test_what_is_built_is_read_back(parts):
    assert list(attributes(b"".join(attribute(kind, value) for kind, value in parts))) == parts


@given(st.binary(max_size=200))
def test_broken_input_ends_the_reading_and_nothing_else(data):
    for _kind, value in attributes(data):
        assert value in data
    for _kind, _seq, payload in messages(data):
        assert payload in data


def test_only_what_is_wanted_is_taken_out():
    data = b"".join(attribute(kind, value) for kind, value in ((1, b"a"), (3, b"name\0"), (20, b"alias\0"), (30, b"c" * 100)))
    wanted = frozenset((3, 20))
    assert only(data, 0, wanted) == {3: b"name\0", 20: b"alias\0"}
    assert only(b"head" + data, 4, wanted) == only(data, 0, wanted)
    assert only(data, 0, frozenset((3, 99))) == {3: b"name\0"}
    for cut in range(len(data)):
        assert only(data[:cut], 0, wanted).items() <= {3: b"name\0", 20: b"alias\0"}.items()
    assert only(b"\x00" * 64, 0, wanted) == {}, "a length of nothing ends it"


def test_nesting_is_flagged_and_masked():
    outer = nested(18, attribute(1, b"veth"))
    assert struct.unpack_from("=H", outer, 2)[0] == 18 | NLA_F_NESTED
    ((kind, inner),) = attributes(outer)
    assert kind == 18
    assert list(attributes(inner)) == [(1, b"veth")]


def test_a_veth_pair_names_both_ends_and_the_far_namespace():
    request = links.add_veth(links.End("near0", "02:00:00:00:00:01"), links.End("far0", "02:00:00:00:00:02"), 77)
    top = dict(attributes(request.body[16:]))
    assert top[links.IFLA_IFNAME] == b"near0\0"
    assert top[links.IFLA_ADDRESS] == bytes([2, 0, 0, 0, 0, 1])
    info = dict(attributes(top[links.IFLA_LINKINFO]))
    assert info[links.IFLA_INFO_KIND] == b"veth"
    peer = dict(attributes(info[links.IFLA_INFO_DATA]))[links.VETH_INFO_PEER]
    far = dict(attributes(peer[16:]))
    assert far[links.IFLA_IFNAME] == b"far0\0"
    assert far[links.IFLA_NET_NS_FD] == struct.pack("=I", 77)


def test_a_route_without_destination_is_the_default_one():
    via = links.add_route(4, None, via="10.64.255.254")
    direct = links.add_route(4, "10.64.0.5")
    assert via.body[1] == 0  # prefix length
    assert dict(attributes(via.body[12:]))[5] == bytes([10, 64, 255, 254])
    assert direct.body[1] == 32
    assert direct.body[6] == links.SCOPE_LINK
