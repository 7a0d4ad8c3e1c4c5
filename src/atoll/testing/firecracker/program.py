"""Firecracker: `firecracker --id ID ... --jail ROOT --uid N --gid N --api-sock PATH`, as the jailer of this room starts it.

Theory of operation. A helper that stays outside (`engine.py`) is split off; then the process enters the root and becomes the user. From then on it is
what a real one is: it opens what requests name, by those names, with that user's rights, and hands the open files to the helper. A request is
checked against the description, then against the order of things; what either refuses is answered with 400 and changes nothing.
"""

from __future__ import annotations

import argparse
import encodings.idna  # noqa: F401 - found before the root is another
import json
import os
import socket
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any, Final

from atoll.testing.firecracker import engine, rules
from atoll.testing.firecracker.contract import VARIABLE, Contract
from atoll.testing.firecracker.rules import Do, Fault, Told

VERSION: Final = "1.17.0-dev"
BODY_BYTES_MAX: Final = 51200


class Program:
    """One machine's process. `helper`: carries out what is allowed."""

    def __init__(self, name: str, contract: Contract | None, helper: engine.Helper) -> None:
        self._name = name
        self._contract = contract
        self._helper = helper
        self._told = Told()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any] | None]:
        """Status and content for a request. `body`: None where there is none."""
        problem = None if self._contract is None else self._contract.problem(method, path, body)
        if problem is None and method != "GET" and not isinstance(body, dict):
            problem = "the body is no object"
        if problem is not None:
            return 400, {"fault_message": problem}
        try:
            if method == "GET":
                return 200, self._look(path)
            done = rules.allow(self._told, method, path, body)
            self._carry_out(done, path, body)
            rules.note(self._told, method, path, body, done)
        except (Fault, engine.Failed, OSError, KeyError) as fault:
            return 400, {"fault_message": f"{type(fault).__name__}: {fault}"}
        return 204, None

    def _look(self, path: str) -> dict[str, Any]:
        match path:
            case "/":
                return {"app_name": "Firecracker", "id": self._name, "state": self._told.state.value, "vmm_version": VERSION}
            case "/version":
                return {"firecracker_version": VERSION}
            case "/machine-config":
                return self._told.by_path.get(path, {"vcpu_count": 1, "mem_size_mib": 128})
            case _:
                raise Fault(f"nothing is said of {path}")

    def _carry_out(self, done: Do, path: str, body: dict[str, Any]) -> None:
        steps: dict[Do, Callable[[], None]] = {
            Do.NOTHING: lambda: self._look_at_files(path, body),
            Do.START: self._start,
            Do.HALT: lambda: self._helper.ask("halt"),
            Do.GO_ON: lambda: self._helper.ask("go on"),
            Do.SNAPSHOT: lambda: self._snapshot(body),
            Do.LOAD: lambda: self._load(body),
        }
        steps[done]()

    def _look_at_files(self, path: str, body: dict[str, Any]) -> None:
        """What it is told of must be there for it, when it is told."""
        if path == "/boot-source":
            for name in ("kernel_image_path", "initrd_path"):
                if name in body:
                    os.close(os.open(body[name], os.O_RDONLY))
        elif path.startswith("/drives/") and "path_on_host" in body:
            os.close(_open_drive(body))

    def _start(self) -> None:
        told = self._told
        source, files = told.by_path["/boot-source"], {}
        kernel = files["kernel"] = os.open(source["kernel_image_path"], os.O_RDONLY | os.O_CLOEXEC)
        if os.pread(kernel, 4, 0) != b"\x7fELF":
            raise Fault("the kernel is no ELF file")
        if "initrd_path" in source:
            files["initrd"] = os.open(source["initrd_path"], os.O_RDONLY | os.O_CLOEXEC)
        self._begin("start", self._machine(), files, words=source.get("boot_args", ""))

    def _machine(self) -> dict[str, Any]:
        """All that a machine is made of, as a snapshot keeps it."""
        told = self._told
        config = told.by_path["/machine-config"]
        return {
            "vcpus": config["vcpu_count"],
            "memory_mib": config["mem_size_mib"],
            "drives": told.drives(),
            "networks": told.networks(),
            "vsock": told.by_path.get("/vsock"),
            "entropy": "/entropy" in told.by_path,
        }

    def _begin(self, verb: str, machine: dict[str, Any], files: dict[str, int], **more: Any) -> None:
        for drive in machine["drives"]:
            files[f"drive {drive['drive_id']}"] = _open_drive(drive)
        for network in machine["networks"]:
            files[f"tap {network['iface_id']}"] = engine.open_tap(network["host_dev_name"])
        if machine["vsock"]:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(machine["vsock"]["uds_path"])
            listener.listen()
            files["vsock"] = listener.detach()
        self._helper.ask(verb, files, machine=machine, **more)

    def _snapshot(self, body: dict[str, Any]) -> None:
        whole = body.get("snapshot_type", "Full") == "Full"
        size = self._machine()["memory_mib"] << 20
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        files = {"memory": os.open(body["mem_file_path"], flags, 0o600), "state": os.open(body["snapshot_path"], flags | os.O_TRUNC, 0o600)}
        if os.fstat(files["memory"]).st_size != size:
            os.ftruncate(files["memory"], 0)
            os.ftruncate(files["memory"], size)
        self._helper.ask("snapshot", files, whole=whole, machine=self._machine())

    def _load(self, body: dict[str, Any]) -> None:
        memory = body.get("mem_backend", {}).get("backend_path", body.get("mem_file_path"))
        state = Path(body["snapshot_path"]).read_bytes()
        machine = engine.machine_of(state)
        for override in body.get("network_overrides", []):
            found = [network for network in machine["networks"] if network["iface_id"] == override["iface_id"]]
            if not found:
                raise Fault(f"there is no interface {override['iface_id']}")
            found[0]["host_dev_name"] = override["host_dev_name"]
        if "vsock_override" in body:
            machine["vsock"] |= {"uds_path": body["vsock_override"]["uds_path"]}
        files = {"memory": os.open(memory, os.O_RDONLY | os.O_CLOEXEC), "state": os.open(body["snapshot_path"], os.O_RDONLY | os.O_CLOEXEC)}
        if os.fstat(files["memory"]).st_size != machine["memory_mib"] << 20:
            raise Fault("the memory file has not the size of the machine's memory")
        self._begin("load", machine, files)
        self._told.by_path |= _told_of(machine)
        if body.get("resume_vm"):
            self._helper.ask("go on")


def _told_of(machine: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {f"/drives/{drive['drive_id']}": drive for drive in machine["drives"]}
    found |= {f"/network-interfaces/{network['iface_id']}": network for network in machine["networks"]}
    found["/machine-config"] = {"vcpu_count": machine["vcpus"], "mem_size_mib": machine["memory_mib"]}
    if machine["vsock"]:
        found["/vsock"] = machine["vsock"]
    return {**found, **({"/entropy": {}} if machine["entropy"] else {})}


def _open_drive(drive: dict[str, Any]) -> int:
    return os.open(drive["path_on_host"], (os.O_RDONLY if drive["is_read_only"] else os.O_RDWR) | os.O_CLOEXEC)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > BODY_BYTES_MAX:
            self._say(413, {"fault_message": "the body is too large"})
            return
        text = self.rfile.read(size)
        try:
            body = json.loads(text) if text else None
        except ValueError as error:
            self._say(400, {"fault_message": f"the body is not valid JSON: {error}"})
            return
        self._say(*self.server.program.answer(self.command, self.path, body))

    do_GET = do_PUT = do_PATCH = _serve  # noqa: N815 - as the library has it

    def _say(self, status: int, content: dict[str, Any] | None) -> None:
        text = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if text:
            self.wfile.write(text)

    def address_string(self) -> str:
        return "local"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's
        """Nothing: the output is the guest's console."""


class _Server(UnixStreamServer):
    program: Program


def _become(root: str, uid: int, gid: int) -> None:
    os.chroot(root)
    os.chdir("/")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def main(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        sys.stdout.write(f"Firecracker v{VERSION}\n")
        return
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--id", default="anonymous-instance")
    for name in ("--start-time-us", "--start-time-cpu-us", "--parent-cpu-time-us"):
        parser.add_argument(name)
    parser.add_argument("--jail")
    parser.add_argument("--uid", type=int, default=os.getuid())
    parser.add_argument("--gid", type=int, default=os.getgid())
    parser.add_argument("--engine", choices=["qemu", "none"], default="qemu")
    parser.add_argument("--api-sock", default="/run/firecracker.socket")
    told = parser.parse_args(arguments)
    described = os.environ.get(VARIABLE)
    contract = Contract.at(Path(described)) if described else None
    aside = Path(told.jail).parent / "helper" if told.jail else None
    helper = engine.split_off(aside) if told.engine == "qemu" else engine.Idle()
    if told.jail:
        _become(told.jail, told.uid, told.gid)
    server = _Server(told.api_sock, _Handler)
    server.program = Program(told.id, contract, helper)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
