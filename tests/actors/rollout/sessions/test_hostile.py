"""Hostile clients of sessions: refused in words, at a bounded cost of memory and log, beside honest sessions."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from actors.engines.http.client import RequestRefusedError
from actors.rollout.episode import Trajectory, _Driven
from actors.rollout.held import AttemptError
from actors.rollout.sessions import server, session
from actors.rollout.sessions.session import Session
from actors.trajectories.recorder import LARGE_CHARACTERS, LONGEST_TOKEN, Recorder, TurnLimits
from tests.actors.rollout.sessions.test_server import ASKED, Endpoint
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import language

ROOT = Path(__file__).parents[4]
LIMITS = TurnLimits(4000, 100, 1_000_000)
MIB = 1 << 20
NOTHING: set[str] = set()
REFUSALS = {
    "guessed": {"401"},
    "large": {"400"},
    "slow_heads": NOTHING,
    "slow_bodies": NOTHING,
    "idle": NOTHING,
    "heads": {"400"},
    "garbage": {"400", "401"},
    "lengths": {"400"},
    "bombs": {"415"},
    "texts": {"400", "429"},  # 429: too many at the same time
}
"""Statuses with which an attack may be answered."""


@pytest.fixture
async def end() -> AsyncIterator[Endpoint]:
    """An endpoint whose model always answers."""
    async with AsyncExitStack() as stack:
        yield await Endpoint(stack, lambda request: "ok", LIMITS).open()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def attacked(end: Endpoint, attack: str, number: int, seconds: float) -> dict[str, int]:
    """What the attackers were told, while an honest session was answered."""
    evil = Session("game", end._ask, language(Chat("qwen2_5")))
    asked = {"attack": attack, "port": int(end.server.url.rpartition(":")[2]), "number": number, "seconds": seconds}
    command, pipe = [sys.executable, "-m", "tests.actors.rollout.sessions.attackers"], subprocess.PIPE
    async with end.table.opened(evil):
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(asked | {"key": evil.key}).encode() + b"\n")
                process.stdin.close()
                told = asyncio.create_task(asyncio.to_thread(process.stdout.read))
                while not told.done():
                    assert (await end.chat(ASKED))[0] == 200
                    await asyncio.sleep(0.02)
            finally:
                process.kill()
        assert evil.untaken == []
        assert evil._replies == {}
    return dict(json.loads((await told).splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_else_to_collect")
@pytest.mark.parametrize("attack", REFUSALS)
@pytest.mark.parametrize(
    ("number", "seconds", "mib"), [(8, 2.0, 200), pytest.param(200, 20.0, 400, marks=pytest.mark.long)]
)
async def test_an_attack_is_refused_and_costs_neither_memory_nor_log(
    end: Endpoint, caplog: pytest.LogCaptureFixture, attack: str, number: int, seconds: float, mib: int
) -> None:
    """An honest session is answered meanwhile, and nothing of the attack is in the record."""
    assert (await end.chat(ASKED))[0] == 200
    before = resident()
    told = await attacked(end, attack, number, seconds)
    assert told.keys() <= REFUSALS[attack] | {"ConnectionResetError", "BrokenPipeError"}
    # the slowest attacks may have had no answer yet
    assert told.keys() & REFUSALS[attack] or not REFUSALS[attack] or attack == "texts"
    assert resident() - before < mib * MIB
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    assert end.session.untaken == []


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_ten_thousand_connections_leave_room_for_honest_ones(end: Endpoint) -> None:
    """As many as descriptors allow."""
    before = resident()
    await attacked(end, "idle", 10_000, 20.0)
    assert resident() - before < 400 * MIB


DEEP = {depth: "[" * depth + "1" + "]" * depth for depth in (90, 900, 990)}
VALUES = {
    "half a character": '"\\ud800 x"',
    "the other half": '"a\\udfff"',
    "half in parts": '[{"type":"text","text":"\\udc00"}]',
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "1e999": "1e999",
    "digits": "9" * 4000,
    "too many digits": "9" * 5000,
    "true": "true",
    "object": "{}",
    "text": '"a\\u0000"',
    **{f"{depth} deep": text for depth, text in DEEP.items()},
    "objects": '{"a":' * 200 + "1" + "}" * 200,
    "parts": f'[{{"type":"text","text":{DEEP[90]}}}]',
}
FIELDS = (
    "tools", "tool_choice", "response_format", "stop", "max_tokens", "model", "temperature", "stream_options", "tokens",
    "system", "instructions", "sampling_params", "logprobs", "stop_sequences", "thinking", "text", "metadata", "n",
    "user", "return_token_ids", "parallel_tool_calls", "max_completion_tokens", "max_output_tokens", "reasoning",
    "previous_response_id", "stream", "wait", "reward", "interaction_id", "add_generation_prompt", "output_config",
)  # fmt: skip
PATHS = (*server.COMPLETIONS, "/tokenize", "/v1/messages/count_tokens", "/rl/set_reward")


def bodies(value: str) -> list[str]:
    """Bodies with a value in each place."""

    def body(**places: str) -> str:
        whole = {"model": '"m"', "max_tokens": "9", "messages": '[{"role":"user","content":"a"}]', "input": '"a"'}
        whole |= {"prompt": '"a"', "token_ids": "[1,2]", "sampling_params": "{}"} | places
        return "{" + ",".join(f'"{name}":{text}' for name, text in whole.items()) + "}"

    def talk(message: str) -> str:
        said = f'[{{"role":"user","content":"a"}},{message},{{"role":"user","content":"b"}}]'
        return body(messages=said, input=said)

    fields = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
    call = f'{{"id":{value},"type":"function","function":{{"name":"add","arguments":{value}}}}}'
    tool = f'{{"type":"function","name":"f","parameters":{value},"input_schema":{value},"function":'
    tool += f'{{"name":"f","parameters":{value},"description":{value}}}}}'
    return [
        body(messages=f'[{{"role":"user","content":{value}}}]', input=value, prompt=value, token_ids=value),
        *(body(**{name: value}) for name in FIELDS),
        *(talk(f'{{"role":"assistant","content":"x","{name}":{value}}}') for name in fields),
        talk(f'{{"role":"assistant","content":"x","tool_calls":[{call}]}}'),
        body(tools=f"[{tool}]"),
        value,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
async def test_a_value_in_any_place_is_refused_in_words_or_harmless(
    end: Endpoint, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """No failure of ours, which clients would ask again, and which would fail the trajectory."""
    headers = {"Authorization": f"Bearer {end.session.key}"}
    for path in PATHS:
        for body in bodies(VALUES[name]):
            async with end.http.post(end.server.url + path, data=body.encode(), headers=headers) as answer:
                told = await answer.json() if "json" in answer.content_type else {}
            assert answer.status in (200, 400, 404), f"{path} {body[:300]} {told}"
            if answer.status != 200:
                assert told["error"]["message"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    # what is in the record can be sent
    json.dumps([end.session.info, *end.recorder._turns], default=repr).encode()
    assert (await end.chat(ASKED))[0] == 200


async def test_the_key_of_a_session_opens_no_other(end: Endpoint) -> None:
    """Neither its calls, nor its rewards, nor its end; after the end a key opens nothing at all."""
    other = Session("game", end._ask, language(Chat("qwen2_5")))
    async with end.table.opened(other):
        _, answer = await end.chat(ASKED)
        status, told = await end.post("/rl/set_reward", {"interaction_id": answer["id"], "reward": 1.0}, other.key)
        assert (status, told["error"]["message"]) == (
            404,
            f"interaction_id: {answer['id']!r} is no reply of this session",
        )
        await end.post("/rl/end_session", {"reward": 1.0}, other.key)
    assert not end.session.ended.is_set()
    assert (await end.post("/v1/chat/completions", {"messages": ASKED}, other.key))[0] == 409
    assert end.session.turn_rewards == []


async def test_requests_of_a_session_at_the_same_time_are_limited(
    end: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have a body in memory; another session is not held up."""
    # the client itself has 100 connections at most
    monkeypatch.setattr(session, "MOST_AT_ONCE", 50)
    end.hold.clear()
    other = Session("game", end._ask, language(Chat("qwen2_5")))
    asked = [asyncio.create_task(end.chat([{"role": "user", "content": str(n)}])) for n in range(55)]
    done: set[Any] = set()
    while len(done) < 5:
        done, _ = await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result()[0] for task in done} == {429}
    end.hold.set()
    async with end.table.opened(other):
        assert (await end.post("/v1/chat/completions", {"messages": ASKED}, other.key))[0] == 200
    assert [task.result()[0] for task in asked if await asyncio.wait({task})].count(200) == 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("word " * 30_000, "tokens in the beginning of a message"),
        ("x" * (LONGEST_TOKEN * 4000 + 1), "characters leave no room"),
        ("x" * 5000, "prompt tokens leave no room"),
    ],
)
async def test_a_prompt_beyond_the_context_is_refused_before_all_of_it_is_read(
    end: Endpoint, text: str, words: str
) -> None:
    """In messages, in tools, and as a prompt; the tokens of the whole would take seconds and hundreds of MiB."""
    places: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": text}]}]
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    if len(text) != LONGEST_TOKEN * 4000 + 1:
        places.append({"messages": ASKED, "tools": [tool]})
    for body in places:
        status, told = await end.post("/v1/chat/completions", body)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        if "tools" not in body:
            assert words in told["error"]["message"]
    status, told = await end.post("/v1/completions", {"prompt": text})
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")


async def test_large_conversations_keep_the_order_of_turns_and_the_limits(end: Endpoint) -> None:
    """They are rendered in a thread: what is asked meanwhile is another turn, and no limit is passed."""
    end.recorder.limits = TurnLimits(4_000_000, 100, 2)
    large = [{"role": "user", "content": " " * (LARGE_CHARACTERS + 1)}]
    told = await asyncio.gather(*(end.chat(large) for _ in range(5)))
    assert sorted(status for status, _ in told) == [200, 200, 429, 429, 429]
    assert end.recorder.tree.num_turns == 2


async def test_what_the_engine_refuses_of_a_clients_own_tokens_fails_no_trajectory() -> None:
    """Ids beyond the vocabulary: the client's mistake. A prompt of ours that is refused is a failure of the engine."""

    async def refuse(request: Any) -> Any:
        refused = RequestRefusedError("inference-0: HTTP 400: prompt: 99999 is no token")
        raise AttemptError("engine", str(refused)) from refused

    for prompt_ids, error, failures in (([99999], ValueError, 0), (None, AttemptError, 1)):
        driven = _Driven(Trajectory(Recorder(language(Chat("qwen2_5")), refuse, LIMITS, 7)))
        with pytest.raises(error, match="99999 is no token"):
            await driven.turn(ASKED, {}, prompt_ids)
        assert len(driven.failed) == failures


async def test_an_agent_that_asks_for_ever_is_told_so_and_keeps_nothing(end: Endpoint) -> None:
    """Its budget ends the calls, and the answers of refused calls are not kept."""
    end.recorder.limits = TurnLimits(4000, 100, 3)
    statuses = [(await end.chat([{"role": "user", "content": f"Again {n}."}]))[0] for n in range(300)]
    assert statuses == [200] * 3 + [429] * 297
    assert (len(end.session._all), len(end.session._replies)) == (3, 3)
