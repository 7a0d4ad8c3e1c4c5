"""What a container that shares the host's kernel may call. Written by purpose, so that each line can be argued about.

Everything not named here does not exist for the guest (ENOSYS, so that libraries fall back); what is refused by name answers EPERM,
since programs ask for it and should hear "no". It is narrower than Docker's default: no io_uring, no keyrings, no 32-bit calls, only
the address families that a guest needs. No call that makes a namespace passes: `unshare` and `setns` are refused, `clone` passes without
CLONE_NEW* flags, and `clone3`, whose flags a filter cannot read, answers ENOSYS so that libc uses `clone`.
Source: research/isolation.md A4 (podman's profile lets CLONE_NEWUSER pass); syscalls(2).
"""

from __future__ import annotations

from typing import Any, Final

EPERM: Final = 1
ENOSYS: Final = 38

FILES: Final = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate fchdir fchmod
fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstatfs fsync ftruncate
futimesat getcwd getdents getdents64 getxattr ioctl lchown lgetxattr link linkat listxattr llistxattr lremovexattr lseek lsetxattr lstat
mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read
readahead readlink readlinkat readv removexattr rename renameat renameat2 rmdir sendfile setxattr splice stat statfs statx symlink symlinkat
sync sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice write writev
getxattrat setxattrat listxattrat removexattrat
"""
WATCHING: Final = """
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 inotify_add_watch inotify_init inotify_init1
inotify_rm_watch fanotify_mark io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit pipe pipe2 poll ppoll pselect6 select
signalfd signalfd4
"""
PROCESSES: Final = """
arch_prctl capget capset execve execveat exit exit_group fork getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority
getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kcmp modify_ldt pidfd_open pidfd_send_signal prctl prlimit64
process_mrelease process_vm_readv process_vm_writev ptrace rseq sched_get_priority_max sched_get_priority_min sched_getaffinity
sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler
sched_yield seccomp set_robust_list get_robust_list set_tid_address setfsgid setfsuid setgid setgroups setpgid setpriority setregid
setresgid setresuid setreuid setrlimit setsid setuid times vfork wait4 waitid getcpu restart_syscall chroot
landlock_add_rule landlock_create_ruleset landlock_restrict_self riscv_flush_icache
"""
SIGNALS: Final = """
alarm kill pause rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo
sigaltstack tgkill tkill
"""
MEMORY: Final = """
brk cachestat futex futex_requeue futex_wait futex_waitv futex_wake get_mempolicy madvise map_shadow_stack mbind membarrier memfd_create
memfd_secret mincore mlock mlock2 mlockall mmap mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect
remap_file_pages set_mempolicy
"""
SOCKETS: Final = """
accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto setsockopt shutdown
socketpair
"""
IPC: Final = """
mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd semctl semget semop semtimedop shmat
shmctl shmdt shmget
"""
TIME: Final = """
adjtimex clock_adjtime clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer time timer_create timer_delete
timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
ABOUT_THE_MACHINE: Final = "getrandom sysinfo uname"

ALLOWED: Final = tuple(sorted({*f"{FILES} {WATCHING} {PROCESSES} {SIGNALS} {MEMORY} {SOCKETS} {IPC} {TIME} {ABOUT_THE_MACHINE}".split()}))

REFUSED: Final = (
    "acct", "add_key", "bpf", "clock_settime", "delete_module", "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick",
    "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kexec_file_load", "kexec_load", "keyctl",
    "lookup_dcookie", "mount", "mount_setattr", "move_mount", "move_pages", "migrate_pages", "open_by_handle_at", "open_tree",
    "perf_event_open", "pidfd_getfd", "pivot_root", "process_madvise", "quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname",
    "sethostname", "setns", "settimeofday", "swapoff", "swapon", "syslog", "umount2", "unshare", "userfaultfd", "vhangup",
)  # fmt: skip

NAMESPACE_FLAGS: Final = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
ADDRESS_FAMILIES: Final = {1: "AF_UNIX", 2: "AF_INET", 10: "AF_INET6", 16: "AF_NETLINK", 17: "AF_PACKET"}
PERSONALITIES: Final = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, 32-bit uname, uname26, both, and asking."""

_ARCHITECTURES: Final = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}


def _rule(names: list[str], action: str, *, errno: int | None = None, argument: tuple[int, int, str] | None = None) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": names, "action": action}
    if errno is not None:
        rule["errnoRet"] = errno
    if argument is not None:
        index, value, operator = argument
        rule["args"] = [{"index": index, "value": value, "op": operator}]
        if operator == "SCMP_CMP_MASKED_EQ":
            rule["args"][0]["valueTwo"] = 0
    return rule


def profile(arch: str) -> dict[str, Any]:
    """The `linux.seccomp` object of config.json. *Errors*: KeyError for an architecture that has no rules here."""
    allow, refuse = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
    return {
        "defaultAction": refuse,
        "defaultErrnoRet": ENOSYS,
        "architectures": [_ARCHITECTURES[arch]],
        "syscalls": [
            _rule(list(ALLOWED), allow),
            _rule(list(REFUSED), refuse, errno=EPERM),
            _rule(["clone"], allow, argument=(0, NAMESPACE_FLAGS, "SCMP_CMP_MASKED_EQ")),
            *(_rule(["socket"], allow, argument=(0, family, "SCMP_CMP_EQ")) for family in ADDRESS_FAMILIES),
            *(_rule(["personality"], allow, argument=(0, value, "SCMP_CMP_EQ")) for value in PERSONALITIES),
        ],
    }
