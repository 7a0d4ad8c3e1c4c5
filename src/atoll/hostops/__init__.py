"""Root primitives: small functions that change the machine, and readers that look at it. No policy, no state of Atoll's.

| module | what for |
|---|---|
| `processes` | find, watch (pidfd) and end processes, all read from /proc |
| `memfiles` | what a process has of memory in files without a name, held over its end |
| `cgroups` | one group per placement, on cgroup v1 and v2; what to write is a pure value |
| `netlink`, `links`, `conntrack` | veth pairs, addresses, routes and connection tracking, without ever starting `ip` |
| `namespaces` | network namespaces that are held by a file descriptor alone; a thread with mounts of its own |
| `nft` | nftables through libnftables, in this process |
| `mounts`, `loopdisk` | the mount table, mounts, sparse file systems on loop devices |
| `syscalls` | the few system calls that Python 3.11 does not have |

Everything here is synchronous and short; callers that must not wait use a thread. Imports `base` only. Read `links` and `cgroups`
first.
"""
