"""`atoll alert`, `atoll audit` and `atoll events`: what happens in the whole deployment, for operators."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from atoll.base.errors import AtollError, Code
from atoll.cli import completion, output
from atoll.cli.output import JsonOption
from atoll.cli.session import session

if TYPE_CHECKING:
    from atoll.client.api import Api

alerts = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What is wrong now (operators).")

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until it is interrupted.")]
AGAIN_S: Final = 1.0
"""Between two looks at the audit, and before a stream that broke is taken up again."""
PAGE: Final = 1000


@alerts.command("list")
def list_alerts(
    every: Annotated[bool, typer.Option("--all", "-a", help="Those that were cleared, too.")] = False,
    severity: Annotated[str | None, typer.Option(help="Only info, warning or critical.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List what is wrong, newest first. Each kind has its section in docs/RUNBOOK.md."""
    with session() as api:
        found = api.alerts(state="all" if every else "open", severity=severity, limit=limit)
    output.table(
        [
            ("SEVERITY", lambda item: item.get("severity")),
            ("KIND", lambda item: item.get("kind")),
            ("SINCE", lambda item: output.age(item.get("raisedAt"))),
            *([("CLEARED", lambda item: output.age(item.get("clearedAt")))] if every else []),
            ("DETAIL", lambda item: item.get("detail")),
            ("WHAT TO DO", lambda item: item.get("runbook")),
        ],
        found,
        empty="Nothing is wrong.",
        as_json=as_json,
    )


def audit(
    action: Annotated[str | None, typer.Option(help="Only this: sandbox.create, key.revoke, host.disable...")] = None,
    subject: Annotated[str | None, typer.Option(help="Only what was done to this id.")] = None,
    team: Annotated[str | None, typer.Option(help="Only by keys of this team, by name or id.")] = None,
    client: Annotated[str | None, typer.Option(help="Only by this key.", autocompletion=completion.keys)] = None,
    result: Annotated[str | None, typer.Option(help="Only with this result: done, or a code.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="The last so many.")] = 50,
    follow: FollowOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show who did what (operators). With --follow and --json, one document a line."""
    wanted = {"action": action, "subject": subject, "team": team, "client": client, "result": result}
    with session() as api:
        found = api.audit(wanted, newest=True, limit=limit)
        if follow:
            _print_all(_audit_as_it_comes(api, found, wanted), _audit_line, as_json=as_json)
    output.table(
        [
            ("AT", lambda item: output.moment(item.get("at"))),
            ("ACTION", lambda item: item.get("action")),
            ("SUBJECT", lambda item: item.get("subject")),
            ("RESULT", lambda item: item.get("result")),
            ("KEY", lambda item: item.get("clientId")),
            ("FROM", lambda item: item.get("address")),
            ("DATA", lambda item: item.get("data")),
        ],
        found,
        empty="Nothing is on record.",
        as_json=as_json,
    )


def _audit_as_it_comes(api: Api, found: list[dict[str, Any]], wanted: dict[str, str | None]) -> Iterator[dict[str, Any]]:
    after = 0
    while True:
        for item in found:
            after = int(item["seq"])
            yield item
        if len(found) < PAGE:
            time.sleep(AGAIN_S)
        found = api.audit(wanted, after=after, limit=PAGE)


def _audit_line(item: dict[str, Any]) -> str:
    who = f"{item.get('clientId') or '-'} from {item.get('address') or '-'}"
    return f"{output.moment(item.get('at'))}  {item.get('action')}  {item.get('subject')}  {item.get('result')}  {who}"


def events(
    kind: Annotated[str | None, typer.Option("--type", help="Only this: sandbox.ready, host.drained, alert.raised...")] = None,
    sandbox: Annotated[str | None, typer.Option(help="Only of this sandbox.", autocompletion=completion.sandboxes)] = None,
    host: Annotated[str | None, typer.Option(help="Only of this host, by id.")] = None,
    team: Annotated[str | None, typer.Option(help="Only of this team's sandboxes, by name or id.")] = None,
    request: Annotated[str | None, typer.Option(help="Only what this client's request caused, by its X-Request-Id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE, help="The last so many.")] = 50,
    follow: FollowOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show events of the whole deployment (operators). With --follow and --json, one document a line."""
    wanted = {"type": kind, "sandbox": sandbox, "host": host, "team": team, "request": request}
    with session() as api:
        found = api.deployment_events(wanted, newest=True, limit=limit)
        if follow:
            _print_all(_events_as_they_come(api, found, wanted), _event_line, as_json=as_json)
    output.table(
        [
            ("AT", lambda item: output.moment(item.get("at"))),
            ("EVENT", lambda item: item.get("type")),
            ("ABOUT", lambda item: item.get("sandboxId") or item.get("hostId")),
            ("STATE", lambda item: item.get("state")),
            ("REASON", lambda item: item.get("reason")),
            ("REQUEST", lambda item: item.get("requestId")),
            ("DATA", lambda item: item.get("data")),
        ],
        found,
        empty="No events.",
        as_json=as_json,
    )


def _events_as_they_come(api: Api, found: list[dict[str, Any]], wanted: dict[str, str | None]) -> Iterator[dict[str, Any]]:
    yield from found
    after = int(found[-1]["seq"]) if found else None
    while True:
        try:
            for item in api.follow_deployment(wanted, after=after):
                after = int(item["seq"])
                yield item
        except AtollError as error:
            # Control is being started again: nothing is missed, since we say where we were.
            if error.code is not Code.CONTROL_UNAVAILABLE or after is None:
                raise
        time.sleep(AGAIN_S)


def _event_line(item: dict[str, Any]) -> str:
    about = item.get("sandboxId") or item.get("hostId") or "-"
    return f"{output.moment(item.get('at'))}  {item.get('type')}  {about}  {item.get('reason') or ''}".rstrip()


def _print_all(items: Iterator[dict[str, Any]], line: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """Until it is interrupted."""
    for item in items:
        print(json.dumps(item, ensure_ascii=False) if as_json else output.printable(line(item)), flush=True)
