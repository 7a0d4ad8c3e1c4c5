"""Egress rules are normalised, refused where they cannot be kept, and elements survive being listed and written again."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import Code, Refused
from atoll.drivers.oci import ruleset
from atoll.drivers.oci.config import Names
from atoll.drivers.oci.ruleset import Egress

NAMES = Names("abcdefgh")
NETWORKS = st.lists(
    st.builds(
        lambda number, length: str(ipaddress.ip_network((number, length), strict=False)), st.integers(0, 2**32 - 1), st.integers(0, 32)
    ),
    max_size=12,
)


@given(NETWORKS)
def test_no_network_lies_in_another_and_none_is_lost(texts):
    found = [ipaddress.ip_network(text) for text in Egress.of(internet=True, allow=texts, deny=()).allow]
    assert not any(one != other and one.overlaps(other) for one in found for other in found)
    for text in texts:
        assert any(ipaddress.ip_network(text).subnet_of(network) for network in found)
    assert sum(network.num_addresses for network in found) <= sum(ipaddress.ip_network(text).num_addresses for text in texts)


def test_single_addresses_and_loose_networks_are_understood():
    assert Egress.of(internet=False, allow=["198.51.100.7"], deny=["203.0.113.9/24"]) == Egress(
        False, ("198.51.100.7/32",), ("203.0.113.0/24",)
    )


def test_host_names_are_refused_and_ipv6_is_closed_anyhow():
    with pytest.raises(Refused) as caught:
        Egress.of(internet=True, allow=["example.org"], deny=())
    assert caught.value.code is Code.NOT_SUPPORTED
    assert Egress.of(internet=True, allow=["2001:db8::/32"], deny=()).allow == ()


def test_an_injected_command_is_no_network():
    with pytest.raises(Refused):
        Egress.of(internet=True, allow=["1.2.3.4 }; flush ruleset; add element inet x y {"], deny=())


def test_closed_ranges_are_merged_with_the_operators():
    text = ruleset.table_text(NAMES, subnet="10.64.0.0/16", gateway="10.64.255.254", closed=("192.0.2.0/24", "10.1.0.0/16"))
    assert "192.0.2.0/24" in text
    assert "10.0.0.0/8" in text
    assert "10.1.0.0/16" not in text, "inside another"
    assert text.count("table inet atoll_abcdefgh") == 3, "made so that it can be deleted, deleted, made"


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "10.64.0.1", "192.168.1.1", "172.31.255.255", "127.0.0.1", "100.100.100.100", "224.0.0.1", "255.255.255.255"],
)
def test_what_nobody_may_reach_is_closed(address):
    assert any(ipaddress.ip_address(address) in ipaddress.ip_network(network) for network in ruleset.CLOSED)


@pytest.mark.parametrize("address", ["1.1.1.1", "198.51.100.1", "203.0.113.1", "100.63.255.255", "172.32.0.1"])
def test_public_addresses_are_not(address):
    assert not any(ipaddress.ip_address(address) in ipaddress.ip_network(network) for network in ruleset.CLOSED)


def test_a_slots_elements():
    egress = Egress(True, ("198.51.100.0/24",), ("203.0.113.0/24",))
    assert ruleset.egress_elements(NAMES, "add", "10.64.0.5", egress).splitlines() == [
        "add element inet atoll_abcdefgh allow4 { 10.64.0.5 . 198.51.100.0/24 }",
        "add element inet atoll_abcdefgh deny4 { 10.64.0.5 . 203.0.113.0/24 }",
        "add element inet atoll_abcdefgh open4 { 10.64.0.5 }",
    ]
    assert ruleset.egress_elements(NAMES, "add", "10.64.0.5", Egress(False)) == ""
    assert (
        ruleset.slot_elements(NAMES, "add", [("atabcdef1", "10.64.0.1")])
        == 'add element inet atoll_abcdefgh slots { "atabcdef1" . 10.64.0.1 }\n'
    )


@pytest.mark.parametrize(
    ("element", "text"),
    [
        ("10.64.0.5", "10.64.0.5"),
        ({"concat": ["atabcdef1", "10.64.0.5"]}, "atabcdef1 . 10.64.0.5"),
        ({"concat": ["10.64.0.5", {"prefix": {"addr": "1.2.3.0", "len": 24}}]}, "10.64.0.5 . 1.2.3.0/24"),
        ({"concat": ["10.64.0.5", {"range": ["1.2.3.4", "1.2.3.9"]}]}, "10.64.0.5 . 1.2.3.4-1.2.3.9"),
        ({"elem": {"val": {"concat": ["10.64.0.5", "1.2.3.4"]}, "comment": "x"}}, "10.64.0.5 . 1.2.3.4"),
    ],
)
def test_listed_elements_are_written_in_nfts_language(element, text):
    assert ruleset.element_text(element) == text


def test_only_interface_names_get_quotes():
    dropped = ruleset.drop_elements(NAMES, "slots", ["atabcdef1 . 10.64.0.5"])
    assert dropped == 'delete element inet atoll_abcdefgh slots { "atabcdef1" . 10.64.0.5 }\n'
    kept = ruleset.keep_elements(NAMES, "allow4", ["10.64.0.5 . 1.2.3.0/24", "10.64.0.6 . 1.2.3.4-1.2.3.9"])
    assert kept == "add element inet atoll_abcdefgh allow4 { 10.64.0.5 . 1.2.3.0/24, 10.64.0.6 . 1.2.3.4-1.2.3.9 }\n"
    assert ruleset.drop_elements(NAMES, "open4", []) == ""
