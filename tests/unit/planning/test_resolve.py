from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import Code, Refused
from atoll.domain.deployment import DEFAULT_CLASSES, Deployment, Range, WorkloadClass
from atoll.domain.spec import Ingress, Isolation, NetworkSpec, OnEnd
from atoll.planning.resolve import CreateRequest, class_of, resolve, template_of
from tests.builders import template

POLICY = WorkloadClass(
    name="small",
    cpu_millis=Range(50, 2000),
    memory_mib=Range(32, 1024),
    disk_mib=Range(64, 4096),
    timeout_s_default=60,
    timeout_s_max=600,
    pids_max=99,
)
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


def test_a_class_s_default_comes_before_the_template_s_size_and_after_the_request() -> None:
    policy = replace(POLICY, cpu_millis=Range(50, 2000, 750))
    assert resolve(request(), template=TEMPLATE, policy=policy).cpu_millis == 750
    assert resolve(request(cpu_millis=1000), template=TEMPLATE, policy=policy).cpu_millis == 1000


def test_who_names_no_timeout_gets_the_class_s() -> None:
    assert resolve(request(timeout_s=None), template=TEMPLATE, policy=POLICY).timeout_s == 60


def test_a_class_closes_what_a_request_cannot_open() -> None:
    closed = replace(POLICY, internet=False, ingress=Ingress.TOKEN)
    spec = resolve(request(network=NetworkSpec(internet=True, public_traffic=True)), template=TEMPLATE, policy=closed)
    assert (spec.network.internet, spec.network.public_traffic) == (False, False)
    with pytest.raises(Refused) as refused:
        resolve(request(secured=False), template=TEMPLATE, policy=closed)
    assert refused.value.code is Code.CLASS_LIMIT


def test_a_class_takes_its_own_templates_only() -> None:
    narrow = replace(POLICY, template="base", templates=("base", "tools"))
    assert resolve(request(), template=TEMPLATE, policy=narrow)
    with pytest.raises(Refused) as refused:
        resolve(request(), template=replace(TEMPLATE, name="other", aliases=("another",)), policy=narrow)
    assert refused.value.code is Code.CLASS_LIMIT
    assert template_of(CreateRequest(), narrow) == "base"
    assert template_of(CreateRequest(), replace(narrow, template="tools")) == "tools"
    assert template_of(CreateRequest(template="mine"), replace(narrow, template="tools")) == "mine"


def test_a_request_is_of_the_class_that_it_names_or_of_the_default_one() -> None:
    deployment = Deployment(classes={"a": WorkloadClass(name="a"), "b": WorkloadClass(name="b")}, default_class="b")
    assert class_of(CreateRequest(), deployment).name == "b"
    assert class_of(CreateRequest(class_name="a"), deployment).name == "a"
    with pytest.raises(Refused) as refused:
        class_of(CreateRequest(class_name="c"), deployment)
    assert refused.value.code is Code.INVALID_REQUEST


def test_a_spec_keeps_what_its_class_said() -> None:
    policy = replace(POLICY, regions=("eu",), labels=(("disk", "ssd"),), arch="aarch64", attempts_max=1, reserve_s=1.0, bootstrap_s=2.0)
    spec = resolve(request(), template=TEMPLATE, policy=policy)
    assert (spec.regions, spec.labels, spec.arch, spec.attempts_max) == (("eu",), (("disk", "ssd"),), "aarch64", 1)
    assert (spec.reserve_s, spec.bootstrap_s, spec.timeout_s_max) == (1.0, 2.0, 600)


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
    isolations = {name: policy.isolation for name, policy in DEFAULT_CLASSES.items()}
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
    assert POLICY.cpu_millis.min <= spec.cpu_millis <= POLICY.cpu_millis.max
    assert POLICY.memory_mib.min <= spec.memory_mib <= POLICY.memory_mib.max
    assert POLICY.disk_mib.min <= spec.disk_mib <= POLICY.disk_mib.max
    assert 0 < spec.timeout_s <= POLICY.timeout_s_max
    assert resolve(asked, template=TEMPLATE, policy=POLICY) == spec


def test_a_spec_holds_no_secret() -> None:
    spec = resolve(request(env={"TOKEN": "tops3cret"}), template=TEMPLATE, policy=POLICY)
    assert "tops3cret" not in repr(spec)
    assert "tops3cret" not in repr(request(env={"TOKEN": "tops3cret"}))
