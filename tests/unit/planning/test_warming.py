from typing import Any

import pytest

from atoll.base.errors import Code
from atoll.base.ids import HostId, TemplateId
from atoll.base.units import ZERO, Vector
from atoll.domain.host import UNSETTLED, Admin
from atoll.domain.sandbox import State
from atoll.domain.warmth import WarmPolicy
from atoll.planning.claiming import CLAIMS, pool_of
from atoll.planning.placing import Advert
from atoll.planning.warming import KEPT, RENEW_S, Guest, Plan, Wanted, give_up, plan
from tests.builders import NOW, host, spec

HERE = HostId("hst_a")
ROOM = Vector(16_000, 8192, 65_536, 64)


def advert(used: Vector = ZERO, **changes: Any) -> Advert:
    return Advert(host(**{"id": HERE, "facts": {CLAIMS: True}, **changes}), used)


POOL = pool_of(spec()) or ""


def wanted(count: int) -> Wanted:
    return Wanted(WarmPolicy(TemplateId("base"), "default", 1000, 512, 2048, count), POOL, spec())


def guest(name: str, **changes: Any) -> Guest:
    given = {"pool": POOL, "state": State.READY, "host_id": HERE, "vector": spec().vector(), "created_at": NOW - 60, **changes}
    return Guest(name, **given)


def planned(count: int, *guests: Guest, **options: Any) -> Plan:
    given = {"now": NOW, "failures": {}, "pressed": False, **options}
    return plan([wanted(count)], guests, given.pop("adverts", [advert()]), **given)


def test_what_is_missing_is_made_two_at_a_time() -> None:
    made = planned(5, guest("a"))
    assert (len(made.make), made.retire, made.short) == (2, (), {POOL: 4})
    assert planned(1, guest("a")).make == ()


@pytest.mark.parametrize("state", sorted(set(State) - KEPT - {State.RELEASING, State.RELEASED, State.FAILED}))
def test_one_that_came_to_rest_goes_and_another_is_made(state: State) -> None:
    """Nobody resumes what is nobody's, and no create can take it."""
    made = planned(1, guest("a", state=state))
    assert made.retire == (("a", Code.WARM_OUTDATED),)
    assert len(made.make) == 1


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        ({"pool": "another"}, {}, Code.WARM_OUTDATED),
        ({"end_at": NOW + RENEW_S - 1}, {}, Code.WARM_OUTDATED),
        ({}, {"adverts": [advert(admin=Admin.DRAINING)]}, Code.HOST_NOT_ACTIVE),
    ],
)
def test_why_one_goes(changes: dict[str, Any], options: dict[str, Any], why: Code) -> None:
    assert planned(1, guest("a", **changes), **options).retire == (("a", why),)


def test_of_too_many_the_newest_go_and_what_is_going_is_left_alone() -> None:
    three = [guest("old", created_at=NOW - 90), guest("new", created_at=NOW - 10), guest("gone", state=State.RELEASING)]
    assert planned(1, *three).retire == (("new", Code.WARM_SURPLUS),)


def test_those_on_a_host_that_is_not_heard_of_do_not_count() -> None:
    made = planned(1, guest("a"), adverts=[advert(seen_at=NOW - 31), advert(id=HostId("hst_b"), name="b")])
    assert (made.retire, [one.prefer_host for one in made.make]) == ((), ["hst_b"])


@pytest.mark.parametrize("changes", [{"seen_at": None}, {"problems": (UNSETTLED,)}])
def test_none_goes_that_may_have_been_claimed_since_the_backup(changes: dict[str, Any]) -> None:
    """The keeper ended somebody's sandbox: on a record that was taken back it was nobody's, and of an older build."""
    there = guest("a", pool="an older build's"), guest("b", end_at=NOW), guest("c"), guest("d")
    assert planned(1, *there, adverts=[advert(**changes)]).retire == ()
    assert {name for name, _ in planned(1, *there, adverts=[advert()]).retire} == {"a", "b", "d"}


def test_nothing_is_made_while_somebody_waits_or_soon_after_a_failure() -> None:
    assert planned(1, pressed=True).make == ()
    made = planned(1, failures={POOL: (1, NOW, "START_FAILED: no kernel")})
    assert (made.make, made.problems, made.look_again_s) == ((), {POOL: "the last one failed with START_FAILED: no kernel"}, 1.0)


def test_the_fewest_are_given_up_and_none_where_that_is_not_enough() -> None:
    guests = [guest("a", created_at=NOW - 90), guest("b", created_at=NOW - 10)]
    full = [advert(used=ROOM, capacity=ROOM)]
    assert give_up(spec(), guests, full, now=NOW) == ("b",)
    assert give_up(spec(memory_mib=4096), guests, full, now=NOW) == ()
    assert give_up(spec(), [guests[0], guest("b", state=State.RELEASING)], full, now=NOW) == (), "what is going will be room enough"
