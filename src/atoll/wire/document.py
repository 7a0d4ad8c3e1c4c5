"""Reading an operator's YAML: a plain tree, and where in the file each part of it stands.

Theory of operation. A subset of YAML in which every file has one meaning. Mappings with plain names, lists, and scalars; `true` and `false`
are the only words that are not text (so a region may be called `no`), numbers are decimal. What can make a file mean more than it shows is
refused by name: anchors and aliases, tags, a second document, a key that stands twice. Sizes and depth are bounded before anything is
built. Nothing is run, and nothing is looked up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

import yaml

TEXT_BYTES_MAX: Final = 256 * 1024
DEPTH_MAX: Final = 12
NODES_MAX: Final = 20_000
PROBLEMS_MAX: Final = 50

Path = tuple[str | int, ...]
Tree = dict[str, "Tree"] | list["Tree"] | str | int | float | bool | None

# libyaml's parser where the wheel brings it: ten times faster than the one in Python, with the same marks.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT: Final = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{1,18}")
_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None, "~": None, "": None}


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong with a document. `line` and `column` count from 1; 0: of the document as a whole."""

    line: int
    column: int
    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        what = f"{self.path}: {self.message}" if self.path else self.message
        return f"{place}{what}" + (f" ({self.hint})" if self.hint else "")


class NotADocument(Exception):
    """What was read is no document; `problems` say why, in the order of the lines."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = sorted(set(problems))[:PROBLEMS_MAX]
        super().__init__("; ".join(map(str, self.problems)))


@dataclass(frozen=True, slots=True)
class Document:
    """A tree of plain values, and (line, column) of each path: of a key where there is one."""

    tree: Tree
    places: dict[Path, tuple[int, int]]

    def problem(self, path: Path, message: str, hint: str = "") -> Problem:
        """A problem at `path`, or at the nearest part around it that stands in the file."""
        at = path
        while at and at not in self.places:
            at = at[:-1]
        line, column = self.places.get(at, (0, 0))
        return Problem(line, column, dotted(path), message, hint)


def dotted(path: Path) -> str:
    """A path as people write it: `classes.ci.regions[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def closest(word: str, known: list[str]) -> str:
    """A hint for a word that is none of `known`."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "known are " + ", ".join(known)


def read(text: str) -> Document:
    """The tree that `text` writes down. *Errors*: NotADocument."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > TEXT_BYTES_MAX:
        raise NotADocument([Problem(0, 0, "", f"the document has {size} bytes; at most {TEXT_BYTES_MAX} are read")])
    _refuse_bombs(text)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise NotADocument([_unreadable(error)]) from error
    reader = _Reader()
    tree = reader.value(node, ()) if node is not None else {}
    if reader.problems:
        raise NotADocument(reader.problems)
    return Document(tree, reader.places)


def _refuse_bombs(text: str) -> None:
    """Stop before nodes are built: what is refused anyway, and what is too deep for a reader that calls itself."""
    depth = nodes = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            mark = event.start_mark
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise NotADocument([_at(mark, "anchors and aliases are not read", "write the value out")])
            if getattr(event, "tag", None) is not None:
                raise NotADocument([_at(mark, "tags are not read", "leave it out")])
            if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                depth += 1
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                depth -= 1
            nodes += 1
            if depth > DEPTH_MAX or nodes > NODES_MAX:
                raise NotADocument([_at(mark, "the document is too deep or has too many parts")])
    except yaml.YAMLError as error:
        raise NotADocument([_unreadable(error)]) from error


def _unreadable(error: yaml.YAMLError) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        message = f"not YAML: {error.problem or error.context or 'it cannot be read'}"
        hint = "indent with blanks" if "\\t" in message else ""
        return _at(mark, message, hint) if mark is not None else Problem(0, 0, "", message, hint)
    return Problem(0, 0, "", f"not YAML: {str(error).splitlines()[0][:200]}")


def _at(mark: Any, message: str, hint: str = "") -> Problem:
    return Problem(mark.line + 1, mark.column + 1, "", message, hint)


class _Reader:
    """From nodes to values."""

    def __init__(self) -> None:
        self.places: dict[Path, tuple[int, int]] = {}
        self.problems: list[Problem] = []

    def value(self, node: yaml.Node, path: Path) -> Tree:
        self.places.setdefault(path, (node.start_mark.line + 1, node.start_mark.column + 1))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, number)) for number, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name is None or not isinstance(name, str) or not name or not name.isprintable():
                self._wrong(key, path, "a key must be a name")
                continue
            if name in found:
                self._wrong(key, (*path, name), "stands twice", f"the first is in line {self.places[*path, name][0]}")
                continue
            self.places[*path, name] = (key.start_mark.line + 1, key.start_mark.column + 1)
            found[name] = self.value(value, (*path, name))
        return found

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Tree:
        text: str = node.value
        if any(not (letter.isprintable() or letter in "\n\t") for letter in text):
            self._wrong(node, path, "holds characters that cannot be printed")
            return ""
        if node.style:  # quoted, or a block: text, whatever it looks like
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text

    def _wrong(self, node: yaml.Node, path: Path, message: str, hint: str = "") -> None:
        mark = node.start_mark
        self.problems.append(Problem(mark.line + 1, mark.column + 1, dotted(path), message, hint))
