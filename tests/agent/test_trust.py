"""Whom an agent sends its credential to: whoever shows the right certificate for the name that was dialled, and nobody else."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl

import pytest
from aiohttp import web

from atoll.agent import trust
from atoll.agent.transport import HttpTransport
from atoll.base.errors import Code, Refused, Unavailable
from atoll.base.secret import Secret
from atoll.programs import certificates
from atoll.wire.agent import Observe

NOW = dt.datetime.now(dt.UTC)
SAID = Observe(host_id="h", epoch="e", observations=[])


class Site:
    """An https control in this process, and the credentials that it has been shown."""

    def __init__(self, directory, *, names=("127.0.0.1",), now=NOW):
        self.authority = directory / "ca.pem"
        certificates.ensure_authority(self.authority, directory / "ca.key", name="test", now=now)
        self.names, self.now, self.directory, self.shown = names, now, directory, []

    async def __aenter__(self):
        files = self.directory / "tls.crt", self.directory / "tls.key"
        certificates.issue(
            *files, authority=self.authority, authority_key=self.directory / "ca.key", names=self.names, owner=None, now=self.now
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
        app = web.Application()

        async def answer(request):
            self.shown.append(request.headers.get("Authorization"))
            return web.json_response({})

        app.router.add_post("/agent/v1/{call}", answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    @property
    def url(self):
        return f"https://127.0.0.1:{self.port}"


async def observe(*urls, authority=None):
    transport = HttpTransport(list(urls), Secret("cr3d"), authority=authority)
    try:
        return await transport.observe(SAID)
    finally:
        await transport.close()


async def untrusted(*urls, authority=None):
    with pytest.raises(Unavailable) as refused:
        await observe(*urls, authority=authority)
    assert refused.value.hint
    return refused.value.code


async def test_the_named_authority_is_trusted(tmp_path):
    async with Site(tmp_path) as site:
        await observe(site.url, authority=site.authority)
        assert site.shown == ["Bearer cr3d"]


async def test_an_authority_that_nobody_named_is_not(tmp_path):
    async with Site(tmp_path) as site:
        assert await untrusted(site.url) is Code.CONTROL_UNTRUSTED
        assert site.shown == []


async def test_another_authority_is_not(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with Site(tmp_path / "a") as site:
        other = Site(tmp_path / "b")
        assert await untrusted(site.url, authority=other.authority) is Code.CONTROL_UNTRUSTED
        assert site.shown == []


@pytest.mark.parametrize("names", [("127.0.0.2",), ("control.example",), ("*.0.0.1",)])
async def test_the_name_that_was_dialled_must_be_in_it(tmp_path, names):
    async with Site(tmp_path, names=names) as site:
        assert await untrusted(site.url, authority=site.authority) is Code.CONTROL_UNTRUSTED
        assert site.shown == []


async def test_an_expired_certificate_is_not_trusted(tmp_path):
    long_ago = NOW - dt.timedelta(days=certificates.SERVER_DAYS + 1)
    async with Site(tmp_path, now=long_ago) as site:
        assert await untrusted(site.url, authority=site.authority) is Code.CONTROL_UNTRUSTED
        assert site.shown == []


async def test_a_program_that_speaks_no_tls_gets_nothing():
    seen = bytearray()

    async def plain(reader, writer):
        seen.extend(await reader.read(1000))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await untrusted(f"https://127.0.0.1:{port}") is Code.CONTROL_UNTRUSTED
    assert b"cr3d" not in seen
    server.close()


async def test_the_next_replica_is_dialled_after_one_that_is_not_to_be_trusted_or_away(tmp_path):
    async with Site(tmp_path) as site:
        transport = HttpTransport(["https://127.0.0.1:1", site.url], Secret("cr3d"), authority=site.authority)
        with pytest.raises(Unavailable):
            await transport.observe(SAID)
        await transport.observe(SAID)
        await transport.observe(SAID)
        assert len(site.shown) == 2
        await transport.close()


async def test_a_redirect_is_not_followed(tmp_path):
    seen = []

    async def elsewhere(request):
        seen.append(request.path)
        raise web.HTTPTemporaryRedirect("/agent/v1/stolen")

    app = web.Application()
    app.router.add_post("/agent/v1/{call}", elsewhere)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    with pytest.raises(Refused):
        await observe(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    assert seen == ["/agent/v1/observe"]
    await runner.cleanup()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:3001", "http://localhost:3001", "http://[::1]:3001", "https://a.example", "https://10.0.0.1:1/"]
)
def test_addresses_that_may_be_dialled(url):
    assert trust.check_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:3001", "http://a.example", "http://localhost.example", "http://127.0.0.1.example:1", "http://[::2]"]
)
def test_plain_http_to_another_machine_is_refused(url):
    with pytest.raises(Refused) as refused:
        trust.check_url(url)
    assert refused.value.code is Code.TLS_REQUIRED
    assert "https://" in refused.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.example",
        "ftp://a.example",
        "https://",
        "https://user:secret@a.example",
        "https://a.example?x",
        "https://a:99999",
        "https://[a",
        "unix:/x",
    ],
)
def test_what_is_no_address_of_control(url):
    with pytest.raises(Refused) as refused:
        trust.check_url(url)
    assert refused.value.code is Code.INVALID_REQUEST


def test_a_file_that_is_no_authority(tmp_path):
    (tmp_path / "x.pem").write_text("no")
    for path in (tmp_path / "x.pem", tmp_path / "missing"):
        with pytest.raises(Refused) as refused:
            trust.context(path)
        assert refused.value.code is Code.SETUP_FAILED
    with pytest.raises(Refused):
        trust.fingerprint("no")


def test_names_and_protocols_are_always_verified():
    made = trust.context()
    assert made.check_hostname
    assert made.verify_mode is ssl.CERT_REQUIRED
    assert made.minimum_version >= ssl.TLSVersion.TLSv1_2
