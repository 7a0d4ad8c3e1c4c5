"""Dockerfiles as steps: what they mean, and what is refused with its line."""

from __future__ import annotations

import subprocess

import pytest

from atoll.base.errors import Refused
from atoll.cli.dockerfile import Copied, read


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
        ("RUN", ["first"]),
        ("RUN", ["export V=1; /bin/bash -o pipefail -c 'echo \"$V\" | cat'"]),
        ("RUN", ["exec form"]),
        ("RUN", ["/bin/sh -ec last"]),
    ]
    assert read(f"FROM x\n{text}", {}).start_command == "/bin/sh -ec 'serve $PORT'"


def test_a_named_shell_runs_what_it_is_given_with_its_options() -> None:
    made = read('FROM x\nARG WORD=it\\\'s\nSHELL ["/bin/bash", "-o", "pipefail", "-c"]\nRUN false | echo "$WORD"', {})
    step = next(one for one in made.steps if not isinstance(one, Copied) and one[0] == "RUN")
    ran = subprocess.run(["/bin/bash", "-c", step[1][0]], capture_output=True, text=True, check=False)  # type: ignore[index]
    assert (ran.returncode, ran.stdout) == (1, "it's\n")


def test_what_has_no_effect_is_told() -> None:
    assert read("FROM x\nEXPOSE 80\nLABEL a=b", {}).notes == ["line 2: EXPOSE has no effect here", "line 3: LABEL has no effect here"]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("RUN a", 1, "before FROM"),
        ("# c\n\nFROM a\nRUN x \\\n  y\nADD b /c", 6, "ADD"),
        ("FROM a\nFROM b", 2, "several stages"),
        ("FROM a\nCOPY --from=b /x /y", 2, "--from"),
        ("FROM a\nRUN --mount=type=cache,target=/x y", 2, "--mount"),
        ("FROM a\nRUN <<EOF\nx\nEOF", 2, "here-document"),
        ("FROM a\nSHELL /bin/bash -c", 2, "as a list"),
        ("FROM a\nSHELL []", 2, "as a list"),
        ("FROM a\nONBUILD RUN x", 2, "ONBUILD"),
        ("FROM scratch", 1, "scratch"),
        ("FROM a\nCOPY x", 2, "where to"),
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


def test_a_dockerfile_has_a_beginning() -> None:
    with pytest.raises(Refused, match="no FROM"):
        read("# nothing", {})
