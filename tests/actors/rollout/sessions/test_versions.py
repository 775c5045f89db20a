"""A session over an engine whose weights change between its calls and in the middle of one."""

import asyncio
from typing import Any

import torch

from actors.engines import fake
from actors.engines.fake import FakeEngine
from actors.engines.protocol import SampleRequest
from actors.rollout.sessions.dialects.calls import Call
from actors.rollout.sessions.session import Session
from actors.trajectories.recorder import Recorder, TurnAnswer, TurnLimits, TurnRequest
from bus.weights import Weights
from schemas.config.fake_engine import FakeEngineConfig
from schemas.messages import Origin, PolicyVersion

CALLS = 6


def engine_of(version: int) -> FakeEngine:
    """An engine that serves a version."""
    engine = FakeEngine(FakeEngineConfig())
    load(engine, version)
    return engine


def load(engine: FakeEngine, version: int) -> None:
    """Let an engine serve a version, from the next token on."""
    weights = Weights("full", {"weight": torch.tensor([float(version)])})
    engine.load(PolicyVersion(lineage=1, version=version), weights, 10.0)


async def test_each_token_has_the_version_that_sampled_it() -> None:
    """Also within a call: each token is the one that an engine with this version alone would have sampled."""
    engine, asked = engine_of(0), []
    newest = 0

    async def sample(request: TurnRequest) -> TurnAnswer:
        nonlocal newest
        number = len(asked)
        asked.append(request)

        def switched(_: int, piece: Any) -> None:
            nonlocal newest
            # of every second call the second token is the last of the old version
            if number % 2 and newest == number and len(pieces) < 2:
                pieces.append(piece)
                if len(pieces) == 2:
                    newest += 1
                    load(engine, newest)

        pieces: list[Any] = []
        wanted = SampleRequest(request.prompt_ids, 1, request.max_tokens, request.seed, on_piece=switched)
        (done,) = await asyncio.wrap_future(engine.submit(wanted))
        if newest == number:
            newest += 1
            load(engine, newest)
        return TurnAnswer(done.token_ids, done.logprobs, done.segments, done.finish_reason)

    language = fake.chat(64)
    recorder = Recorder(language, sample, TurnLimits(4096, 64, CALLS), 7)
    session = Session("game", lambda m, o, p: recorder.turn(m, o["tools"], o["max_tokens"], o["stop"]), language)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for number in range(CALLS):
        taken = await session.answer(Call(list(messages)), str(number), "any")
        taken.note(taken=True)
        messages += [dict(taken.reply.message), {"role": "user", "content": f"Next {number}."}]
    engine.close()
    (whole,) = recorder.tree.samples()
    ends = [start for start, *_ in whole.segments[1:]] + [len(whole.token_ids)]
    pairs = list(zip(whole.segments, ends, strict=True))
    found = [
        (turn, version, whole.token_ids[start:end])
        for (start, _, version, origin, turn), end in pairs
        if origin is Origin.MODEL
    ]
    assert {(turn, version) for turn, version, _ in found} == {
        *((number, number) for number in range(CALLS)),
        *((number, number + 1) for number in range(1, CALLS, 2)),
    }
    for turn, request in enumerate(asked):
        place = 0
        for _, version, tokens in (one for one in found if one[0] == turn):
            alone = engine_of(version)
            wanted = SampleRequest(request.prompt_ids, 1, request.max_tokens, request.seed)
            (done,) = await asyncio.wrap_future(alone.submit(wanted))
            alone.close()
            # the version at the first token decides the length, so the last token alone may be the end of it
            inner = tokens[: max(0, len(done.token_ids) - 1 - place)]
            both = [one for one in zip(inner, done.token_ids[place:], strict=False) if 0 not in one]
            assert all(first == second for first, second in both)
            place += len(tokens)
