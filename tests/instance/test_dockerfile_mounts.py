"""Secrets, keys and caches of a Dockerfile's RUNs, images that begin with nothing, repositories and zstd in ADD, in real sandboxes."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.instance.conftest import Instance
from tests.instance.survival import Client
from tests.instance.test_builds import nothing_left
from tests.instance.test_dockerfile import sandbox_of

SECRET = "k9-never-to-be-found-" + uuid.uuid4().hex


@pytest.fixture
def name(instance: Instance) -> Iterator[str]:
    name = f"m-{uuid.uuid4().hex[:12]}"
    yield name
    instance.run("template", "delete", name, check=False)


def found_in(instance: Instance, text: str) -> list[str]:
    """Files of the instance, its images and logs among them, that have a text in them."""
    ran = subprocess.run(["grep", "-rlaF", "--devices=skip", "--", text, str(instance.home)], capture_output=True, text=True, check=False)
    return ran.stdout.split()


def test_a_secret_is_used_and_is_nowhere_afterwards(instance: Instance, name: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "Dockerfile").write_text(
        "FROM template:base\n"
        "RUN --mount=type=secret,id=token,uid=1000,mode=0440 --mount=type=secret,id=token,env=TOKEN,target=/opt/place \\\n"
        '    sha256sum </run/secrets/token >/digest && [ "$TOKEN" = "$(cat /opt/place)" ] && stat -c "%u %a" /run/secrets/token >>/digest \\\n'
        "    && cat /run/secrets/token && echo && tr '\\0' ' ' </proc/self/cmdline >/words\n"
        "RUN --mount=type=secret,id=other test ! -e /run/secrets/other\n"
        'RUN test ! -e /opt/place && test -z "$TOKEN"\n'
    )
    missing = instance.run("template", "build", name, str(tmp_path), check=False)
    assert missing.returncode != 0
    built = instance.run("template", "build", name, str(tmp_path), "--secret", f"id=token,src={tmp_path / 'token'}")
    assert SECRET not in built.stderr + built.stdout
    assert "***" in built.stderr, "what a command writes of it is not shown"
    with sandbox_of(instance, name) as sandbox:
        digest = subprocess.run(["sha256sum"], input=SECRET.encode(), capture_output=True, check=True).stdout.decode()
        assert sandbox.commands.run("cat /digest").stdout == digest + "1000 440\n"
        assert SECRET not in sandbox.commands.run("cat /words; env").stdout
        ran = sandbox.commands.run(f"grep -rlaF {SECRET} /etc /home /opt /root /srv /usr/local /var 2>/dev/null || true", user="root")
        assert ran.stdout == ""
    nothing_left(instance)
    assert found_in(instance, SECRET) == []


def test_a_key_for_ssh_is_an_agents_and_nowhere_afterwards(instance: Instance, name: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (tmp_path / "Dockerfile").write_text(
        "FROM template:base\n"
        "RUN --mount=type=ssh ssh-add -L >/root-has\n"
        "USER user\n"
        "RUN --mount=type=ssh ssh-add -L >/home/user/user-has; ls /.atoll/ssh/0 >/home/user/names\n"
        "RUN ssh-add -L >/home/user/after 2>&1; test $? != 0\n"
    )
    instance.run("template", "build", name, str(tmp_path), "--ssh", f"default={key}")
    public = " ".join(key.with_suffix(".pub").read_text().split()[:2])
    with sandbox_of(instance, name) as sandbox:
        for place in ("/root-has", "/home/user/user-has"):
            assert " ".join(sandbox.commands.run(f"cat {place}").stdout.split()[:2]) == public
            assert len(sandbox.commands.run(f"cat {place}").stdout.splitlines()) == 1
        assert sandbox.commands.run("cat /home/user/names").stdout.split() == ["agent", "agent.sock"], "the key itself is gone when it runs"
    nothing_left(instance)
    assert found_in(instance, key.read_text().splitlines()[2]) == []


def test_a_cache_is_there_in_the_next_build(instance: Instance, name: str, tmp_path: Path) -> None:
    mount = f"--mount=type=cache,target=/var/seen,id={name}"
    text = f"FROM template:base\nARG N\nRUN {mount} echo $N >>/var/seen/all && cat /var/seen/all >/all\n"
    (tmp_path / "Dockerfile").write_text(text)
    for number in ("1", "2"):
        instance.run("template", "build", name, str(tmp_path), "--build-arg", f"N={number}")
    with sandbox_of(instance, name) as sandbox:
        assert sandbox.commands.run("cat /all; ls /var/seen 2>&1 | wc -l").stdout.split()[:2] == ["1", "2"]
        assert sandbox.commands.run("ls -A /var/seen 2>/dev/null || true").stdout == "", "it is no part of the template"


def test_an_image_that_begins_with_nothing(instance: Instance, name: str, tmp_path: Path) -> None:
    (tmp_path / "hello.txt").write_text("hello\n")
    with tarfile.open(tmp_path / "more.tar", "w") as tar:
        info = tarfile.TarInfo("unpacked/file")
        info.size, info.uid, info.mode = 3, 4321, 0o640
        tar.addfile(info, io.BytesIO(b"hi\n"))
    subprocess.run(["zstd", "-q", "--rm", str(tmp_path / "more.tar"), "-o", str(tmp_path / "more.tar.zst")], check=True)
    (tmp_path / "Dockerfile").write_text(
        "FROM template:base AS parts\n"
        "RUN mkdir /out && for one in /bin/sh /bin/cat /bin/ls /usr/bin/stat /usr/bin/id; do cp --parents -L $one /out; \\\n"
        "    for library in $(ldd $one | grep -o '/[^ ]*'); do cp --parents -L $library /out; done; done\n"
        "FROM scratch\n"
        "COPY --from=parts /out /\n"
        "COPY --chown=77:78 hello.txt /data/\n"
        "ADD more.tar.zst /data\n"
        "RUN cat /data/hello.txt >/made && ls -A / >/names\n"
        "COPY hello.txt /last\n"
        "WORKDIR /data\n"
        "USER 77:78\n"
    )
    (tmp_path / "fail").mkdir()
    ran = instance.run("template", "build", name, str(tmp_path), check=False)
    # Its last COPY is taken in the image itself, which has no tar.
    assert ran.returncode != 0
    assert "tar" in ran.stdout + ran.stderr
    (tmp_path / "Dockerfile").write_text((tmp_path / "Dockerfile").read_text().replace("COPY hello.txt /last\n", ""))
    instance.run("template", "build", name, str(tmp_path))
    with Client(instance) as client:
        sandbox = client.create(template=name)
        assert sandbox.files.read("/made") == "hello\n"
        names = set(sandbox.files.read("/names").split())
        assert "data" in names
        assert not names & {"etc-of-base", "boot", "srv", "media"}, "nothing of the base is in it"
        assert sandbox.commands.run("stat -c '%u:%g %a %n' /data/hello.txt /data/unpacked/file; id -u").stdout == (
            "77:78 644 /data/hello.txt\n4321:0 640 /data/unpacked/file\n77\n"
        )
        sandbox.kill()
    nothing_left(instance)


def test_a_repository_is_added_at_its_tag(instance: Instance, name: str, tmp_path: Path) -> None:
    place = tmp_path / "app.git"
    place.mkdir()
    (place / "file").write_text("one")
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run(["git", "-C", str(place), *words], env={**os.environ, **who}, check=True)
    port = subprocess.run(["python3", "scripts/free_ports.py", "1"], capture_output=True, text=True, check=True).stdout.strip()
    command = ["git", "daemon", "--export-all", f"--base-path={tmp_path}", "--listen=127.0.0.1", f"--port={port}", str(tmp_path)]
    daemon = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        (tmp_path / "Dockerfile").write_text(f"FROM template:base\nADD git://127.0.0.1:{port}/app.git#v1 /srv/app\n")
        instance.run("template", "build", name, str(tmp_path))
    finally:
        os.killpg(daemon.pid, 9)
        daemon.wait()
    with sandbox_of(instance, name) as sandbox:
        assert sandbox.commands.run("ls -A /srv/app; cat /srv/app/file").stdout == "file\none"
