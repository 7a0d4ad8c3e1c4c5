"""The registry with Docker itself, where this machine has it: its own daemon, beside any other, on a folder of its own.

Docker is not what set-up installs. Where it is missing, skopeo, oras and the specification's own tests speak for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from e2b import Sandbox, Template

from tests.e2e.conftest import Product
from tests.e2e.test_push import push
from tests.e2e.test_registry import ask, imported, token

STARTS_S = 60


@dataclass(frozen=True)
class Docker:
    """A client with a login of its own, and its daemon."""

    home: Path

    def run(self, *words: str, text: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["docker", "--config", str(self.home / "client"), "--host", f"unix://{self.home}/docker.sock", *words]
        # What builds is then part of the daemon, not a plug-in that may be missing.
        environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
        ran = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=180, check=False)
        assert not check or ran.returncode == 0, f"docker {' '.join(words)}: {ran.stdout}\n{ran.stderr}"
        return ran

    def digests(self, image: str) -> list[str]:
        return list(json.loads(self.run("image", "inspect", image).stdout)[0]["RepoDigests"])


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    missing = [name for name in ("docker", "dockerd") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)} on this machine: apt-get install docker.io")
    if os.geteuid() != 0:
        pytest.skip("a daemon of one's own needs root")
    home = Path(tempfile.mkdtemp(prefix="atoll-docker.", dir="/var/tmp"))
    command = [
        "dockerd", "--host", f"unix://{home}/docker.sock", "--data-root", str(home / "data"), "--exec-root", str(home / "run"),
        "--pidfile", str(home / "pid"), "--bridge=none", "--iptables=false", "--ip6tables=false",
    ]  # fmt: skip
    with (home / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        made = Docker(home)
        until = time.monotonic() + STARTS_S
        while made.run("version", check=False).returncode != 0:
            if daemon.poll() is not None or time.monotonic() > until:
                pytest.fail("\n".join((home / "log").read_text(errors="replace").splitlines()[-20:]), pytrace=False)
            time.sleep(0.2)
        yield made
    finally:
        daemon.terminate()
        try:
            daemon.wait(timeout=30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def address(product: Product, docker: Docker) -> Iterator[str]:
    address = product.url.removeprefix("http://")
    docker.run("login", "--username", "anybody", "--password-stdin", address, text=product.key)
    yield address
    docker.run("logout", address)


def test_docker_pushes_and_pulls(product: Product, docker: Docker, address: str, tmp_path: Path) -> None:
    repository = f"default/{uuid4().hex[:8]}"
    image = f"{address}/{repository}:one"
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY large words /srv/\nENV WORD=there\nWORKDIR /srv\nUSER 77:78\n")
    (tmp_path / "large").write_bytes(os.urandom(3_000_000))
    (tmp_path / "words").write_text("said by docker\n")
    docker.run("build", "--tag", image, str(tmp_path))
    pushed = docker.run("push", image).stdout
    (named,) = docker.digests(image)
    digest = named.rpartition("@")[2]
    assert f"digest: {digest}" in pushed
    types = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
    answer = ask(product, "HEAD", f"/v2/{repository}/manifests/one", token(product, f"repository:{repository}:pull"), headers=types)
    assert answer.headers["docker-content-digest"] == digest
    again = docker.run("push", image).stdout
    assert "Layer already exists" in again
    assert f"digest: {digest}" in again
    made = json.loads(docker.run("image", "inspect", image).stdout)[0]
    docker.run("rmi", image)
    for wanted in (image, f"{address}/{repository}@{digest}"):
        assert f"Digest: {digest}" in docker.run("pull", wanted).stdout
    there = json.loads(docker.run("image", "inspect", image).stdout)[0]
    assert there["Id"] == made["Id"], "what came back is what went"
    docker.run("rmi", image)
    docker.run("rmi", f"{address}/{repository}@{digest}", check=False)


def test_docker_without_a_login_gets_nothing(product: Product, docker: Docker, address: str, tmp_path: Path) -> None:
    image = f"{address}/default/{uuid4().hex[:8]}:one"
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    docker.run("build", "--tag", image, str(tmp_path))
    refused = docker.run("login", "--username", "anybody", "--password-stdin", address, text="e2b_" + "0" * 40, check=False)
    assert refused.returncode != 0
    assert "unauthorized" in refused.stderr.lower() or "401" in refused.stderr, refused.stderr
    docker.run("logout", address)
    for word in ("push", "pull"):
        ran = docker.run(word, image, check=False)
        assert ran.returncode != 0
        assert any(reason in ran.stderr.lower() for reason in ("denied", "unauthorized", "authentication required")), ran.stderr
    docker.run("login", "--username", "anybody", "--password-stdin", address, text=product.key)
    docker.run("push", image)
    docker.run("rmi", image)


def test_what_docker_has_pushed_becomes_a_template_and_what_atoll_has_pushed_an_image(
    product: Product, docker: Docker, address: str, tmp_path: Path
) -> None:
    name, repository = f"docker-{uuid4().hex[:8]}", f"default/{uuid4().hex[:8]}"
    try:
        built = (
            Template()
            .from_template("base")
            .set_envs({"WORD": "hello there"})
            .run_cmd("echo made >/srv/made", user="root")
            .set_workdir("/srv")
        )
        Template.build(built, name, cpu_count=1, memory_mb=512)
        ran = push(product, name, f"{address}/{repository}:one", "--json")
        assert ran.returncode == 0, ran.stderr
        assert f"Digest: {json.loads(ran.stdout)['digest']}" in docker.run("pull", f"{address}/{repository}:one").stdout
        said = json.loads(docker.run("image", "inspect", f"{address}/{repository}:one").stdout)[0]["Config"]
        assert (said["User"], said["WorkingDir"]) == ("user", "/srv")
        assert "WORD=hello there" in said["Env"]
        (tmp_path / "Dockerfile").write_text(f"FROM {address}/{repository}:one\nCOPY Dockerfile /srv/added\nENV MORE=by-docker\n")
        docker.run("build", "--tag", f"{address}/{repository}:two", str(tmp_path))
        docker.run("push", f"{address}/{repository}:two")
        ended = imported(product, f"{address}/{repository}:two", product.key, name=f"{name}-back")
        assert ended["state"] == "ready", (ended.get("message"), ended.get("log"))
        with Sandbox.create(template=f"{name}-back", timeout=60) as sandbox:
            shown = sandbox.commands.run("id -un; pwd; echo $WORD $MORE; cat made; head -c 4 added").stdout
            assert shown == "user\n/srv\nhello there by-docker\nmade\nFROM"
    finally:
        for alias in (name, f"{name}-back"):
            product.call("DELETE", f"/templates/{alias}")
        docker.run("system", "prune", "--all", "--force", check=False)
