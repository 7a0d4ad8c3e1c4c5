"""`atoll template build` of a Dockerfile with stages, here-documents, archives and mounts, in real sandboxes; and what is wrong with one."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shlex
import tarfile
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from e2b import Sandbox

from atoll.control.builds import scripts
from tests.instance.conftest import Instance, until
from tests.instance.survival import Client, kill
from tests.instance.test_builds import nothing_left

DOCKERFILE = r"""# syntax=docker/dockerfile:1
ARG BASE=base
FROM template:$BASE AS tools
RUN useradd --uid 4321 maker

FROM tools AS build
ARG WORD=first
WORKDIR /src
COPY --chown=maker main.sh lib* ./
RUN <<EOF
set -e
mkdir -p /out/deep
{ cat main.sh; echo "echo $WORD"; } >/out/app
chmod 750 /out/app
chown 4321:4321 /out/app
ln -s app /out/link
echo in-deep >/out/deep/file
EOF

FROM template:$BASE AS unused
RUN exit 9

FROM template:$BASE
ARG URL
COPY --from=build /out/app /out/lin? /usr/local/bin/
COPY --from=build --chown=user:user /out/deep /opt/deep
ADD files.tar.xz /opt/unpacked/
ADD $URL /opt/
COPY --chmod=640 <<note.txt <<'raw.txt' /opt/
from $URL
note.txt
$URL stays
raw.txt
RUN --mount=type=cache,target=/root/.cache --mount=type=bind,source=main.sh,target=/opt/main.sh \
    --mount=type=bind,from=build,source=/out,target=/mnt/out \
    echo cached >/root/.cache/big && cat /opt/main.sh /mnt/out/deep/file >/opt/mounted && ls /mnt/out >>/opt/mounted
RUN <<EOF
#!/usr/bin/env python3
print("by python", file=open("/opt/python", "w"))
EOF
USER user
WORKDIR /opt
"""


@pytest.fixture
def name() -> str:
    return f"d-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "main.sh").write_text("#!/bin/sh\necho main\n")
    (tmp_path / "lib.txt").write_text("lib\n")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    with tarfile.open(tmp_path / "files.tar.xz", "w:xz") as tar:
        for path, owner in (("dir/owned", 4321), ("plain", 0)):
            info = tarfile.TarInfo(path)
            info.size, info.uid, info.gid, info.mode = 3, owner, owner, 0o600 if owner else 0o644
            tar.addfile(info, io.BytesIO(b"hi\n"))
    return tmp_path


@pytest.fixture
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("web")
    (root / "fetched.bin").write_bytes(b"from elsewhere\n")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/fetched.bin"
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def sandbox_of(instance: Instance, template: str) -> Iterator[Sandbox]:
    with Client(instance) as client:
        sandbox = client.create(template=template)
        try:
            yield sandbox
        finally:
            sandbox.kill()


def test_a_dockerfile_in_stages(instance: Instance, context: Path, url: str, name: str) -> None:
    first = instance.run("template", "build", name, str(context), "--build-arg", f"URL={url}")
    assert "[build 4/4] RUN" in first.stderr, first.stderr
    assert "stage unused is not needed, and not built" in first.stderr
    with sandbox_of(instance, name) as sandbox:

        def said(command: str) -> str:
            return sandbox.commands.run(command, user="root").stdout

        # Those of another stage stay whose they are, and a link that was asked for is what it leads to.
        assert said("stat -c '%u:%g %a %s %F' /usr/local/bin/app /usr/local/bin/link") == "4321:4321 750 31 regular file\n" * 2
        assert said("/usr/local/bin/app") == "main\nfirst\n"
        assert said("stat -c '%U:%G %n' /opt/deep/file; cat /opt/deep/file") == "user:user /opt/deep/file\nin-deep\n"
        assert said("cd /opt/unpacked; stat -c '%u %a %n' dir/owned plain; cat dir/owned") == "4321 600 dir/owned\n0 644 plain\nhi\n"
        assert said("stat -c '%U %a' /opt/fetched.bin; cat /opt/fetched.bin") == "root 600\nfrom elsewhere\n"
        assert said("stat -c '%a' /opt/note.txt; cat /opt/note.txt /opt/raw.txt") == f"640\nfrom {url}\n$URL stays\n"
        assert said("cat /opt/mounted") == "#!/bin/sh\necho main\nin-deep\napp\ndeep\nlink\n"
        assert said("ls -A /mnt/out /root/.cache /opt/main.sh 2>&1 | grep -v 'No such' | grep -v : | tr -d '\\n'") == ""
        assert said("cat /opt/python") == "by python\n"
        assert sandbox.commands.run("pwd; id -un").stdout == "/opt\nuser\n"
    again = instance.run("template", "build", name, str(context), "--build-arg", f"URL={url}")
    assert "sending" not in again.stderr
    taken = [line for line in again.stderr.splitlines() if line.startswith("[") and ("RUN" in line or "COPY" in line or "ADD" in line)]
    assert not taken, taken
    nothing_left(instance)


def test_a_changed_stage_is_taken_again_and_the_others_are_not(instance: Instance, context: Path, name: str) -> None:
    text = "FROM template:base AS one\nRUN echo 1 >/one\nFROM template:base AS two\nRUN echo 2 >/two\n"
    text += "FROM template:base\nCOPY --from=one /one /one\nCOPY --from=two /two /two\n"
    (context / "Dockerfile").write_text(text)
    instance.run("template", "build", name, str(context))
    (context / "Dockerfile").write_text(text.replace("echo 2", "echo 3"))
    changed = instance.run("template", "build", name, str(context))
    assert "CACHED [one 3/3] RUN" in changed.stderr
    assert "CACHED [4/6] COPY" in changed.stderr or "CACHED [3/6] COPY" in changed.stderr, changed.stderr
    with sandbox_of(instance, name) as sandbox:
        assert sandbox.commands.run("cat /one /two").stdout == "1\n3\n"
    wanted = instance.run("template", "build", f"{name}-one", str(context), "--target", "one")
    assert "COPY" not in wanted.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM template:base\nCOPY --from=nothere:1 /x /y\n", "nothere:1"),
        ("FROM template:base AS a\nRUN true\nFROM template:base\nCOPY --from=a /missing /y\n", "there is no /missing"),
        ("FROM template:base AS a\nCOPY --from=b /x /y\nFROM template:base AS b\nCOPY --from=a /x /y\n", "line 2: stages need each other"),
        ("FROM template:base\nADD evil.tar /x/\n", "line 2: evil.tar has '../up', which leads out"),
        ("FROM template:base\nADD broken.tar.gz /x/\n", "line 2: the archive broken.tar.gz is broken"),
        ("FROM template:base\nADD http://127.0.0.1:9/x /x/\n", "line 2: http://127.0.0.1:9/x cannot be read"),
        ("FROM template:base\nCOPY outside/passwd /x/\n", "by a link"),
        ("FROM template:base\nRUN --mount=type=bind,source=nothing,target=/x true\n", "line 2: RUN --mount nothing"),
        ("FROM template:base AS a\nRUN exit 3\nFROM template:base\nCOPY --from=a / /y\n", "a:3: failed to run command 'exit 3'"),
    ],
)
def test_what_is_wrong_is_said_and_leaves_nothing(instance: Instance, context: Path, name: str, text: str, words: str) -> None:
    with tarfile.open(context / "evil.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../up"))
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        info = tarfile.TarInfo("large")
        info.size = 1 << 16
        tar.addfile(info, io.BytesIO(hashlib.shake_256(b"x").digest(1 << 16)))
    (context / "broken.tar.gz").write_bytes(whole.getvalue()[: 1 << 15])
    (context / "outside").symlink_to("/etc")
    (context / "Dockerfile").write_text(text)
    failed = instance.run("template", "build", name, str(context), check=False)
    assert failed.returncode != 0
    assert words in failed.stderr, failed.stderr
    nothing_left(instance)


def test_what_is_mounted_is_there_for_a_while_also_where_nothing_may_be_mounted(client: Client) -> None:
    sandbox = client.create("shared-kernel")
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w:gz") as tar:
        info = tarfile.TarInfo("dir/file")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"hi\n"))

    def run(command: str) -> str:
        return sandbox.commands.run(command, user="root").stdout

    def script(text: str, *words: str) -> None:
        run(shlex.join(["/bin/sh", "-c", text, "sh", *words]))

    try:
        run("mkdir -p /srv/kept; echo mine >/srv/kept/own")
        for number, (target, source, how) in enumerate(
            [("/srv/kept", "dir", "-o"), ("/new/deep", ".", ""), ("/srv/kept/file", "dir/file", "-p"), ("/srv/kept/own", "dir/file", "-p")]
        ):
            before = run("find /srv /new -type f -exec cat {} + 2>/dev/null || true")
            if how:
                sandbox.files.write(scripts.ARCHIVE, files.getvalue(), user="root")
            script(scripts.MOUNT, str(number), target, source, how, "" if how else "1:2", "" if how else "750")
            if how:
                assert run(f"cat {target}{'/file' if source == 'dir' else ''}") == "hi\n"
            else:
                assert run(f"stat -c '%u:%g %a' {target}; touch {target}/new; ls -A {target}") == "1:2 750\nnew\n"
            script(scripts.UNMOUNT, str(number), target)
            assert run("find /srv /new -type f -exec cat {} + 2>/dev/null || true") == before == "mine\n", (target, source)
        assert run("ls -A /.atoll/mounts /new") == "/.atoll/mounts:\n\n/new:\n"
    finally:
        sandbox.kill()


def test_control_that_is_killed_between_two_stages_leaves_nothing(instance: Instance, context: Path, name: str) -> None:
    text = "FROM template:base AS a\nRUN head -c 400M /dev/urandom >/large\nFROM template:base\nCOPY --from=a /large /large\nRUN true\n"
    (context / "Dockerfile").write_text(text)
    uploads = instance.layout.blobs / "uploads"
    passing = partial(lambda: list(uploads.rglob(".passing-*")))
    building = threading.Thread(target=lambda: instance.run("template", "build", name, str(context), check=False))
    building.start()
    until(lambda: any(path.stat().st_size > 1 << 20 for path in passing()), within_s=90, what=instance.last_words)
    kill(instance, "control")
    instance.until_well()
    building.join(120)
    done = instance.run("template", "build", name, str(context))
    assert "CACHED" in done.stderr
    assert not passing()
    nothing_left(instance)


def test_what_docker_takes_is_taken(instance: Instance, name: str, tmp_path: Path) -> None:
    """A mark before the text and ends of lines of another system, links that are asked for, a group behind USER."""
    (tmp_path / "real.txt").write_text("real\n")
    (tmp_path / "link.txt").symlink_to("real.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in.txt").write_text("in\n")
    (tmp_path / "folder" / "near").symlink_to("in.txt")
    (tmp_path / "there").symlink_to("folder")
    (tmp_path / "s p a c e ü").write_text("odd\n")
    lines = [
        "FROM template:base",
        "COPY link.txt /x/copied.txt",
        "COPY there /x/there",
        'COPY ["s p a c e ü", "/x/odd name"]',
        "RUN test ! -L /x/copied.txt && \\",
        "    cat /x/copied.txt /x/there/near '/x/odd name' >/x/all && test -L /x/there/near",
        "USER 1234:4321",
        "RUN id -u >/tmp/ids && id -g >>/tmp/ids && id -G >>/tmp/ids",
        "USER root",
        "RUN tr '\\n' ' ' </tmp/ids >/x/ids",
    ]
    (tmp_path / "Dockerfile").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    instance.run("template", "build", name, str(tmp_path))
    with sandbox_of(instance, name) as sandbox:
        assert sandbox.commands.run("cat /x/all").stdout == "real\nin\nodd\n"
        assert sandbox.commands.run("cat /x/ids").stdout == "1234 4321 4321 "
    nothing_left(instance)


def test_what_cannot_be_sent_leaves_no_template(instance: Instance, name: str, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/etc/passwd")
    for text, words in (
        ("COPY gone /x", "has nothing of that name"),
        ("COPY out /x", "leads out of"),
        ("COPY . /x\nCOPY --chmod=u+x . /x", "octal"),
    ):
        (tmp_path / "Dockerfile").write_text(f"FROM template:base\n{text}\n")
        refused = instance.run("template", "build", name, str(tmp_path), check=False)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    assert name not in instance.run("template", "list").stdout
