"""Process of hostile clients of a session server: `python -m tests.actors.rollout.sessions.attackers`.

Reads one JSON line: `attack`, a name in ATTACKS; `port`; `key`, of a session of its own; `seconds`; and `number` of
connections. Writes a JSON line with what the server answered, by status, once the attack is under way (`{}`) and at
its end. By the standard library alone.
"""

import asyncio
import contextlib
import gzip
import json
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

MIB = 1 << 20
PATH = "/v1/chat/completions"


class Attack:
    """What all attacks have."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.port, self.key, self.number = asked["port"], asked["key"], asked["number"]
        self.end = time.monotonic() + asked["seconds"]
        self.told: Counter[str] = Counter()

    @property
    def goes_on(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self.end

    def head(self, *lines: str, key: str | None = None) -> bytes:
        """The head of a request."""
        bearer = f"Authorization: Bearer {self.key if key is None else key}"
        return "\r\n".join([f"POST {PATH} HTTP/1.1", "Host: a", bearer, *lines, "", ""]).encode()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection that is dropped at the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def answers(self, reader: asyncio.StreamReader, most: int = 1) -> None:
        """Count the answers by their status, until the connection ends."""
        left = max(0.1, self.end - time.monotonic())
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, ValueError):
            async with asyncio.timeout(left):
                for _ in range(most):
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                    self.told[head.split()[1]] += 1
                    length = head.partition("content-length:")[2].split("\r\n")[0]
                    await reader.readexactly(int(length or 0))


async def guessed(attack: Attack) -> None:
    """Keys by chance, one after the other on a connection."""
    chance = random.Random(time.monotonic_ns())
    while attack.goes_on:
        async with attack.connected() as (reader, writer):
            for _ in range(1000):
                if not attack.goes_on:
                    break
                key = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.choice([0, 1, 42, 43, 44, 4000])))
                writer.write(attack.head("Content-Length: 2", key=key) + b"{}")
                await attack.answers(reader)


async def large(attack: Attack) -> None:
    """Bodies of 64 MiB: with their length, with a length that is a lie, and in chunks."""
    block = b"x" * MIB
    while attack.goes_on:
        for lines in (["Content-Length: 67108864"], ["Transfer-Encoding: chunked"]):
            async with attack.connected() as (reader, writer):
                answered = asyncio.create_task(attack.answers(reader))
                with contextlib.suppress(ConnectionError, TimeoutError):
                    async with asyncio.timeout(max(0.1, attack.end - time.monotonic())):
                        writer.write(attack.head(*lines))
                        for _ in range(64):
                            writer.write(block if "Length" in lines[0] else b"100000\r\n" + block + b"\r\n")
                            await writer.drain()
                            if answered.done():
                                break
                        await answered
                answered.cancel()


async def slow_heads(attack: Attack) -> None:
    """A byte of a head, and then another one."""
    async with attack.connected() as (_, writer):
        for byte in attack.head("X-Long: " + "a" * 8000):
            if not attack.goes_on:
                return
            writer.write(bytes([byte]))
            await asyncio.sleep(0.1)


async def slow_bodies(attack: Attack) -> None:
    """The head of a body that never comes whole."""
    async with attack.connected() as (reader, writer):
        writer.write(attack.head("Content-Length: 100000"))
        answered = asyncio.create_task(attack.answers(reader))
        while attack.goes_on and not answered.done():
            writer.write(b" ")
            await asyncio.sleep(0.1)
        answered.cancel()


async def idle(attack: Attack) -> None:
    """Nothing at all."""
    async with attack.connected() as (reader, _):
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(1), max(0.1, attack.end - time.monotonic()))


async def heads(attack: Attack) -> None:
    """Heads without an end: many fields, or a long one, or a long path."""
    kinds = [b"A: b\r\n" * 1000, b"A" * 6000, b"A: " + b"b" * 6000]
    while attack.goes_on:
        for number, kind in enumerate(kinds):
            async with attack.connected() as (reader, writer):
                answered = asyncio.create_task(attack.answers(reader))
                with contextlib.suppress(ConnectionError):
                    writer.write(b"GET /" if number == 1 else b"GET / HTTP/1.1\r\n")
                    for _ in range(2000):
                        writer.write(kind)
                        await writer.drain()
                        if answered.done() or not attack.goes_on:
                            break
                    await asyncio.wait({answered}, timeout=1)
                answered.cancel()


async def garbage(attack: Attack) -> None:
    """Bytes by chance, and requests in a row whose answers are not read."""
    request = attack.head("Content-Length: 2", key="no") + b"{}"
    while attack.goes_on:
        for data in (os.urandom(10_000), b"\x16\x03\x01" + os.urandom(500), request * 2000, b"\r\n" * 10_000):
            async with attack.connected() as (reader, writer):
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    await asyncio.wait_for(writer.drain(), 1) if len(data) < MIB else None
                    await attack.answers(reader, 3)


async def lengths(attack: Attack) -> None:
    """Lengths that are none, and two at once."""
    kinds = ["-1", "1e9", "9" * 30, "0x10", "+5", "1, 2", "18446744073709551617", ""]
    while attack.goes_on:
        for kind in kinds:
            async with attack.connected() as (reader, writer):
                writer.write(attack.head(f"Content-Length: {kind}") + b"{}")
                await attack.answers(reader)
        async with attack.connected() as (reader, writer):
            writer.write(attack.head("Content-Length: 2", "Transfer-Encoding: chunked") + b"{}")
            await attack.answers(reader)


async def bombs(attack: Attack) -> None:
    """64 MiB of blanks in less than one."""
    blanks = b" " * (64 * MIB)
    data = gzip.compress(blanks, 1)
    while attack.goes_on:
        for kind, body in (("gzip", data), ("deflate", zlib.compress(blanks, 1)), ("gzip", gzip.compress(b"{}")[:-3])):
            async with attack.connected() as (reader, writer):
                with contextlib.suppress(ConnectionError):
                    writer.write(attack.head(f"Content-Encoding: {kind}", f"Content-Length: {len(body)}") + body)
                    await attack.answers(reader)


async def texts(attack: Attack) -> None:
    """Bodies with a whole conversation, or tools, of a million characters, which is as much as is read."""
    text = "word " * 200_000
    one = {"messages": [{"role": "user", "content": text}]}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    two = {"messages": [{"role": "user", "content": "Go."}], "tools": [tool]}
    while attack.goes_on:
        for body in (json.dumps(one).encode(), json.dumps(two).encode()):
            async with attack.connected() as (reader, writer):
                writer.write(attack.head(f"Content-Length: {len(body)}") + body)
                await attack.answers(reader)


ATTACKS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    one.__name__: one for one in (guessed, large, slow_heads, slow_bodies, idle, heads, garbage, lengths, bombs, texts)
}


async def main() -> None:
    """Attack as the standard input says."""
    asked = json.loads(sys.stdin.readline())
    attack, kind = Attack(asked), ATTACKS[asked["attack"]]

    async def attacked() -> None:
        while attack.goes_on:
            try:
                await kind(attack)
            except OSError as error:
                attack.told[type(error).__name__] += 1
                await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for number in range(attack.number):
            group.create_task(attacked())
            if number % 100 == 99:
                # the server's queue of connections is short
                await asyncio.sleep(0.02)
        print("{}", flush=True)
    print(json.dumps(attack.told), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
