"""Many sessions at the same time, whose clients repeat calls, hang up and are killed: each call is answered once."""

import asyncio
import gc
import json
import random
import signal
import subprocess
import sys
import weakref
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from actors.engines.http.client import EngineError
from actors.rollout.sessions.dialects.calls import Call, CallError
from actors.rollout.sessions.server import SessionServer
from actors.rollout.sessions.session import Session
from actors.rollout.sessions.table import SessionTable
from actors.trajectories.recorder import Recorder, TurnAnswer, TurnLimits, TurnRequest
from schemas.messages import Origin
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import Writer, language

ROOT = Path(__file__).parents[4]
LIMITS = TurnLimits(100_000, 1000, 1000)


class Played:
    """A session, and what its engine was asked; every answer is another one, and some requests fail."""

    def __init__(self, name: int, family: Chat) -> None:
        self.name, self._chance = name, random.Random(name)
        self.writer = Writer(family, lambda request: f"Answer {len(self.writer.answers)} of {name}.")
        self.recorder = Recorder(language(family), self._sample, LIMITS, name)

    async def ask(self, messages: Any, options: Any, prompt_ids: Any) -> Any:
        """As an episode asks."""
        return await self.recorder.turn(messages, options["tools"], options["max_tokens"], options["stop"])

    async def _sample(self, request: TurnRequest) -> TurnAnswer:
        await asyncio.sleep(self._chance.random() * 0.01)
        if self._chance.random() < 0.05:
            raise EngineError("inference-0 is gone")
        return await self.writer.sample(request)

    def trained(self) -> tuple[Counter[int], dict[int, list[int]]]:
        """How often each turn is trained, and its tokens."""
        counts: Counter[int] = Counter()
        tokens: dict[int, list[int]] = {}
        for sample in self.recorder.tree.samples():
            ends = [start for start, *_ in sample.segments[1:]] + [len(sample.token_ids)]
            for (start, _, _, origin, turn), end in zip(sample.segments, ends, strict=True):
                mask = set(sample.loss_mask[start:end])
                assert len(mask) == 1
                if mask == {1}:
                    assert origin is Origin.MODEL
                    counts[turn] += 1
                    tokens[turn] = sample.token_ids[start:end]
        return counts, tokens


async def crowd(asked: dict[str, Any], answers: dict[int, list[str]], ids: list[str], most: int | None = None) -> None:
    """Run a process of clients to its end, or kill it after so many answers."""
    command, pipe = [sys.executable, "-m", "tests.actors.rollout.sessions.crowd"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.close()
        try:
            # what has left the process counts, also where its end was a kill
            while line := await asyncio.to_thread(process.stdout.readline):
                name, number, reply_id, text = json.loads(line)
                assert len(answers[name]) == number
                answers[name].append(text)
                ids.append(reply_id)
                if most is not None and len(ids) >= most:
                    process.kill()
            code = await asyncio.to_thread(process.wait)
        finally:
            process.kill()
    assert code == 0 if most is None else code in (0, -signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "calls", "characters"),
    [(12, 5, 40), pytest.param(200, 20, 1000, marks=pytest.mark.long)],
)
async def test_each_call_is_answered_once_and_each_token_is_trained_once(
    number: int, calls: int, characters: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three processes of clients are killed in the middle, and four of ten requests are disturbed."""
    family, told = Chat("qwen3"), Counter()
    played = [Played(name, family) for name in range(number)]
    answers: dict[int, list[str]] = {one.name: [] for one in played}
    ids: list[str] = []
    async with AsyncExitStack() as stack:
        table = SessionTable()
        count = lambda label, outcome: told.update([outcome])  # noqa: E731
        server = SessionServer(table, {"game": language(family)}, "tiny", 100_000, count=count)
        await stack.enter_async_context(server)
        sessions = [Session("game", one.ask, language(family)) for one in played]
        for session in sessions:
            await stack.enter_async_context(table.opened(session))
        for third in (1, 2, 3):
            left = [[one.name, s.key, answers[one.name]] for one, s in zip(played, sessions, strict=True)]
            asked = {"url": server.url, "sessions": left, "calls": calls, "characters": characters}
            asked |= {"mischief": 0.4, "seed": 1000 * third, "again": third > 1}
            await crowd(asked, answers, ids, number * calls * third // 3 if third < 3 else None)
        untaken = [session.untaken for session in sessions]
    assert {name: len(texts) for name, texts in answers.items()} == {one.name: calls for one in played}
    assert len(ids) == len(set(ids)) == number * calls
    assert untaken == [[]] * number
    assert told["answered"] <= number * calls <= told["answered"] + told["repeated"]
    for one in played:
        # a call that was repeated was not sampled again
        assert len(one.writer.answers) == calls
        counts, tokens = one.trained()
        assert counts == dict.fromkeys(range(calls), 1)
        assert [family.decode(tokens[turn]) for turn in range(calls)] == [
            f"{text}{family.family.ends[0]}" for text in answers[one.name]
        ]
        assert [tokens[turn] for turn in range(calls)] == [list(answer.token_ids) for answer in one.writer.answers]
        assert len(one.recorder.tree.samples()) == 1
    # nothing of the sessions is left, and no failure that only a client without patience would have seen is logged
    kept = [weakref.ref(session) for session in sessions]
    del sessions, session, left, asked, server, table, stack
    gc.collect()
    assert [one() for one in kept] == [None] * number
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


class Failing:
    """A model whose answers wait, and that fails where it is told to."""

    def __init__(self) -> None:
        family = Chat("qwen2_5")
        self.writer = Writer(family, lambda request: f"Answer {len(self.writer.answers)}.")
        self.recorder = Recorder(language(family), self._sample, LIMITS, 7)
        self.session = Session("game", self._ask, language(family))
        self.hold, self.failures = asyncio.Event(), [False] * 1000

    async def _ask(self, messages: Any, options: Any, prompt_ids: Any) -> Any:
        return await self.recorder.turn(messages, options["tools"], options["max_tokens"], options["stop"])

    async def _sample(self, request: TurnRequest) -> TurnAnswer:
        fails = self.failures.pop(0)
        await self.hold.wait()
        if fails:
            raise EngineError("inference-0 is gone")
        return await self.writer.sample(request)

    def asks(self, text: str = "Go.", *, again: bool = False, leaves: bool = False) -> "asyncio.Task[str]":
        """Ask as OpenAI's client does; return the id of the answer."""
        call = Call([{"role": "user", "content": text}], ignored=[f"unknown {text}"])

        async def asked() -> str:
            taken = await self.session.answer(call, text, "any", is_repeated=again)
            taken.note(taken=not leaves)
            return taken.reply.id

        return asyncio.create_task(asked())


async def test_calls_that_are_the_same_have_an_answer_each_when_they_are_repeated() -> None:
    """Best of three: one fails, one loses its client, one is answered; both others get an answer of their own."""
    model = Failing()
    model.failures[1] = True
    first, second, third = model.asks(), model.asks(), model.asks()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    third.cancel()
    model.hold.set()
    one = await first
    with pytest.raises(CallError, match="inference-0 is gone"):
        await second
    repeated = await asyncio.gather(model.asks(again=True), model.asks(again=True))
    assert len({one, *repeated}) == 3
    assert (model.recorder.tree.num_turns, model.session.untaken) == (3, [])
    # nobody is left who has no answer: the newest one again
    assert await model.asks(again=True) in repeated
    assert model.recorder.tree.num_turns == 3


@pytest.mark.slow
async def test_calls_that_fail_leave_nothing_behind() -> None:
    """An agent that asks for ever, with a new body and other parameters each time, costs no memory."""
    model = Failing()
    model.failures, _ = [True] * 1000, model.hold.set()
    for number in range(1000):
        with pytest.raises(CallError):
            await model.asks(f"Go {number}." + "x" * 1000)
    gc.collect()
    # the newest one is in the last error, which pytest keeps
    assert sum(isinstance(one, Call) for one in gc.get_objects()) <= 1
    assert len(model.session.info["ignored"]) <= 199
    assert sum(map(len, model.session._unheeded["ignored"])) < 100_000
