"""Which isolation a class gives: the first rung of the ladder that a living host offers, and never one below what the class says."""

import pytest

from atoll.base.units import Vector
from atoll.domain.deployment import DEFAULT_CLASSES, WorkloadClass
from atoll.domain.host import Admin
from atoll.domain.spec import LADDER, OVERHEAD_MIB, Isolation
from atoll.planning.fleet import Fleet
from atoll.planning.placing import Advert
from tests.builders import host, spec

NOW = 1_000.0


def fleet(*offers, **fields):
    made = Fleet()
    made.load(
        Advert(host(**{"isolations": frozenset(offered), "seen_at": NOW, "name": f"h{number}", **fields}), Vector())
        for number, offered in enumerate(offers)
    )
    return made


def rung(policy, *offers, now=NOW, **fields):
    return fleet(*offers, **fields).rung(spec(), policy.rungs(), now=now)


DEFAULT = DEFAULT_CLASSES["default"]


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ([{"gvisor"}], Isolation.GVISOR),
        ([{"gvisor", "shared-kernel"}, {"gvisor", "vm"}], Isolation.VM),
        ([{"gvisor", "vm-emulated", "shared-kernel"}], Isolation.GVISOR),
        ([{"vm-emulated", "shared-kernel"}], Isolation.GVISOR),
        ([], Isolation.GVISOR),
    ],
)
def test_the_default_class_takes_the_first_rung_and_none_below_gvisor(offers, chosen):
    assert rung(DEFAULT, *offers) is chosen


def test_how_far_down_is_the_operators_to_say():
    shared = WorkloadClass(isolation=Isolation.SHARED_KERNEL, or_stronger=True)
    emulated = WorkloadClass(isolation=Isolation.VM_EMULATED, or_stronger=True)
    assert rung(shared, {"shared-kernel", "vm-emulated"}) is Isolation.SHARED_KERNEL
    assert rung(shared, {"shared-kernel", "gvisor"}) is Isolation.GVISOR
    assert rung(emulated, {"vm-emulated"}) is Isolation.VM_EMULATED
    assert emulated.rungs() == LADDER


def test_what_is_named_is_what_one_gets():
    for isolation in Isolation:
        assert rung(WorkloadClass(isolation=isolation), {str(one) for one in Isolation}) is isolation


def test_a_machine_with_hardware_is_not_had_by_one_that_is_emulated():
    assert rung(WorkloadClass(isolation=Isolation.VM), {"vm-emulated"}) is Isolation.VM, "it waits rather than be another"
    assert fleet({"vm-emulated"}).choose(spec(isolation=Isolation.VM), sandbox_id="i1", now=NOW) is None
    assert fleet({"vm"}).choose(spec(isolation=Isolation.VM), sandbox_id="i1", now=NOW) is not None


def test_only_a_host_that_lives_and_may_be_asked_counts():
    offers = {"gvisor", "vm"}
    assert rung(DEFAULT, offers, now=NOW + 10_000) is Isolation.GVISOR
    assert rung(DEFAULT, offers, admin=Admin.DRAINING) is Isolation.GVISOR
    assert rung(DEFAULT, offers, arch="aarch64") is Isolation.GVISOR


def test_a_full_host_offers_it_all_the_same():
    assert rung(DEFAULT, {"gvisor", "vm"}, capacity=Vector()) is Isolation.VM


@pytest.mark.parametrize("isolation", list(Isolation))
def test_what_runs_a_machine_takes_its_own_part(isolation):
    plain = spec(isolation=isolation)
    assert plain.vector().memory_mib == plain.memory_mib + OVERHEAD_MIB.get(isolation, 0)


def test_no_driver_takes_more_than_is_counted():
    from atoll.drivers.firecracker import config as firecracker
    from atoll.drivers.machines.config import Accelerator
    from atoll.drivers.qemu import config as qemu

    assert max(firecracker.OVERHEAD_MIB, qemu.OVERHEAD_MIB[Accelerator.KVM]) <= OVERHEAD_MIB[Isolation.VM]
    assert qemu.OVERHEAD_MIB[Accelerator.TCG] <= OVERHEAD_MIB[Isolation.VM_EMULATED]
