"""`atoll top`: hosts and sandboxes with what they use, live in the terminal. What is shown is worked out apart from showing it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.base.errors import AtollError, Code, Refused
from atoll.cli import output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

if TYPE_CHECKING:
    from rich.console import Group

    from atoll.client.api import Api

SANDBOXES_MAX: Final = 1000
HOSTS_SHOWN: Final = 8
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """One look. `hosts` is empty for who may not see them."""

    at: float
    hosts: Sequence[Json]
    sandboxes: Sequence[Json]
    problem: str | None = None
    """Why this is older than it should be."""


@dataclass(frozen=True, slots=True)
class View:
    """How the person wants it."""

    sort: str = "cpu"
    reverse: bool = False
    skip: int = 0


def _used(item: Json, name: str) -> float:
    return float((item.get("usage") or {}).get(name) or 0.0)


KEYS: Final[Mapping[str, tuple[str, Callable[[Json], Any]]]] = {
    "c": ("cpu", lambda item: -_used(item, "cpuPercent") * _used(item, "cpuMillis")),
    "m": ("memory", lambda item: -_used(item, "memoryBytes")),
    "d": ("disk", lambda item: -_used(item, "diskBytes")),
    "a": ("age", lambda item: -(output.seconds(item.get("createdAt")) or 0.0)),
    "s": ("state", lambda item: str(item.get("state"))),
    "t": ("team", lambda item: str(item.get("teamId"))),
    "h": ("host", lambda item: str((item.get("placement") or {}).get("hostId"))),
}
"""Key → what the sandboxes are sorted by, the largest or newest first."""
SORTS: Final = dict(KEYS.values())
HELP: Final = "sort: c cpu  m memory  d disk  a age  s state  t team  h host    r reverse  space/b page  q quit"


def top(
    sort: Annotated[str, typer.Option(help=f"By {', '.join(SORTS)}.")] = "cpu",
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One look, printed whole.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch hosts and sandboxes with what they use. Operators see every team's, others their own."""
    if sort not in SORTS:
        raise typer.BadParameter(f"--sort takes {', '.join(SORTS)}")
    with session() as api:
        look = Look(api)
        seen = look()
        if as_json:
            output.document({"at": seen.at, "hosts": list(seen.hosts), "sandboxes": ordered(seen, View(sort))})
        elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print_once(seen, View(sort))
        else:
            _watch(look, seen, View(sort), interval_s=interval)


@dataclass(slots=True)
class Look:
    """Asks for everything that is shown."""

    api: Api
    operator: bool | None = None
    last: Seen = field(default_factory=lambda: Seen(0.0, (), ()))

    def __call__(self) -> Seen:
        """A look. *Errors*: those of the first one; later ones keep what was seen last, and say why."""
        if self.operator is None:
            self.operator = (self.api.whoami().get("client") or {}).get("role") == "operator"
        hosts = self.api.hosts() if self.operator else []
        found = self.api.sandboxes(team="*" if self.operator else None, usage=True, limit=SANDBOXES_MAX)
        self.last = Seen(time.time(), hosts, found)
        return self.last

    def again(self) -> Seen:
        """Another look, or the last one with what went wrong."""
        try:
            return self()
        except AtollError as error:
            return replace(self.last, problem=f"{error.message} [{error.code}]")


def ordered(seen: Seen, view: View) -> list[Json]:
    """The sandboxes as they are shown."""
    found = sorted(seen.sandboxes, key=lambda item: str(item.get("id")))
    found.sort(key=SORTS[view.sort], reverse=view.reverse)
    return found


def totals(seen: Seen) -> str:
    """One line over all of it."""
    ready = sum(item.get("state") == "ready" for item in seen.sandboxes)
    cores = sum(_used(item, "cpuPercent") * _used(item, "cpuMillis") for item in seen.sandboxes) / 100_000
    memory = sum(_used(item, "memoryBytes") for item in seen.sandboxes)
    disk = sum(_used(item, "diskBytes") for item in seen.sandboxes)
    more = "+" if len(seen.sandboxes) >= SANDBOXES_MAX else ""
    line = f"{len(seen.sandboxes)}{more} sandboxes, {ready} ready; using {cores:.2f} cores, {size(memory)} memory, {size(disk)} disk"
    if seen.hosts:
        healthy = sum(host.get("health") == "healthy" for host in seen.hosts)
        warm = sum(host.get("warm") or 0 for host in seen.hosts)
        line = f"{healthy} of {len(seen.hosts)} hosts healthy; {line}" + (f"; {warm} warm guests" if warm else "")
    return line


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def share(part: float, whole: float, *, width: int = 10) -> str:
    """A bar and a number."""
    ratio = min(1.0, part / whole) if whole > 0 else 0.0
    full = round(ratio * width)
    return f"{'█' * full}{'░' * (width - full)} {100 * ratio:3.0f}%"


def draw(seen: Seen, view: View, *, rows: int | None = None) -> Group:
    """What is shown. `rows`: how many lines of sandboxes there is room for; None: all."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [Text(time.strftime("%H:%M:%S ", time.localtime(seen.at)) + totals(seen), style="bold")]
    if seen.problem:
        parts.append(Text(output.printable(seen.problem), style="red"))
    if seen.hosts:
        parts.append(_hosts(seen.hosts, limit=None if rows is None else HOSTS_SHOWN))
    found = ordered(seen, view)
    shown = found if rows is None else found[view.skip : view.skip + rows]
    parts.append(_sandboxes(shown, view, names={str(host.get("id")): str(host.get("name")) for host in seen.hosts}))
    left = len(found) - view.skip - len(shown)
    if left > 0:
        parts.append(Text(f"and {left} more", style="dim"))
    return Group(*parts)


def _hosts(hosts: Sequence[Json], *, limit: int | None) -> Any:
    table = _table("HOST", "STATE", "HEALTH", "SANDBOXES", "WARM", "CPU GRANTED", "MEMORY GRANTED", "DISK GRANTED", "PROBLEMS")
    # What is not well comes first: there may be more hosts than room.
    ranked = sorted(hosts, key=lambda host: (host.get("health") == "healthy" and not host.get("problems"), str(host.get("name"))))
    for host in ranked[:limit]:
        capacity, used = host.get("capacity") or {}, host.get("used") or {}
        bars = [share(used.get(name) or 0, capacity.get(name) or 0) for name in ("cpuMillis", "memoryMib", "diskMib")]
        cells = [
            host.get("name"),
            host.get("admin"),
            host.get("health"),
            host.get("sandboxes"),
            host.get("warm"),
            *bars,
            ", ".join(host.get("problems") or []),
        ]
        table.add_row(*map(_text, cells))
    if limit is not None and len(hosts) > limit:
        table.add_row(_text(f"and {len(hosts) - limit} more"))
    return table


def _sandboxes(found: Sequence[Json], view: View, *, names: Mapping[str, str]) -> Any:
    arrow = "▲" if view.reverse else "▼"
    titles = ("SANDBOX", "STATE", "CPU", "MEMORY", "DISK", "AGE", "HOST", "TEAM", "TEMPLATE")
    table = _table(*(f"{title} {arrow}" if title.lower() == view.sort else title for title in titles))
    for item in found:
        host = str((item.get("placement") or {}).get("hostId") or "")
        usage = item.get("usage")
        cells = [
            item.get("id"),
            item.get("state"),
            f"{usage['cpuPercent']:5.1f}% of {usage['cpuMillis'] / 1000:g}" if usage else None,
            f"{size(usage['memoryBytes'])} of {size(usage['memoryMib'] * 2**20)}" if usage else None,
            f"{size(usage['diskBytes'])} of {size(usage['diskMib'] * 2**20)}" if usage else None,
            output.age(item.get("createdAt")),
            names.get(host, host),
            item.get("teamId"),
            (item.get("template") or {}).get("name"),
        ]
        table.add_row(*map(_text, cells))
    return table


def _table(*titles: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", expand=False)
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _text(value: Any) -> Any:
    from rich.text import Text

    return Text(output.printable(str(value)) if value not in (None, "") else "-")


def _print_once(seen: Seen, view: View) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    console.print(draw(seen, view))


def pressed(view: View, key: str, *, rows: int, count: int) -> View | None:
    """What a key makes of the view; None: quit."""
    if key in {"q", "\x03", "\x04"}:
        return None
    if key in KEYS:
        return replace(view, sort=KEYS[key][0], skip=0)
    if key == "r":
        return replace(view, reverse=not view.reverse)
    if key == " ":
        return replace(view, skip=min(view.skip + rows, max(0, count - 1)))
    if key == "b":
        return replace(view, skip=max(0, view.skip - rows))
    return view


def _watch(look: Look, seen: Seen, view: View, *, interval_s: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    hint = Text(HELP, style="dim")
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        due = time.monotonic() + interval_s
        while True:
            hosts = min(len(seen.hosts), HOSTS_SHOWN + 1) + 2 if seen.hosts else 0
            rows = max(3, console.height - hosts - 6)
            live.update(Group(draw(seen, view, rows=rows), hint), refresh=True)
            letter = key(max(0.0, due - time.monotonic()))
            if letter:
                changed = pressed(view, letter, rows=rows, count=len(seen.sandboxes))
                if changed is None:
                    return
                view = changed
            else:
                seen, due = look.again(), time.monotonic() + interval_s


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """One key at a time, as it is pressed; the terminal is as it was afterwards."""
    descriptor = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error as error:
        raise Refused(Code.INVALID_REQUEST, "there is no terminal to read keys from", hint="Use --once or --json.") from error

    def key(timeout_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return os.read(descriptor, 1).decode("latin-1") or "q" if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
