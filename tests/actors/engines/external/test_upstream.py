"""Calls of a server of others over HTTP."""

import asyncio

import pytest

from actors.engines.external.upstream import RefusedError, Upstream


async def test_a_server_that_hangs_up_behind_a_failure_is_met_anew() -> None:
    """The server hangs up a moment after it has answered 500, as uvicorn does; the next call has one of its own."""
    served: list[int] = []
    hang_up = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(served)
        served.append(0)
        while await reader.readuntil(b"\r\n\r\n"):
            served[number] += 1
            status = "500 Internal Server Error" if number == 0 else "200 OK"
            writer.write(f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nno".encode())
            await writer.drain()
            if number == 0:
                await hang_up.wait()
                break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    upstream = Upstream("vLLM", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
    try:
        with pytest.raises(RefusedError, match="vLLM answers 500 to /x: no"):
            await upstream.call("POST", "/x")
        asyncio.get_running_loop().call_later(0.05, hang_up.set)
        assert await asyncio.wait_for(upstream.call("POST", "/x"), 60.0) == "no"
        assert served == [1, 1]
    finally:
        hang_up.set()
        await upstream.close()
        server.close()
