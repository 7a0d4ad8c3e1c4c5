"""Which copies go, and which stay."""

from __future__ import annotations

import pytest

from atoll.base.units import Vector
from atoll.domain.host import Admin
from atoll.planning.placing import Advert
from atoll.planning.relieving import LocalCopy, given_up, wants_relief
from tests.builders import host

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
