"""`--secret` and `--ssh`: what is read, and what is said of what cannot be."""

from __future__ import annotations

import base64
import socket
from pathlib import Path

import pytest

from atoll.base.errors import Refused
from atoll.cli.dockerfile.reading import read
from atoll.cli.secrets import BYTES_MAX, brought, check


def test_files_variables_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"from a file\0")
    monkeypatch.setenv("MINE", "from a variable")
    found = brought(
        [f"id=a,src={tmp_path}/file", "type=env,id=b,env=MINE", "id=MINE", f"id=d,source={tmp_path}/file"],
        [f"{tmp_path}/file", f"work={tmp_path}/file"],
    )
    values = {name: base64.b64decode(value) for name, value in found.values.items()}
    file, variable = b"from a file\0", b"from a variable"
    assert values == {"a": file, "b": variable, "MINE": variable, "d": file, "ssh:default": file, "ssh:work": file}


@pytest.mark.parametrize(
    ("secrets", "keys", "words"),
    [
        (["a"], [], "is id=ID"), (["src=x"], [], "is id=ID"), (["id=a,src=x,env=y"], [], "is id=ID"), (["id=a,what=x"], [], "is id=ID"),
        (["id=a,src=/nothere"], [], "/nothere cannot be read"), (["id=a,env=NOT_THERE"], [], "no variable NOT_THERE"),
        ([], ["/nothere"], "cannot be read"), ([], ["work=nothere"], "cannot be read"), ([], ["work=a,b"], "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(secrets: list[str], keys: list[str], words: str) -> None:
    with pytest.raises(Refused, match=words):
        brought(secrets, keys)


def test_an_agent_of_this_machine_is_refused_with_the_line_that_wants_it(tmp_path: Path) -> None:
    """However Docker's users say it."""
    (tmp_path / "key").write_text("a key")
    built = read("FROM a AS b\nRUN x\nFROM a\nRUN --mount=type=ssh y\n\nRUN --mount=type=ssh,id=work z", {})
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        for keys, line, name in (
            (["default"], 4, "default"),
            (["default="], 4, "default"),
            ([str(tmp_path / "agent")], 4, "default"),
            ([f"default={tmp_path}/agent"], 4, "default"),
            ([f"{tmp_path}/key", "work"], 6, "work"),
        ):
            with pytest.raises(Refused) as refused:
                check(built, brought([], keys))
            assert refused.value.message == f"line {line}: RUN --mount=type=ssh by an agent of this machine (--ssh {name}) is not supported"
            assert f"--ssh {name}=KEYFILE" in (refused.value.hint or "")
    # What no RUN wants is nobody's, and what has a key needs no agent.
    check(built, brought([], ["other"]))
    check(built, brought([], ["default", f"{tmp_path}/key", f"work={tmp_path}/key"]))


def test_size_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * (BYTES_MAX + 1))
    with pytest.raises(Refused, match="more than"):
        brought([f"id=a,src={tmp_path}/large"], [])
