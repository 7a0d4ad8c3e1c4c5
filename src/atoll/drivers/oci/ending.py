"""The steps that take a placement away, each of which finds nothing to do when it has been done. Blocking.

They ask nobody: a placement can be removed whatever state its runtime is in, and when the runtime is not installed any more.
"""

from __future__ import annotations

import shutil

from atoll.base.errors import Code, Refused
from atoll.drivers.oci import look, saves
from atoll.drivers.oci.look import View
from atoll.hostops import cgroups, mounts, processes


def end_processes(view: View, placement_id: str, *, strays: bool) -> None:
    """Kill everything in the placement's groups, and with `strays` also runtimes of an earlier run that mention it.

    *Errors*: Refused(CLEANUP_FAILED) when something does not end.
    """

    def find() -> set[int]:
        pids = set(cgroups.pids(view.layout, view.group(placement_id)))
        if strays:
            pids |= look.find_strays(view, placement_id)
        return {pid for pid in pids if processes.alive(pid)}

    at_once = cgroups.kill_file(view.layout, view.group(placement_id))
    if at_once is not None and at_once.exists():
        at_once.write_text("1")
    elif cgroups.freezes(view.layout) and cgroups.frozen(view.layout, view.group(placement_id)):
        # A frozen process of v1 dies when it goes on, and with its end waiting for it nothing of the guest runs before.
        for pid in find():
            processes.send_signal(pid)
        cgroups.thaw(view.layout, view.group(placement_id))
    if left := processes.end_all(find):
        raise Refused(Code.CLEANUP_FAILED, f"processes {sorted(left)} do not end")


def end_runtime(view: View, placement_id: str) -> None:
    """Remove the runtime's files and every mount below the placement's directory."""
    view.runtime.let_go(placement_id)
    for path in view.runtime.state_paths(placement_id):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    mounts.unmount_below(view.directory(placement_id))


def end_groups(view: View, placement_id: str) -> None:
    """Remove the placement's control groups. *Errors*: Refused(CLEANUP_FAILED) naming those that cannot be."""
    if left := cgroups.remove(view.layout, view.group(placement_id)):
        raise Refused(Code.CLEANUP_FAILED, f"control groups {[str(path) for path in left]} cannot be removed")


def remove_directory(view: View, placement_id: str) -> None:
    """Remove record, disk, bundle and console. *Errors*: Refused(CLEANUP_FAILED) while something is mounted below."""
    directory = view.directory(placement_id)
    if directory.is_dir():
        if below := mounts.below(directory):
            raise Refused(Code.CLEANUP_FAILED, f"still mounted: {below}")
        saves.drop(directory)
        shutil.rmtree(directory)
