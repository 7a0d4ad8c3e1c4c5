"""Tokens of Amazon's registries: what is asked for, and what becomes of the answer."""

from __future__ import annotations

import base64

import httpx
import pytest

from atoll.base.errors import Code, Refused
from atoll.control.builds.amazon import TARGET, Amazon, endpoint, sign

NOW = 1440938160.0
"""2015-08-30 12:36:00 UTC, of Amazon's published examples."""
KEYS = {"awsAccessKeyId": "AKIDEXAMPLE", "awsSecretAccessKey": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "awsRegion": "eu-central-1"}
GIVEN = base64.b64encode(b"AWS:a-pass:word").decode()


class Still:
    def now(self) -> float:
        return NOW

    def boot(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def test_signatures_are_amazons() -> None:
    # "get-vanilla" of Amazon's test suite for Signature Version 4.
    headers = {"host": "example.amazonaws.com", "x-amz-date": "20150830T123600Z"}
    signed = sign("GET", "/", headers, b"", key_id="AKIDEXAMPLE", secret=KEYS["awsSecretAccessKey"], region="us-east-1", service="service")
    assert signed == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, SignedHeaders=host;x-amz-date, "
        "Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"
    )


async def test_keys_become_user_and_password() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"authorizationData": [{"authorizationToken": GIVEN, "expiresAt": 1.0}]})

    got = await Amazon(Still(), httpx.MockTransport(answer)).login(KEYS)
    assert got == {"username": "AWS", "password": "a-pass:word"}
    (request,) = asked
    assert str(request.url) == "https://api.ecr.eu-central-1.amazonaws.com/"
    assert (request.method, request.content, request.headers["x-amz-target"]) == ("POST", b"{}", TARGET)
    names = ("content-type", "host", "x-amz-date", "x-amz-target")
    signed = {name: request.headers[name] for name in names}
    assert request.headers["authorization"] == sign(
        "POST", "/", signed, b"{}", key_id="AKIDEXAMPLE", secret=KEYS["awsSecretAccessKey"], region="eu-central-1", service="ecr"
    )
    assert signed["x-amz-date"] == "20150830T123600Z"


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(400, json={"__type": "com.amazon#UnrecognizedClientException", "message": f"invalid {KEYS['awsAccessKeyId']}"}),
        httpx.Response(200, json={"authorizationData": []}),
        httpx.Response(200, json={"authorizationData": [{"authorizationToken": "%%"}]}),
        httpx.Response(200, json={"authorizationData": [{"authorizationToken": base64.b64encode(b"AWS").decode()}]}),
        httpx.Response(200, json=[]),
        httpx.Response(502, text="<html>"),
        httpx.Response(307, headers={"location": "http://elsewhere.invalid/"}),
    ],
)
async def test_what_is_no_token_is_refused(answer: httpx.Response) -> None:
    with pytest.raises(Refused) as raised:
        await Amazon(Still(), httpx.MockTransport(lambda _request: answer)).login(KEYS)
    assert raised.value.code is Code.IMAGE_ACCESS_DENIED
    assert not any(value in str(raised.value) for value in (KEYS["awsAccessKeyId"], KEYS["awsSecretAccessKey"]))
    if answer.status_code == 400:
        assert "UnrecognizedClientException" in raised.value.message


async def test_no_answer_is_told_as_such() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(Refused) as raised:
        await Amazon(Still(), httpx.MockTransport(broken)).login(KEYS)
    assert raised.value.code is Code.IMAGE_UNAVAILABLE


@pytest.mark.parametrize("region", ["", "localhost", "eu-central-1.evil.example", "eu-central-1/", "EU-CENTRAL-1", "eu-central-1\n"])
async def test_what_is_no_region_is_asked_nowhere(region: str) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200)

    with pytest.raises(Refused) as raised:
        await Amazon(Still(), httpx.MockTransport(answer)).login({**KEYS, "awsRegion": region})
    assert (raised.value.code, asked) == (Code.INVALID_REQUEST, [])


def test_other_partitions_have_other_names() -> None:
    assert endpoint("cn-north-1") == "https://api.ecr.cn-north-1.amazonaws.com.cn"
    assert endpoint("us-gov-west-1") == "https://api.ecr.us-gov-west-1.amazonaws.com"
