"""Files of the oci driver: records, consoles, what runtimes leave, and what is made of it."""

import shutil
from pathlib import Path

import pytest

from atoll.drivers.oci import console, look
from atoll.drivers.oci import record as records
from atoll.drivers.oci.crun import Crun, SpareDisks
from atoll.drivers.oci.look import Traces, View
from atoll.drivers.oci.record import Record
from atoll.drivers.oci.runsc import Runsc
from atoll.drivers.port import Power
from atoll.hostops import loopdisk
from atoll.hostops.cgroups import Layout

ID = "plc_00000000000000000001"
OTHER = "plc_00000000000000000002"
RECORD = Record("ins_1", "hst_1", ID, "i1", 2, "runsc", slot=7, address="10.64.0.7")


def test_a_record_is_read_back_and_a_broken_one_is_none(tmp_path):
    records.write(tmp_path, RECORD)
    assert records.read(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == [records.FILE], "nothing unfinished"
    (tmp_path / records.FILE).write_text((tmp_path / records.FILE).read_text().replace("{", '{"later": 1, ', 1))
    assert records.read(tmp_path) == RECORD, "a newer agent's field is ignored"
    for text in ("", "{", "[]", '{"install_id": "ins_1"}'):
        (tmp_path / records.FILE).write_text(text)
        assert records.read(tmp_path) is None
    assert records.read(tmp_path / "absent") is None


def test_a_console_is_read_from_its_end_and_cut_to_half(tmp_path):
    assert console.tail(tmp_path, 10) == b""
    file = tmp_path / "console.log"
    appending = file.open("ab", buffering=0)
    appending.write(b"a" * 60 + b"b" * 60)
    assert console.tail(tmp_path, 5) == b"bbbbb"
    console.cut([tmp_path, tmp_path / "absent"], 200)
    assert file.stat().st_size == 120, "not too large yet"
    console.cut([tmp_path], 100)
    assert file.read_bytes() == b"b" * 50
    appending.write(b"c")
    appending.close()
    assert file.read_bytes() == b"b" * 50 + b"c", "the guest goes on after what is left"


def test_runscs_state_is_found_by_exact_id(tmp_path):
    runtime = Runsc(Path("/bin/true"), tmp_path, tmp_path)
    assert runtime.containers() == set()
    for name in (f"{ID}_sandbox:{ID}.state", f"{ID}_sandbox:{ID}.lock", f"runsc-{ID}.sock", f"{OTHER}_sandbox:{OTHER}.lock", "null-netns"):
        (tmp_path / name).touch()
    assert runtime.containers() == {ID, OTHER}
    assert len(runtime.state_paths(ID)) == 3
    assert [path.name for path in runtime.state_paths(OTHER)] == [f"{OTHER}_sandbox:{OTHER}.lock"]
    assert runtime.state_paths("plc_0000") == []


def test_cruns_state_is_a_directory(tmp_path):
    runtime = Crun(Path("/nowhere/crun"), Path("/nowhere/runc"), tmp_path, Layout(2, (("", tmp_path),)), probe=Path("/bin/true"))
    assert runtime.containers() == set()
    (tmp_path / "containers" / ID).mkdir(parents=True)
    (tmp_path / "containers" / ".cache").mkdir()
    assert runtime.containers() == {ID}
    assert runtime.state_paths(ID) == [tmp_path / "containers" / ID]
    assert runtime.state_paths(OTHER) == []


def test_runc_stands_in_where_there_is_no_crun(tmp_path):
    runc = tmp_path / "runc"
    runc.touch()
    assert Crun(tmp_path / "crun", runc, tmp_path, Layout(2, ()), probe=runc).binary == runc
    (tmp_path / "crun").touch()
    assert Crun(tmp_path / "crun", runc, tmp_path, Layout(2, ()), probe=runc).binary == tmp_path / "crun"


@pytest.mark.skipif(not shutil.which("mkfs.ext4"), reason="needs mkfs.ext4 (apt-get install e2fsprogs)")
def test_disks_are_sparse_copies_and_spare_ones_are_moved(tmp_path):
    disks = SpareDisks(tmp_path / "spare", 1)
    disks.open()
    disks.take(tmp_path / "first.img", 64)
    disks.close()  # waits until the spare one has been made
    (spare,) = (path.stat().st_ino for path in (tmp_path / "spare").glob("64-*.img"))
    with (tmp_path / "first.img").open("r+b") as file:
        file.write(b"mine")
    disks.open()
    disks.take(tmp_path / "second.img", 64)
    disks.take(tmp_path / "third.img", 64)
    disks.take(tmp_path / "small.img", 32)
    disks.close()
    for name, size_mib in (("first.img", 64), ("second.img", 64), ("small.img", 32)):
        info = (tmp_path / name).stat()
        assert info.st_size == size_mib << 20
        assert info.st_blocks * 512 < 4 << 20
    assert (tmp_path / "second.img").stat().st_ino == spare
    loopdisk.check(tmp_path / "second.img")
    assert (tmp_path / "third.img").read_bytes() == (tmp_path / "second.img").read_bytes() != (tmp_path / "first.img").read_bytes()


def test_a_copy_keeps_data_and_holes(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        for offset in (0, 1 << 20, (8 << 20) - 5):
            file.seek(offset)
            file.write(b"12345")
        file.truncate(16 << 20)
    loopdisk.copy(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 < 1 << 20
    (tmp_path / "empty").touch()
    loopdisk.copy(tmp_path / "empty", target)
    assert target.stat().st_size == 0


def test_a_copy_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "target").write_text("kept")
    with pytest.raises(FileNotFoundError):
        loopdisk.copy(tmp_path / "nowhere", tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target").read_text() == "kept"


def test_a_disk_that_cannot_be_made_leaves_nothing(tmp_path):
    with pytest.raises(OSError):
        loopdisk.make(tmp_path / "tiny.img", 0)
    assert list(tmp_path.iterdir()) == []


def traces(**found):
    nothing = {
        "directory": None,
        "record": None,
        "ran": False,
        "groups": (),
        "pids": (),
        "runtime_files": (),
        "slots": (),
        "mounts": (),
        "guest": None,
    }
    return Traces(**{**nothing, **found})


@pytest.mark.parametrize(
    ("found", "power"),
    [
        ({}, Power.ABSENT),
        ({"directory": Path("/d"), "record": RECORD}, Power.PREPARED),
        ({"slots": (7,)}, Power.PREPARED),
        ({"groups": (Path("/cg/x"),)}, Power.PREPARED),
        ({"directory": Path("/d"), "record": RECORD, "ran": True, "pids": (5,), "guest": 5}, Power.RUNNING),
        ({"directory": Path("/d"), "record": RECORD, "ran": True, "pids": (6,)}, Power.STOPPED),
        ({"directory": Path("/d"), "record": RECORD, "ran": True}, Power.STOPPED),
    ],
)
def test_what_traces_mean(found, power):
    seen = look.seen(traces(**found))
    assert seen.power is power
    if power is Power.RUNNING:
        assert (seen.address, seen.pid) == ("10.64.0.7", 5)
    else:
        assert bool(seen.leftovers) is (power is not Power.ABSENT)


def test_a_pid_in_a_file_is_nobodys_identity(tmp_path):
    """Only a process in the placement's own group can be its guest, whatever number the pid file has."""
    runtime = Runsc(Path("/bin/true"), tmp_path / "runsc", tmp_path)
    view = View(tmp_path / "sandboxes", Layout(2, (("", tmp_path / "cg"),)), "parent", runtime)
    view.directory(ID).mkdir(parents=True)
    (view.directory(ID) / "init.pid").write_text("1")
    found = look.traces(view, ID, {3: ID, 4: OTHER, 5: ""})
    assert found.guest is None
    assert found.slots == (3,)
    assert look.seen(found).power is Power.STOPPED
    assert look.known(view, {4: OTHER, 5: ""}) == {ID, OTHER}
