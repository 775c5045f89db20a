"""The server over real HTTP: every address, hostile texts, access, and runs that grow or die meanwhile."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from actors.view import server
from actors.view.access import HEADERS, token_for
from actors.view.listing import Listing
from actors.view.server import application
from actors.view.viewed_run import ViewedRun
from schemas.errors import ConfigError
from tests.actors.view.conftest import Make
from tests.actors.view.runs import MadeGroup, MadeRun

TOKEN = "a-token-of-many-characters"
PATIENCE_SECONDS = 300.0


@contextmanager
def viewed(tmp_path: Path, *runs: MadeRun) -> Iterator[list[ViewedRun]]:
    """Runs that are shown, until the end of the block."""
    opened = [ViewedRun(run.config, tmp_path / "cache") for run in runs]
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


@asynccontextmanager
async def served(runs: list[ViewedRun], token: str = "") -> AsyncIterator["Client"]:
    """A server on a free port of loopback, with a client."""
    runner = web.AppRunner(application(runs, token), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            yield Client(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


class Client:
    """Client of a server."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self.session, self.base = session, base

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and value of an answer of `/api`; each answer has all headers of security."""
        async with self.session.get(f"{self.base}/api/{path}", **options) as response:
            assert {name: response.headers.get(name) for name in HEADERS} == HEADERS
            assert response.content_type == "application/json"
            return response.status, json.loads(await response.read())

    async def until(self, path: str, test: Any) -> Any:
        """The first answer that passes a test."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            status, value = await self.get(path)
            if status == 200 and test(value):
                return value
            assert time.monotonic() < deadline, value
            await asyncio.sleep(0.05)


def indexed(number: int) -> Any:
    """Whether so many groups are in the catalogue, none of which waits for its numbers."""
    return lambda facts: facts["groups"] == number


@pytest.mark.parametrize("steps", [0, 1, 6])
async def test_every_address_answers(make: Make, tmp_path: Path, steps: int) -> None:
    """Of an empty run, a small one, and one with evaluations, dropped and compacted groups."""
    run = make()
    for number in range(steps):
        run.add_step(dropped=number % 2)
    run.report()
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            status, found = await client.get("runs")
            assert (status, found["runs"][0]["step"], found["runs"][0]["alive"]) == (200, steps, True)
            assert (await client.get("runs/0"))[1]["step"] == steps
            curves = (await client.get("runs/0/curves?name=reward_mean&name=loss"))[1]
            assert curves["last"] == steps
            assert set(curves["columns"]) == ({"reward_mean", "loss"} if steps else set())
            total = len(run.store.groups())
            facts = await client.until("runs/0/facts", indexed(total))
            assert facts["problem"] == ""
            page = await client.until(
                "runs/0/groups?limit=100", lambda page: sum(g["completions"] for g in page["groups"]) == 12 * steps
            )
            for group in page["groups"]:
                status, life = await client.get(f"runs/0/groups/{group['ordinal']}/life")
                assert (status, life["state"]) == (200, group["state"])
                if group["state"] == "dropped":
                    assert (await client.get(f"runs/0/groups/{group['ordinal']}"))[0] == 404
                    continue
                status, whole = await client.get(f"runs/0/groups/{group['ordinal']}")
                assert (status, len(whole["completions"]), whole["step"]) == (200, 4, group["step"])
                status, one = await client.get(f"runs/0/groups/{group['ordinal']}/trajectories/3")
                assert (status, one["completion"]["reward"]) == (200, group["rewards"][3])
                sample = one["samples"][0]
                status, tokens = await client.get(f"runs/0/groups/{group['ordinal']}/samples/{sample['sample']}")
                assert (status, len(tokens["id"])) == (200, sample["tokens"])
            for step in range(1, steps + 1):
                status, value = await client.get(f"runs/0/steps/{step}")
                assert (status, len(value["packing"]["ordinals"])) == (200, 3)
                assert value["values"]["weights"] == f"digest{step}"


async def test_several_runs_are_side_by_side(make: Make, tmp_path: Path) -> None:
    """In the order of the command line, each with its own groups."""
    first, second = make(1, name="first"), make(2, name="second")
    with viewed(tmp_path, first, second) as runs:
        async with served(runs) as client:
            assert [one["name"] for one in (await client.get("runs"))[1]["runs"]] == ["first", "second"]
            await client.until("runs/0/facts", indexed(3))
            await client.until("runs/1/facts", indexed(6))


async def test_what_is_not_there_is_said_in_words(make: Make, tmp_path: Path) -> None:
    """404 for what the run does not have, 400 for a parameter that can't be used; never an exception's text."""
    run = make(1)
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            await client.until("runs/0/facts", indexed(3))
            for path, words in {
                "runs/7": "run 7: there are 1, from 0",
                "runs/-1": "run -1: there are 1, from 0",
                "runs/0/groups/99": "group 99: samples.jsonl has no such group",
                "runs/0/groups/1/trajectories/9": "completion 9: group 1 has 4",
                "runs/0/groups/1/samples/9": "sample 9: the group has 4",
                "runs/0/steps/9": "step 9: the run has steps 1 to 1",
                "nothing": "Not Found",
            }.items():
                status, value = await client.get(path)
                assert status == 404, path
                assert words in value["error"], path
            for path, words in {
                "runs/x": "run: needs a whole number, got 'x'",
                f"runs/0/groups/{'9' * 5000}": "ordinal: needs a whole number",
                f"runs/0/groups/{'9' * 30}": "ordinal: needs ",
                "runs/0/groups?purpose=sell": "purpose: is train or eval, got 'sell'",
                "runs/0/groups?reward_min=nan": "reward_min: needs a number, got 'nan'",
                "runs/0/groups?step_min=1.5": "step_min: needs a whole number",
                "runs/0/groups?limit=100000": "limit: needs 1 to 100",
                "runs/0/curves?points=0": "points: needs 1 to 2000",
            }.items():
                status, value = await client.get(path)
                assert (status, words in value["error"]) == (400, True), (path, value)


HOSTILE = [
    "<script>alert(document.cookie)</script><img src=x onerror=alert(1)>",
    "\u202eevil \u2066\u200f\ufeff right to left",
    "\x1b[31mred\x1b[0m \x00\x07 control",
    "x" * (1 << 20),
]


async def test_hostile_texts_come_back_as_they_are_inside_json(make: Make, tmp_path: Path) -> None:
    """Scripts, escapes, right-to-left marks, a megabyte in a line: equal texts, ASCII bytes, and no HTML anywhere."""
    run = make()
    run.add_step(
        sampled=1, groups=[MadeGroup("".join(HOSTILE[:3]), HOSTILE, [1.0, 0.0, 0.0, 0.0], environment="<b>sums</b>")]
    )
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            page = await client.until("runs/0/groups?text=onerror", lambda page: page["groups"])
            assert page["groups"][0]["environment"] == "<b>sums</b>"
            for completion, text in enumerate(HOSTILE):
                async with client.session.get(
                    f"{client.base}/api/runs/0/groups/0/trajectories/{completion}"
                ) as response:
                    raw = await response.read()
                assert raw.isascii()
                value = json.loads(raw)
                assert value["completion"]["text"] == text
                assert value["completion"]["messages"][-1]["content"] == text
            _, cut = await client.get("runs/0/groups/0")
            assert [one["cut"] for one in cut["completions"]] == [False, False, False, True]
            assert len(cut["completions"][3]["text"]) < 10_000


async def test_half_a_surrogate_pair_does_not_stop_an_answer(make: Make, tmp_path: Path) -> None:
    """A line of samples.jsonl may have it, and UTF-8 may not."""
    run = make(1)
    path = run.config.output / "samples.jsonl"
    line = json.loads(path.read_text()) | {"ordinal": 70, "completions": ["\ud800", "b", "c", "d"]}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            await client.until("runs/0/facts", indexed(4))
            status, value = await client.get("runs/0/groups/70")
            assert (status, value["completions"][0]["text"], value["source"]) == (200, "\ud800", "samples.jsonl")


async def test_a_living_run_grows_on_the_pages_and_a_dead_one_stays(make: Make, tmp_path: Path) -> None:
    """Curves, lists and states follow; once the progress is old the run is dead, and all of it is still there."""
    run = make(1)
    run.report()
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            await client.until("runs/0/facts", indexed(3))
            for step in (2, 3):
                run.add_step()
                run.report()
                assert (await client.get("runs/0/curves?name=loss"))[1]["steps"] == list(range(1, step + 1))
                newest = await client.until("runs/0/groups?limit=1", lambda page: page["groups"][0]["step"] == step)  # noqa: B023
                assert newest["groups"][0]["completions"] in (0, 4)
            run.close()
            run.report(age=1000.0)
            found = (await client.get("runs/0"))[1]
            assert (found["alive"], found["state"], found["step"]) == (False, "stopped", 3)
            assert (await client.get("runs/0/steps/3"))[0] == 200
            assert (await client.get("runs/0/groups/8/trajectories/0"))[0] == 200


async def test_only_reading_is_answered(make: Make, tmp_path: Path) -> None:
    """Each other method is refused at each address, with and without a body."""
    with viewed(tmp_path, make(1)) as runs:
        async with served(runs) as client:
            for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"):
                for path in ("/", "/api/runs", "/api/runs/0/groups/0", "/static/app.js", "/nothing"):
                    async with client.session.request(method, client.base + path, data=b"x") as response:
                        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD"), (method, path)
            async with client.session.head(f"{client.base}/api/runs") as response:
                assert response.status == 200


TRAVERSALS = [
    "/static/../access.py", "/static/..%2faccess.py", "/static/%2e%2e/access.py", "/static/....//access.py",
    "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/../../etc/passwd", "/static/..\\access.py", "/static/%00",
    "/static/access.py", "/static/", "/static", "/access.py", "//etc/passwd", "/static/app.js/../../access.py",
]  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS)
async def test_no_address_leads_to_another_file(make: Make, tmp_path: Path, path: str) -> None:
    """Sent as it stands, without a client that tidies it."""
    with viewed(tmp_path, make()) as runs:
        async with served(runs) as client:
            status, _, body = await raw(client, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert status in (400, 404), path
            assert b"root:" not in body
            assert b"def " not in body


async def raw(client: Client, request: str) -> tuple[int, bytes, bytes]:
    """Status, head and body of the answer to these bytes."""
    port = int(client.base.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode("latin-1"))
    answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head, body


async def test_without_a_token_only_this_machine_is_a_host(make: Make, tmp_path: Path) -> None:
    """A site whose name resolves to 127.0.0.1 gets nothing from the browser of its visitor."""
    with viewed(tmp_path, make(1)) as runs:
        async with served(runs) as client:
            for host, expected in {
                "127.0.0.1": 200, "localhost:1234": 200, "[::1]": 200, "evil.example": 403, "10.0.0.1": 403,
                "127.0.0.1.evil.example": 403, "localhost.evil.example:80": 403,
            }.items():  # fmt: skip
                request = f"GET /api/runs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                status, _, body = await raw(client, request)
                assert status == expected, host
                assert (b"output" in body) == (expected == 200)
            status, _, _ = await raw(client, "GET /api/runs HTTP/1.1\r\nHost: bad host/\r\nConnection: close\r\n\r\n")
            assert status in (400, 403)


WRONG: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("?token=wrong-token-as-long-xxx", {}),
    ("?token=é", {}),
    ("", {"Authorization": "Bearer wrong"}),
    ("", {"Authorization": f"Basic {TOKEN}"}),
    ("", {"Cookie": f"actors_view={TOKEN}"}),
]
"""Queries and headers without the token, or with the token in another place."""


async def test_with_a_token_every_address_needs_it(make: Make, tmp_path: Path) -> None:
    """In the address once, then as a cookie no script can read; or as a header. A wrong one opens nothing."""
    with viewed(tmp_path, make(1)) as runs:
        async with served(runs, TOKEN) as client:
            for path in ("/", "/api/runs", "/static/app.js", "/nothing"):
                for query, headers in WRONG:
                    async with client.session.get(client.base + path + query, headers=headers) as response:
                        assert response.status == 401, (path, query)
                        assert b"output" not in await response.read()
            assert (await client.get("runs", headers={"Authorization": f"Bearer {TOKEN}"}))[0] == 200
            address = f"{client.base}/?page=groups&token={TOKEN}&run=0"
            async with client.session.get(address, allow_redirects=False) as response:
                assert (response.status, response.headers["Location"]) == (303, "/?page=groups&run=0")
                cookie = response.headers["Set-Cookie"]
                assert "HttpOnly" in cookie
                assert "SameSite=Strict" in cookie
            async with client.session.get(f"{client.base}/api/runs") as response:  # the cookie is there now
                assert response.status == 200
            async with client.session.get(
                f"{client.base}//evil.example/?token={TOKEN}", allow_redirects=False
            ) as response:
                assert response.headers["Location"].startswith("/evil.example")


def test_beyond_loopback_there_is_always_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one each time, or that of the environment, which must be long enough."""
    monkeypatch.delenv("ACTORS_VIEW_TOKEN", raising=False)
    assert [token_for(host) for host in ("127.0.0.1", "localhost", "::1", "[::1]")] == [""] * 4
    made = {token_for(host) for host in ("0.0.0.0", "::", "10.0.0.1", "gpu7.example", "")}
    assert len(made) == 5
    assert min(map(len, made)) >= 32
    monkeypatch.setenv("ACTORS_VIEW_TOKEN", TOKEN)
    assert {token_for("127.0.0.1"), token_for("0.0.0.0")} == {TOKEN}
    monkeypatch.setenv("ACTORS_VIEW_TOKEN", "short")
    with pytest.raises(ConfigError, match="ACTORS_VIEW_TOKEN: needs at least 16"):
        token_for("127.0.0.1")


async def test_an_answer_that_takes_too_long_ends_in_words(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that hangs; other pages are answered meanwhile."""
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.2)
    with viewed(tmp_path, make(1)) as runs:
        monkeypatch.setattr(runs[0], "overview", lambda: time.sleep(2.0))
        async with served(runs) as client:
            slow, facts = await asyncio.gather(client.get("runs/0"), client.get("runs"))
            assert slow[0] == 503
            assert "no answer within 0.2 s" in slow[1]["error"]
            assert facts[0] == 200


async def test_a_catalogue_that_can_not_be_kept_is_said_to_be_so(make: Make, tmp_path: Path) -> None:
    """The pages go on with what is there, and the reason is on them."""
    run = make(1)
    with viewed(tmp_path, run) as runs:
        async with served(runs) as client:
            await client.until("runs/0/facts", indexed(3))
            good = run.config.output / "samples.jsonl"
            good.rename(tmp_path / "aside")
            good.mkdir()  # a folder in place of the file
            facts = await client.until("runs/0/facts", lambda facts: facts["problem"])
            assert "IsADirectoryError" in facts["problem"]
            assert (await client.get("runs/0/groups"))[0] == 200
            good.rmdir()
            (tmp_path / "aside").rename(good)
            await client.until("runs/0/facts", lambda facts: not facts["problem"])


STATIC = Path(server.__file__).with_name("static")


SERVED = {
    "": "text/html",
    "static/app.js": "text/javascript",
    "static/style.css": "text/css",
    "static/icon.svg": "image/svg+xml",
}
"""Content types of files of the pages."""


async def test_the_pages_load_nothing_of_other_hosts_and_no_inline_code(make: Make, tmp_path: Path) -> None:
    """Every file of the page is served with its type; the policy lets in nothing else."""
    with viewed(tmp_path, make()) as runs:
        async with served(runs) as client:
            for name, kind in SERVED.items():
                async with client.session.get(f"{client.base}/{name}") as response:
                    assert (response.status, response.content_type) == (200, kind)
                    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert not re.search(r"\son\w+=|style=|<style", page)


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_texts_of_runs_can_become_nothing_but_text(path: Path) -> None:
    """No way of the browser that makes elements or code of a text is named, and no address of another host."""
    text = path.read_text()
    ways = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser",
            "srcdoc", "createContextualFragment", "setHTML", "javascript:"]  # fmt: skip
    assert [way for way in ways if way in text] == []
    hosts = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert hosts == set()


def test_a_port_that_is_taken_is_named(make: Make, tmp_path: Path) -> None:
    """With the way out."""
    from actors.view.command import serve

    run = make()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port 0 takes any free port"):
            serve([run.config.output], "127.0.0.1", taken.getsockname()[1], tmp_path / "cache")


def test_a_catalogue_that_is_being_made_has_the_time_left(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pace since the first look, which has none yet."""
    shares = iter((0.2, 0.6, 1.0))
    facts = Listing.facts
    with viewed(tmp_path, make(2)) as (run,):
        monkeypatch.setattr(Listing, "facts", lambda listing: facts(listing) | {"indexed": next(shares)})
        first, second, last = (run.facts()["left"] for _ in range(3))
    assert (first, last) == ("", "")
    assert second == "about 0 s left"
