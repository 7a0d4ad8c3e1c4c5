"""Templates built from steps by the unmodified Python SDK: `Template`, its builder calls, and sandboxes of what it makes."""

from __future__ import annotations

import base64
import http.server
import json
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from e2b import Sandbox, Template, wait_for_port, wait_for_timeout
from e2b.exceptions import BuildException

from tests.e2e import oci
from tests.e2e.conftest import ATOLL, Product
from tests.e2e.oci import Image

Make = Callable[..., Sandbox]
CPU = {"cpu_count": 1, "memory_mb": 512}


@pytest.fixture
def name(product: Product) -> Iterator[str]:
    name = f"b-{uuid.uuid4().hex[:12]}"
    yield name
    for suffix in ("", "-child"):
        product.call("DELETE", f"/v1/templates/{name}{suffix}")


def build(template: object, name: str, **options: object) -> tuple[object, list[str]]:
    """What a build answers, and its log."""
    log: list[str] = []
    info = Template.build(template, name, **{**CPU, **options}, on_build_logs=lambda entry: log.append(entry.message))  # type: ignore[arg-type]
    return info, log


def test_steps_make_a_template(product: Product, name: str, make: Make, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("print('hello from', __file__)\n")
    (tmp_path / "app" / "data.txt").write_text("data\n")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran as $(whoami)\n")
    template = (
        Template(file_context_path=tmp_path)
        .from_template("base")
        .set_envs({"BUILD": name, "GREETING": "hello", "LONG": "$GREETING and ${GREETING}"})
        .run_cmd("echo $LONG >/home/user/greeting; id -un >>/home/user/greeting; pwd >>/home/user/greeting")
        .run_cmd("touch /root/made-by-root && echo shared >/tmp/for-the-next-step", user="root")
        .run_cmd("cp /tmp/for-the-next-step /home/user/from-tmp")
        .copy("app", "/srv/app")
        .copy("run.sh", "/usr/local/bin/run-me", user="root", mode=0o755)
        .copy("app/*.txt", "/srv/texts/")
        .make_dir("/srv/made", user="root")
        .make_symlink("/srv/app/main.py", "/srv/link", user="root")
        .rename("/home/user/from-tmp", "/home/user/renamed")
        .remove("/etc/issue", force=True, user="root")
        .set_workdir("/srv/app")
        .run_cmd("pwd >here && ls -A")
    )
    info, log = build(template, name)
    assert info.name == name  # type: ignore[attr-defined]
    assert any(line.startswith("[2/") for line in log), log
    assert "here" in log

    sandbox = make(name)

    def said(command: str, **options: object) -> str:
        return str(sandbox.commands.run(command, **options).stdout)  # type: ignore[call-overload]

    assert said("cat /home/user/greeting") == "hello and hello\nuser\n/home/user\n"
    assert said("stat -c '%U %a' /root/made-by-root", user="root").startswith("root")
    assert said("python3 /srv/app/main.py") == "hello from /srv/app/main.py\n"
    assert said("stat -c '%U:%G' /srv/app/main.py") == "user:user\n"
    assert said("run-me") == "ran as user\n"
    assert said("stat -c '%U:%G %a' /usr/local/bin/run-me") == "root:root 755\n"
    assert said("ls /srv/texts") == "data.txt\n"
    assert said("readlink /srv/link; test -d /srv/made; cat /home/user/renamed") == "/srv/app/main.py\nshared\n"
    assert said("test -e /etc/issue || echo gone") == "gone\n"
    assert said("pwd; cat /srv/app/here; echo $LONG") == "/srv/app\n/srv/app\nhello and hello\n"
    assert said("stat -c %U /srv/app") == "user\n"
    assert said("sudo id -u") == "0\n", "what the base template allows is allowed still"


def test_renamed_files_are_in_the_template_by_their_last_names(name: str, make: Make) -> None:
    # As compilers and installers write: beside the place first. All old names are then one device with several names.
    template = (
        Template()
        .from_template("base")
        .run_cmd("mkdir d && cd d && for n in a b c; do echo $n >$n.part && mv $n.part $n; done")
        .run_cmd("cd d && mv a x && mv b y && rm c")
    )
    build(template, name)
    assert make(name).commands.run("cd d && ls -A && cat x y").stdout == "x\ny\na\nb\n"


def test_only_changed_steps_run_again(product: Product, name: str, make: Make, tmp_path: Path) -> None:
    def of(word: str) -> object:
        (tmp_path / "file").write_text(word)
        return (
            Template(file_context_path=tmp_path)
            .from_template("base")
            .run_cmd("date +%s%N >/home/user/first")
            .copy("file", "/home/user/file")
            .run_cmd("cat file >last")
        )

    build(of("one"), name)
    first = make(name).commands.run("cat first").stdout
    began = time.monotonic()
    _, log = build(of("one"), name)
    unchanged_s = time.monotonic() - began
    assert next(line for line in log if "[1/3]" in line).startswith("CACHED")
    assert len([line for line in log if line.startswith("CACHED")]) == 3
    _, log = build(of("two"), name)
    assert len([line for line in log if line.startswith("CACHED")]) == 1
    sandbox = make(name)
    assert sandbox.commands.run("cat first").stdout == first
    assert sandbox.commands.run("cat last").stdout == "two"
    assert unchanged_s < 10, unchanged_s
    _, log = build(of("two"), name, skip_cache=True)
    assert not [line for line in log if line.startswith("CACHED")]
    assert make(name).commands.run("cat first").stdout != first


def test_a_start_command_is_ready_before_create_answers(product: Product, name: str, make: Make) -> None:
    template = (
        Template()
        .from_template("base")
        .set_workdir("/srv/web")
        .run_cmd("echo served >index.html")
        .set_start_cmd("sleep 1; exec python3 -m http.server 8000", wait_for_port(8000))
    )
    build(template, name)
    for _ in range(2):
        sandbox = make(name)
        answer = product.inside(sandbox, "GET", "/index.html", port=8000)
        assert (answer.status_code, answer.text) == (200, "served\n")
        owner = sandbox.commands.run("ps -o user= -C python3 || pgrep -u user python3").stdout
        assert owner.strip()


def test_a_start_command_that_never_gets_ready_fails_the_build(product: Product, name: str) -> None:
    template = Template().from_template("base").set_start_cmd("exit 3", "false")
    with pytest.raises(BuildException, match="exit status 3"):
        build(template, name)
    assert product.call("POST", "/sandboxes", json={"templateID": name}).status_code == 404


def test_a_start_command_that_fails_only_later_fails_the_create(product: Product, name: str) -> None:
    # Ready while it is built, never afterwards: there the mark is on the disk already.
    template = (
        Template()
        .from_template("base")
        .run_cmd("touch mark")
        .set_start_cmd("test -e /home/user/broken && exit 4; sleep infinity", wait_for_timeout(1))
    )
    build(template, name)
    child = Template().from_template(name).run_cmd("touch broken")
    with pytest.raises(BuildException, match="start command ended before it was ready: exit status 4"):
        build(child, f"{name}-child")


def test_a_failed_command_is_told_with_its_step(name: str) -> None:
    template = Template().from_template("base").run_cmd("echo about to fail >&2; exit 7")
    log: list[str] = []
    with pytest.raises(BuildException, match="exit status 7"):
        Template.build(template, name, **CPU, on_build_logs=lambda entry: log.append(entry.message))  # type: ignore[arg-type]
    assert "about to fail" in log


def test_a_user_who_is_not_there_is_named(name: str) -> None:
    template = Template().from_template("base").set_user("root123").run_cmd("whoami")
    expected = "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'"
    with pytest.raises(BuildException) as raised:
        build(template, name)
    assert expected in str(raised.value)


def test_names_tags_and_what_exists(product: Product, name: str, make: Make, stranger: str) -> None:
    assert not Template.exists(name)
    first, _ = build(Template().from_template("base").run_cmd("echo 1 >version"), f"{name}:v1")
    second, _ = build(Template().from_template("base").run_cmd("echo 2 >version"), name, tags=["v2", "default"])
    assert Template.exists(name)
    assert product.call("GET", f"/templates/aliases/{name}", key=stranger).status_code == 404
    assert make(f"{name}:v1").commands.run("cat version").stdout == "1\n"
    assert make(name).commands.run("cat version").stdout == "2\n"
    Template.assign_tags(f"{name}:v1", ["default", "stable"])
    tags = {one.tag: one.build_id for one in Template.get_tags(name)}
    assert tags["stable"] == tags["default"] == tags["v1"] == first.build_id  # type: ignore[attr-defined]
    assert tags["v2"] == second.build_id  # type: ignore[attr-defined]
    assert make(name).commands.run("cat version").stdout == "1\n"
    Template.remove_tags(name, ["stable"])
    assert product.call("POST", "/sandboxes", json={"templateID": f"{name}:stable"}).status_code == 404


def test_the_sandboxes_of_a_build_are_not_shown(product: Product, name: str) -> None:
    template = Template().from_template("base").run_cmd("sleep 3")
    info = Template.build_in_background(template, name, **CPU)  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while Template.get_build_status(info).status.value == "building" and time.monotonic() < deadline:
        listed = product.call("GET", "/v2/sandboxes").json()
        assert not [one for one in listed if one["templateID"] == info.template_id]
        time.sleep(0.2)
    assert Template.get_build_status(info).status.value == "ready"


def test_a_newer_build_takes_the_place_of_one_that_runs(name: str) -> None:
    older = Template.build_in_background(Template().from_template("base").run_cmd("sleep 120"), name, **CPU)  # type: ignore[arg-type]
    time.sleep(2)
    began = time.monotonic()
    build(Template().from_template("base").run_cmd("echo newer"), name)
    assert time.monotonic() - began < 60
    status = Template.get_build_status(older)
    assert status.status.value == "error"


class Registry(http.server.BaseHTTPRequestHandler):
    """Just enough of a registry for one image: a layout's blobs behind one account."""

    blobs: ClassVar[Path]
    manifest: ClassVar[str]
    asked: ClassVar[list[str]]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.headers.get("Authorization") != "Basic " + base64.b64encode(b"me:secret word").decode():
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="here"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        name = self.path.rpartition("/")[2].removeprefix("sha256:")
        content = b"{}" if self.path == "/v2/" else (self.blobs / (self.manifest if name == "v1" else name)).read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 - the library calls it so

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    image = Image([oci.busybox(oci.Entry("etc/from-image", b"yes\n"))], {"Env": ["PATH=/bin", "COLOUR=blue"], "WorkingDir": "/ignored"})
    root = image.write(tmp_path / "image")
    index = json.loads((root / "index.json").read_text())
    Registry.blobs, Registry.asked = root / "blobs" / "sha256", []
    Registry.manifest = index["manifests"][0]["digest"].removeprefix("sha256:")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"localhost:{server.server_port}/team/small:v1"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(oci.BUSYBOX is None, reason="busybox is missing: apt-get install busybox-static")
def test_a_small_image_of_a_registry_is_built_upon(product: Product, name: str, make: Make, registry: str, tmp_path: Path) -> None:
    (tmp_path / "context" / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "context" / "tree" / "deep" / "file.txt").write_text("deep\n")
    (tmp_path / "context" / "one.txt").write_text("one\n")
    template = (
        Template(file_context_path=tmp_path / "context")
        .from_image(registry, username="me", password="secret word")
        .run_cmd("cat /etc/from-image >/home/user/seen; echo $COLOUR >>/home/user/seen")
        .copy("tree", "/srv/tree", user="root")
        .copy("tree", "/srv/tree/again", user="root")
        .copy("one.txt", "/srv/tree/", mode=0o640)
        .copy("*.txt", "/srv/globbed/")
        .copy(".", "/srv/all/")
    )
    build(template, name)
    sandbox = make(name)
    assert sandbox.commands.run("cat /home/user/seen").stdout == "yes\nblue\n"
    assert sandbox.commands.run("cat /srv/tree/deep/file.txt /srv/tree/again/deep/file.txt").stdout == "deep\ndeep\n"
    assert sandbox.commands.run("stat -c '%U %a' /srv/tree/one.txt /srv/tree/deep/file.txt").stdout.split()[:3] == ["user", "640", "root"]
    assert sandbox.commands.run("cat /srv/globbed/one.txt /srv/all/one.txt /srv/all/tree/deep/file.txt").stdout == "one\none\ndeep\n"
    assert sandbox.commands.run("ls -a /.atoll").stdout.split() == [".", "..", "guest", "placement"]

    wrong = Template().from_image(registry, username="me", password="another").run_cmd("true")
    with pytest.raises(BuildException) as raised:
        build(wrong, name)
    assert "another" not in str(raised.value)


def test_the_command_line_builds_a_dockerfile(product: Product, name: str, make: Make, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("print('from the Dockerfile')\n")
    (tmp_path / "app" / "left.out").write_text("no\n")
    (tmp_path / ".dockerignore").write_text("**/*.out\n")
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE=base\nFROM template:$BASE\nARG WORD\nENV SAID=$WORD\nRUN id -u >/srv/who && \\\n    echo $WORD >>/srv/who\n"
        'COPY app /srv/app\nWORKDIR /srv/app\nUSER user\nEXPOSE 80\nCMD ["sleep", "infinity"]\n'
    )

    def built(*more: str) -> subprocess.CompletedProcess[str]:
        command = [ATOLL, "template", "build", name, str(tmp_path), "--build-arg", "WORD=hello", *more]
        return subprocess.run(command, env=product.environment, capture_output=True, text=True, timeout=120, check=False)

    first = built()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "line 10: EXPOSE has no effect here" in first.stderr
    sandbox = make(name)
    assert sandbox.commands.run("cat /srv/who; python3 main.py; echo $SAID; ls; id -un").stdout == (
        "0\nhello\nfrom the Dockerfile\nhello\nmain.py\nuser\n"
    )
    assert sandbox.commands.run("pgrep -x sleep").stdout.strip()
    again = built()
    assert "CACHED" in again.stderr
    assert "sending" not in again.stderr
    (tmp_path / "Dockerfile").write_text("FROM template:base\nRUN exit 3\n")
    failed = built()
    assert failed.returncode != 0
    assert "exit status 3" in failed.stderr
