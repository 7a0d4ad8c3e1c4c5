from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import Code, Refused
from atoll.domain.spec import Isolation, NetworkSpec, OnEnd
from atoll.planning.resolve import CLASSES, CreateRequest, WorkloadClass, resolve
from tests.builders import template

POLICY = WorkloadClass(name="small", cpu_millis_max=2000, memory_mib_max=1024, disk_mib_max=4096, timeout_s_max=600, pids_max=99)
TEMPLATE = template(cpu_millis=500, memory_mib=256, disk_mib=1024, default_user="me", default_workdir="/srv")


def request(**changes: Any) -> CreateRequest:
    return replace(CreateRequest(template="base", timeout_s=60), **changes)


def test_what_is_not_asked_comes_from_template_and_class() -> None:
    spec = resolve(request(), template=TEMPLATE, policy=POLICY)
    assert (spec.cpu_millis, spec.memory_mib, spec.disk_mib) == (500, 256, 1024)
    assert (spec.default_user, spec.default_workdir) == ("me", "/srv")
    assert (spec.template_id, spec.image, spec.image_name) == (TEMPLATE.id, TEMPLATE.image, TEMPLATE.name)
    assert (spec.class_name, spec.isolation, spec.pids_max) == ("small", Isolation.GVISOR, 99)
    assert spec.on_end is OnEnd.KILL


def test_what_is_asked_wins_over_the_template() -> None:
    network = NetworkSpec(internet=False)
    asked = request(cpu_millis=2000, memory_mib=1024, disk_mib=4096, network=network, require_host="hst_x", on_end=OnEnd.SUSPEND)
    spec = resolve(asked, template=TEMPLATE, policy=POLICY)
    assert (spec.cpu_millis, spec.memory_mib, spec.disk_mib) == (2000, 1024, 4096)
    assert spec.network is network
    assert spec.require_host == "hst_x"
    assert spec.on_end is OnEnd.SUSPEND


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"timeout_s": 0}, Code.INVALID_REQUEST),
        ({"timeout_s": -5}, Code.INVALID_REQUEST),
        ({"timeout_s": 601}, Code.CLASS_LIMIT),
        ({"cpu_millis": 2001}, Code.CLASS_LIMIT),
        ({"cpu_millis": 0}, Code.CLASS_LIMIT),
        ({"memory_mib": 1025}, Code.CLASS_LIMIT),
        ({"memory_mib": 1}, Code.CLASS_LIMIT),
        ({"disk_mib": 4097}, Code.CLASS_LIMIT),
        ({"disk_mib": -1}, Code.CLASS_LIMIT),
        ({"metadata": {str(n): "" for n in range(65)}}, Code.CLASS_LIMIT),
        ({"metadata": {"k": "v" * 16384}}, Code.CLASS_LIMIT),
        ({"env": {str(n): "" for n in range(513)}}, Code.CLASS_LIMIT),
        ({"env": {"K": "ü" * 33000}}, Code.CLASS_LIMIT),
        ({"env": {"A=B": "x"}}, Code.INVALID_REQUEST),
        ({"env": {"": "x"}}, Code.INVALID_REQUEST),
        ({"env": {"A\0": "x"}}, Code.INVALID_REQUEST),
        ({"env": {"A": "x\0"}}, Code.INVALID_REQUEST),
        ({"metadata": {"A": "x\0"}}, Code.INVALID_REQUEST),
    ],
)
def test_what_a_class_refuses(changes: dict[str, Any], code: Code) -> None:
    with pytest.raises(Refused) as refused:
        resolve(request(**changes), template=TEMPLATE, policy=POLICY)
    assert refused.value.code is code


def test_names_that_only_metadata_may_have() -> None:
    assert resolve(request(metadata={"": "empty", "a=b": "c"}), template=TEMPLATE, policy=POLICY)


def test_a_refusal_never_repeats_a_value_of_the_environment() -> None:
    with pytest.raises(Refused) as refused:
        resolve(request(env={"TOKEN": "tops3cret\0"}), template=TEMPLATE, policy=POLICY)
    assert "tops3cret" not in str(refused.value)


def test_a_template_beyond_its_class_is_refused_as_well() -> None:
    """An operator who lowers a class's limit means the templates too."""
    with pytest.raises(Refused) as refused:
        resolve(request(), template=replace(TEMPLATE, memory_mib=4096), policy=POLICY)
    assert refused.value.code is Code.CLASS_LIMIT


def test_the_shared_kernel_is_only_for_who_asks_for_its_class() -> None:
    isolations = {name: policy.isolation for name, policy in CLASSES.items()}
    assert isolations["default"] is Isolation.GVISOR
    assert [name for name, isolation in isolations.items() if isolation is Isolation.SHARED_KERNEL] == ["shared-kernel"]


sizes = st.none() | st.integers(-10, 70_000)


@given(cpu=sizes, memory=sizes, disk=sizes, timeout_s=st.integers(-10, 100_000))
def test_whatever_is_asked_a_spec_is_within_its_class(cpu: int | None, memory: int | None, disk: int | None, timeout_s: int) -> None:
    asked = request(cpu_millis=cpu, memory_mib=memory, disk_mib=disk, timeout_s=timeout_s)
    try:
        spec = resolve(asked, template=TEMPLATE, policy=POLICY)
    except Refused:
        return  # which code each refusal has is tested above
    assert POLICY.cpu_millis_min <= spec.cpu_millis <= POLICY.cpu_millis_max
    assert POLICY.memory_mib_min <= spec.memory_mib <= POLICY.memory_mib_max
    assert POLICY.disk_mib_min <= spec.disk_mib <= POLICY.disk_mib_max
    assert 0 < spec.timeout_s <= POLICY.timeout_s_max
    assert resolve(asked, template=TEMPLATE, policy=POLICY) == spec


def test_a_spec_holds_no_secret() -> None:
    spec = resolve(request(env={"TOKEN": "tops3cret"}), template=TEMPLATE, policy=POLICY)
    assert "tops3cret" not in repr(spec)
    assert "tops3cret" not in repr(request(env={"TOKEN": "tops3cret"}))
