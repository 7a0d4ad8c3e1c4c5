"""config.json says what a guest may do, on both kinds of isolation."""

import json
from dataclasses import replace

import pytest

from atoll.domain.spec import Isolation, Spec
from atoll.drivers.oci import bundle, seccomp
from atoll.drivers.oci.bundle import Places
from atoll.drivers.oci.config import RuntimeKind
from atoll.drivers.port import Order

SPEC = Spec("default", "tpl", "sha256:1", "base", Isolation.GVISOR, 1500, 512, 2048, 256, 300, command=("/srv/start", "now"))
ORDER = Order("plc_00000000000000000001", "i00000000000000000001", 3, SPEC, "nonce-1", "cHVibGlj", "box")
PLACES = Places(
    rootfs="/cache/rootfs",
    guest_binary="/bin/atoll-guest",
    resolv_conf="/run/resolv.conf",
    namespace="/proc/1/fd/9",
    cgroup="atoll-abcdefgh/plc_00000000000000000001",
    nofile_max=20000,
    cgroup_binds=(("/sys/fs/cgroup/memory/atoll-abcdefgh/plc_1", "memory"),),
)
BOTH = pytest.mark.parametrize("kind", [RuntimeKind.RUNSC, RuntimeKind.CRUN])


def mounts(config):
    return {mount["destination"]: mount for mount in config["mounts"]}


@BOTH
def test_the_guest_is_started_and_told_who_it_is(kind):
    config = bundle.make(kind, ORDER, PLACES)
    process = config["process"]
    assert process["args"] == ["/.atoll/guest"]
    assert process["user"] == {"uid": 0, "gid": 0}
    assert config["hostname"] == "box"
    environment = dict(item.split("=", 1) for item in process["env"])
    told = json.loads(environment["ATOLL_GUEST_CONFIG"])
    assert told["sandbox_id"] == ORDER.sandbox_id
    assert told["placement_id"] == ORDER.placement_id
    assert (told["generation"], told["nonce"], told["public_key"]) == (3, "nonce-1", "cHVibGlj")
    assert told["command"] == ["/srv/start", "now"]
    assert told["pids_max"] == 256
    guest = mounts(config)["/.atoll/guest"]
    assert guest["source"] == "/bin/atoll-guest"
    assert "ro" in guest["options"]
    assert process["noNewPrivileges"] is False, "sudo works"


@BOTH
def test_limits_and_namespaces(kind):
    linux = bundle.make(kind, ORDER, PLACES)["linux"]
    assert linux["cgroupsPath"] == "/atoll-abcdefgh/plc_00000000000000000001"
    assert linux["resources"]["memory"]["limit"] == 512 << 20
    assert linux["resources"]["cpu"] == {"quota": 150_000, "period": 100_000}
    by_type = {item["type"]: item for item in linux["namespaces"]}
    assert {"pid", "ipc", "uts", "mount", "network"} <= set(by_type)
    assert by_type["network"]["path"] == "/proc/1/fd/9"


def test_the_hosts_process_limit_is_far_above_a_gvisor_guests_own():
    """A hit of the host's ends the whole sandbox: more than twice what the guest may have, and 20."""
    assert bundle.host_pids_max(RuntimeKind.RUNSC, 256) > 2 * 256 + 20
    assert bundle.host_pids_max(RuntimeKind.CRUN, 256) == 256


@BOTH
@pytest.mark.parametrize("memory_mib", [64, 512, 8192])
def test_temporary_file_systems_together_are_smaller_than_memory(kind, memory_mib):
    config = bundle.make(kind, replace(ORDER, spec=replace(SPEC, memory_mib=memory_mib)), PLACES)
    sizes = {}
    for destination in ("/tmp", "/dev/shm", "/run"):
        (size,) = [option for option in mounts(config)[destination]["options"] if option.startswith("size=")]
        sizes[destination] = int(size.removeprefix("size=").removesuffix("m"))
    assert all(size >= 1 for size in sizes.values())
    assert sum(sizes.values()) < memory_mib
    assert "mode=1777" in mounts(config)["/tmp"]["options"]


def test_a_shared_kernel_is_guarded():
    config = bundle.make(RuntimeKind.CRUN, ORDER, PLACES)
    capabilities = set(config["process"]["capabilities"]["bounding"])
    assert not capabilities & {
        f"CAP_{name}" for name in ("SYS_ADMIN", "NET_ADMIN", "SYS_MODULE", "SYS_PTRACE", "MKNOD", "SYS_RAWIO", "BPF", "DAC_READ_SEARCH")
    }
    assert {"CAP_CHOWN", "CAP_SETUID", "CAP_NET_RAW"} <= capabilities, "apt, sudo and ping work"
    linux = config["linux"]
    assert linux["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
    assert "/proc/kcore" in linux["maskedPaths"]
    assert "/proc/sys" in linux["readonlyPaths"]
    assert linux["resources"]["devices"] == [{"allow": False, "access": "rwm"}]
    assert "/etc/resolv.conf" not in mounts(config), "it is written to the guest's own disk"
    own = mounts(config)["/sys/fs/cgroup/memory"]
    assert own["source"].endswith("/plc_1")
    assert "ro" in own["options"]


def test_a_gvisor_guest_is_root_of_its_own_kernel():
    config = bundle.make(RuntimeKind.RUNSC, ORDER, PLACES)
    assert "CAP_SYS_ADMIN" in config["process"]["capabilities"]["effective"]
    assert "seccomp" not in config["linux"]
    assert mounts(config)["/sys/fs/cgroup"]["type"] == "cgroup"
    assert mounts(config)["/etc/resolv.conf"]["source"] == "/run/resolv.conf"
    # A writable bind mount would be room on the host's disk that nobody limits.
    assert all("ro" in mount["options"] for mount in config["mounts"] if mount["type"] == "bind")


def test_seccomp_allows_and_refuses_each_call_once():
    assert not set(seccomp.ALLOWED) & set(seccomp.REFUSED)
    assert len(set(seccomp.REFUSED)) == len(seccomp.REFUSED)
    plain = [name for rule in seccomp.profile("x86_64")["syscalls"] if "args" not in rule for name in rule["names"]]
    assert len(plain) == len(set(plain))
    for name in ("unshare", "setns", "mount", "bpf", "keyctl", "io_uring_setup", "kexec_load", "userfaultfd", "open_by_handle_at"):
        assert name in seccomp.REFUSED
    # Left out altogether, so ENOSYS: libc then uses clone, whose flags a filter can read.
    assert "clone3" not in seccomp.ALLOWED + seccomp.REFUSED


def test_clone_passes_only_without_namespaces():
    (rule,) = [rule for rule in seccomp.profile("x86_64")["syscalls"] if rule["names"] == ["clone"]]
    (argument,) = rule["args"]
    assert (argument["op"], argument["valueTwo"]) == ("SCMP_CMP_MASKED_EQ", 0)
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert argument["value"] & flag
    assert not argument["value"] & 0x00010F00, "threads are made with CLONE_VM, FS, FILES, SIGHAND and THREAD"


def test_an_architecture_without_rules_is_refused():
    with pytest.raises(KeyError):
        seccomp.profile("riscv64")
