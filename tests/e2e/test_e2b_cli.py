"""The unmodified command line of E2B: what it does with templates, and the older form, which pushes images itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from e2b import Sandbox

from tests.e2e import oci
from tests.e2e.conftest import ROOT, Product
from tests.e2e.test_registry import push_layout, token

NODE = ROOT / "build" / "tools" / "node"
PROGRAM = ROOT / "tests" / "e2e" / "js" / "node_modules" / "@e2b" / "cli" / "dist" / "index.js"

Run = Callable[..., str]


@pytest.fixture
def name(product: Product) -> Iterator[str]:
    made = f"cli-{uuid4().hex[:10]}"
    yield made
    for alias in (made, f"{made}-dev"):
        product.call("DELETE", f"/templates/{alias}")


@pytest.fixture
def e2b(product: Product, tmp_path: Path) -> Run:
    if not NODE.exists() or not PROGRAM.exists():
        pytest.skip("node or E2B's command line is not here; `make test` installs both")
    environment = {**os.environ, **product.environment, "HOME": str(tmp_path), "NO_UPDATE_NOTIFIER": "1"}

    def run(*words: str, status: int = 0) -> str:
        ran = subprocess.run(
            [NODE, PROGRAM, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.returncode == status, f"e2b {' '.join(words)}: {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout + ran.stderr

    return run


def described(e2b: Run, name: str) -> dict[str, object]:
    listed = json.loads(e2b("template", "list", "-f", "json"))
    return next((one for one in listed if name in one["aliases"]), {})


def test_a_template_is_created_listed_published_and_deleted(e2b: Run, name: str, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("a page\n")
    dockerfile = "FROM e2bdev/base\nENV WORD=hello\nCOPY page /srv/page\nRUN echo $WORD >/home/user/word\n"
    (tmp_path / "e2b.Dockerfile").write_text(dockerfile)
    words = [
        "--cmd",
        "python3 -m http.server 8000 -d /srv",
        "--ready-cmd",
        "curl -fsS localhost:8000/page",
        "--memory-mb",
        "512",
        "--cpu-count",
        "1",
    ]
    said = e2b("template", "create", name, *words)
    assert "finished" in said
    assert "RUN echo $WORD" in said
    assert (described(e2b, name)["memoryMB"], described(e2b, name)["public"]) == (512, False)
    assert name in e2b("template", "list")
    with Sandbox.create(template=name, timeout=60) as sandbox:
        assert sandbox.commands.run("cat /home/user/word; curl -fsS localhost:8000/page").stdout == "hello\na page\n"
    e2b("template", "publish", "-y", name)
    assert described(e2b, name)["public"] is True
    e2b("template", "unpublish", "-y", name)
    assert described(e2b, name)["public"] is False
    e2b("template", "delete", "-y", name)
    assert described(e2b, name) == {}
    e2b("template", "delete", "-y", name, status=1)


def test_a_step_that_fails_is_told(e2b: Run, name: str, tmp_path: Path) -> None:
    (tmp_path / "e2b.Dockerfile").write_text("FROM e2bdev/base\nRUN echo because >&2; exit 7\n")
    said = e2b("template", "create", name, status=1)
    assert "because" in said
    assert "exit status 7" in said


def test_a_template_of_the_older_form_is_migrated_and_built(e2b: Run, name: str, product: Product, tmp_path: Path) -> None:
    (tmp_path / "e2b.Dockerfile").write_text("FROM e2bdev/base\nRUN echo moved >/home/user/word\n")
    (tmp_path / "e2b.toml").write_text(f'template_id = "x"\ndockerfile = "e2b.Dockerfile"\ntemplate_name = "{name}"\n')
    e2b("template", "migrate", "-l", "python-sync")
    environment = {**os.environ, **product.environment, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "build_dev.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with Sandbox.create(template=f"{name}-dev", timeout=60) as sandbox:
        assert sandbox.commands.run("cat /home/user/word").stdout == "moved\n"


def test_files_for_a_new_template_are_written(e2b: Run, name: str, tmp_path: Path) -> None:
    e2b("template", "init", "-n", name, "-l", "python-sync")
    assert (tmp_path / name / "template.py").exists()


@pytest.mark.skipif(oci.BUSYBOX is None, reason="busybox is missing: apt-get install busybox-static")
def test_an_image_that_the_client_has_pushed_becomes_a_template(product: Product, name: str, tmp_path: Path) -> None:
    # As the command line did before it built by steps: it has docker build and push, then starts the build.
    asked = product.call("POST", "/templates", json={"alias": name, "dockerfile": "FROM debian\n", "memoryMB": 256, "cpuCount": 1})
    assert asked.status_code == 202, asked.text
    template, build = asked.json()["templateID"], asked.json()["buildID"]
    repository = f"e2b/custom-envs/{template}"
    image = oci.Image([oci.busybox(oci.Entry("etc/from-image", b"yes\n"))], {"Env": ["PATH=/bin"]}).write(tmp_path / "image")
    push_layout(product, repository, build, image)
    other = product.call("POST", "/v1/keys", json={"name": "other", "team": f"o-{uuid4().hex[:8]}"}).json()["secret"]
    refused = product.http.get(
        f"{product.url}/v2/{repository}/tags/list",
        headers={"Authorization": f"Bearer {token(product, f'repository:{repository}:pull', key=other)}"},
    )
    assert refused.status_code == 401
    path = f"/templates/{template}/builds/{build}"
    assert product.call("POST", path).status_code == 202
    until = time.monotonic() + 60
    while (now := product.call("GET", f"{path}/status").json())["status"] not in ("ready", "error"):
        assert time.monotonic() < until, now
        time.sleep(0.2)
    assert now["status"] == "ready", now
    with Sandbox.create(template=name, timeout=60) as sandbox:
        assert sandbox.commands.run("cat /etc/from-image", user="root", cwd="/").stdout == "yes\n"
