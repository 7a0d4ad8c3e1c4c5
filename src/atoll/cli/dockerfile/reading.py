"""From instructions to stages: each becomes steps, notes (what has no effect here) or a refusal with its line.

Theory of operation. Values of ARG and ENV are put in where they are known (`words.py`); what depends on the base image is left to control.
Stages are named after all of the text has been read, since a COPY may name a later one; only those that the wanted one needs are kept.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Final

from atoll.base.errors import Code, Refused
from atoll.cli.dockerfile import mounts
from atoll.cli.dockerfile.lines import Document, Instruction, instructions, listed
from atoll.cli.dockerfile.stages import Built, Copied, Ran, Stage
from atoll.cli.dockerfile.words import Scope, Words

WITHOUT_EFFECT: Final = frozenset({"EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"})
ELSEWHERE: Final = "Build the image elsewhere, and `atoll template import` it."
URLS: Final = ("http://", "https://")
_MODE: Final = re.compile(r"[0-7]{1,4}")
_PROCESSORS: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_FLAGS: Final = {
    "COPY": frozenset({"from", "chown", "chmod", "link", "exclude"}),
    "ADD": frozenset({"chown", "chmod", "link", "exclude", "checksum", "keep-git-dir"}),
    "RUN": frozenset({"mount", "network", "security"}),
    "FROM": frozenset({"platform"}),
}


def read(text: str, arguments: Mapping[str, str], *, target: str | None = None) -> Built:
    """Read a Dockerfile. `arguments`: values for its ARGs; `target`: a stage's name or number, else the last one.

    *Errors*: Refused INVALID_REQUEST with the line (from 1).
    """
    reader = _Reader(dict(arguments))
    for one in instructions(text):
        try:
            reader.take(one)
        except Refused as error:
            raise Refused(Code.INVALID_REQUEST, f"line {one.line}: {error.message}", hint=error.hint) from error
        except ValueError as error:
            raise Refused(Code.INVALID_REQUEST, f"line {one.line}: {one.word} cannot be read: {error}") from error
    return reader.finish(target)


def unsupported(what: str) -> Refused:
    """What to raise for what there is no way to do here."""
    return Refused(Code.INVALID_REQUEST, f"{what} is not supported", hint=ELSEWHERE)


def is_repository(source: str) -> bool:
    """Whether ADD takes a git repository: by what Docker tells it from a file."""
    address = source.partition("#")[0].partition("?")[0].removesuffix("/")
    return source.startswith(("git@", "git://", "ssh://")) or (source.startswith(URLS) and address.endswith(".git"))


class _Reader:
    """What is known while the instructions are read."""

    def __init__(self, given: dict[str, str]) -> None:
        self._given = given
        self._taken: set[str] = set()
        """Arguments that an ARG has asked for."""
        self._shared = Scope(dict(_platforms()))
        """ARGs before the first FROM, which FROMs see."""
        self._stages: list[Stage] = []
        self._notes: list[str] = []
        self._handlers: dict[str, Callable[[Stage, Instruction], None]] = {
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "ENV": self._env,
            "SHELL": self._take_shell,
            "WORKDIR": self._work,
            "USER": self._be,
            "CMD": self._begin,
            "ENTRYPOINT": self._begin,
        }

    def take(self, one: Instruction) -> None:
        """One instruction."""
        for flag in one.flags:
            if one.word in _FLAGS and flag not in _FLAGS[one.word]:
                raise unsupported(f"{one.word} --{flag}")
        if not one.rest and one.word in {*self._handlers, "FROM", "ARG"}:
            raise Refused(Code.INVALID_REQUEST, f"{one.word} says nothing")
        if one.word == "ARG":
            self._arg(one)
        elif one.word == "FROM":
            self._from(one)
        elif not self._stages:
            raise Refused(Code.INVALID_REQUEST, f"{one.word} stands before FROM")
        elif one.word in WITHOUT_EFFECT:
            self._stages[-1].notes.append(f"line {one.line}: {one.word} has no effect here")
        elif one.word in self._handlers:
            self._handlers[one.word](self._stages[-1], one)
        else:
            raise unsupported(one.word)

    # the whole

    def finish(self, target: str | None) -> Built:
        """All of it. Sandboxes are the unprivileged user's, where the Dockerfile does not say otherwise."""
        if not self._stages:
            raise Refused(Code.INVALID_REQUEST, "the Dockerfile has no FROM")
        wanted = self._stages[-1] if target is None else self._find(target)
        if wanted is None:
            names = ", ".join(stage.name for stage in self._stages)
            raise Refused(Code.INVALID_REQUEST, f"there is no stage {str(target)[:80]!r}", hint=f"There are: {names}.")
        ordered: list[Stage] = []
        origins: dict[str, Stage] = {}
        self._need(wanted, ordered, origins, ())
        if not wanted.user:
            wanted.steps.append(("USER", ["user"]))
        if not wanted.workdir:
            wanted.steps.append(("WORKDIR", ["/home/user"]))
        words = ("ENTRYPOINT",) if wanted.alone else ("ENTRYPOINT", "CMD")
        begins = [wanted.begins[word] for word in words if word in wanted.begins]
        notes = self._notes + [note for stage in ordered for note in stage.notes]
        notes += [f"stage {stage.name} is not needed, and not built" for stage in self._stages if stage not in ordered]
        notes += [f"no ARG asks for the build argument {name}" for name in self._given if name not in self._taken]
        return Built(ordered, {name: ordered.index(stage) for name, stage in origins.items()}, " ".join(begins) or None, notes)

    def _need(self, stage: Stage, ordered: list[Stage], origins: dict[str, Stage], above: tuple[Stage, ...]) -> None:
        """Put a stage, after all that it needs, into the order."""
        if stage in ordered:
            return
        above = (*above, stage)
        if stage.parent is not None:
            self._need(stage.parent, ordered, origins, above)
        for name, line in stage.origins():
            found = origins.get(name.lower()) or self._find(name)
            if found in above:
                names = " -> ".join(one.name for one in [*above[above.index(found) :], found])
                raise Refused(Code.INVALID_REQUEST, f"line {line}: stages need each other: {names}")
            if found is None:
                if name.isdigit():
                    raise Refused(Code.INVALID_REQUEST, f"line {line}: there is no stage {name}: they are counted from 0")
                found = Stage(name, line, base=name)
            origins[name.lower()] = found
            self._need(found, ordered, origins, above)
        ordered.append(stage)

    def _find(self, name: str) -> Stage | None:
        for stage in self._stages:
            if stage.name.lower() == name.lower():
                return stage
        return self._stages[int(name)] if name.isdigit() and int(name) < len(self._stages) else None

    # stages

    def _from(self, one: Instruction) -> None:
        words = Words(self._shared, later=False, empty=True).split(one.rest)
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise Refused(Code.INVALID_REQUEST, f"FROM names one image, not {one.rest[:80]!r}")
        name = words[2] if len(words) == 3 else str(len(self._stages))
        if len(words) == 3 and (not name[0].isalpha() or self._find(name) is not None):
            raise Refused(Code.INVALID_REQUEST, f"{name[:80]!r} is another stage's name, or begins with no letter")
        for wanted in one.flags.get("platform", ()):
            self._notes.append(f"line {one.line}: --platform={wanted} has no effect here: images are for the hosts' processors")
        parent = next((stage for stage in self._stages if stage.name.lower() == words[0].lower()), None)
        if parent is None:
            # As Docker has it, until the Dockerfile says otherwise.
            begun: list[tuple[str, list[str]]] = [("USER", ["root"]), ("WORKDIR", ["/"])]
            self._stages.append(Stage(name, one.line, base=words[0], steps=[*begun]))
            return
        scope = Scope(dict(parent.scope.arguments), dict(parent.scope.variables))
        child = Stage(name, one.line, parent=parent, scope=scope, shell=parent.shell, begins=dict(parent.begins))
        child.user, child.workdir, child.alone = parent.user, parent.workdir, parent.alone
        self._stages.append(child)

    def _arg(self, one: Instruction) -> None:
        scope = self._stages[-1].scope if self._stages else self._shared
        for word in Words(scope, later=False, empty=not self._stages).split(one.rest):
            name, equals, default = word.partition("=")
            self._taken.add(name)
            outer = self._shared.arguments.get(name) if self._stages else None
            scope.arguments[name] = self._given.get(name, default if equals else outer)
            if self._stages and not equals and name in _platforms() and name not in self._given:
                self._stages[-1].notes.append(f"line {one.line}: {name} is {outer}, as of this machine; --build-arg says otherwise")

    # steps

    def _run(self, stage: Stage, one: Instruction) -> None:
        for flag, only in (("network", "default"), ("security", "sandbox")):
            for value in one.flags.get(flag, ()):
                if value != only:
                    raise unsupported(f"RUN --{flag}={value}")
        command = self._command(stage, _script(one), one.documents)
        # ARGs are variables of each RUN: put before it, since its shell is to expand them.
        before = "".join(f"export {name}={shlex.quote(value)}; " for name, value in stage.scope.exported().items())
        mounted = mounts.read(stage, one.flags.get("mount", ()), one.line)
        stage.steps.append(Ran(before + command, mounted) if mounted else ("RUN", [before + command]))

    def _copy(self, stage: Stage, one: Instruction) -> None:
        now, later = Words(stage.scope, later=False), Words(stage.scope, later=True)
        words = one.listed or _raw(one.rest)
        if len(words) < 2:
            raise Refused(Code.INVALID_REQUEST, f"{one.word} names what is copied, and where to")
        sources, target = words[:-1], later.one(words[-1])
        if len(sources) > 1 and not target.endswith("/"):
            raise Refused(Code.INVALID_REQUEST, "where several files go is a directory, and ends with /")
        named = one.flags.get("from")
        origin = mounts.origin(named[-1], f"{one.word} --from") if named else None
        # Whoever USER is, Docker gives files to root; those of another stage stay whose they are.
        owner = now.one("".join(one.flags.get("chown", ())[-1:])) or ("" if origin is not None or one.word == "ADD" else "root")
        mode = now.one("".join(one.flags.get("chmod", ())[-1:]))
        if mode and not _MODE.fullmatch(mode):
            raise Refused(Code.INVALID_REQUEST, f"{one.word} --chmod={mode[:80]}: {mode[:80]!r} is no octal mode", hint="Say it as 0644.")
        checksum = now.one("".join(one.flags.get("checksum", ())[-1:]))
        excluded = tuple(now.one(pattern) for pattern in one.flags.get("exclude", ()))
        if excluded and origin is not None:
            raise unsupported(f"{one.word} --exclude together with --from")
        keep_git = now.one("".join(one.flags.get("keep-git-dir", ())[-1:])).lower() == "true"
        documents = {document.mark: document for document in one.documents}
        for source in sources:
            content: str | None = None
            if document := documents.get(source):
                content = document.text if document.literal else now.document(document.text)
                path, from_stage = document.name, None
            else:
                path, from_stage = self._source(one, now.one(source), origin), origin
            git = one.word == "ADD" and content is None and is_repository(path)
            if checksum and not (git or path.startswith(URLS)):
                raise Refused(Code.INVALID_REQUEST, f"{one.word} --checksum is for what a URL leads to")
            more = (from_stage, excluded, content, checksum, git, keep_git)
            stage.steps.append(Copied(path, target, owner, mode, one.line, one.word, *more))

    def _source(self, one: Instruction, source: str, origin: str | None) -> str:
        if one.word == "ADD" and (source.startswith(URLS) or is_repository(source)):
            return source
        return mounts.relative(source, clamped=origin is not None)

    def _env(self, stage: Stage, one: Instruction) -> None:
        words = Words(stage.scope, later=True)
        rest = one.rest
        first, _, value = rest.partition(" ")
        # All values are those from before this instruction.
        pairs = [word.partition("=")[::2] for word in words.split(rest)] if "=" in first else [(first, words.one(value.strip()))]
        unknown = words.left
        arguments: list[str] = []
        for name, text in pairs:
            if not name:
                raise Refused(Code.INVALID_REQUEST, "ENV: a value has no name")
            arguments += [name, text]
        for name, text in pairs:
            # What was left for control in one of them is not told from the others: none of those with a dollar is known.
            stage.scope.variables[name] = None if unknown and "$" in text else text.replace("\\$", "$")
        stage.steps.append(("ENV", arguments))

    def _work(self, stage: Stage, one: Instruction) -> None:
        stage.steps.append(("WORKDIR", [Words(stage.scope, later=True).one(one.rest)]))
        stage.workdir = True

    def _be(self, stage: Stage, one: Instruction) -> None:
        stage.steps.append(("USER", [Words(stage.scope, later=False).one(one.rest)]))
        stage.user = True

    def _begin(self, stage: Stage, one: Instruction) -> None:
        # A stage's own ENTRYPOINT takes the CMD of an earlier stage away; one in shell form is given no CMD at all.
        if one.word == "ENTRYPOINT" and stage.parent is not None and stage.begins.get("CMD") == stage.parent.begins.get("CMD"):
            stage.begins.pop("CMD", None)
        if one.word == "ENTRYPOINT":
            stage.alone = one.listed is None
        stage.begins[one.word] = self._command(stage, one.rest, ())

    def _take_shell(self, stage: Stage, one: Instruction) -> None:
        if not one.listed:
            raise Refused(Code.INVALID_REQUEST, 'SHELL names a program and its options as a list: SHELL ["/bin/bash", "-c"]')
        stage.shell = tuple(one.listed)

    def _command(self, stage: Stage, text: str, documents: tuple[Document, ...]) -> str:
        """One for a shell: the exec form is run as it is, all else by what SHELL has named."""
        words = None if documents else listed(text)
        if words is None:
            return shlex.join([*stage.shell, text]) if stage.shell else text
        return shlex.join(words)


def _script(one: Instruction) -> str:
    """What a RUN's shell is given: the line with its here-documents, or the only document itself."""
    if not one.documents:
        return one.rest
    first = one.documents[0]
    if one.rest != first.mark:
        if all(word in {document.mark for document in one.documents} for word in one.rest.split()):
            raise unsupported("RUN with several here-documents and no command")
        return "\n".join([one.rest, *(f"{document.text}{document.name}" for document in one.documents), ""])
    if not first.text.startswith("#!"):
        return first.text
    # As a program of its own: its first line says what runs it.
    end = first.name
    while end in first.text.splitlines():
        end += "_"
    return (
        f"atoll_script=$(mktemp) && cat >\"$atoll_script\" <<'{end}'\n{first.text}{end}\n"
        'chmod 755 "$atoll_script" && "$atoll_script"; atoll_status=$?; rm -f "$atoll_script"; exit $atoll_status\n'
    )


def _raw(rest: str) -> list[str]:
    """Words between blanks with their quotes, which are read afterwards."""
    found: list[str] = []
    word, quote, at = "", "", 0
    while at < len(rest):
        sign = rest[at]
        if sign == "\\" and quote != "'" and at + 1 < len(rest):
            word, at = word + rest[at : at + 2], at + 2
            continue
        if sign.isspace() and not quote:
            found += [word] if word else []
            word = ""
        else:
            quote = "" if sign == quote else sign if sign in "'\"" and not quote else quote
            word += sign
        at += 1
    if quote:
        raise ValueError("No closing quotation")
    return [*found, word] if word else found


def _platforms() -> dict[str, str | None]:
    """What Docker's builder gives by itself: of the machine that builds."""
    processor = _PROCESSORS.get(platform.machine(), platform.machine())
    whole = {
        f"{side}{name}": value
        for side in ("BUILD", "TARGET")
        for name, value in (("PLATFORM", f"linux/{processor}"), ("OS", "linux"), ("ARCH", processor))
    }
    return {**whole}
