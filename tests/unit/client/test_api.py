import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from atoll.base.errors import Code, OutcomeUnknown, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.client.api import Api
from atoll.client.target import Target

TARGET = Target("http://atoll.test", Secret("k1"), "http://atoll.test", "a test")
Handler = Callable[[httpx.Request], httpx.Response]


def api(handler: Handler) -> Api:
    return Api(TARGET, transport=httpx.MockTransport(handler))


def test_a_create_says_only_what_was_asked() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(201, json={"id": "i1"})

    with api(answer) as client:
        client.create_sandbox(request_id="r1", size={"memoryMib": 64}, internet=False, env={"A": "b"})
    assert seen[0].headers["x-api-key"] == "k1"
    assert json.loads(seen[0].content) == {
        "clientRequestId": "r1",
        "wait": True,
        "size": {"memoryMib": 64},
        "env": {"A": "b"},
        "network": {"internet": False},
    }


def test_pages_are_followed_until_the_last_or_the_limit() -> None:
    pages = {None: (["a", "b"], "c1"), "c1": (["c"], "c2"), "c2": (["d"], None)}
    asked: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        cursor = request.url.params.get("cursor")
        asked.append(cursor)
        ids, following = pages[cursor]
        return httpx.Response(200, json={"items": [{"id": i} for i in ids], "nextCursor": following})

    with api(answer) as client:
        assert [item["id"] for item in client.sandboxes()] == ["a", "b", "c", "d"]
        assert asked == [None, "c1", "c2"]
        assert [item["id"] for item in client.sandboxes(limit=2)] == ["a", "b"]
        assert asked == [None, "c1", "c2", None]


def test_a_server_that_repeats_its_cursor_does_not_hold_us() -> None:
    with api(lambda _: httpx.Response(200, json={"items": [{"id": "a"}], "nextCursor": "x"})) as client:
        assert len(client.sandboxes()) == 2


def test_metadata_is_encoded_part_by_part() -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.params.get("metadata"))
        return httpx.Response(200, json={"items": []})

    with api(answer) as client:
        client.sandboxes(metadata={"a&b": "c=d"})
    assert seen == ["a%26b=c%3Dd"]


def test_a_path_cannot_be_escaped() -> None:
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={})

    with api(answer) as client:
        client.sandbox("../keys?x")
    assert seen == [b"/v1/sandboxes/..%2Fkeys%3Fx"]


def failing(*errors: Exception) -> Handler:
    waiting: Iterator[Exception] = iter(errors)

    def answer(_: httpx.Request) -> httpx.Response:
        error = next(waiting, None)
        if error is not None:
            raise error
        return httpx.Response(200, json={"items": [], "id": "i1"})

    return answer


def test_nothing_was_sent_when_nobody_listens() -> None:
    with api(failing(httpx.ConnectError("refused"))) as client, pytest.raises(Unavailable) as unavailable:
        client.release("i1")
    assert unavailable.value.code is Code.CONTROL_UNAVAILABLE


def test_a_change_without_an_answer_is_not_repeated() -> None:
    with api(failing(httpx.RemoteProtocolError("cut"))) as client, pytest.raises(OutcomeUnknown):
        client.release("i1")


def test_a_read_is_repeated_once() -> None:
    with api(failing(httpx.RemoteProtocolError("cut"))) as client:
        assert client.sandbox("i1")["id"] == "i1"
    with api(failing(httpx.RemoteProtocolError("cut"), httpx.RemoteProtocolError("cut"))) as client, pytest.raises(Unavailable):
        client.sandbox("i1")


def test_a_slow_read_is_not_repeated() -> None:
    with api(failing(httpx.ReadTimeout("slow"))) as client, pytest.raises(Unavailable):
        client.sandbox("i1")


def test_something_else_listens_there() -> None:
    with api(lambda _: httpx.Response(200, text="<html>hello")) as client, pytest.raises(Unavailable) as unavailable:
        client.whoami()
    assert "a test" in unavailable.value.hint


def test_a_refusal_is_raised_with_its_code() -> None:
    body = {"error": {"code": "SANDBOX_NOT_FOUND", "message": "no", "hint": "look"}}
    with api(lambda _: httpx.Response(404, json=body)) as client, pytest.raises(Refused) as refused:
        client.sandbox("i1")
    assert (refused.value.code, refused.value.hint) == (Code.SANDBOX_NOT_FOUND, "look")
