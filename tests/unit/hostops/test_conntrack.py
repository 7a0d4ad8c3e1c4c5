"""Requests to forget connections: both directions, and a filter in each, since a request without one empties the whole table."""

import socket
import struct

import pytest

from atoll.hostops import conntrack
from atoll.hostops.netlink import NLM_F_DUMP, attribute, attributes, nested


def test_both_directions_are_asked_for_and_filtered():
    by_source, by_destination = conntrack.forgetting("10.64.0.5")
    for request, which, flags in ((by_source, conntrack.CTA_IP_V4_SRC, 1), (by_destination, conntrack.CTA_IP_V4_DST, 2)):
        assert request.kind == 0x102
        parts = dict(attributes(request.body[4:]))
        addresses = dict(attributes(dict(attributes(parts[conntrack.CTA_TUPLE_ORIG]))[conntrack.CTA_TUPLE_IP]))
        assert addresses == {which: bytes([10, 64, 0, 5])}
        filters = dict(attributes(parts[conntrack.CTA_FILTER]))
        assert int.from_bytes(filters[conntrack.CTA_FILTER_ORIG_FLAGS], "little") == flags


def test_only_tcp_that_an_address_began_is_listed():
    request = conntrack.listing("10.64.0.5")
    assert (request.kind, request.flags) == (0x101, NLM_F_DUMP)
    parts = dict(attributes(request.body[4:]))
    begun = dict(attributes(parts[conntrack.CTA_TUPLE_ORIG]))
    assert dict(attributes(begun[conntrack.CTA_TUPLE_IP])) == {conntrack.CTA_IP_V4_SRC: bytes([10, 64, 0, 5])}
    assert dict(attributes(begun[conntrack.CTA_TUPLE_PROTO])) == {conntrack.CTA_PROTO_NUM: bytes([socket.IPPROTO_TCP])}
    filters = dict(attributes(parts[conntrack.CTA_FILTER]))
    assert int.from_bytes(filters[conntrack.CTA_FILTER_ORIG_FLAGS], "little") == 1 | 8


def direction(kind, source, target, ports):
    places = nested(
        conntrack.CTA_TUPLE_IP,
        attribute(conntrack.CTA_IP_V4_SRC, socket.inet_aton(source)),
        attribute(conntrack.CTA_IP_V4_DST, socket.inet_aton(target)),
    )
    numbers = [
        attribute(conntrack.CTA_PROTO_NUM, b"\x06"),
        *(attribute(which, struct.pack(">H", port)) for which, port in zip((2, 3), ports, strict=True)),
    ]
    return nested(kind, places, nested(conntrack.CTA_TUPLE_PROTO, *numbers))


def entry(state):
    """As the kernel tells it, of a guest's connection behind the host's address."""
    begun = direction(conntrack.CTA_TUPLE_ORIG, "10.64.0.5", "203.0.113.2", (5000, 5432))
    back = direction(conntrack.CTA_TUPLE_REPLY, "203.0.113.2", "203.0.113.1", (5432, 40001))
    told = nested(
        conntrack.CTA_PROTOINFO, nested(conntrack.CTA_PROTOINFO_TCP, attribute(conntrack.CTA_PROTOINFO_TCP_STATE, bytes([state])))
    )
    return bytes(4) + begun + back + told


@pytest.mark.parametrize("state", conntrack.AT_WORK)
def test_a_connection_is_known_as_its_far_end_knows_it(state):
    assert conntrack.connection(entry(state)) == conntrack.Connection("203.0.113.1", 40001, "203.0.113.2", 5432)


@pytest.mark.parametrize("state", [1, 2, 6, 7, 8])
def test_where_nobody_waits_there_is_none(state):
    assert conntrack.connection(entry(state)) is None


def test_what_is_cut_off_is_none():
    whole = entry(3)
    assert [conntrack.connection(whole[:size]) for size in range(4, len(whole) - 8, 4)] == [None] * len(range(4, len(whole) - 8, 4))
