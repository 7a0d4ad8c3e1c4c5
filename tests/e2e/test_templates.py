"""Container images as templates: imported by the command line, used by the SDK, refused when they are not what they say."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from tests.e2e import oci
from tests.e2e.conftest import ATOLL, Product
from tests.e2e.oci import Entry, Image

pytestmark = pytest.mark.skipif(oci.BUSYBOX is None, reason="busybox is missing: apt-get install busybox-static")


@pytest.fixture
def name(product: Product) -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex[:12]}"
    yield name
    product.call("DELETE", f"/v1/templates/{name}")


def atoll(product: Product, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ATOLL, *arguments], env=product.environment, input=given, capture_output=True, text=True, timeout=120, check=False
    )


def imported(product: Product, name: str, source: str, *more: str) -> dict[str, Any]:
    ran = atoll(product, "template", "import", name, source, "--json", *more)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def refused(product: Product, name: str, source: str) -> str:
    ran = atoll(product, "template", "import", name, source, "--json")
    assert ran.returncode != 0, ran.stdout
    return str(json.loads(ran.stdout or ran.stderr)["error"]["code"])


def an_image(**config: Any) -> Image:
    return Image(
        [
            oci.busybox(
                Entry("etc/kept", b"1\n"), Entry("etc/hidden", b"1\n"), Entry("opaque/old", b"1\n"), Entry("home/me/f", b"x", uid=77)
            ),
            oci.layer(Entry("etc/.wh.hidden"), Entry("opaque/new", b"2\n"), Entry("opaque/.wh..wh..opq"), Entry("etc/kept", b"2\n")),
        ],
        {"Env": ["PATH=/bin", "COLOUR=blue", "SHADE=dark"], "User": "77:78", "WorkingDir": "/app/here", **config},
    )


@pytest.fixture(params=["default", "shared-kernel"])
def sandbox_on(request: pytest.FixtureRequest, product: Product) -> Iterator[Callable[..., Sandbox]]:
    """Creates a sandbox of a template on each of the runtimes, and reaches it with the SDK."""
    made: list[str] = []

    def make(template: str, **body: Any) -> Sandbox:
        answer = product.call("POST", "/v1/sandboxes", json={"template": template, "class": request.param, "timeoutSeconds": 120, **body})
        assert answer.status_code == 201, answer.text
        made.append(answer.json()["id"])
        return Sandbox.connect(made[-1])

    yield make
    for sandbox_id in made:
        product.call("DELETE", f"/v1/sandboxes/{sandbox_id}")


def test_layers_env_directory_and_user(product: Product, name: str, tmp_path: Path, sandbox_on: Callable[..., Sandbox]) -> None:
    made = imported(product, name, f"oci-layout:{an_image().write(tmp_path)}", "--size", "0.5,256M,512M")
    template = made["template"]
    assert template["size"] == {"cpuMillis": 500, "memoryMib": 256, "diskMib": 512}
    assert (template["defaultUser"], template["defaultWorkdir"]) == ("77:78", "/app/here")
    sandbox = sandbox_on(name)
    run = sandbox.commands.run
    assert run("echo $COLOUR; pwd; id -u; id -g").stdout.split() == ["blue", "/app/here", "77", "78"]
    assert run("cat /etc/kept /opaque/new").stdout.split() == ["2", "2"]
    assert run("test -e /etc/hidden || test -e /opaque/old || echo gone").stdout.strip() == "gone"
    assert run("id -un", user="root").stdout.strip() == "root"
    assert run("cat /etc/resolv.conf").stdout.startswith("nameserver ")


def test_what_an_image_lacks_is_there(product: Product, name: str, tmp_path: Path, sandbox_on: Callable[..., Sandbox]) -> None:
    imported(product, name, f"oci-layout:{Image([oci.busybox()]).write(tmp_path)}")
    sandbox = sandbox_on(name)
    sandbox.files.write("/home/user/note", "mine")
    assert sandbox.commands.run("id -un; cat /home/user/note").stdout.split() == ["user", "mine"]


def test_start_command_and_request_win(product: Product, name: str, tmp_path: Path, sandbox_on: Callable[..., Sandbox]) -> None:
    imported(product, name, f"oci-layout:{an_image().write(tmp_path)}", "--start-command", "echo $SHADE > /opaque/started; sleep 1000")
    sandbox = sandbox_on(name, env={"COLOUR": "red"})
    assert sandbox.commands.run("echo $COLOUR $SHADE").stdout.split() == ["red", "dark"]
    started = "for i in 1 2 3 4 5 6 7 8 9 10; do test -s /opaque/started && break; sleep 0.3; done; cat /opaque/started"
    assert sandbox.commands.run(started, user="root").stdout.strip() == "dark"


def test_sdk_creates_by_name(product: Product, name: str, tmp_path: Path) -> None:
    imported(product, name, f"oci-layout:{an_image().write(tmp_path)}")
    with Sandbox.create(template=name, timeout=60) as sandbox:
        assert sandbox.commands.run("echo $COLOUR").stdout.strip() == "blue"


def test_sandboxes_do_not_share_what_they_write(product: Product, name: str, tmp_path: Path, sandbox_on: Callable[..., Sandbox]) -> None:
    imported(product, name, f"oci-layout:{an_image().write(tmp_path)}")
    one, two = sandbox_on(name), sandbox_on(name)
    one.commands.run("echo spoilt > /etc/kept", user="root")
    assert two.commands.run("cat /etc/kept").stdout.strip() == "2"
    assert sandbox_on(name).commands.run("cat /etc/kept").stdout.strip() == "2"


def test_delete_waits_for_sandboxes(product: Product, name: str, tmp_path: Path) -> None:
    imported(product, name, f"oci-layout:{an_image().write(tmp_path)}")
    with Sandbox.create(template=name, timeout=60):
        answer = product.call("DELETE", f"/v1/templates/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "TEMPLATE_IN_USE")
    assert atoll(product, "template", "delete", name).returncode == 0
    assert product.call("GET", f"/v1/templates/{name}").status_code == 404
    assert product.call("DELETE", "/v1/templates/base").status_code == 403


def test_a_new_import_is_a_new_build(product: Product, name: str, tmp_path: Path) -> None:
    first = imported(product, name, f"oci-layout:{an_image().write(tmp_path / 'a')}")["template"]
    with Sandbox.create(template=name, timeout=60) as old:
        second = imported(product, name, f"oci-layout:{an_image(Env=['PATH=/bin', 'COLOUR=green']).write(tmp_path / 'b')}")["template"]
        assert first["id"] == second["id"]
        assert first["buildId"] != second["buildId"]
        with Sandbox.create(template=name, timeout=60) as new:
            assert new.commands.run("echo $COLOUR").stdout.strip() == "green"
        assert old.commands.run("echo $COLOUR").stdout.strip() == "blue"


def spoil(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "change",
    [lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 1]) + b[len(b) // 2 + 1 :], lambda b: b[:-9], lambda b: b + b"x"],
    ids=["tampered", "truncated", "longer"],
)
def test_broken_layers_make_no_template(product: Product, name: str, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    # Of its own: the store has the right blobs of the other tests' image.
    image = Image([oci.busybox(), oci.layer(Entry("etc/own", uuid.uuid4().bytes))])
    image.write(tmp_path)
    spoil(oci.blob(tmp_path, image.digests[1]), change)
    assert refused(product, name, f"oci-layout:{tmp_path}") == "IMAGE_CORRUPT"
    assert product.call("GET", f"/v1/templates/{name}").status_code == 404


@pytest.mark.parametrize(
    "entry", [Entry("../escaped", b"x"), Entry("/absolute", b"x"), Entry("a/.wh...")], ids=["parent", "absolute", "whiteout of parent"]
)
def test_hostile_layers_make_no_template(product: Product, name: str, tmp_path: Path, entry: Entry) -> None:
    image = Image([oci.busybox(), oci.layer(entry)])
    assert refused(product, name, f"oci-layout:{image.write(tmp_path)}") == "IMAGE_REFUSED"


def test_nothing_at_the_registry(product: Product, name: str) -> None:
    assert refused(product, name, "127.0.0.1:9/nothing:here") == "IMAGE_UNAVAILABLE"


def test_docker_archive(product: Product, name: str, tmp_path: Path) -> None:
    root = oci.busybox()
    config = {"os": "linux", "architecture": oci.ARCH, "config": {"Env": ["PATH=/bin"]}}
    config["rootfs"] = {"type": "layers", "diff_ids": [oci.digest(root)]}
    saved = oci.layer(
        Entry("manifest.json", json.dumps([{"Config": "c.json", "RepoTags": ["x:1"], "Layers": ["l/layer.tar"]}]).encode()),
        Entry("c.json", json.dumps(config).encode()),
        Entry("l/layer.tar", root),
    )
    (tmp_path / "saved.tar").write_bytes(saved)
    imported(product, name, f"docker-archive:{tmp_path / 'saved.tar'}")
    with Sandbox.create(template=name, timeout=60) as sandbox:
        assert sandbox.commands.run("echo up").stdout.strip() == "up"


def test_teams_are_apart(product: Product, name: str, tmp_path: Path) -> None:
    made = imported(product, name, f"oci-layout:{an_image().write(tmp_path)}")
    answer = product.call("POST", "/v1/keys", json={"name": "other", "team": f"o-{uuid.uuid4().hex[:8]}"})
    key = answer.json()["secret"]
    assert product.call("GET", f"/v1/templates/{name}", key=key).status_code == 404
    assert product.call("DELETE", f"/v1/templates/{name}", key=key).status_code == 404
    assert product.call("GET", f"/v1/template-imports/{made['import']['id']}", key=key).status_code == 404
