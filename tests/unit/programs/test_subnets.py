import os
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.programs import subnets
from atoll.programs.files import read_json, write_whole

ROUTES = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
tun0\t0000400A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth0\t0A01420A\t00000000\t0001\t0\t0\t0\tFFFFFFFF\t0\t0\t0
"""
"""The default route, 10.64.0.0/16 (index 0), and one address in 10.66.0.0/16 (index 2)."""


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    path = tmp_path / "route"
    path.write_text(ROUTES)
    return path


def instance(tmp_path: Path, name: str) -> Path:
    home = tmp_path / name
    home.mkdir()
    (home / "config.toml").write_text(f'install_id = "{name}"\n')
    return home


def forget_claimer(registry: Path, index: int) -> None:
    """As if the process that made the claim had ended."""
    record = read_json(registry / f"{index}.json")
    assert record is not None
    assert record["claimed_by"] == os.getpid()
    write_whole(registry / f"{index}.json", f'{{"home": "{record["home"]}", "install_id": "{record["install_id"]}", "claimed_by": 0}}')


def test_ranges_with_routes_are_not_chosen(tmp_path: Path, routes: Path) -> None:
    registry = tmp_path / "registry"
    first = subnets.claim(instance(tmp_path, "a"), "a", registry=registry, routes=routes)
    second = subnets.claim(instance(tmp_path, "b"), "b", registry=registry, routes=routes)
    assert (first, second) == (1, 3)


def test_a_whole_private_route_leaves_none(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(ROUTES.splitlines()[0] + "\neth0\t0000000A\t0\t1\t0\t0\t0\t000000FF\t0\t0\t0\n")
    with pytest.raises(Refused) as refused:
        subnets.claim(instance(tmp_path, "a"), "a", registry=tmp_path / "registry", routes=routes)
    assert refused.value.code is Code.SETUP_FAILED


def test_the_same_instance_gets_the_same(tmp_path: Path, routes: Path) -> None:
    registry, home = tmp_path / "registry", instance(tmp_path, "a")
    assert {subnets.claim(home, "a", registry=registry, routes=routes) for _ in range(3)} == {1}


def test_what_is_written_down_is_kept_even_with_a_route_of_our_own(tmp_path: Path, routes: Path) -> None:
    assert subnets.claim(instance(tmp_path, "a"), "a", wanted=0, registry=tmp_path / "registry", routes=routes) == 0


def test_a_living_instances_range_is_refused_and_a_gone_ones_is_free(tmp_path: Path, routes: Path) -> None:
    registry, home = tmp_path / "registry", instance(tmp_path, "a")
    subnets.claim(home, "a", registry=registry, routes=routes)
    forget_claimer(registry, 1)
    with pytest.raises(Refused):
        subnets.claim(instance(tmp_path, "b"), "b", wanted=1, registry=registry, routes=routes)
    (home / "config.toml").unlink()
    assert subnets.claim(tmp_path / "b", "b", registry=registry, routes=routes) == 1


def test_a_claim_counts_before_its_configuration_is_written(tmp_path: Path, routes: Path) -> None:
    registry = tmp_path / "registry"
    assert subnets.claim(tmp_path / "a", "a", registry=registry, routes=routes) == 1
    assert subnets.claim(tmp_path / "b", "b", registry=registry, routes=routes) == 3


def test_release_strikes_only_its_own(tmp_path: Path, routes: Path) -> None:
    registry = tmp_path / "registry"
    for name in ("a", "b"):
        subnets.claim(instance(tmp_path, name), name, registry=registry, routes=routes)
    subnets.release("a", registry=registry)
    subnets.release("a", registry=registry)
    assert sorted(path.name for path in registry.glob("*.json")) == ["3.json"]


def test_addresses_do_not_meet() -> None:
    assert subnets.cidr(0) == "10.64.0.0/16"
    assert subnets.cidr(subnets.COUNT - 1) == "10.127.0.0/16"


def test_ranges_that_other_hosts_have_are_avoided_while_there_are_others(tmp_path: Path, routes: Path) -> None:
    registry = tmp_path / "registry"
    assert subnets.claim(instance(tmp_path, "a"), "a", avoid={0, 1}, registry=registry, routes=routes) == 3
    everything = set(range(subnets.COUNT))
    assert subnets.claim(instance(tmp_path, "b"), "b", avoid=everything, registry=registry, routes=routes) == 1


def test_a_machine_is_one_host_of_a_deployment(tmp_path: Path, routes: Path) -> None:
    registry = tmp_path / "registry"
    subnets.claim(instance(tmp_path, "a"), "a", registry=registry, routes=routes)
    other = tmp_path / "other"
    other.mkdir()
    (other / "host.toml").write_text('install_id = "a"\n')
    with pytest.raises(Refused) as refused:
        subnets.claim(other, "a", registry=registry, routes=routes)
    assert str(tmp_path / "a") in refused.value.hint


def test_a_joined_host_keeps_its_claim(tmp_path: Path, routes: Path) -> None:
    registry, home = tmp_path / "registry", tmp_path / "joined"
    home.mkdir()
    (home / "host.toml").write_text('install_id = "a"\n')
    first = subnets.claim(home, "a", registry=registry, routes=routes)
    forget_claimer(registry, first)
    assert subnets.claim(instance(tmp_path, "b"), "b", registry=registry, routes=routes) != first
    assert subnets.index_of(subnets.cidr(first)) == first
    assert subnets.index_of("10.0.0.0/8") is None
