"""Linux containers by an OCI runtime: `runsc` (gVisor, the default), `crun`, and `runc` where crun refuses.

| file | what it holds |
|---|---|
| `driver` | the port's verbs, step by step; read it first |
| `config` | what an instance decides: directories, binaries, subnet |
| `slots`, `slotworks`, `ruleset` | network slots made ahead, how one is made, and the one nftables table that closes them |
| `record` | the file that says what a placement's directory is for |
| `bundle`, `seccomp` | config.json and what a container may call: pure |
| `runtime`, `runsc`, `crun` | how each runtime is started and where it leaves its state |
| `look`, `ending` | what the machine says of a placement, and the steps that take it away |
| `watching`, `console` | a guest's end by itself, and its last words |
| `probes`, `selftest` | self-checks; the one that boots a guest |

What a placement consists of on the machine, and the order in which it appears: directory with record, disk, slot, bundle (prepare);
control group, runtime state, processes (start). `remove` takes it away in the opposite order and then looks.
"""
