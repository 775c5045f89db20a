"""Process with many clients of sessions, by the standard library alone.

Reads one JSON line: `url` of the server; `sessions`, each a name, a key and the answers so far; or `services`, a
number of clients that take waiting trajectories with the key `admin` for as long as the process lives; and `calls`,
`characters` of the first message, `mischief` (share of calls that are disturbed) and `seed`. Writes a JSON line for
each answer: name of the session, number of the call, id and text. A process that is killed can be followed by another
one with the answers so far, as agents with a memory do.

A disturbed call is asked again until it is answered. Sessions with an even name use `Idempotency-Key`, the others
`x-stainless-retry-count`.
"""

import asyncio
import json
import random
import sys
from typing import Any

SECONDS = 120.0
"""Limit of each wait."""
TRIES = 20


class Connection:
    """A connection of one client, opened when it is needed."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._host, self._port = host, int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, head: str, body: bytes, most: int | None = None) -> asyncio.StreamReader:
        """Send a request, or its first bytes."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        lines = f"{head}\r\nHost: {self._host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        writer.write((f"{lines}\r\n\r\n".encode() + body)[:most])
        await writer.drain()
        return reader

    async def ask(self, head: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        async with asyncio.timeout(SECONDS):
            reader = await self.send(head, body)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
            data = await reader.readexactly(int(fields["content-length"]))
        return int(lines[0].split()[1]), json.loads(data)

    def drop(self) -> None:
        """Close at once, without a farewell."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


class Client:
    """Client of one session at a time."""

    def __init__(self, asked: dict[str, Any], seed: int) -> None:
        self._asked, self._chance = asked, random.Random(seed)
        self._connection = Connection(asked["url"])

    async def play(self, name: int, key: str, answers: list[str], *, again: bool = False) -> None:
        """Make the calls of a session that are left; `again`: the first one may have been asked by a process before."""
        opening = f"Session {name}. " + "word " * (self._asked["characters"] // 5)
        messages = [{"role": "user", "content": opening}]
        for number, text in enumerate(answers):
            messages += _turn(number, text)
        for number in range(len(answers), self._asked["calls"]):
            told = await self._call(name, key, number, messages, again=again)
            again = False
            text = told["choices"][0]["message"]["content"]
            print(json.dumps([name, number, told["id"], text]), flush=True)
            messages += _turn(number, text)

    async def serve(self) -> None:
        """Take trajectories, and end each with a reward."""
        for name in range(self._chance.randrange(1000), sys.maxsize):
            bearer = f"POST /rl/start_session HTTP/1.1\r\nAuthorization: Bearer {self._asked['admin']}"
            status, taken = await self._connection.ask(bearer, b'{"wait": 30}')
            if status != 200:
                continue
            await self.play(name, taken["api_key"], [])
            await self._connection.ask(f"POST /s/{taken['api_key']}/rl/end_session HTTP/1.1", b'{"reward": 1.0}')

    async def _call(
        self, name: int, key: str, number: int, messages: list[dict[str, str]], *, again: bool
    ) -> dict[str, Any]:
        body = json.dumps({"model": "any", "messages": messages}).encode()
        path = f"POST /s/{key}/v1/chat/completions HTTP/1.1"
        is_named = name % 2 == 0
        for attempt in range(TRIES):
            head = path
            if is_named:
                head += f"\r\nIdempotency-Key: call-{number}"
            elif attempt or again:
                head += f"\r\nx-stainless-retry-count: {attempt + 1}"
            if attempt < 3 and self._chance.random() < self._asked["mischief"]:
                await self._disturb(head, body, is_named=is_named)
                continue
            status, told = await self._connection.ask(head, body)
            if status == 503:
                continue
            assert status == 200, f"session {name}, call {number}: {status} {told}"
            return told
        raise AssertionError(f"session {name}, call {number}: not answered in {TRIES} attempts")

    async def _disturb(self, head: str, body: bytes, *, is_named: bool) -> None:
        """Ask, and do not wait for the answer."""
        kinds = ["leave", "half", "deaf", *(["twice"] if is_named else [])]
        kind = self._chance.choice(kinds)
        if kind == "half":
            await self._connection.send(head, body, len(head) + len(body) // 2)
        elif kind == "twice":
            other = Connection(self._asked["url"])
            first, second = await asyncio.gather(self._connection.ask(head, body), other.ask(head, body))
            assert len({told["id"] for status, told in (first, second) if status == 200}) <= 1, "answered twice"
            other.drop()
        else:
            reader = await self._connection.send(head, body)
            if kind == "deaf":
                await asyncio.wait_for(reader.read(40), SECONDS)
            else:
                await asyncio.sleep(self._chance.random() * 0.02)
        self._connection.drop()


def _turn(number: int, text: str) -> list[dict[str, str]]:
    """An answer, and what the client says to it."""
    return [{"role": "assistant", "content": text}, {"role": "user", "content": f"Result {number} is there. Next?"}]


async def main() -> None:
    """Play what the standard input says."""
    asked = json.loads(sys.stdin.readline())
    seed = asked["seed"]
    async with asyncio.TaskGroup() as group:
        for number, (name, key, answers) in enumerate(asked.get("sessions", ())):
            again = bool(asked.get("again"))
            group.create_task(Client(asked, seed + number).play(name, key, answers, again=again))
        for number in range(asked.get("services", 0)):
            group.create_task(Client(asked, seed + number).serve())


if __name__ == "__main__":
    asyncio.run(main())
