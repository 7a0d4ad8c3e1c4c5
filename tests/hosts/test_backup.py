"""Control's database is taken back to a backup by `atoll backup restore`, after a sandbox has left its machine for the artifact store."""

from __future__ import annotations

from pathlib import Path

from tests.hosts.guests import counting, resumed
from tests.hosts.rig import ATOLL, Rig, run, until


def test_what_left_its_machine_since_the_backup_comes_back_from_the_store(two: Rig, tmp_path: Path) -> None:
    first, _ = two.machines
    control = two.replicas[0]
    environment = two.environment(ATOLL_HOME=str(control.layout.home))
    guest, digest = counting(two, first)
    file = tmp_path / "control.backup"
    run(ATOLL, "backup", "create", file, env=environment)
    before = guest.count()
    guest.sh("echo since the backup >since")
    guest.suspend()
    guest.stored()
    two.call("POST", f"/v1/hosts/{two.hosts()[first.name]['id']}/drain")
    until(lambda: guest.view["placement"] is None, within_s=90, what=two.last_words)
    control.program.kill()
    run(ATOLL, "backup", "restore", file, env=environment)
    control.program.start()
    until(control.well, within_s=60, what=two.last_words)
    until(lambda: two.healthy() == len(two.machines), within_s=90, what=two.last_words)
    until(lambda: guest.view["state"] == "suspended", within_s=60, what=lambda: f"{guest.view}\n{two.last_words()}")
    resumed(guest)
    assert guest.count() >= before, "its memory is that of the suspend, not of the backup"
    assert guest.sh("cat since; sha256sum kept") == f"since the backup\n{digest}"
    guest.delete()
