"""Which copies go, and which stay."""

from __future__ import annotations

import pytest

from atoll.base.units import Vector
from atoll.domain.host import Admin
from atoll.planning.placing import Advert
from atoll.planning.relieving import LocalCopy, for_room, given_up, wants_relief
from tests.builders import NOW, host, spec

COPIES = [LocalCopy(snapshot=True, id=f"snp_{n}", disk_mib=100, since=float(n)) for n in (3, 1, 2)]


def of(used_mib: int, admin: Admin = Admin.ACTIVE) -> Advert:
    return Advert(host(capacity=Vector(1000, 1000, 1000, 4), admin=admin), Vector(disk_mib=used_mib))


@pytest.mark.parametrize(("used_mib", "gone"), [(850, []), (860, ["snp_1", "snp_2"]), (1000, ["snp_1", "snp_2", "snp_3"])])
def test_the_oldest_go_until_there_is_room_again(used_mib: int, gone: list[str]) -> None:
    assert [one.id for one in given_up(of(used_mib), COPIES)] == gone


def test_a_host_that_drains_keeps_none() -> None:
    assert given_up(of(10, Admin.DRAINING), COPIES) == COPIES


def test_a_host_that_is_disabled_is_asked_for_nothing() -> None:
    assert not wants_relief(of(1000, Admin.DISABLED))


def idle(*sizes: int) -> list[LocalCopy]:
    return [LocalCopy(snapshot=True, id=f"snp_{n}", disk_mib=mib, since=float(n), fetched=True) for n, mib in enumerate(sizes)]


def full(name: str, *, free_mib: int, memory_mib: int = 16_384) -> Advert:
    return Advert(host(id=name, capacity=Vector(8000, memory_mib, 10_000, 8), seen_at=NOW), Vector(disk_mib=10_000 - free_mib))


def test_a_sandbox_without_room_has_the_fewest_copies_of_one_host_go() -> None:
    wanted = spec(disk_mib=2048)
    adverts = [full("hst_a", free_mib=1000), full("hst_b", free_mib=1000), full("hst_c", free_mib=1900)]
    copies = {"hst_a": idle(600, 600, 600), "hst_b": idle(1100, 600), "hst_c": idle(100)}
    found = for_room(wanted, adverts, copies, now=NOW)
    assert found is not None
    assert (found[0], [one.id for one in found[1]]) == ("hst_b", ["snp_0"])


@pytest.mark.parametrize("why", ["not enough", "memory", "room already", "none"])
def test_where_it_would_not_help_none_goes(why: str) -> None:
    wanted = spec(disk_mib=2048)
    advert = full("hst_a", free_mib=3000 if why == "room already" else 1000, memory_mib=100 if why == "memory" else 16_384)
    copies = {} if why == "none" else {"hst_a": idle(600 if why == "not enough" else 2000)}
    assert for_room(wanted, [advert], copies, now=NOW) is None
