"""Names on the machine: an instance's own, short enough, and read back exactly."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.base.ids import ALPHABET
from atoll.drivers.oci.config import Names, base36
from atoll.drivers.oci.slotworks import SLOTS_MAX, address_of, gateway_of, guest_mac
from atoll.drivers.port import Mark

INSTALLS = st.text(ALPHABET, min_size=20, max_size=20).map(lambda body: Names.of(Mark("ins_" + body, "hst_x")))
SLOTS = st.integers(1, SLOTS_MAX)


@given(INSTALLS, SLOTS)
def test_a_slot_is_read_back_from_its_interface(names, slot):
    link = names.link(slot)
    assert len(link) <= 15
    assert names.slot(link) == slot


@given(INSTALLS, INSTALLS, SLOTS)
def test_another_instances_interface_is_not_ours(names, other, slot):
    if names.install[:6] != other.install[:6]:
        assert names.slot(other.link(slot)) is None


@given(INSTALLS)
def test_the_gateways_device_is_no_slot(names):
    assert names.slot(names.gateway_link) is None
    assert len(names.gateway_link) <= 15
    assert names.slot(names.link_prefix) is None
    assert names.slot("eth0") is None


@given(st.integers(0, 10**9))
def test_base36_is_what_int_reads(number):
    assert int(base36(number), 36) == number


@given(st.integers(0, 63), SLOTS, SLOTS)
def test_addresses_are_one_to_one_and_never_the_gateways(subnet, one, other):
    assert (address_of(subnet, one) == address_of(subnet, other)) is (one == other)
    assert address_of(subnet, one) != gateway_of(subnet)
    assert address_of(subnet, one).startswith(f"10.{64 + subnet}.")
    assert guest_mac(address_of(subnet, one)).startswith("02:"), "locally administered"
