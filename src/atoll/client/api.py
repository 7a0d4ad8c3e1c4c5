"""Control's `/v1`, synchronous. Answers are the API's own JSON, unchanged: what a script reads is what the API documents.

*Errors* of every call: those of `failures.of_control`; Unavailable CONTROL_UNAVAILABLE when nothing was sent, OutcomeUnknown when a change
was sent and no answer came. Reads are repeated once when the connection broke; changes never are (create is idempotent by its request id,
and its caller decides).
"""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, cast
from urllib.parse import quote, urlencode

import httpx

from atoll.base.errors import Code, Refused, Unavailable
from atoll.client import failures
from atoll.client.guest import Guest
from atoll.client.target import Target

Json = dict[str, Any]
CONNECT_S: Final = 5.0
READ_S: Final = 90.0
"""Longer than a create's patience (50 s): control answers first."""
UPLOAD_S: Final = 1800.0
STREAM_S: Final = 60.0
"""A stream says several times in this that it lives."""
PAGE: Final = 100


class Api:
    """One key's view of one Atoll."""

    def __init__(self, target: Target, *, timeout_s: float = READ_S, transport: httpx.BaseTransport | None = None) -> None:
        self._target = target
        self._http = httpx.Client(
            base_url=target.url,
            headers={"X-API-KEY": target.key.reveal(), "User-Agent": "atoll-cli"},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            transport=transport,
            verify=_verify(target.authority),
            # A proxy for the outside world has no business between us and our own machine, unless the target is elsewhere.
            trust_env=not target.url.startswith(("http://127.0.0.1", "http://localhost")),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give back the connections."""
        self._http.close()

    @property
    def target(self) -> Target:
        return self._target

    # sandboxes
    def create_sandbox(  # noqa: PLR0913 - what one may ask of a sandbox is this much
        self,
        *,
        request_id: str,
        template: str | None = None,
        timeout_s: int | None = None,
        class_name: str | None = None,
        size: Mapping[str, int] | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        internet: bool | None = None,
        prefer_host: str | None = None,
        wait: bool = True,
    ) -> Json:
        """Create a sandbox. *Idempotency*: the same `request_id` and content give the same sandbox. *Units*: size in cpuMillis, memoryMib, diskMib."""
        body: Json = {"clientRequestId": request_id, "wait": wait}
        if template is not None:
            body["template"] = template
        if timeout_s is not None:
            body["timeoutSeconds"] = timeout_s
        if class_name is not None:
            body["class"] = class_name
        if size:
            body["size"] = dict(size)
        if metadata:
            body["metadata"] = dict(metadata)
        if env:
            body["env"] = dict(env)
        if internet is not None:
            body["network"] = {"internet": internet}
        if prefer_host is not None:
            body["preferHost"] = prefer_host
        return self._call("POST", "/v1/sandboxes", json=body)

    def sandboxes(
        self,
        *,
        states: list[str] | None = None,
        ended: bool = False,
        metadata: Mapping[str, str] | None = None,
        limit: int | None = None,
        team: str | None = None,
        usage: bool = False,
    ) -> list[Json]:
        """The team's sandboxes, newest first, over as many pages as it takes; at most `limit`. `ended`: those whose end is on record, too.

        `team`: another team's, or `*` for every team's; operators only. `usage`: with what each uses now.
        """
        parameters: dict[str, str] = {**({"team": team} if team else {}), **({"usage": "true"} if usage else {})}
        if states:
            parameters["state"] = ",".join(states)
        if ended:
            parameters["scope"] = "all"
        if metadata:
            parameters["metadata"] = urlencode(metadata)
        found: list[Json] = []
        for item in self._pages("/v1/sandboxes", parameters):
            found.append(item)
            if limit is not None and len(found) >= limit:
                break
        return found

    def sandbox(self, sandbox_id: str) -> Json:
        """One sandbox, in whatever state, with its access token while it lives."""
        return self._call("GET", f"/v1/sandboxes/{_path(sandbox_id)}")

    def release(self, sandbox_id: str) -> Json:
        """End it; returns when that is decided, not when it is gone."""
        return self._call("DELETE", f"/v1/sandboxes/{_path(sandbox_id)}")

    def set_end(self, sandbox_id: str, *, timeout_s: int, only_extend: bool = False) -> Json:
        """Let it end `timeout_s` seconds from now."""
        return self._call("POST", f"/v1/sandboxes/{_path(sandbox_id)}/end", json={"timeoutSeconds": timeout_s, "onlyExtend": only_extend})

    def pause(self, sandbox_id: str) -> Json:
        """Freeze it where it is."""
        return self._call("POST", f"/v1/sandboxes/{_path(sandbox_id)}/pause")

    def suspend(self, sandbox_id: str, *, memory: bool = True) -> Json:
        """Save it, and let its host have its memory back."""
        return self._call("POST", f"/v1/sandboxes/{_path(sandbox_id)}/suspend", json={"memory": memory})

    def resume(self, sandbox_id: str, *, timeout_s: int | None = None, reboot: bool = False) -> Json:
        """Let it go on, for `timeout_s` from when it is ready."""
        body = {"reboot": reboot, **({"timeoutSeconds": timeout_s} if timeout_s is not None else {})}
        return self._call("POST", f"/v1/sandboxes/{_path(sandbox_id)}/resume", json=body)

    def take_snapshot(self, sandbox_id: str, *, name: str | None = None, memory: bool = True) -> Json:
        """Keep what it is now; it goes on. The answer's `mode` says what its host could keep."""
        body = {"memory": memory, **({"name": name} if name is not None else {})}
        return self._call("POST", f"/v1/sandboxes/{_path(sandbox_id)}/snapshots", json=body)

    def fork(self, sandbox_id: str, *, count: int, timeout_s: float | None, request_id: str) -> list[Json]:
        """Clones of one moment, each `sandbox` or `error`. *Idempotency*: by the request's id."""
        body: Json = {
            "count": count,
            "clientRequestId": request_id,
            **({"timeoutSeconds": int(timeout_s)} if timeout_s is not None else {}),
        }
        return _items(self._call("POST", f"/v1/sandboxes/{_path(sandbox_id)}/forks", json=body))

    def snapshots(self, *, sandbox: str | None = None, name: str | None = None) -> list[Json]:
        """The team's, newest first."""
        wanted = {"sandbox": sandbox, "name": name}
        return list(self._pages("/v1/snapshots", {key: value for key, value in wanted.items() if value}))

    def delete_snapshot(self, reference: str) -> Json:
        """By id, or the newest of a name."""
        return self._call("DELETE", f"/v1/snapshots/{_path(reference)}")

    def authorize_replacement(self, sandbox_id: str, *, generation: int, statement: str = "") -> Json:
        """Certify that what this generation was given is revoked outside. *Idempotency*: said again, the same."""
        body = {"generation": generation, "statement": statement}
        return self._call("POST", f"/v1/sandboxes/{_path(sandbox_id)}/replacement-authorizations", json=body)

    def events(self, sandbox_id: str, *, after: int = 0, limit: int = PAGE) -> list[Json]:
        """Its history from `after` on."""
        return _items(self._call("GET", f"/v1/sandboxes/{_path(sandbox_id)}/events", params={"after": str(after), "limit": str(limit)}))

    def why(self, sandbox_id: str, *, limit: int = PAGE) -> Json:
        """Why it is where it is, or nowhere; `verdicts` for operators."""
        return self._call("GET", f"/v1/sandboxes/{_path(sandbox_id)}/placement", params={"limit": str(limit)})

    def why_request(self, body: Json, *, limit: int = PAGE) -> Json:
        """Where a sandbox like this would be placed now; nothing is made."""
        return self._call("POST", "/v1/placement/explain", json=body, params={"limit": str(limit)})

    def follow_events(self, sandbox_id: str, *, after: int = 0) -> Iterator[Json]:
        """Its history from `after` on, and then what comes, until it has ended. *Errors*: also CONTROL_UNAVAILABLE when the stream breaks."""
        return self._lines(f"/v1/sandboxes/{_path(sandbox_id)}/events/stream", {"after": str(after)})

    def sandbox_metrics(self, sandbox_id: str) -> list[Json]:
        """What it has used, oldest first."""
        return _items(self._call("GET", f"/v1/sandboxes/{_path(sandbox_id)}/metrics"))

    def logs(self, sandbox_id: str) -> str:
        """The guest's console, as far as its host has it."""
        return self._send("GET", f"/v1/sandboxes/{_path(sandbox_id)}/logs").text

    def guest(self, sandbox: Json) -> Guest:
        """What is inside a sandbox, by an answer of `create_sandbox` or `sandbox`."""
        return Guest(self._target.sandbox_url, str(sandbox["id"]), cast("str | None", sandbox.get("accessToken")))

    # operations
    def alerts(self, *, state: str = "open", severity: str | None = None, limit: int | None = None) -> list[Json]:
        """What is wrong, newest first; operators only."""
        parameters = {"state": state, **({"severity": severity} if severity else {})}
        found: list[Json] = []
        for item in self._pages("/v1/operations/alerts", parameters):
            found.append(item)
            if limit is not None and len(found) >= limit:
                break
        return found

    def collect_artifacts(self, *, dry_run: bool = False) -> Json:
        """Remove what nothing needs from the artifact store; what went, or would go; operators only."""
        return self._call("POST", "/v1/operations/artifacts/collect", json={"dryRun": dry_run})

    def audit(
        self, wanted: Mapping[str, str | None] | None = None, *, after: int = 0, newest: bool = False, limit: int = PAGE
    ) -> list[Json]:
        """Who did what, oldest first: after `after`, or with `newest` the last ones; operators only."""
        return self._records("/v1/operations/audit", wanted, after=after, newest=newest, limit=limit)

    def deployment_events(
        self, wanted: Mapping[str, str | None] | None = None, *, after: int = 0, newest: bool = False, limit: int = PAGE
    ) -> list[Json]:
        """Events of the whole deployment, as `audit`; operators only."""
        return self._records("/v1/operations/events", wanted, after=after, newest=newest, limit=limit)

    def follow_deployment(self, wanted: Mapping[str, str | None] | None = None, *, after: int | None = None) -> Iterator[Json]:
        """Events as they come, for ever; operators only. *Errors*: also CONTROL_UNAVAILABLE when the stream breaks."""
        parameters = {name: value for name, value in (wanted or {}).items() if value}
        return self._lines("/v1/operations/events/stream", {**parameters, **({} if after is None else {"after": str(after)})})

    def metrics(self) -> str:
        """Control's counters in Prometheus' text format; operators only."""
        return self._send("GET", "/v1/operations/metrics").text

    def _records(self, path: str, wanted: Mapping[str, str | None] | None, *, after: int, newest: bool, limit: int) -> list[Json]:
        parameters = {name: value for name, value in (wanted or {}).items() if value}
        return _items(
            self._call("GET", path, params={**parameters, "after": str(after), "limit": str(limit), "newest": str(newest).lower()})
        )

    def _lines(self, path: str, parameters: Mapping[str, str]) -> Iterator[Json]:
        request = self._http.build_request("GET", path, params=dict(parameters), timeout=httpx.Timeout(STREAM_S, connect=CONNECT_S))
        try:
            answer = self._http.send(request, stream=True)
            if not answer.is_success:
                answer.read()
                raise failures.of_control(answer.status_code, answer.content, retry_after=answer.headers.get("retry-after"))
            with contextlib.closing(answer):
                for line in answer.iter_lines():
                    if line:
                        yield json.loads(line)
        except httpx.TransportError as error:
            raise failures.unreachable(self._target.url, error, sent=False) from error

    # the rest
    def templates(self) -> list[Json]:
        """Templates that this key can use."""
        return list(self._pages("/v1/templates", {}))

    def template(self, reference: str) -> Json:
        """One template, by id or alias."""
        return self._call("GET", f"/v1/templates/{_path(reference)}")

    def template_image(self, reference: str) -> Json:
        """What its files are made of."""
        return self._call("GET", f"/v1/templates/{_path(reference)}/image")

    def template_layer(self, reference: str, digest: str, into: IO[bytes]) -> None:
        """The bytes of one of its layers. *Errors*: as `template`; Unavailable when they break off."""
        path = f"/v1/templates/{_path(reference)}/layers/{_path(digest)}"
        try:
            with self._http.stream("GET", path) as answer:
                if not answer.is_success:
                    raise failures.of_control(answer.status_code, answer.read())
                for piece in answer.iter_raw(1 << 20):
                    into.write(piece)
        except httpx.TransportError as error:
            raise failures.unreachable(self._target.url, error, sent=False) from error

    def warm(self) -> list[Json]:
        """What is kept ready; for operators."""
        return list(self._call("GET", "/v1/warm")["items"])

    def keep_warm(self, reference: str, body: Json) -> Json:
        """Keep so many guests of a template ready; for operators."""
        return self._call("PUT", f"/v1/templates/{_path(reference)}/warm", json=body)

    def delete_template(self, reference: str) -> Json:
        """Refused while sandboxes use it."""
        return self._call("DELETE", f"/v1/templates/{_path(reference)}")

    def upload_archive(self, content: Iterable[bytes]) -> str:
        """Send a tar with an image; answers its name in a source."""
        options: Json = {"content": content, "headers": {"content-type": "application/x-tar"}, "timeout": UPLOAD_S}
        return str(self._call("PUT", "/v1/template-archives", **options)["archive"])

    def request_build(self, body: Json) -> Json:
        """A build that waits for its steps: ids of it and its template. As E2B's clients do it, as the other three are."""
        return self._call("POST", "/v3/templates", json={name: value for name, value in body.items() if value is not None})

    def build_files(self, template_id: str, files_hash: str) -> Json:
        """Whether what a step copies was sent before, and where to send it."""
        return self._call("GET", f"/templates/{_path(template_id)}/files/{_path(files_hash)}")

    def send_files(self, url: str, content: IO[bytes], *, size: int) -> None:
        """Send what a step copies to where `build_files` says; that is a secret of its own, so no key goes with it."""
        try:
            answer = httpx.put(url, content=content, headers={"Content-Length": str(size)}, timeout=UPLOAD_S, trust_env=False)
        except httpx.TransportError as error:
            raise failures.unreachable(self._target.url, error, sent=False) from error
        if not answer.is_success:
            raise failures.of_control(answer.status_code, answer.content)

    def start_build(self, template_id: str, build_id: str, recipe: Json) -> None:
        """Give a build its steps."""
        self._send("POST", f"/v2/templates/{_path(template_id)}/builds/{_path(build_id)}", json=recipe)

    def build_status(self, template_id: str, build_id: str, *, offset: int = 0) -> Json:
        """A build, with its log from a line on."""
        return self._call("GET", f"/templates/{_path(template_id)}/builds/{_path(build_id)}/status", params={"logsOffset": str(offset)})

    def begin_import(self, body: Json) -> Json:
        """Make a template of an image; ask with `template_import` how far it is."""
        return self._call("POST", "/v1/template-imports", json=body)

    def template_import(self, import_id: str) -> Json:
        """An import, with its log so far."""
        return self._call("GET", f"/v1/template-imports/{_path(import_id)}")

    def hosts(self) -> list[Json]:
        """Operators only."""
        return list(self._pages("/v1/hosts", {}))

    def host(self, reference: str) -> Json:
        """By id or name; operators only."""
        return self._call("GET", f"/v1/hosts/{_path(reference)}")

    def set_host_admin(self, reference: str, verb: str, *, off: bool = False) -> Json:
        """`activate`, `drain`, `disable` or `reset`; operators only. `off`: the machine is known to be off."""
        options: Json = {"json": {"off": off}} if verb == "disable" else {}
        return self._call("POST", f"/v1/hosts/{_path(reference)}/{verb}", **options)

    def register_host(self, name: str, body: Json) -> Json:
        """Make a host without a token; operators only. *Idempotency*: the same again changes nothing."""
        return self._call("PUT", f"/v1/hosts/{_path(name)}/registration", json=body)

    def recount_host(self, reference: str) -> Json:
        """Let a host grant what its machine has now; operators only."""
        return self._call("POST", f"/v1/hosts/{_path(reference)}/recount")

    def well_known(self) -> Json:
        """What a machine needs to know before it may join; for everybody."""
        return self._call("GET", "/.well-known/atoll")

    def create_enrollment_token(self, *, host_name: str, life_s: int = 3600) -> Json:
        """A one-use token for a host of this name; `token` is in this answer and nowhere else."""
        return self._call("POST", "/v1/enrollment-tokens", json={"hostName": host_name, "lifeSeconds": life_s})

    def config(self, revision: int | None = None) -> Json:
        """The deployment document, the newest or one revision of it; operators only."""
        return self._call("GET", "/v1/config" if revision is None else f"/v1/config/revisions/{revision}")

    def config_history(self, *, limit: int = PAGE) -> list[Json]:
        """Applied documents, newest first, at most `limit`; operators only."""
        return _items(self._call("GET", "/v1/config/revisions", params={"limit": str(limit)}))

    def check_config(self, document: str) -> Json:
        """What is wrong with a document, or what it would change; operators only."""
        return self._call("POST", "/v1/config/check", json={"document": document})

    def apply_config(self, document: str, *, revision: int) -> Json:
        """Let it apply in the place of the one at `revision`. *Idempotency*: the same document for the same revision changes nothing more."""
        return self._call("PUT", "/v1/config", json={"document": document, "revision": revision})

    def keys(self) -> list[Json]:
        """The team's keys, without the keys themselves."""
        return list(self._pages("/v1/keys", {}))

    def create_key(self, *, name: str, role: str = "member", team: str | None = None) -> Json:
        """A new key; `secret` is in this answer and nowhere else."""
        body = {"name": name, "role": role, **({"team": team} if team else {})}
        return self._call("POST", "/v1/keys", json=body)

    def revoke_key(self, key_id: str) -> Json:
        """It is refused from now on."""
        return self._call("DELETE", f"/v1/keys/{_path(key_id)}")

    def whoami(self) -> Json:
        """Team, name and role of this key."""
        return self._call("GET", "/v1/whoami")

    def status(self) -> Json:
        """Control's own state."""
        return self._call("GET", "/v1/status")

    def _pages(self, path: str, parameters: dict[str, str]) -> Iterator[Json]:
        cursor: str | None = None
        while True:
            page = self._call("GET", path, params={**parameters, "limit": str(PAGE), **({"cursor": cursor} if cursor else {})})
            yield from _items(page)
            following = page.get("nextCursor")
            if not following or following == cursor:
                return
            cursor = str(following)

    def _call(self, method: str, path: str, **options: Any) -> Json:
        answer = self._send(method, path, **options)
        if not answer.content:
            return {}
        try:
            value = answer.json()
        except ValueError as error:
            raise Unavailable(
                Code.CONTROL_UNAVAILABLE,
                f"{self._target.url} does not answer as Atoll does",
                hint=f"Something else may listen there; this address came from {self._target.source}.",
            ) from error
        return value if isinstance(value, dict) else {"items": value}

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        for attempt in (1, 2):
            try:
                answer = self._http.request(method, path, **options)
                break
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
                raise failures.unreachable(self._target.url, error, sent=False) from error
            except httpx.TransportError as error:
                if method == "GET" and attempt == 1 and not isinstance(error, httpx.TimeoutException):
                    continue
                raise failures.unreachable(self._target.url, error, sent=method != "GET") from error
        else:  # pragma: no cover - the loop ends by break or raise
            raise AssertionError
        if answer.is_success:
            return answer
        raise failures.of_control(answer.status_code, answer.content, retry_after=answer.headers.get("retry-after"))


def _verify(authority: Path | None) -> ssl.SSLContext | bool:
    if authority is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise Refused(Code.INVALID_REQUEST, f"{authority} cannot be used as an authority: {error}") from error


def _items(answer: Json) -> list[Json]:
    items = answer.get("items")
    return cast("list[Json]", items) if isinstance(items, list) else []


def _path(text: str) -> str:
    return quote(text, safe="")
