"""Connections of the completions server: slow clients get their answers, and those that stop are shut."""

import asyncio
import itertools
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from actors.engines.http import connections
from actors.engines.http.connections import Connections
from schemas import limits

ANSWER_BYTES = 30 << 20
WAIT = 120.0


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_CONNECTION_SECONDS", 0.5)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 0.5)
    # the server's time passes with its looks: while this process is held up the client can take nothing either
    looks = itertools.count()
    close_idle = Connections.close_idle
    monkeypatch.setattr(
        Connections,
        "close_idle",
        lambda self, open_ones, _: close_idle(self, open_ones, next(looks) * connections.LOOK_SECONDS),
    )


@asynccontextmanager
async def _served(tls: ssl.SSLContext | None) -> AsyncIterator[tuple[web.Server, int]]:
    """A server with one large answer, and its port."""
    watched = Connections()

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=bytes(ANSWER_BYTES))

    app = web.Application(middlewares=[watched.note])
    app.add_routes([web.get("/", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    assert runner.server is not None
    stop = asyncio.Event()
    watching = asyncio.create_task(watched.watch(runner.server, stop))
    try:
        yield runner.server, int(runner.addresses[0][1])
    finally:
        stop.set()
        await watching
        await runner.cleanup()


def _contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Settings of TLS for a server and for its client."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl, which makes the certificate, is not here")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=60)
    here = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    here.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    there = ssl.create_default_context()
    there.check_hostname, there.verify_mode = False, ssl.CERT_NONE
    return here, there


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_client_that_takes_an_answer_slowly_has_it_whole(tmp_path: Path, encrypted: bool) -> None:
    """It takes several times as long as an idle connection may last, after the handler has returned."""
    here, there = _contexts(tmp_path) if encrypted else (None, None)
    async with _served(here) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=there, limit=1 << 16)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        received = 0
        while received < ANSWER_BYTES and (data := await asyncio.wait_for(reader.read(1 << 20), WAIT)):
            received += len(data)
            await asyncio.sleep(len(data) / (ANSWER_BYTES / 3.0))
        writer.transport.abort()
    assert received >= ANSWER_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_client_that_takes_nothing_of_its_answer_is_shut(tmp_path: Path, encrypted: bool) -> None:
    """The connection leaves the server's list, and what was to be sent leaves its memory."""
    here, there = _contexts(tmp_path) if encrypted else (None, None)
    async with _served(here) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=there, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        try:
            assert await asyncio.wait_for(reader.read(100), WAIT)
            for _ in range(3000):
                if not server.connections:
                    break
                await asyncio.sleep(0.02)
            assert not server.connections
        finally:
            writer.transport.abort()
