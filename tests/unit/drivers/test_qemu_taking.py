"""What QEMU has written is taken as content: whatever else it has put there is refused."""

import os

import pytest

from atoll.base.errors import Refused
from atoll.drivers.qemu import machine


def test_a_file_is_taken(tmp_path):
    (tmp_path / "devices").write_bytes(b"state")
    machine._take(tmp_path / "devices", tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"state"
    assert not (tmp_path / "devices").exists()


@pytest.mark.parametrize("trap", ["link", "pipe", "directory", "empty", "huge"])
def test_anything_else_is_refused(tmp_path, trap):
    place = tmp_path / "devices"
    if trap == "link":
        (tmp_path / "secret").write_text("secret")
        place.symlink_to(tmp_path / "secret")
    elif trap == "pipe":
        os.mkfifo(place)
    elif trap == "directory":
        place.mkdir()
    elif trap == "empty":
        place.touch()
    else:
        with place.open("wb") as file:
            file.truncate(machine.DEVICES_BYTES_MAX + 1)
    with pytest.raises((Refused, OSError)):
        machine._take(place, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
