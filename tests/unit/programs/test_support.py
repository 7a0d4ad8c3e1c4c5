"""The support bundle: what is in it, what is never in it, and what is said of what is missing."""

from __future__ import annotations

import base64
import gzip
import json
import os
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import Refused
from atoll.programs import support
from atoll.programs.layout import Layout
from atoll.programs.support import Bundle

KEY = "e2b_" + "0123456789abcdef" * 2 + "01234567"
SEALING = base64.b64encode(b"s" * 32).decode()
EDGE = "fedcba9876543210" * 4
CREDENTIAL = "hk_" + "ab" * 32
PASSWORD = "correct-horse-battery"


@pytest.fixture
def place(tmp_path: Path) -> Layout:
    made = Layout(tmp_path)
    for directory in (made.secrets, made.control, made.agent, made.run, made.log):
        directory.mkdir()
    made.config.write_text('install_id = "ins_abcdefghij0123456789"\nport = 9\nsubnet = 3\ndomain = "localhost:9"\nhost_name = "rack"\n')
    made.operator_key.write_text(KEY + "\n")
    (made.secrets / "sealing.key").write_text(SEALING + "\n")
    (made.secrets / "edge.token").write_text(EDGE + "\n")
    (made.secrets / "database.url").write_text(f"postgresql+asyncpg://atoll:{PASSWORD}@db.example/atoll\n")
    made.credential.write_text(json.dumps({"host_id": "hst_abcdefghij0123456789", "credential": CREDENTIAL, "credential_version": 1}))
    lines = [json.dumps({"event": "sandbox.state.changed", "n": number}) for number in range(10)]
    # Faults of ours, each of which would have put a secret into a log.
    lines += [
        f"leaked {KEY}",
        f"leaked {SEALING}",
        f"leaked {base64.b64encode(EDGE.encode()).decode()}",
        f"leaked {CREDENTIAL.encode().hex()}",
    ]
    lines += [
        "postgresql+asyncpg://atoll:other-password-here@db/x",
        "leaked ea_" + "9" * 40,
        "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJpMTIzNDU2In0.c2lnbmF0dXJl",
    ]
    made.log_file("control").write_text("\n".join(lines) + "\n")
    with sqlite3.connect(made.database) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('0003')")
        connection.execute("CREATE TABLE payloads (sealed BLOB)")
        connection.execute("INSERT INTO payloads VALUES ('canary-in-a-row')")
    return made


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive.getmembers():
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.removeprefix("atoll-support/")] = file.read()
        return found


def test_nothing_running_is_packed_as_well(place: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.secrets / "database.url").unlink()
    monkeypatch.setattr("atoll.programs.doctor.examine", lambda _place: {"ok": False, "checks": []})
    target = tmp_path / "out.tar.gz"
    made = support.write(support.collect(place), target)
    parts = unpacked(target)
    assert {"bundle.json", "versions.json", "status.json", "doctor.json", "config.toml", "database.json", "log/control.log"} <= set(parts)
    assert {"hosts.json", "metrics/edge.txt", "log/agent.log", "agent.health.json"} <= set(made["missing"])
    assert json.loads(parts["database.json"])["rows"] == {"alembic_version": 1, "payloads": 1}
    assert json.loads(parts["versions.json"])["packages"]["sqlalchemy".replace("sqla", "SQLA")]
    assert b"sandbox.state.changed" in parts["log/control.log"]
    assert target.stat().st_mode & 0o777 == 0o600


def test_no_secret_comes_out_in_whatever_form(place: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "atoll.programs.doctor.examine", lambda _place: {"detail": f"password {PASSWORD} in postgresql+asyncpg://atoll:{PASSWORD}@db"}
    )
    target = tmp_path / "out.tar.gz"
    made = support.write(support.collect(place), target)
    whole = b"\n".join([*unpacked(target).values(), gzip.decompress(target.read_bytes()), target.read_bytes()])
    for secret in (KEY, SEALING, EDGE, CREDENTIAL, PASSWORD, "other-password-here", "ea_" + "9" * 40, "c2lnbmF0dXJl", "canary-in-a-row"):
        raw = secret.encode()
        for form in (raw, base64.b64encode(raw), base64.b64encode(raw).rstrip(b"="), raw.hex().encode(), gzip.compress(raw, mtime=0)):
            assert form not in whole, secret
    assert made["masked"] >= 6
    assert b"hst_abcdefghij0123456789" not in support.MASK
    assert b"credential_version" not in set(support._forms_of(support.known_secrets(place))), "names of fields are no secrets"


def test_clients_own_words_are_left_out() -> None:
    shown: Any = support._without_words({"id": "i1", "metadata": {"password": "hunter2"}, "clientRequestId": "ci-hunter2"})
    assert shown == {"id": "i1", "metadata": ["password"], "clientRequestId": None}


def test_a_part_that_fails_is_named_and_the_others_are_packed() -> None:
    bundle = Bundle(secrets=[])

    def broken() -> str:
        raise OSError("the disk says no")

    bundle.add("one", broken)
    bundle.add("two", lambda: {"fine": True})
    assert bundle.missing == {"one": "OSError: the disk says no"}
    assert list(bundle.parts) == ["two"]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_text("precious")
    with pytest.raises(Refused, match="there already"):
        support.write(Bundle(secrets=[]), target)
    assert target.read_text() == "precious"


def test_of_a_long_log_the_end_in_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_bytes(b"".join(b"%08d\n" % number for number in range(300_000)))
    raw = support.tail(log)
    assert len(raw) <= support.LOG_BYTES
    assert raw.endswith(b"00299999\n")
    assert len(raw.splitlines()[0]) == 8


def test_where_there_is_no_instance(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no instance"):
        support.collect(Layout(tmp_path))


def test_a_key_in_the_environment_is_a_secret_too(place: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "ATOLL_API_KEY", "a-key-of-somebodys")
    assert b"a-key-of-somebodys" in set(support.known_secrets(place))
