"""The registry against the distribution specification's own tests, and oras.

Both clients are built by set-up (`scripts/setup.py --for test`), as native/clients pins them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final
from uuid import uuid4
from xml.etree import ElementTree as ET

import pytest

from tests.e2e.conftest import ROOT, Product

TOOLS: Final = ROOT / "build" / "tools"
OPTIONAL: Final = frozenset({"blob-post-only", "blob-mount-anonymous", "blob-post-cancel"})
"""What the specification lets a registry decline, and ours declines: the client then goes another way."""


def tool(name: str) -> str:
    found = TOOLS / name
    if not found.exists():
        pytest.skip(f"{name} is not built: scripts/setup.py --for test")
    return str(found)


def test_the_specifications_own_tests_pass(product: Product, tmp_path: Path) -> None:
    some = uuid4().hex[:8]
    settings = {
        "OCI_REGISTRY": product.url.removeprefix("http://"),
        "OCI_TLS": "disabled",
        "OCI_REPO1": f"default/{some}/one",
        "OCI_REPO2": f"default/{some}/two",
        "OCI_USERNAME": "anybody",
        "OCI_PASSWORD": product.key,
        "OCI_RESULTS_DIR": str(tmp_path),
        "OCI_VERSION": "1.1",
    }
    command = [tool("oci-conformance")]
    ran = subprocess.run(command, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    cases = [(str(case.get("name")), case.get("status")) for case in ET.parse(tmp_path / "junit.xml").iter("testcase")]
    declined = {name.rpartition("/")[2] for name, status in cases if status != "passed"}
    # What the suite leaves out by itself would hide what we think is tested.
    assert declined <= OPTIONAL, declined
    assert sum(status == "passed" for _, status in cases) > 600, cases
    assert any("sha512" in name for name, _ in cases)
    assert any("referrers" in name for name, _ in cases)


class Oras:
    """The client, with a login of its own."""

    def __init__(self, product: Product, folder: Path) -> None:
        self.address = product.url.removeprefix("http://")
        self._folder = folder
        self._login = folder / "login.json"
        self.run("login", "--username", "anybody", "--password-stdin", self.address, text=product.key)

    def run(self, word: str, *words: str, text: str | None = None) -> str:
        command = [tool("oras"), word, "--plain-http", "--registry-config", str(self._login), *words]
        ran = subprocess.run(command, cwd=self._folder, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, f"oras {word}: {ran.stderr}"
        return ran.stdout

    def read(self, word: str, *words: str) -> Any:
        return json.loads(self.run(word, "--format", "json", *words))


def test_oras_pushes_pulls_and_finds_what_is_attached(product: Product, tmp_path: Path) -> None:
    oras = Oras(product, tmp_path)
    image = f"{oras.address}/default/{uuid4().hex[:8]}:one"
    (tmp_path / "file.txt").write_text("some content\n")
    (tmp_path / "list.json").write_text("[]\n")
    pushed = oras.read("push", "--artifact-type", "application/vnd.test.thing", image, "file.txt:text/plain")
    attached = oras.read("attach", "--artifact-type", "application/vnd.test.list", image, "list.json:application/json")
    oras.run("attach", "--artifact-type", "application/vnd.test.other", image, "list.json:application/json")
    there = tmp_path / "there"
    oras.run("pull", "--output", str(there), image)
    assert (there / "file.txt").read_text() == "some content\n"
    # By the list of referrers, not by the tags that stand in for it where a registry has none.
    found = oras.read("discover", "--distribution-spec", "v1.1-referrers-api", "--artifact-type", "application/vnd.test.list", image)
    assert [one["digest"] for one in found["referrers"]] == [attached["digest"]]
    assert found["digest"] == pushed["digest"]
    copied = f"{oras.address}/default/{uuid4().hex[:8]}:two"
    login = str(tmp_path / "login.json")
    words = ["--from-plain-http", "--to-plain-http", "--from-registry-config", login, "--to-registry-config", login]
    ran = subprocess.run(
        [tool("oras"), "cp", "--recursive", *words, image, copied], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert len(oras.read("discover", copied)["referrers"]) == 2
