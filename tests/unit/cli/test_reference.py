import re
from typing import Any

import pytest
import typer

from atoll.cli import reference
from atoll.programs.main import app


def commands(command: Any = None, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    command = command or typer.main.get_command(app)
    inner = getattr(command, "commands", None)
    if not inner:
        return [(path, command)]
    return [found for name, one in inner.items() for found in commands(one, (*path, name))]


def test_the_document_is_what_the_commands_say() -> None:
    assert reference.FILE.read_text() == reference.text(), "run python -m atoll.cli.reference"


@pytest.mark.parametrize(("path", "command"), commands(), ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_every_command_speaks_json_and_says_what_it_does(path: tuple[str, ...], command: Any) -> None:
    options = {name for parameter in command.params for name in parameter.opts}
    assert "--json" in options, path
    assert command.help, path
    assert all(getattr(parameter, "help", None) for parameter in command.params if parameter.name != "help"), path


def test_all_that_people_use_is_in_it() -> None:
    found = set(re.findall(r"^## atoll (.+)$", reference.text(), flags=re.MULTILINE))
    assert found == {
        "up", "down", "status", "env", "doctor", "top", "alert list", "audit", "events", "support bundle", "backup create", "backup restore", "backup restored",
        "sandbox create", "sandbox pause", "sandbox suspend", "sandbox resume", "sandbox snapshot", "sandbox fork", "snapshot list", "snapshot rm", "sandbox list", "sandbox get", "sandbox exec", "sandbox shell", "sandbox cp", "sandbox logs", "sandbox events", "sandbox rm",
        "template list", "template get", "template build", "template import", "template push", "template delete", "template warm", "host list", "host get", "host activate", "host drain", "host disable", "host reset", "host recount", "host enrollment-token create", "agent join", "agent register", "agent setup", "agent doctor", "agent status", "agent run", "agent leave", "control listen", "control close", "key create", "key list", "key revoke",
        "config show", "config history", "config check", "config apply", "sandbox why", "host why", "sandbox authorize-replacement", "registry status", "registry gc",
        "image ls", "image verify", "image prune", "image pin", "image unpin", "image limit", "image gc", "image key show", "image key rotate", "image key retire",
    }  # fmt: skip
