"""Dockerfiles, read as steps of a build. What is not supported is named with its line, never dropped.

Theory of operation. Comments and continued lines are taken away first, as Docker does it; then each instruction becomes steps, notes (what
has no effect here) or a refusal. Values of ARG are put in where they are used; ENV goes on as it is, since control expands it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import Code, Refused

WITHOUT_EFFECT: Final = frozenset({"EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"})
_VARIABLE: Final = re.compile(r"\\\$|\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\})")
_FLAG: Final = re.compile(r"--(?P<name>[a-z-]+)(?:=(?P<value>\S*))?\s+")
_DIRECTIVE: Final = re.compile(r"#\s*(?P<name>[a-z]+)\s*=\s*(?P<value>\S+)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Copied:
    """A COPY step, whose files are still to be sent."""

    source: str
    target: str
    owner: str
    mode: str


@dataclass(slots=True)
class Built:
    """What a Dockerfile asks for. A step is E2B's word and its arguments, or files to copy."""

    from_image: str = ""
    steps: list[tuple[str, list[str]] | Copied] = field(default_factory=list)
    start_command: str | None = None
    notes: list[str] = field(default_factory=list)
    """Instructions without effect, with their lines."""


def read(text: str, arguments: Mapping[str, str]) -> Built:
    """Read a Dockerfile. `arguments`: values for its ARGs. *Errors*: Refused INVALID_REQUEST with the line (from 1)."""
    reader = _Reader(dict(arguments))
    for line, word, rest in _instructions(text):
        try:
            reader.take(line, word, rest)
        except Refused as error:
            raise Refused(Code.INVALID_REQUEST, f"line {line}: {error.message}", hint=error.hint) from error
        except ValueError as error:
            raise Refused(Code.INVALID_REQUEST, f"line {line}: {word} cannot be read: {error}") from error
    return reader.finish()


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, instruction, the rest), with continued lines joined."""
    escape, begun, gathered = "\\", 0, ""
    directives = True
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = raw.strip()
        if directives and (match := _DIRECTIVE.fullmatch(stripped)):
            escape = match["value"] if match["name"].lower() == "escape" else escape
            continue
        directives = False
        if stripped.startswith("#") or (not stripped and not gathered):
            continue
        begun = begun if gathered else number
        continued = stripped.endswith(escape)
        gathered += stripped.removesuffix(escape) if continued else stripped
        if not continued and gathered.strip():
            word, _, rest = gathered.strip().partition(" ")
            yield begun, word.upper(), rest.strip()
            gathered = ""
    if gathered.strip():
        word, _, rest = gathered.strip().partition(" ")
        yield begun, word.upper(), rest.strip()


def _unsupported(what: str) -> Refused:
    return Refused(Code.INVALID_REQUEST, f"{what} is not supported", hint="Build the image elsewhere, and `atoll template import` it.")


class _Reader:
    """What is known while the instructions are read."""

    def __init__(self, given: dict[str, str]) -> None:
        self._given = given
        self._known: dict[str, str] = {}
        self._set: set[str] = set()
        self._made = Built()
        self._begins: dict[str, str] = {}
        """ENTRYPOINT and CMD, as a shell takes them."""
        self._shell: list[str] = []
        """What SHELL has named; none: whatever a sandbox's commands are run by."""
        self._user = self._workdir = False
        self._handlers: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "ARG": self._arg,
            "RUN": self._run,
            "COPY": self._copy,
            "ENV": self._env,
            "SHELL": self._take_shell,
            "WORKDIR": self._work,
            "USER": self._be,
            "CMD": lambda rest: self._begin("CMD", rest),
            "ENTRYPOINT": lambda rest: self._begin("ENTRYPOINT", rest),
        }

    def take(self, line: int, word: str, rest: str) -> None:
        """One instruction."""
        if not self._made.from_image and word not in ("FROM", "ARG"):
            raise Refused(Code.INVALID_REQUEST, f"{word} stands before FROM")
        if word in WITHOUT_EFFECT:
            self._made.notes.append(f"line {line}: {word} has no effect here")
        elif word not in self._handlers:
            raise _unsupported(word)
        elif not rest:
            raise Refused(Code.INVALID_REQUEST, f"{word} says nothing")
        else:
            self._handlers[word](rest)

    def finish(self) -> Built:
        """All of it. Sandboxes are the unprivileged user's, where the Dockerfile does not say otherwise."""
        made = self._made
        if not made.from_image:
            raise Refused(Code.INVALID_REQUEST, "the Dockerfile has no FROM")
        if not self._user:
            made.steps.append(("USER", ["user"]))
        if not self._workdir:
            made.steps.append(("WORKDIR", ["/home/user"]))
        made.start_command = " ".join(self._begins[word] for word in ("ENTRYPOINT", "CMD") if word in self._begins) or None
        return made

    def _expand(self, text: str) -> str:
        """ARGs put in; what is not one stays as it is, for control or the shell."""

        def value(match: re.Match[str]) -> str:
            name = match["plain"] or match["braced"]
            if name is None or name not in self._known or name in self._set:
                return match[0]
            return self._known[name] or match["default"] or ""

        return _VARIABLE.sub(value, text)

    def _from(self, rest: str) -> None:
        if self._made.from_image:
            raise _unsupported("a second FROM (a build in several stages)")
        words = [word for word in self._expand(rest).split() if not word.startswith("--platform=")]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise Refused(Code.INVALID_REQUEST, f"FROM names one image, not {rest[:80]!r}")
        if words[0] == "scratch":
            raise _unsupported("FROM scratch")
        self._made.from_image = words[0]
        # As Docker has it, until the Dockerfile says otherwise.
        self._made.steps += [("USER", ["root"]), ("WORKDIR", ["/"])]

    def _arg(self, rest: str) -> None:
        for word in shlex.split(rest):
            name, _, default = word.partition("=")
            self._known[name] = self._given.get(name, self._expand(default))

    def _run(self, rest: str) -> None:
        if match := _FLAG.match(rest):
            raise _unsupported(f"RUN --{match['name']}")
        if "<<" in rest and re.search(r"<<-?['\"]?\w+['\"]?\s*$", rest):
            raise _unsupported("a here-document")
        command = self._command(rest)
        # ARGs are variables of each RUN: put before it, since its shell is to expand them.
        used = [name for name in self._known if name not in self._set and re.search(rf"\b{name}\b", command)]
        before = "".join(f"export {name}={shlex.quote(self._known[name])}; " for name in used)
        self._made.steps.append(("RUN", [before + command]))

    def _copy(self, rest: str) -> None:
        owner = mode = ""
        while match := _FLAG.match(rest):
            if match["name"] == "chown":
                owner = self._expand(match["value"] or "")
            elif match["name"] == "chmod":
                mode = match["value"] or ""
            else:
                raise _unsupported(f"COPY --{match['name']}")
            rest = rest[match.end() :]
        words = _list(rest) or shlex.split(self._expand(rest))
        if len(words) < 2:
            raise Refused(Code.INVALID_REQUEST, "COPY names what is copied, and where to")
        *sources, target = words
        if len(sources) > 1 and not target.endswith("/"):
            raise Refused(Code.INVALID_REQUEST, "where several files go is a directory, and ends with /")
        # Whoever USER is, Docker gives files to root.
        self._made.steps += [Copied(source.lstrip("/") or ".", target, owner or "root", mode) for source in sources]

    def _env(self, rest: str) -> None:
        first, _, value = rest.partition(" ")
        pairs = [word.partition("=")[::2] for word in shlex.split(rest)] if "=" in first else [(first, value.strip())]
        arguments: list[str] = []
        for name, text in pairs:
            arguments += [name, self._expand(text)]
            self._set.add(name)
        self._made.steps.append(("ENV", arguments))

    def _work(self, rest: str) -> None:
        self._made.steps.append(("WORKDIR", [self._expand(rest)]))
        self._workdir = True

    def _be(self, rest: str) -> None:
        self._made.steps.append(("USER", [self._expand(rest)]))
        self._user = True

    def _begin(self, word: str, rest: str) -> None:
        self._begins[word] = self._command(rest)

    def _take_shell(self, rest: str) -> None:
        listed = _list(rest)
        if not listed:
            raise Refused(Code.INVALID_REQUEST, 'SHELL names a program and its options as a list: SHELL ["/bin/bash", "-c"]')
        self._shell = listed

    def _command(self, rest: str) -> str:
        """One for a shell: the exec form is run as it is, all else by what SHELL has named."""
        listed = _list(rest)
        if listed is None:
            return shlex.join([*self._shell, rest]) if self._shell else rest
        return shlex.join(listed)


def _list(text: str) -> list[str] | None:
    """The exec form: a JSON list of strings; None when it is none."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return [str(one) for one in found] if isinstance(found, list) and all(isinstance(one, str) for one in found) else None
