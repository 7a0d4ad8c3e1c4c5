"""The mount table is read with the kernel's own escapes."""

from atoll.hostops import mounts

TABLE = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 0:26 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
41 22 0:40 / /srv/with\\040space\\134and\\303\\244 rw master:2 propagate_from:3 - tmpfs tmp\\040fs rw
"""


def test_points_kinds_and_sources():
    root, cpu, odd = mounts.parse(TABLE)
    assert (root.point, root.kind, root.source) == ("/", "ext4", "/dev/vda")
    assert (cpu.point, cpu.kind) == ("/sys/fs/cgroup/cpu,cpuacct", "cgroup")
    assert odd.point == "/srv/with space\\andä"
    assert odd.source == "tmp fs"


def test_lines_that_are_none_are_left_out():
    assert mounts.parse("nonsense\n\n1 2 3 - \n") == []
