"""What is said to a sentry, and what is made of its answers: a socket's other end stands in for it."""

import array
import contextlib
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from atoll.base.errors import Code, Refused
from atoll.drivers.oci import sentry


class Other:
    """The other end: takes one message, writes into what came with it, and answers."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        here = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        self._socket.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
        self._socket.listen()
        self._answer = answer
        self.heard: dict[str, object] = {}
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        line, _ = self._socket.accept()
        with line:
            fds = array.array("i")
            said, beside, _, _ = line.recvmsg(65536, socket.CMSG_LEN(4 * fds.itemsize))
            for _, _, data in beside:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            self.heard = json.loads(said)
            for number, fd in enumerate(fds):
                os.write(fd, b"x" * (number + 1))
                os.close(fd)
            # In pieces: there is no frame around it.
            with contextlib.suppress(ConnectionError):  # it is not read to its end
                for at in range(0, len(self._answer), 1000):
                    line.sendall(self._answer[at : at + 1000])

    def end(self) -> None:
        self._thread.join()
        self._socket.close()


def said(tmp_path: Path, answer: bytes, timeout_s: float = 5.0) -> Other:
    other = Other(tmp_path / "runsc-plc.sock", answer)
    try:
        sentry.checkpoint(tmp_path / "runsc-plc.sock", tmp_path, timeout_s=timeout_s)
    finally:
        other.end()
    return other


@pytest.mark.parametrize("deep", ["", "x" * 100])
def test_a_checkpoint_is_asked_for_with_its_files(tmp_path: Path, deep: str) -> None:
    place = tmp_path / deep
    place.mkdir(exist_ok=True)
    other = said(place, b'{"success":true,"err":"","result":{}}\n')
    assert other.heard["method"] == "containerManager.Checkpoint"
    assert other.heard["arg"] == {"metadata": {"compression": "none"}, "have_pages_file": True, "Resume": True}
    sizes = {name: (place / name).stat().st_size for name in sentry.IMAGE_FILES}
    assert sizes == {"checkpoint.img": 1, "pages_meta.img": 2, "pages.img": 3}
    assert {(place / name).stat().st_mode & 0o777 for name in sentry.IMAGE_FILES} == {0o600}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"success":false,"err":"no space left on device"}', "no space left"),
        (b'{"success":1,"err":""}', "has not done"),
        (b"{}", "has not done"),
        (b"[]", "is no answer"),
        (b"", "it has ended"),
        (b'{"success":tr', "it has ended"),
        (b'{"x":"' + b"y" * (2 * sentry.ANSWER_BYTES_MAX), "does not answer"),
    ],
)
def test_what_is_no_yes_is_a_save_that_failed(tmp_path: Path, answer: bytes, words: str) -> None:
    with pytest.raises(Refused, match=words) as told:
        said(tmp_path, answer)
    assert told.value.code is Code.SAVE_FAILED


def test_who_is_not_there_or_silent_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(Refused) as told:
        sentry.checkpoint(tmp_path / "runsc-plc.sock", tmp_path, timeout_s=5.0)
    assert told.value.code is Code.SAVE_FAILED
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        with pytest.raises(Refused, match="within") as told:
            sentry.call(tmp_path / "silent.sock", "x", {}, timeout_s=0.05, code=Code.SAVE_FAILED)
    assert told.value.code is Code.SAVE_FAILED


def test_files_that_are_there_are_nobodys_to_write_over(tmp_path: Path) -> None:
    (tmp_path / "pages.img").touch()
    with pytest.raises(FileExistsError):
        sentry.checkpoint(tmp_path / "runsc-plc.sock", tmp_path, timeout_s=5.0)
