"""What a machine is by Firecracker: read off what its API is told, held against the strict one's rules and, where it is given, the description."""

import hashlib
import os
import socket
import threading
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.drivers.firecracker import api, jailer, memory, programs, shape
from atoll.drivers.firecracker.config import FirecrackerConfig, Rate, Rates
from atoll.drivers.firecracker.machine import to_guest
from atoll.programs import machines
from atoll.testing.firecracker import engine, rules
from atoll.testing.firecracker.contract import VARIABLE, Contract
from atoll.testing.firecracker.program import Program
from atoll.testing.firecracker.rules import Told

RATES = Rates(disk_bytes=Rate(200 << 20, burst=1 << 30), disk_operations=Rate(5000), network_bytes=Rate(5), network_packets=Rate(1))
EVERYTHING = [
    *shape.fresh(shape.Shape(512, 2, RATES)),
    shape.halted(),
    shape.snapshot(whole=True),
    shape.snapshot(whole=False),
    shape.going(),
]


def described():
    if VARIABLE not in os.environ:
        pytest.skip(f"needs {VARIABLE}, the path of Firecracker's OpenAPI description (firecracker.yaml)")
    return Contract.at(Path(os.environ[VARIABLE]))


def bodies():
    return {path: body for _, path, body in shape.fresh(shape.Shape(512, 2, RATES))}


def test_all_that_is_said_is_as_described():
    contract = described()
    for method, path, body in [*EVERYTHING, *shape.loaded()]:
        assert contract.problem(method, path, body) is None, path


def test_what_is_not_described_is_refused():
    contract = described()
    drive = bodies()["/drives/disk"]
    wrong = [
        ("POST", "/actions", {"action_type": "InstanceStart"}),
        ("PUT", "/action", {}),
        ("PUT", "/actions", {"action_type": "Start"}),
        ("PUT", "/actions", None),
        ("PUT", "/drives/disk", {**drive, "readonly": True}),
        ("PUT", "/drives/disk", {name: value for name, value in drive.items() if name != "is_root_device"}),
        ("PUT", "/drives/other", drive),
        ("PUT", "/machine-config", {"vcpu_count": 33, "mem_size_mib": 128}),
        ("PUT", "/machine-config", {"vcpu_count": True, "mem_size_mib": 128}),
        ("PUT", "/vsock", {"guest_cid": 2, "uds_path": "/v"}),
        ("PUT", "/drives/disk", {**drive, "rate_limiter": {"bandwidth": {"size": 1}}}),
        ("PATCH", "/vm", {"state": "Stopped"}),
        ("GET", "/", {"x": 1}),
    ]
    for method, path, body in wrong:
        assert contract.problem(method, path, body), (method, path, body)


def test_every_path_is_inside_of_the_jail():
    named = shape.paths([*EVERYTHING, *shape.loaded()])
    assert len(named) > 10
    assert all(path.startswith("/vm/") or path in ("/image", "/kernel", "/initrd") for path in named), named


def test_a_machine_may_write_its_own_disk_alone():
    drives = {path: body for path, body in bodies().items() if path.startswith("/drives/")}
    assert [path for path, body in drives.items() if not body["is_read_only"]] == ["/drives/disk"]
    assert [path for path, body in drives.items() if body["is_root_device"]] == ["/drives/image"]
    assert list(drives) == ["/drives/image", "/drives/disk", "/drives/config"], "the guest knows them by this order"
    assert drives["/drives/disk"]["rate_limiter"] == {
        "bandwidth": {"size": 20 << 20, "refill_time": 100, "one_time_burst": 1 << 30},
        "ops": {"size": 500, "refill_time": 100},
    }
    assert "rate_limiter" not in drives["/drives/image"]
    network = bodies()["/network-interfaces/net"]
    bucket = {"size": 1, "refill_time": 100}
    assert network["rx_rate_limiter"] == network["tx_rate_limiter"] == {"bandwidth": bucket, "ops": bucket}
    assert bodies()["/machine-config"]["track_dirty_pages"], "else no difference can be saved"
    assert "/entropy" in bodies()


@pytest.mark.parametrize(("cpu_millis", "cores"), [(1, 1), (1000, 1), (1001, 2), (64000, 32)])
def test_cores(cpu_millis, cores):
    assert shape.cpus(cpu_millis) == cores


def test_a_jailed_name_is_one_that_the_jailer_takes():
    assert jailer.instance_id("plc_abc123") == "plc-abc123"
    jail = jailer.Jail(programs.Programs(Path("/p/firecracker"), Path("/p/jailer"), "1"), Path("/d"), "plc-a", "/proc/1/fd/3", 1 << 30)
    words = jailer.program(jail, 4711)
    own, theirs = words[: words.index("--")], words[words.index("--") + 1 :]
    assert own[:1] == ["/p/jailer"]
    assert own[own.index("--uid") + 1] == own[own.index("--gid") + 1] == "4711"
    assert own[own.index("--netns") + 1] == "/proc/1/fd/3"
    assert f"fsize={(1 << 30) + (64 << 20)}" in own
    assert theirs == ["--api-sock", "/vm/run/api.sock"]
    assert jail.root == Path("/d/jail/firecracker/plc-a/root")


class Order:
    """The order of things, asked as a process would be."""

    def __init__(self):
        self.told = Told()

    def say(self, method, path, body):
        done = rules.allow(self.told, method, path, body)
        rules.note(self.told, method, path, body, done)
        return done

    def fresh(self):
        for request in shape.fresh(shape.Shape(512, 1)):
            self.say(*request)
        return self


def test_the_driver_keeps_the_order_of_things():
    order = Order().fresh()
    for request in (shape.halted(), shape.snapshot(whole=True), shape.snapshot(whole=False), shape.going(), shape.halted()):
        order.say(*request)
    other = Order()
    for request in shape.loaded():
        other.say(*request)
    assert other.told.state is rules.State.RUNNING
    other.say(*shape.halted())
    other.say(*shape.snapshot(whole=False))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/drives/disk", {"drive_id": "disk", "is_root_device": False, "is_read_only": False, "path_on_host": "/x"}),
        ("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": 128}),
        ("PUT", "/vsock", {"guest_cid": 3, "uds_path": "/x"}),
        ("PUT", "/entropy", {}),
        ("PUT", "/boot-source", {"kernel_image_path": "/x"}),
        ("PUT", "/actions", {"action_type": "InstanceStart"}),
        ("PUT", "/snapshot/load", {"snapshot_path": "/x", "mem_file_path": "/y"}),
        ("PUT", "/snapshot/create", {"snapshot_path": "/x", "mem_file_path": "/y"}),
        ("PATCH", "/drives/other", {"drive_id": "other"}),
        ("PUT", "/balloon", {"amount_mib": 1, "deflate_on_oom": True}),
    ],
)
def test_what_comes_too_late_is_refused(method, path, body):
    order = Order().fresh()
    with pytest.raises(rules.Fault):
        order.say(method, path, body)


@pytest.mark.parametrize(
    ("before", "method", "path", "body"),
    [
        ([], "PATCH", "/vm", {"state": "Paused"}),
        ([], "PUT", "/actions", {"action_type": "InstanceStart"}),
        ([], "PUT", "/snapshot/create", {"snapshot_path": "/x", "mem_file_path": "/y"}),
        ([("PUT", "/entropy", {})], "PUT", "/snapshot/load", {"snapshot_path": "/x", "mem_file_path": "/y"}),
        ([], "PUT", "/snapshot/load", {"snapshot_path": "/x"}),
        ([], "PUT", "/snapshot/load", {"snapshot_path": "/x", "mem_file_path": "/y", "mem_backend": {}}),
        ([("PUT", "/metrics", {})], "PUT", "/metrics", {}),
        ([], "PUT", "/drives/disk", {"drive_id": "disk", "is_root_device": False, "socket": "/x"}),
    ],
)
def test_what_comes_too_early_is_refused(before, method, path, body):
    order = Order()
    for request in before:
        order.say(*request)
    with pytest.raises(rules.Fault):
        order.say(method, path, body)


def test_a_difference_takes_that_pages_are_followed():
    order = Order()
    for method, path, body in shape.fresh(shape.Shape(512, 1)):
        order.say(method, path, {**body, "track_dirty_pages": False} if path == "/machine-config" else body)
    order.say(*shape.halted())
    with pytest.raises(rules.Fault, match="followed"):
        order.say(*shape.snapshot(whole=False))
    order.say(*shape.snapshot(whole=True))


def test_a_process_of_the_strict_one_answers_as_a_real_one(tmp_path):
    program = Program("plc-1", None, engine.Idle())
    assert program.answer("GET", "/", None)[1]["state"] == "Not started"
    status, said = program.answer("PUT", "/actions", {"action_type": "InstanceStart"})
    assert status == 400
    assert "boot-source" in said["fault_message"]
    assert program.answer("PUT", "/boot-source", {"kernel_image_path": str(tmp_path / "none")})[0] == 400, "it must be there"
    assert program.answer("PUT", "/vm", None)[0] == 400
    assert program.answer("PUT", "/entropy", {}) == (204, None)


# -- programs


@pytest.fixture
def pinned(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    digests = {}
    for name in ("firecracker", "jailer"):
        (there / name).write_text(f"#!/bin/sh\necho Firecracker v9 {name}\n")
        (there / name).chmod(0o755)
        digests[name] = hashlib.sha256((there / name).read_bytes()).hexdigest()
    return FirecrackerConfig(
        tmp_path,
        firecracker=there / "firecracker",
        firecracker_sha256=digests["firecracker"],
        jailer=there / "jailer",
        jailer_sha256=digests["jailer"].upper(),
    )


def test_what_is_run_is_a_copy_of_what_was_looked_at(tmp_path, pinned):
    found = programs.have(pinned, tmp_path / "run")
    assert found.version == "Firecracker v9 firecracker"
    assert found.firecracker.read_bytes() == pinned.firecracker.read_bytes()
    assert found.firecracker.is_relative_to(tmp_path / "run")
    assert found.firecracker.parent.stat().st_mode & 0o077 == 0
    assert programs.have(pinned, tmp_path / "run") == found


@pytest.mark.parametrize("name", ["firecracker", "jailer"])
def test_a_program_with_another_digest_is_refused(tmp_path, pinned, name):
    with getattr(pinned, name).open("a") as file:
        file.write("# changed\n")
    with pytest.raises(Refused, match="SHA-256") as refused:
        programs.have(pinned, tmp_path / "run")
    assert refused.value.code is Code.RUNTIME_UNTRUSTED
    getattr(pinned, name).unlink()
    with pytest.raises(Refused) as refused:
        programs.have(pinned, tmp_path / "run")
    assert refused.value.code is Code.RUNTIME_MISSING


def test_the_operators_file_is_read(tmp_path):
    file = tmp_path / "firecracker.toml"
    assert machines.pinned(file, tmp_path) is None
    both = f'firecracker = {{ path = "/f", sha256 = "{"A" * 64}" }}\njailer = {{ path = "/j", sha256 = "{"b" * 64}" }}\n'
    file.write_text(f"{both}[rates]\ndisk_bytes = {{ per_s = 10, burst = 5 }}\n")
    found = machines.pinned(file, tmp_path)
    assert (found.firecracker, found.firecracker_sha256, found.jailer) == (Path("/f"), "a" * 64, Path("/j"))
    assert found.rates == Rates(disk_bytes=Rate(10, 5))
    for broken in ("nonsense", "", both.replace("/f", "f"), both.replace("bb", "x"), f"{both}[rates]\nother = {{ per_s = 1 }}\n"):
        file.write_text(broken)
        with pytest.raises(Refused) as refused:
            machines.pinned(file, tmp_path)
        assert refused.value.code is Code.SETUP_FAILED


# -- memory


def test_what_has_changed_is_laid_over(tmp_path):
    whole, changed = tmp_path / "memory", tmp_path / "changed"
    whole.write_bytes(b"a" * (8 << 12))
    memory.blank(changed, 8 << 12)
    with changed.open("r+b") as file:
        file.seek(2 << 12)
        file.write(bytes(1 << 12))
        file.seek(5 << 12)
        file.write(b"b" * (1 << 12))
    assert memory.lay_over(changed, whole) == 2 << 12
    pages = [whole.read_bytes()[place << 12 : (place + 1) << 12] for place in range(8)]
    assert [page[:1] for page in pages] == [b"a", b"a", b"\0", b"a", b"a", b"b", b"a", b"a"], "what became zero is zero"
    memory.blank(changed, 4 << 12)
    with pytest.raises(OSError, match="size"):
        memory.lay_over(changed, whole)


# -- talk


class Peer:
    """Answers each connection to a socket with the same bytes, after it has heard a line."""

    def __init__(self, directory, name, answer):
        self.heard = []
        self._answer = answer
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(directory / name))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            with peer:
                self.heard.append(peer.recv(65536))
                while b"PUT " in self.heard[-1] and not self.heard[-1].endswith(b"}"):
                    self.heard[-1] += peer.recv(65536)
                peer.sendall(self._answer)

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b'HTTP/1.1 400 Bad Request\r\nContent-Length: 26\r\n\r\n{"fault_message": "never"}', "never"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\n[12]", "500"),
        (b"nonsense", "does not answer"),
        (b"", "does not answer"),
    ],
)
def test_a_refusal_has_firecrackers_words_and_the_conversations_code(tmp_path, answer, told):
    peer = Peer(tmp_path, api.SOCKET, answer)
    try:
        with pytest.raises(Refused, match=told) as refused:
            api.Api(tmp_path, code=Code.SAVE_FAILED).put("/actions", {"action_type": "InstanceStart"})
    finally:
        peer.close()
    assert refused.value.code is Code.SAVE_FAILED
    assert peer.heard[0].startswith(b"PUT /actions HTTP/1.1\r\n")


@pytest.mark.parametrize(("answer", "fine"), [(b"OK 1073\nrest", True), (b"", False), (b"NO\n", False), (b"x" * 200, False)])
def test_a_port_of_the_guest_is_reached_by_a_line(tmp_path, answer, fine):
    peer = Peer(tmp_path, Path(shape.VSOCK).name, answer)
    try:
        if fine:
            with to_guest(tmp_path, 1024, timeout_s=5.0) as guest:
                assert guest.recv(16) == b"rest", "what follows is the guest's"
        else:
            with pytest.raises(OSError, match="listens"):
                to_guest(tmp_path, 1024, timeout_s=5.0)
    finally:
        peer.close()
    assert peer.heard == [b"CONNECT 1024\n"]
