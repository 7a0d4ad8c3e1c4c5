import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.base.errors import HINTS, Code
from atoll.domain.sandbox import State
from tests.unit.cli.conftest import Atoll

UNKNOWN = "i" + "0" * 20


def test_create_prints_the_id_alone(atoll: Atoll) -> None:
    done = atoll.run("sandbox", "create", "--cpu", "0.5", "--memory", "1G", "--timeout", "2m", "-e", "A=b=c", "-m", "k=v", "--no-internet")
    assert done.exit_code == 0
    assert len(done.stdout.strip()) == 21
    request = atoll.service.requests[-1]
    assert (request.cpu_millis, request.memory_mib, request.disk_mib, request.timeout_s) == (500, 1024, None, 120)
    assert request.env == {"A": "b=c"}
    assert request.metadata == {"k": "v"}
    assert request.network.internet is False


def test_create_with_the_same_request_id_gives_the_same_sandbox(atoll: Atoll) -> None:
    assert atoll.create("--request-id", "r1") == atoll.create("--request-id", "r1")
    assert atoll.create("--request-id", "r1") != atoll.create()


def test_a_create_whose_answer_was_lost_is_asked_again_with_the_same_id(atoll: Atoll) -> None:
    atoll.guest.lost_answers = 2
    sandbox = atoll.create()
    assert len(atoll.service.requests) == 3
    assert len({request.request_id for request in atoll.service.requests}) == 1
    assert [item["id"] for item in atoll.json("sandbox", "list", "--json")["items"]] == [sandbox]


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "--timeout", "soon"),
        ("create", "--timeout", "0"),
        ("create", "--memory", "much"),
        ("create", "--cpu", "-1"),
        ("create", "--env", "NOVALUE"),
        ("create", "--shell", "--no-wait"),
        ("rm",),
        ("rm", "--all", UNKNOWN),
        ("exec", UNKNOWN),
        ("exec", UNKNOWN, "--"),
        ("cp", "a", "b"),
        ("cp", f"{UNKNOWN}:a", f"{UNKNOWN}:b"),
        ("nonsense",),
        ("list", "--limit", "0"),
    ],
)
def test_usage_is_2(atoll: Atoll, arguments: tuple[str, ...]) -> None:
    assert atoll.run("sandbox", *arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("sandbox", "create", "--json", "--timeout", "soon"), "soon"),
        (("sandbox", "create", "--memory", "all", "--json"), "all"),
        (("sandbox", "list", "--json", "--nope"), "--nope"),
        (("sandbox", "list", "--nope", "--json"), "--nope"),
        (("sandbox", "get", "--json"), "SANDBOX"),
        (("sandbox", "exec", "--json"), "SANDBOX"),
        (("sandbox", "rm", "--json"), "--all"),
        (("sandbox", "cp", "--json", "a", "b"), "SANDBOX:PATH"),
        (("host", "drain", "--json"), "HOST"),
        (("nope", "--json"), "nope"),
        (("--json",), "--json"),
        (("--nope", "status", "--json"), "--nope"),
    ],
)
def test_usage_with_json_is_one_document(atoll: Atoll, arguments: tuple[str, ...], word: str) -> None:
    done = atoll.run(*arguments)
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "INVALID_REQUEST"
    assert word.casefold() in error["message"].casefold()
    assert error["hint"]
    assert done.stderr == ""


def test_usage_without_json_is_text_whatever_a_command_inside_is_given(atoll: Atoll) -> None:
    for arguments in (("sandbox", "create", "--timeout", "soon"), ("sandbox", "exec", "--nope", "i1", "--", "ls", "--json")):
        done = atoll.run(*arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "Usage: " in done.stderr


@pytest.mark.parametrize("command", ["get", "logs", "events", "rm", "exec", "shell"])
def test_not_found_is_3_and_json_is_still_one_document(atoll: Atoll, command: str) -> None:
    more = ["true"] if command == "exec" else []
    done = atoll.run("sandbox", command, UNKNOWN, *more)
    assert done.exit_code == 3
    assert done.stdout == ""
    assert "SANDBOX_NOT_FOUND" in done.stderr
    told = atoll.run("sandbox", command, "--json", UNKNOWN, *more)
    assert told.exit_code == 3
    document = json.loads(told.stdout)
    error = document["error"] if "error" in document else document["items"][0]["error"]
    assert error["code"] == "SANDBOX_NOT_FOUND"
    assert error["hint"]


def test_unavailable_is_4(atoll: Atoll) -> None:
    done = atoll.run("sandbox", "list", ATOLL_API_URL="http://127.0.0.1:1")
    assert done.exit_code == 4
    assert "CONTROL_UNAVAILABLE" in done.stderr


def test_refused_is_1(atoll: Atoll) -> None:
    assert atoll.run("sandbox", "list", key="e2b_" + "0" * 40).exit_code == 1
    assert atoll.run("host", "list").exit_code == 1


def test_a_list_for_people_for_pipes_and_for_scripts(atoll: Atoll) -> None:
    first, second = atoll.create("-m", "who=a"), atoll.create("-m", "who=b")
    table = atoll.run("sandbox", "list").stdout
    assert first in table
    assert second in table
    assert "ready" in table
    assert set(atoll.run("sandbox", "list", "-q").stdout.split()) == {first, second}
    assert [item["id"] for item in atoll.json("sandbox", "list", "--json", "-m", "who=a")["items"]] == [first]
    assert len(atoll.json("sandbox", "list", "--json", "--limit", "1")["items"]) == 1
    assert atoll.json("sandbox", "list", "--json", "-s", "paused")["items"] == []


def test_an_empty_list_says_so(atoll: Atoll) -> None:
    assert atoll.run("sandbox", "list").stdout.strip() == "No sandboxes."
    assert atoll.json("sandbox", "list", "--json") == {"items": []}


def test_ended_ones_are_listed_when_asked_for(atoll: Atoll) -> None:
    sandbox = atoll.create()
    atoll.service.end(sandbox)
    assert atoll.json("sandbox", "list", "--json")["items"] == []
    assert [item["id"] for item in atoll.json("sandbox", "list", "--all", "--json")["items"]] == [sandbox]


def test_what_a_tenant_wrote_does_not_steer_the_terminal(atoll: Atoll) -> None:
    atoll.create("-m", "who=\x1b[2Jgone")
    assert "\x1b" not in atoll.run("sandbox", "list").stdout


def test_get_shows_the_state_and_json_is_the_apis_own(atoll: Atoll) -> None:
    sandbox = atoll.create()
    assert f"id           {sandbox}".split() == atoll.run("sandbox", "get", sandbox).stdout.splitlines()[0].split()
    shown = atoll.json("sandbox", "get", "--json", sandbox)
    assert shown["state"] == "ready"
    assert shown["accessToken"]


def test_exec_passes_output_and_status(atoll: Atoll) -> None:
    sandbox = atoll.create()
    done = atoll.run("sandbox", "exec", sandbox, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.exit_code, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert atoll.guest.tokens[-1] == atoll.json("sandbox", "get", "--json", sandbox)["accessToken"]


def test_exec_takes_the_commands_own_options(atoll: Atoll) -> None:
    sandbox = atoll.create()
    done = atoll.run("sandbox", "exec", sandbox, "echo", "--json", "-e", "x")
    assert (done.exit_code, done.stdout) == (0, "--json -e x\n")


def test_exec_json(atoll: Atoll) -> None:
    told = json.loads(atoll.run("sandbox", "exec", "--json", "-e", "A=1", atoll.create(), "sh", "-c", "echo $A; exit 3").stdout)
    assert (told["exitCode"], told["stdout"], told["stderr"]) == (3, "1\n", "")
    assert told["pid"] > 0


def test_exec_json_keeps_bytes_that_are_no_text(atoll: Atoll) -> None:
    told = json.loads(atoll.run("sandbox", "exec", "--json", atoll.create(), "printf", "\\377").stdout)
    assert told["stdoutBase64"] == "/w=="


def test_exec_of_a_killed_command_is_128_and_the_signal(atoll: Atoll) -> None:
    assert atoll.run("sandbox", "exec", atoll.create(), "sh", "-c", "kill -9 $$").exit_code == 137


def test_exec_of_what_cannot_start_is_127(atoll: Atoll) -> None:
    done = atoll.run("sandbox", "exec", atoll.create(), "/not/there")
    assert done.exit_code == 127
    assert "/not/there" in done.stderr


def test_exec_in_one_that_ended(atoll: Atoll) -> None:
    sandbox = atoll.create()
    atoll.service.end(sandbox)
    done = atoll.run("sandbox", "exec", sandbox, "true")
    assert done.exit_code == 3
    assert "GUEST_EXITED" in done.stderr
    other = atoll.create()
    atoll.service.set_state(other, State.PAUSED)
    assert atoll.run("sandbox", "exec", other, "true").exit_code == 1


def process(atoll: Atoll, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "ATOLL_API_URL": atoll.url, "ATOLL_API_KEY": atoll.key}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "atoll.programs.main", "sandbox", *arguments], env=environment, **pipes)  # type: ignore[call-overload]


def test_exec_gives_its_standard_input(atoll: Atoll) -> None:
    data = os.urandom(300_000)
    child = process(atoll, "exec", "-i", atoll.create(), "cat")
    out, _ = child.communicate(data, timeout=60)
    assert child.returncode == 0
    assert out == data


def test_ctrl_c_asks_the_command_to_end(atoll: Atoll) -> None:
    program = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nprint('on', flush=True)\ntime.sleep(60)"
    child = process(atoll, "exec", atoll.create(), sys.executable, "-c", program)
    assert child.stdout is not None
    assert child.stdout.readline() == b"on\n"
    child.send_signal(2)
    child.communicate(timeout=30)
    assert child.returncode == 9


def test_rm_ends_each_and_tells_what_it_could_not(atoll: Atoll) -> None:
    first, second = atoll.create(), atoll.create()
    done = atoll.run("sandbox", "rm", first, UNKNOWN, second)
    assert done.exit_code == 3
    assert done.stdout.split() == [first, second]
    assert {atoll.json("sandbox", "get", "--json", one)["state"] for one in (first, second)} == {"releasing"}


def test_a_resting_sandbox_is_said_to_rest_with_how_it_goes_on(atoll: Atoll) -> None:
    sandbox = atoll.create()
    assert atoll.run("sandbox", "pause", sandbox).exit_code == 0
    done = atoll.run("sandbox", "exec", sandbox, "--", "true")
    assert done.exit_code == 1
    assert "is paused, not ready" in done.stderr
    assert f"atoll sandbox resume {sandbox}" in done.stderr


def test_what_cannot_be_removed_is_told_with_what_to_do(atoll: Atoll) -> None:
    kept = atoll.json("sandbox", "snapshot", atoll.create(), "--name", "kept", "--json")["id"]
    done = atoll.run("snapshot", "rm", "snp_00000000000000000000", kept)
    assert (done.exit_code, done.stdout) == (3, f"{kept}\n")
    assert "[SNAPSHOT_NOT_FOUND]" in done.stderr
    assert HINTS[Code.SNAPSHOT_NOT_FOUND] in done.stderr


def test_rm_all(atoll: Atoll) -> None:
    ids = {atoll.create() for _ in range(3)}
    assert {item["id"] for item in atoll.json("sandbox", "rm", "--all", "--json")["items"]} == ids


def test_logs_and_events(atoll: Atoll) -> None:
    sandbox = atoll.create()
    assert atoll.run("sandbox", "logs", sandbox).stdout == "guest is up\n"
    assert atoll.json("sandbox", "logs", "--json", sandbox)["logs"] == "guest is up\n"
    kinds = [item["type"] for item in atoll.json("sandbox", "events", "--json", sandbox)["items"]]
    assert kinds[0] == "sandbox.accepted"
    assert "sandbox.ready" in atoll.run("sandbox", "events", sandbox).stdout


def test_following_events_ends_with_the_sandbox(atoll: Atoll) -> None:
    sandbox = atoll.create()
    atoll.service.end(sandbox)
    done = atoll.run("sandbox", "events", "--follow", "--json", sandbox)
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["state"] == "released"
    assert [line["seq"] for line in lines] == sorted({line["seq"] for line in lines})


def test_cp_there_and_back(atoll: Atoll, tmp_path: Path) -> None:
    sandbox, local = atoll.create(), tmp_path / "file.bin"
    local.write_bytes(os.urandom(3_000_000))
    (atoll.guest.root / "dir").mkdir()
    assert atoll.json("sandbox", "cp", "--json", str(local), f"{sandbox}:/dir")["bytes"] == 3_000_000
    assert (atoll.guest.root / "dir" / "file.bin").read_bytes() == local.read_bytes()
    assert atoll.run("sandbox", "cp", str(local), f"{sandbox}:/new/name").exit_code == 0
    assert (atoll.guest.root / "new" / "name").read_bytes() == local.read_bytes()
    (tmp_path / "back").mkdir()
    assert atoll.run("sandbox", "cp", f"{sandbox}:/dir/file.bin", str(tmp_path / "back")).exit_code == 0
    assert (tmp_path / "back" / "file.bin").read_bytes() == local.read_bytes()
    assert list((tmp_path / "back").iterdir()) == [tmp_path / "back" / "file.bin"]


def test_cp_of_what_is_not_there(atoll: Atoll, tmp_path: Path) -> None:
    sandbox = atoll.create()
    assert atoll.run("sandbox", "cp", str(tmp_path / "none"), f"{sandbox}:/x").exit_code == 2
    assert atoll.run("sandbox", "cp", f"{sandbox}:/none", str(tmp_path)).exit_code == 2
    assert not (tmp_path / "none").exists()


def test_keys(atoll: Atoll) -> None:
    made = atoll.run("key", "create", "ci")
    secret = made.stdout.strip()
    assert secret.startswith("e2b_")
    assert atoll.run("sandbox", "list", key=secret).exit_code == 0
    (found,) = [item for item in atoll.json("key", "list", "--json")["items"] if item["name"] == "ci"]
    assert secret not in json.dumps(found)
    assert atoll.run("key", "revoke", found["id"]).exit_code == 0
    assert atoll.run("sandbox", "list", key=secret).exit_code == 1
    assert atoll.run("key", "revoke", "cli_" + "0" * 20).exit_code == 3


def test_hosts_and_templates(atoll: Atoll) -> None:
    (host,) = atoll.json("host", "list", "--json", key=atoll.operator_key)["items"]
    assert host["name"] in atoll.run("host", "list", key=atoll.operator_key).stdout
    assert host["id"] in atoll.run("host", "get", host["name"], key=atoll.operator_key).stdout
    assert atoll.run("host", "get", "none", key=atoll.operator_key).exit_code == 3
    assert "base" in atoll.run("template", "list").stdout


def test_completion_offers_running_sandboxes_and_is_silent_without_an_answer(atoll: Atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.cli import completion

    sandbox = atoll.create()
    monkeypatch.setenv("ATOLL_API_URL", atoll.url)
    monkeypatch.setenv("ATOLL_API_KEY", atoll.key)
    assert [one for one, _ in completion.sandboxes("i")] == [sandbox]
    assert completion.sandboxes("x") == []
    assert completion.templates("b") == ["base"]
    monkeypatch.setenv("ATOLL_API_URL", "http://127.0.0.1:1")
    assert completion.sandboxes("i") == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("sandbox get i", None),
        ("sandbox list -s pau", ["pausing", "paused"]),
        ("sandbox create -t b", ["base"]),
        ("sandbox ev", ["events"]),
    ],
)
def test_a_shell_can_complete(atoll: Atoll, words: str, offered: list[str] | None) -> None:
    sandbox = atoll.create()
    done = subprocess.run(
        [sys.executable, "-m", "atoll.programs.main"],
        env={
            **os.environ,
            "ATOLL_API_URL": atoll.url,
            "ATOLL_API_KEY": atoll.key,
            "_ATOLL_COMPLETE": "complete_bash",
            "COMP_WORDS": f"atoll {words}",
            "COMP_CWORD": str(len(words.split())),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == (offered or [sandbox])
