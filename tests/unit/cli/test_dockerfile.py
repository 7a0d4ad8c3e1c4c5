"""Dockerfiles as steps: what they mean, and what is refused with its line."""

from __future__ import annotations

import subprocess

import pytest

from atoll.base.errors import Refused
from atoll.cli.dockerfile.reading import read
from atoll.cli.dockerfile.stages import Copied, Mounted, Ran


def steps(text: str, **arguments: str) -> list[object]:
    """Without what every Dockerfile begins and ends with."""
    made = read(f"FROM base\n{text}", arguments).steps
    assert made[:2] == [("USER", ["root"]), ("WORKDIR", ["/"])]
    ends = [("USER", ["user"]), ("WORKDIR", ["/home/user"])]
    return [one for one in made[2:] if one not in ends]


def test_instructions_become_steps() -> None:
    text = """
    RUN apt-get update && \\
        # a comment between
        apt-get install -y curl
    ENV A=1 B="two words"
    ENV OLD form of it
    COPY --chown=app:app --chmod=755 one two /srv/
    COPY ["with space", "/x"]
    RUN ["echo", "a b"]
    """
    assert steps(text) == [
        ("RUN", ["apt-get update && apt-get install -y curl"]),
        ("ENV", ["A", "1", "B", "two words"]),
        ("ENV", ["OLD", "form of it"]),
        Copied("one", "/srv/", "app:app", "755"),
        Copied("two", "/srv/", "app:app", "755"),
        Copied("with space", "/x", "root", ""),
        ("RUN", ["echo 'a b'"]),
    ]


def test_sandboxes_are_the_users_unless_it_says_otherwise() -> None:
    assert read("FROM x\nRUN a", {}).steps[-2:] == [("USER", ["user"]), ("WORKDIR", ["/home/user"])]
    assert read("FROM x\nUSER app\nWORKDIR /srv", {}).steps[-2:] == [("USER", ["app"]), ("WORKDIR", ["/srv"])]


def test_arguments_are_put_in_and_environment_is_left_to_control() -> None:
    text = "ARG V=1\nARG W\nENV V2=${V}-$HOME X=${W:-none}\nRUN make $V\nWORKDIR /srv/$V\nENV V=9\nRUN echo $V"
    assert steps(text) == [
        ("ENV", ["V2", "1-$HOME", "X", "none"]),
        ("RUN", ["export V=1; make $V"]),
        ("WORKDIR", ["/srv/1"]),
        ("ENV", ["V", "9"]),
        ("RUN", ["echo $V"]),
    ]
    assert ("WORKDIR", ["/srv/2"]) in steps(text, V="2")
    assert read("ARG TAG=12\nFROM debian:$TAG AS here", {}).from_image == "debian:12"


@pytest.mark.parametrize(
    ("begins", "command"),
    [
        ('CMD ["python3", "-m", "http.server"]', "python3 -m http.server"),
        ('ENTRYPOINT ["serve"]\nCMD ["--port", "8 0"]', "serve --port '8 0'"),
        ("CMD one\nCMD exec two", "exec two"),
        ("RUN a", None),
    ],
)
def test_what_runs_in_a_container_is_the_start_command(begins: str, command: str | None) -> None:
    assert read(f"FROM x\n{begins}", {}).start_command == command


def test_commands_are_run_by_the_shell_that_was_named_last() -> None:
    text = """ARG V=1
RUN first
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN echo "$V" | cat
RUN ["exec", "form"]
SHELL ["/bin/sh", "-ec"]
RUN last
CMD serve $PORT"""
    assert steps(text) == [
        ("RUN", ["export V=1; first"]),
        ("RUN", ["export V=1; /bin/bash -o pipefail -c 'echo \"$V\" | cat'"]),
        ("RUN", ["export V=1; exec form"]),
        ("RUN", ["export V=1; /bin/sh -ec last"]),
    ]
    assert read(f"FROM x\n{text}", {}).start_command == "/bin/sh -ec 'serve $PORT'"


def test_a_named_shell_runs_what_it_is_given_with_its_options() -> None:
    made = read('FROM x\nARG WORD=it\\\'s\nSHELL ["/bin/bash", "-o", "pipefail", "-c"]\nRUN false | echo "$WORD"', {})
    step = next(one for one in made.steps if not isinstance(one, Copied) and one[0] == "RUN")
    ran = subprocess.run(["/bin/bash", "-c", step[1][0]], capture_output=True, text=True, check=False)  # type: ignore[index]
    assert (ran.returncode, ran.stdout) == (1, "it's\n")


def test_what_has_no_effect_is_told() -> None:
    assert read("FROM x\nEXPOSE 80\nLABEL a=b", {}).notes == ["line 2: EXPOSE has no effect here", "line 3: LABEL has no effect here"]


def test_stages_are_built_in_the_order_in_which_they_are_needed() -> None:
    text = """ARG V=12
FROM debian:$V AS tools
RUN a
FROM node AS unused
RUN never
FROM tools AS Build
WORKDIR /src
RUN make
FROM base
COPY --from=build /src/out /src/*.so /opt/
COPY --from=busybox:1 /bin/busybox /bin/busybox
COPY --from=0 /a /b
RUN end"""
    made = read(text, {})
    assert [stage.name for stage in made.stages] == ["tools", "Build", "busybox:1", "3"]
    assert made.stages[1].parent is made.stages[0]
    assert made.stages[1].steps == [("WORKDIR", ["/src"]), ("RUN", ["make"])]
    assert made.origins == {"build": 1, "busybox:1": 2, "0": 0}
    assert (made.stages[0].base, made.stages[2].base, made.from_image) == ("debian:12", "busybox:1", "base")
    assert made.steps[2:5] == [
        Copied("src/out", "/opt/", "", "", origin="build"),
        Copied("src/*.so", "/opt/", "", "", origin="build"),
        Copied("bin/busybox", "/bin/busybox", "", "", origin="busybox:1"),
    ]
    assert "stage unused is not needed, and not built" in made.notes
    assert [stage.name for stage in read(text, {}, target="tools").stages] == ["tools"]
    assert [stage.name for stage in read(text, {}, target="1").stages] == ["unused"]


def test_a_stage_goes_on_with_what_another_one_was() -> None:
    text = """FROM a AS one
ARG A=1
ENV E=2
USER app
WORKDIR /srv
SHELL ["/bin/sh", "-ec"]
CMD ["serve"]
FROM one
RUN $A
ARG E
"""
    made = read(text, {})
    assert made.steps == [("RUN", ["export A=1; /bin/sh -ec '$A'"])]
    assert made.start_command == "serve"
    # Its own ENTRYPOINT begins anew, and one in shell form takes no CMD.
    assert read(text + 'ENTRYPOINT ["x"]', {}).start_command == "x"
    assert read(text + 'ENTRYPOINT ["x"]\nCMD ["y"]', {}).start_command == "x y"
    assert read(text + "ENTRYPOINT x $PORT\nCMD y", {}).start_command == "/bin/sh -ec 'x $PORT'"


def test_arguments_belong_to_their_stage() -> None:
    text = "ARG A=1\nFROM x:$A AS one\nRUN none\nARG A\nRUN first\nFROM base\nRUN other\nARG A=3\nRUN second\nARG NOTHING\nRUN third"
    made = read(text + "\nCOPY --from=one /a /b", {})
    assert [step[1][0] for step in made.stages[0].steps[2:]] == ["none", "export A=1; first"]  # type: ignore[index]
    assert made.steps[2:5] == [("RUN", ["other"]), ("RUN", ["export A=3; second"]), ("RUN", ["export A=3; third"])]
    assert read(text, {"A": "9", "B": "x"}).notes[-1] == "no ARG asks for the build argument B"
    assert read(text, {"A": "9"}).steps[3] == ("RUN", ["export A=9; second"])


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("a$A", "a1"),
        ("${A}b", "1b"),
        ("${N:-x$A}", "x1"),
        ("${A:+yes}${N:+no}", "yes"),
        ("${E:-empty}${E-}", "empty"),
        ("'$A'", "\\$A"),
        ('"$A \\$A"', "1 \\$A"),
        ("\\$A", "\\$A"),
        ("$V/bin", "v/bin"),
        ("${PATH}:$A", "${PATH}:1"),
        ("${HOME:-$A}", "${HOME:-1}"),
    ],
)
def test_variables(said: str, value: str) -> None:
    made = steps(f"ARG A=1\nARG N\nARG E=\nENV V=v\nENV X={said}")
    assert made[-1] == ("ENV", ["X", value])


def test_values_that_the_image_decides_are_not_guessed() -> None:
    assert steps("ENV A=1\nENV P=$PATH:/x\nENV B=$A\nENV C=$B")[-1] == ("ENV", ["C", "1"])
    with pytest.raises(Refused, match=r"line 3: \$P is not known here"):
        read("FROM x\nENV P=$PATH:/x\nUSER $P", {})


def test_here_documents() -> None:
    text = """RUN <<EOF
  echo one  # no comment
  echo "$TWO" \\
    three
EOF
RUN python3 - <<'END' && cat <<-TABS >/x
print("<<EOF")
END
\tindented
\tTABS
RUN echo "a <<b c" $((1<<4))
RUN <<-A
\t#!/usr/bin/env python3
\tprint(1)
\tA
"""
    made = [step[1][0] for step in steps(text)]  # type: ignore[index]
    assert made[0] == '  echo one  # no comment\n  echo "$TWO" \\\n    three\n'
    assert made[1] == "python3 - <<'END' && cat <<-TABS >/x\nprint(\"<<EOF\")\nEND\nindented\nTABS\n"
    assert made[2] == 'echo "a <<b c" $((1<<4))'
    ran = subprocess.run(["/bin/bash", "-c", made[3]], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("1\n", "", 0)


def test_files_may_stand_in_the_dockerfile_itself() -> None:
    text = "ARG V=1\nENV E=2\nCOPY --chmod=755 <<a.txt <<'b.txt' /srv/\n$V ${E} \\$V 'it'\na.txt\n$V\nb.txt\nRUN after"
    assert steps(text)[1:] == [
        Copied("a.txt", "/srv/", "root", "755", content="1 2 $V 'it'\n"),
        Copied("b.txt", "/srv/", "root", "755", content="$V\n"),
        ("RUN", ["export V=1; after"]),
    ]


def test_mounts() -> None:
    text = """FROM golang AS build
RUN x
FROM base
RUN --mount=type=cache,target=/root/.cache,uid=5,sharing=locked --mount=type=tmpfs,dst=/scratch \\
    --mount=src=go.mod,target=go.mod --mount=type=bind,from=build,source=/out,target=/in,ro go build
RUN --network=default plain"""
    made = read(text, {})
    assert made.steps[2] == Ran(
        "go build",
        (
            Mounted("/root/.cache", owner="5:0", mode="755", kind="cache", id="/root/.cache"),
            Mounted("/scratch", owner="0:0", mode="1777"),
            Mounted("go.mod", "go.mod"),
            Mounted("/in", "out", "build"),
        ),
    )
    assert made.origins == {"build": 0}
    assert made.notes == []


def test_secrets_keys_and_caches_have_ids() -> None:
    text = """FROM base
RUN --mount=type=secret,id=token --mount=type=secret,id=b,target=/b,uid=7,mode=0440,required=true a
RUN --mount=type=secret,id=c,env=TOKEN --mount=type=secret,target=/etc/netrc b
RUN --mount=type=ssh --mount=type=ssh,id=work --mount=type=cache,id=pip,target=/c c"""
    first, second, third = [step.mounts for step in read(text, {}).steps if isinstance(step, Ran)]
    assert first == (
        Mounted("/run/secrets/token", owner="0:0", mode="400", kind="secret", id="token"),
        Mounted("/b", owner="7:0", mode="0440", kind="secret", id="b", required=True),
    )
    assert second == (
        Mounted("", owner="0:0", mode="400", kind="secret", id="c", env="TOKEN"),
        Mounted("/etc/netrc", owner="0:0", mode="400", kind="secret", id="netrc"),
    )
    assert third == (
        Mounted("", kind="ssh", id="default", required=True),
        Mounted("", kind="ssh", id="work", required=True),
        Mounted("/c", owner="0:0", mode="755", kind="cache", id="pip"),
    )


def test_a_stage_may_begin_with_nothing() -> None:
    made = read("FROM a AS b\nRUN x\nFROM scratch\nCOPY --from=b /out /", {})
    assert (made.from_image, [stage.base for stage in made.stages]) == ("scratch", ["a", "scratch"])


@pytest.mark.parametrize(
    ("source", "git"),
    [
        ("https://example.org/a.git", True), ("https://example.org/a.git#v1:sub", True), ("git@example.org:a/b", True),
        ("ssh://git@example.org/a", True), ("https://example.org/a.tar.gz", False), ("a.git", False), ("./x", False),
    ],
)  # fmt: skip
def test_what_add_takes_for_a_repository(source: str, git: bool) -> None:
    (step,) = steps(f"ADD --keep-git-dir=true {source} /srv/")
    assert isinstance(step, Copied)
    assert (step.git, step.keep_git) == (git, True)


def test_add_takes_archives_and_links_to_elsewhere() -> None:
    assert steps("ADD a.tar.gz /opt/\nADD --checksum=sha256:00 https://example.org/x.bin /opt/\nADD --chown=1:2 a /b") == [
        Copied("a.tar.gz", "/opt/", "", "", word="ADD"),
        Copied("https://example.org/x.bin", "/opt/", "", "", word="ADD", checksum="sha256:00"),
        Copied("a", "/b", "1:2", "", word="ADD"),
    ]


def test_what_a_platform_is_called_is_told() -> None:
    made = read("FROM --platform=$BUILDPLATFORM x\nARG TARGETOS\nRUN make", {})
    assert made.steps[2] == ("RUN", ["export TARGETOS=linux; make"])
    assert "line 2: TARGETOS is linux, as of this machine" in made.notes[-1]


def test_lines_are_read_as_docker_does() -> None:
    text = "# syntax=docker/dockerfile:1\n# escape=`\nfrom x\nrun\ta `\n\n# between\n  b\\\\\nCopy c`\n d"
    made = read(text, {})
    assert made.steps[2:4] == [("RUN", ["a b\\\\"]), Copied("c", "d", "root", "")]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("RUN a", 1, "before FROM"),
        ("# c\n\nFROM a\nRUN x \\\n  y\nADD --unpack=true b /c", 6, "ADD --unpack"),
        ("FROM a\nCOPY --checksum=sha256:0 b /c", 2, "COPY --checksum"),
        ("FROM a\nADD --checksum=sha256:0 b /c", 2, "a URL"),
        ("FROM a\nCOPY --from=5 /x /y", 2, "no stage 5"),
        ("FROM a\nCOPY --from=$X /x /y", 2, "without variables"),
        ("FROM a\nCOPY --parents /x /y", 2, "--parents"),
        ("FROM a\nCOPY ../x /y", 2, "outside"),
        ("FROM a AS b\nCOPY --from=b /x /y", 2, "need each other: b -> b"),
        ("FROM a AS b\nCOPY --from=c /x /y\nFROM b AS c\nRUN x", 2, "need each other: c -> b -> c"),
        ("FROM a AS b\nFROM c AS B", 2, "another stage"),
        ("FROM a AS 1b", 1, "no letter"),
        ("FROM a\nRUN --mount=type=secret y", 2, "no id"),
        ("FROM a\nRUN --mount=type=secret,id=x,required=maybe y", 2, "true or false"),
        ("FROM a\nRUN --mount=type=secret,id=$X y", 2, "no variables"),
        ("FROM a\nRUN --mount=type=ssh,target=/x y", 2, "type=ssh,target"),
        ("FROM a\nRUN --mount=type=cache y", 2, "no target"),
        ("FROM a\nRUN --mount=type=cache,target=/x,from=y z", 2, "from"),
        ("FROM a\nRUN --mount=type=bind,source=../x,target=/x z", 2, "outside"),
        ("FROM a\nRUN --network=none y", 2, "--network=none"),
        ("FROM a\nRUN <<EOF\nx\nEO", 2, "EOF does not end"),
        ("FROM a\nRUN <<A <<B\nx\nA\nB", 2, "several here-documents"),
        ("FROM a\nCOPY <<EOF /x\n$NOT_KNOWN\nEOF", 2, "NOT_KNOWN is not known"),
        ("FROM a\nUSER ${X?say who}", 2, "X is not known"),
        ("FROM a\nARG X\nUSER ${X?say who}", 3, "say who"),
        ("FROM a\nARG X\nUSER ${X##y}", 3, "is not supported"),
        ("FROM a\nARG X\nUSER ${X", 3, "not closed"),
        ("FROM a\nENV =x", 2, "no name"),
        ("FROM a\nSHELL /bin/bash -c", 2, "as a list"),
        ("FROM a\nSHELL []", 2, "as a list"),
        ("FROM a\nONBUILD RUN x", 2, "ONBUILD"),
        ("FROM a\nCOPY x", 2, "where to"),
        ("FROM a\nCOPY --chmod=u+x x /y", 2, "no octal mode"),
        ("FROM a\nADD --chmod=0999 x /y", 2, "no octal mode"),
        ("FROM a\nCOPY x y /z", 2, "ends with /"),
        ("FROM a\nUSER", 2, "says nothing"),
        ("FROM a\nENV A='open", 2, "quotation"),
    ],
)
def test_what_is_not_supported_is_named_with_its_line(text: str, line: int, word: str) -> None:
    with pytest.raises(Refused) as refused:
        read(text, {})
    assert refused.value.message.startswith(f"line {line}: ")
    assert word in refused.value.message


def test_a_stage_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(Refused, match="there is no stage 'x'") as refused:
        read("FROM a AS one\nFROM b", {}, target="x")
    assert refused.value.hint == "There are: one, 1."


def test_a_dockerfile_has_a_beginning() -> None:
    with pytest.raises(Refused, match="no FROM"):
        read("# nothing", {})
