"""`--secret` and `--ssh`: what is read, and what is said of what cannot be."""

from __future__ import annotations

import base64
import socket
from pathlib import Path

import pytest

from atoll.base.errors import Refused
from atoll.cli.secrets import BYTES_MAX, brought


def test_files_variables_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"from a file\0")
    monkeypatch.setenv("MINE", "from a variable")
    found = brought(
        [f"id=a,src={tmp_path}/file", "type=env,id=b,env=MINE", "id=MINE", f"id=d,source={tmp_path}/file"],
        [f"{tmp_path}/file", f"work={tmp_path}/file"],
    )
    values = {name: base64.b64decode(value) for name, value in found.items()}
    file, variable = b"from a file\0", b"from a variable"
    assert values == {"a": file, "b": variable, "MINE": variable, "d": file, "ssh:default": file, "ssh:work": file}


@pytest.mark.parametrize(
    ("secrets", "keys", "words"),
    [
        (["a"], [], "is id=ID"), (["src=x"], [], "is id=ID"), (["id=a,src=x,env=y"], [], "is id=ID"), (["id=a,what=x"], [], "is id=ID"),
        (["id=a,src=/nothere"], [], "/nothere cannot be read"), (["id=a,env=NOT_THERE"], [], "no variable NOT_THERE"),
        ([], ["default="], "names no file"), ([], ["/nothere"], "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(secrets: list[str], keys: list[str], words: str) -> None:
    with pytest.raises(Refused, match=words):
        brought(secrets, keys)


def test_an_agents_socket_is_no_key_and_size_has_an_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        with pytest.raises(Refused, match="not forwarded"):
            brought([], [str(tmp_path / "agent")])
    (tmp_path / "large").write_bytes(b"x" * (BYTES_MAX + 1))
    with pytest.raises(Refused, match="more than"):
        brought([f"id=a,src={tmp_path}/large"], [])
