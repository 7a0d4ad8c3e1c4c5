"""What an operator sees and packs on a machine with a running instance: no secret in any of it, in clear or encoded."""

from __future__ import annotations

import base64
import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

CANARY = "canary-5f3759df-in-an-environment"
WORDS = "canary-2b992ddf-in-metadata"


def _forms(secret: bytes) -> set[bytes]:
    """In clear, in hex, and as base64 at each of the three places in a longer text."""
    shifted = {base64.b64encode(b"x" * pad + secret)[4 if pad else 0 : -4] for pad in range(3)}
    return {secret, secret.hex().encode(), *shifted}


def _everything(home: Path, bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as archive:
        found = {f"bundle:{one.name}": archive.extractfile(one).read() for one in archive.getmembers()}  # type: ignore[union-attr]
    found["bundle"] = bundle.read_bytes()
    found["bundle, unpacked"] = gzip.decompress(found["bundle"])
    for path in [*home.glob("log/*"), *home.glob("control/atoll.db*")]:
        found[str(path)] = path.read_bytes()
    return found


def test_no_secret_is_in_the_bundle_the_logs_or_the_database(instance: Any, tmp_path: Path) -> None:
    made = instance.create("--env", f"TOKEN={CANARY}", "--metadata", f"note={WORDS}")
    shown = instance.json("sandbox", "get", made, "--json")
    key = instance.json("key", "create", "canary", "--json")["secret"]
    token = instance.json("host", "enrollment-token", "create", "canary", "--json")["token"]
    bundle = tmp_path / "support.tar.gz"
    said = instance.json("support", "bundle", str(bundle), "--json")
    assert said["missing"] == {}
    everything = _everything(instance.home, bundle)
    secrets = {
        "environment": CANARY,
        "key": key,
        "operator's key": instance.layout.operator_key.read_text().strip(),
        "access token": shown["accessToken"],
        "enrolment token": token,
        "host's credential": json.loads(instance.layout.credential.read_text())["credential"],
        "sealing key": (instance.layout.secrets / "sealing.key").read_text().strip(),
        "edge's token": (instance.layout.secrets / "edge.token").read_text().strip(),
    }
    assert all(secrets.values())
    for what, secret in secrets.items():
        for form in _forms(secret.encode()):
            places = [name for name, raw in everything.items() if form in raw]
            assert places == [], f"{what} is in {places}"
    told = {name: raw for name, raw in everything.items() if name.startswith(("bundle", str(instance.home / "log")))}
    assert not [name for name, raw in told.items() if WORDS.encode() in raw]


def test_one_look_at_everything(instance: Any) -> None:
    made = instance.create()
    seen = instance.json("top", "--once", "--json")
    assert made in [one["id"] for one in seen["sandboxes"]]
    assert made in instance.run("top", "--once").stdout
    assert instance.run("alert", "list").returncode == 0
    assert made in instance.run("audit", "--action", "sandbox.create").stdout
    assert "sandbox.ready" in instance.run("events", "--sandbox", made).stdout
