"""What limits mean on each version of control groups: golden writes, since no machine here has both."""

import contextlib
from pathlib import Path

import pytest

from atoll.hostops import cgroups
from atoll.hostops.cgroups import Layout, Limits
from atoll.hostops.mounts import Mount

LIMITS = Limits(memory_mib=512, cpu_millis=1500, pids_max=256, devices=True)
V2 = Layout(2, (("", Path("/cg")),))
V1 = Layout(1, tuple((name, Path("/cg") / name) for name in ("memory", "pids", "cpu", "devices", "freezer")))


def written(layout):
    return [(str(path), text) for path, text in cgroups.limit_writes(layout, "atoll-x/plc_1", LIMITS)]


def test_version_two():
    assert written(V2) == [
        ("/cg/atoll-x/plc_1/memory.max", "536870912"),
        ("/cg/atoll-x/plc_1/memory.swap.max", "0"),
        ("/cg/atoll-x/plc_1/pids.max", "256"),
        ("/cg/atoll-x/plc_1/cpu.max", "150000 100000"),
    ]


def test_version_one():
    found = written(V1)
    assert found[:5] == [
        ("/cg/memory/atoll-x/plc_1/memory.limit_in_bytes", "536870912"),
        ("/cg/pids/atoll-x/plc_1/pids.max", "256"),
        ("/cg/cpu/atoll-x/plc_1/cpu.cfs_period_us", "100000"),
        ("/cg/cpu/atoll-x/plc_1/cpu.cfs_quota_us", "150000"),
        ("/cg/devices/atoll-x/plc_1/devices.deny", "a"),
    ]
    allowed = [text for path, text in found[5:] if path.endswith("devices.allow")]
    assert allowed == list(cgroups.DEVICES_V1)
    assert not any("b 8:" in rule or rule.startswith("a") or ("b " in rule and "r" in rule.split()[2]) for rule in allowed), "no disks"


def test_nothing_is_written_for_what_is_not_limited():
    assert cgroups.limit_writes(V2, "g", Limits()) == []
    assert cgroups.limit_writes(V1, "g", Limits()) == []


@pytest.mark.parametrize(("millis", "quota"), [(1, 1000), (100, 10_000), (1000, 100_000), (16_000, 1_600_000)])
def test_quota_has_a_floor_that_the_kernel_accepts(millis, quota):
    assert cgroups.cpu_quota_us(millis) == quota


def test_version_two_is_found_by_its_file(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    layout = cgroups.detect(tmp_path, [])
    assert layout == Layout(2, (("", tmp_path),))
    assert layout.missing() == []
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    assert layout.missing() == ["memory", "pids"]


def test_version_one_is_found_by_its_mounts_and_a_hybrids_second_tree_is_left_alone(tmp_path):
    table = [
        Mount(str(tmp_path / "memory"), "cgroup", "cgroup"),
        Mount(str(tmp_path / "cpu,cpuacct"), "cgroup", "cgroup"),
        Mount(str(tmp_path / "systemd"), "cgroup", "cgroup"),
        Mount(str(tmp_path / "unified"), "cgroup2", "cgroup2"),
        Mount("/elsewhere/pids", "cgroup", "cgroup"),
    ]
    layout = cgroups.detect(tmp_path, table)
    assert layout.version == 1
    assert layout.root("cpu") == tmp_path / "cpu,cpuacct"
    assert layout.missing() == ["pids"]
    # cpu and cpuacct are one hierarchy: its group is made and removed once.
    assert cgroups.directories(layout, "g") == [tmp_path / "memory" / "g", tmp_path / "cpu,cpuacct" / "g", tmp_path / "systemd" / "g"]


def test_no_control_groups_at_all(tmp_path):
    with pytest.raises(FileNotFoundError):
        cgroups.detect(tmp_path, [])


def test_version_two_hands_controllers_down(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    layout = cgroups.detect(tmp_path, [])
    (tmp_path / "parent").mkdir()
    cgroups.make_parent(layout, "parent")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "parent" / "cgroup.subtree_control").read_text() == "+cpu"
    assert cgroups.kill_file(layout, "parent/x") == tmp_path / "parent" / "x" / "cgroup.kill"


def test_a_group_with_groups_below_is_removed_deepest_first(tmp_path):
    layout = Layout(2, (("", tmp_path),))
    (tmp_path / "g" / "inner" / "inmost").mkdir(parents=True)
    assert cgroups.remove(layout, "g") == []
    assert not (tmp_path / "g").exists()
    assert cgroups.remove(layout, "g") == []


def test_what_cannot_be_removed_is_named(tmp_path):
    layout = Layout(2, (("", tmp_path),))
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "busy").write_text("a directory with a file stands for a group with a process")
    assert cgroups.remove(layout, "g", patience_s=0.02) == [tmp_path / "g"]


def test_processes_of_a_group_include_those_below_it(tmp_path):
    layout = Layout(1, (("memory", tmp_path / "memory"), ("pids", tmp_path / "pids")))
    for place, text in (("memory/g", "7\n8\n"), ("pids/g", "7\n"), ("pids/g/inner", "9\n")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "cgroup.procs").write_text(text)
    assert cgroups.pids(layout, "g") == [7, 8, 9]
    assert cgroups.pids(layout, "other") == []
    assert cgroups.members(layout, "") == {"g"}


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [(1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), (2, "memory.events", "low 0\noom 4\noom_kill 3\n")],
)
def test_kills_for_lack_of_memory_are_counted(tmp_path, version, name, text):
    layout = Layout(version, (("memory" if version == 1 else "", tmp_path),))
    assert cgroups.oom_kills(layout, "g") == 0
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / name).write_text(text)
    assert cgroups.oom_kills(layout, "g") == 3


def test_a_container_sees_its_own_groups_only():
    assert cgroups.own_views(V2, "p/x") == (("/cg/p/x", ""),)
    assert cgroups.own_views(V1, "p/x") == (("/cg/memory/p/x", "memory"), ("/cg/pids/p/x", "pids"), ("/cg/cpu/p/x", "cpu"))


def test_the_groups_that_a_process_is_in():
    one = Layout(1, (("memory", Path("/c/memory")), ("cpu", Path("/c/cpu,cpuacct")), ("systemd", Path("/c/systemd"))))
    text = "3:cpu,cpuacct:/a/b\n2:memory:/\n1:name=systemd:/init.scope\n0::/elsewhere\n"
    assert cgroups.own_places(one, text) == [Path("/c/memory"), Path("/c/cpu,cpuacct/a/b"), Path("/c/systemd/init.scope")]
    two = Layout(2, (("", Path("/c")),))
    assert cgroups.own_places(two, "0::/system.slice/atoll.service\n") == [Path("/c/system.slice/atoll.service")]
    assert cgroups.own_places(two, "2:memory:/x\n") == []


def test_expecting_moves_moves_nothing(tmp_path):
    """Wherever it is tried, with or without the right to."""
    before = Path("/proc/self/cgroup").read_text()
    cgroups.expect_moves(Layout(2, (("", tmp_path / "nowhere"),)))
    with contextlib.suppress(FileNotFoundError):  # a machine without control groups
        cgroups.expect_moves(cgroups.detect())
    assert Path("/proc/self/cgroup").read_text() == before


def v1_group(tmp_path: Path) -> Layout:
    layout = Layout(1, tuple((name, tmp_path / name) for name in ("memory", "cpu", "cpuacct")))
    for name in ("memory", "cpuacct"):
        (tmp_path / name / "g").mkdir(parents=True)
    (tmp_path / "cpuacct" / "g" / "cpuacct.usage").write_text("1500000000\n")
    (tmp_path / "memory" / "g" / "memory.usage_in_bytes").write_text("1000\n")
    (tmp_path / "memory" / "g" / "memory.stat").write_text("cache 1\nshmem 1\ntotal_cache 700\ntotal_rss 300\ntotal_shmem 500\n")
    return layout


def v2_group(tmp_path: Path) -> Layout:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (tmp_path / "g" / "memory.current").write_text("1000\n")
    (tmp_path / "g" / "memory.stat").write_text("anon 300\nfile 700\nshmem 500\n")
    return Layout(2, (("", tmp_path),))


@pytest.mark.parametrize("made", [v1_group, v2_group])
def test_what_a_group_uses_without_what_could_be_dropped(made, tmp_path):
    """Memory of a guest under gVisor is shared memory: the kernel counts it as cache, and cannot drop it."""
    layout = made(tmp_path)
    assert cgroups.spent(layout, "g") == cgroups.Spent(cpu_s=1.5, memory_bytes=800, cache_bytes=200)
    assert cgroups.spent(layout, "other") is None


def test_a_group_that_vanishes_while_it_is_read_uses_nothing(tmp_path):
    layout = v2_group(tmp_path)
    (tmp_path / "g" / "memory.stat").unlink()
    assert cgroups.spent(layout, "g") is None
