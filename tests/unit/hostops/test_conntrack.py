"""Requests to forget connections: both directions, and a filter in each, since a request without one empties the whole table."""

from atoll.hostops import conntrack
from atoll.hostops.netlink import attributes


def test_both_directions_are_asked_for_and_filtered():
    by_source, by_destination = conntrack.forgetting("10.64.0.5")
    for request, which, flags in ((by_source, conntrack.CTA_IP_V4_SRC, 1), (by_destination, conntrack.CTA_IP_V4_DST, 2)):
        assert request.kind == 0x102
        parts = dict(attributes(request.body[4:]))
        addresses = dict(attributes(dict(attributes(parts[conntrack.CTA_TUPLE_ORIG]))[conntrack.CTA_TUPLE_IP]))
        assert addresses == {which: bytes([10, 64, 0, 5])}
        filters = dict(attributes(parts[conntrack.CTA_FILTER]))
        assert int.from_bytes(filters[conntrack.CTA_FILTER_ORIG_FLAGS], "little") == flags
