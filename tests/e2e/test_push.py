"""Templates pushed out as ordinary images: to the deployment's own registry, and from there back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from e2b import Sandbox, Template

from tests.e2e.conftest import ATOLL, Product
from tests.e2e.test_registry import ask, imported, token


@pytest.fixture
def name(product: Product) -> Iterator[str]:
    made = f"push-{uuid4().hex[:8]}"
    yield made
    for alias in (made, f"{made}-back"):
        product.call("DELETE", f"/templates/{alias}")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the command line remembers of earlier pushes is each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "atoll" / "pushed.json"


def push(product: Product, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Named outright: whoever runs the tests may have another instance in the environment.
    kept = {**os.environ, **product.environment, "ATOLL_API_URL": product.url, "ATOLL_API_KEY": product.key, **environment}
    return subprocess.run([ATOLL, "template", "push", *words], env=kept, capture_output=True, text=True, timeout=300, check=False)


def test_a_template_goes_out_as_an_image_and_comes_back(product: Product, name: str, tmp_path: Path) -> None:
    template = (
        Template()
        .from_template("base")
        .set_envs({"WORD": "hello there"})
        .run_cmd(
            "echo made >/srv/made; chown user:user /srv/made; ln -s made /srv/link; setcap cap_net_raw+ep /bin/ping || true", user="root"
        )
        .set_workdir("/srv")
    )
    Template.build(template, name, cpu_count=1, memory_mb=512)
    address = product.url.removeprefix("http://")
    repository = f"default/{uuid4().hex[:8]}"
    pushed = push(product, name, f"{address}/{repository}:one", "--json")
    assert pushed.returncode == 0, pushed.stderr
    said = json.loads(pushed.stdout)
    bearer = token(product, f"repository:{repository}:pull")
    answer = ask(product, "GET", f"/v2/{repository}/manifests/one", bearer)
    assert answer.headers["docker-content-digest"] == said["digest"]
    manifest = answer.json()
    config = ask(product, "GET", f"/v2/{repository}/blobs/{manifest['config']['digest']}", bearer).json()
    assert (config["config"]["User"], config["config"]["WorkingDir"], config["os"]) == ("user", "/srv", "linux")
    assert "WORD=hello there" in config["config"]["Env"]
    if skopeo := shutil.which("skopeo"):
        login = tmp_path / "auth.json"
        there = f"docker://{address}/{repository}:one"
        ran = subprocess.run(
            [skopeo, "copy", "--src-tls-verify=false", "--src-creds", f"x:{product.key}", there, f"oci:{tmp_path / 'image'}"],
            env={**os.environ, "REGISTRY_AUTH_FILE": str(login)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
    # Any other machine, ours or not, has the same system of it.
    ended = imported(product, f"{address}/{repository}:one", product.key, name=f"{name}-back")
    assert ended["state"] == "ready", ended
    with Sandbox.create(template=f"{name}-back", timeout=60) as sandbox:
        shown = sandbox.commands.run(
            "id -un; pwd; echo $WORD; cat link; stat -c '%U %a' made /tmp; sudo id -u; ls /proc/self/status /dev/null"
        )
        assert shown.stdout == "user\n/srv\nhello there\nmade\nuser 644\nroot 1777\n0\n/dev/null\n/proc/self/status\n"
    assert not [one for one in product.call("GET", "/v1/sandboxes").json()["items"] if one["metadata"].get("for") == "template push"]


def test_a_refusal_is_told_before_anything_is_packed(product: Product) -> None:
    address = product.url.removeprefix("http://")
    refused = push(product, "base", f"{address}/somebody/app:one")
    assert refused.returncode != 0
    assert "IMAGE_ACCESS_DENIED" in refused.stderr
    assert "packing" not in refused.stderr
    wrong = push(product, "base", f"{address}/default/app:one", ATOLL_REGISTRY_PASSWORD="e2b_" + "f" * 40)
    assert "IMAGE_ACCESS_DENIED" in wrong.stderr
    for nowhere in ("app:one", "library/app:one", "https://a.test/app"):
        assert "does not say where to push" in push(product, "base", nowhere).stderr
    assert "TEMPLATE_NOT_FOUND" in push(product, "nothere", f"{address}/default/app:one").stderr


def test_a_template_goes_out_in_its_layers_and_what_is_shared_goes_once(product: Product, name: str) -> None:
    address = product.url.removeprefix("http://")
    repository = f"default/{uuid4().hex[:8]}"

    def pushed(tag: str, *steps: str) -> tuple[dict[str, object], list[str]]:
        template = Template().from_template("base")
        for step in steps:
            template = template.run_cmd(step, user="root")
        Template.build(template, name, cpu_count=1, memory_mb=512)
        ran = push(product, name, f"{address}/{repository}:{tag}", "--json")
        assert ran.returncode == 0, ran.stderr
        bearer = token(product, f"repository:{repository}:pull")
        manifest = ask(product, "GET", f"/v2/{repository}/manifests/{tag}", bearer).json()
        config = ask(product, "GET", f"/v2/{repository}/blobs/{manifest['config']['digest']}", bearer).json()
        assert len(config["rootfs"]["diff_ids"]) == len(manifest["layers"])
        return json.loads(ran.stdout), [one["digest"] for one in manifest["layers"]]

    shared = "head -c 3M /dev/urandom >/srv/shared; ln -s shared /srv/link; rm /etc/motd || true"
    said, first = pushed("one", shared, "echo one >/srv/own; chown user /srv/own")
    assert (said["layers"], said["sentBytes"]) == (3, said["sizeBytes"])
    said, second = pushed("two", shared, "echo two >/srv/own")
    assert second[:2] == first[:2], "what is shared has another digest"
    assert 0 < int(str(said["sentBytes"])) < 1 << 20
    ended = imported(product, f"{address}/{repository}:one", product.key, name=f"{name}-back")
    assert ended["state"] == "ready", ended
    with Sandbox.create(template=f"{name}-back", timeout=60) as sandbox:
        shown = sandbox.commands.run("cat /srv/own; stat -c %U /srv/own; readlink /srv/link; stat -c %s /srv/shared; sudo id -un")
        assert shown.stdout == "one\nuser\nshared\n3145728\nroot\n"


def test_a_base_that_was_packed_once_is_not_packed_again(product: Product, name: str, memory: Path) -> None:
    address = product.url.removeprefix("http://")
    first, other = (f"default/{uuid4().hex[:8]}" for _ in range(2))
    Template.build(Template().from_template("base").run_cmd("echo one >/srv/own", user="root"), name, cpu_count=1, memory_mb=512)

    def pushed(repository: str, tag: str) -> tuple[str, list[str]]:
        ran = push(product, name, f"{address}/{repository}:{tag}")
        assert ran.returncode == 0, ran.stderr
        bearer = token(product, f"repository:{repository}:pull")
        manifest = ask(product, "GET", f"/v2/{repository}/manifests/{tag}", bearer).json()
        return ran.stderr, [one["digest"] for one in manifest["layers"]]

    said, layers = pushed(first, "one")
    assert "packing base" in said
    for repository, tag in ((first, "two"), (other, "one"), (other, "two")):
        said, same = pushed(repository, tag)
        assert "packing" not in said, f"{repository}:{tag}"
        assert same == layers
    # What it remembers may be wrong (or gone, tests/unit/cli/test_packed.py): then it is packed again, and is the same.
    memory.write_text(memory.read_text().replace(layers[0], "sha256:" + "0" * 64))
    said, same = pushed(first, "three")
    assert "packing base" in said
    assert same == layers
