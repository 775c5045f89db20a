"""Which engine is asked for a ticket, and what follows when it fails."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from actors.engines.http.client import EngineError, RequestRefusedError, SampledCompletion
from actors.rollout.engine_choice import EngineChoice, check_experts, may_sample
from actors.rollout.held import AttemptError
from actors.telemetry.metrics import Metrics
from schemas.messages import PolicyVersion
from tests.actors.rollout.doubles import Client, completion, directive, engine, ticket
from tests.ring.harness import ring_config


@pytest.fixture
def client():
    """Answers for all engines."""
    return Client({})


@pytest.fixture
async def engines(tmp_path, client):
    """A choice with two retries and a lease that no test outlasts; `short_lease` is for those that wait for its end."""
    config = ring_config(tmp_path, bus={"lease": 600.0, "resend_after": 600.0})
    async with EngineChoice(config, Metrics("rollout"), lambda: client) as made:
        yield made


@pytest.fixture
def short_lease(engines, monkeypatch):
    """Sets the lease to 0.2 s."""
    return lambda: monkeypatch.setattr(engines, "_lease", 0.2)


def test_ticket_names_the_oldest_version_or_exactly_one_policy():
    """min_version 3 is served by 3 and 4, not by 2; an evaluation of 1.3 not even by 2.3."""
    assert [may_sample(engine("e", version), ticket()) for version in (2, 3, 4)] == [False, True, True]
    evaluation = ticket(policy=PolicyVersion(lineage=1, version=3))
    assert may_sample(engine("e", 3), evaluation)
    assert not may_sample(engine("e", 4), evaluation)
    assert not may_sample(engine("e", 3, lineage=2), evaluation)


@pytest.mark.parametrize(
    "completions",
    [
        [completion([5], [(0, 1, 3)])],
        [completion([5], [(0, 1, 3)]), completion([], [(0, 1, 3)])],
        [completion([5], [(0, 1, 3)]), completion([6], [])],
        [completion([5], [(0, 1, 3)]), SampledCompletion([6, 7], [-1.0], [(0, 1, 3)], "stop", "")],
    ],
    ids=["one too few", "an empty one", "no policy", "a logprob missing"],
)
async def test_answer_that_lacks_something_is_asked_for_again_in_place(engines, client, short_lease, completions):
    """Two full completions with logprobs and policies from another engine; none is taken from the first answer."""
    client.answers["a"] = completions
    engines.note(0.0, directive(engines=[engine("a", load=0), engine("b", load=9)]))
    assert await engines.ask(ticket(), [1]) == Client.ANSWER
    assert client.asked == ["a", "b"]
    engines.note(0.0, directive(engines=[engine("a")]))
    short_lease()
    with pytest.raises(AttemptError, match=r"a at http://a: .* (completions for 2|lacks logprobs)") as caught:
        await engines.ask(ticket(), [1])
    assert caught.value.reason == "engine"


async def test_requests_under_way_count_into_an_engines_load(engines, client):
    """Two tickets at the same moment go to two engines, though directives say that both are idle."""
    engines.note(0.0, directive(engines=[engine("a"), engine("b")]))
    await asyncio.gather(engines.ask(ticket(0), [1]), engines.ask(ticket(1), [1]))
    assert sorted(client.asked) == ["a", "b"]
    assert set(engines.asked.values()) == {0}


async def test_tickets_of_many_rollout_actors_spread_over_the_engines(tmp_path):
    """Each has the same loads from the packer and asks for one ticket: none of eight engines gets most of them."""
    config, asked = ring_config(tmp_path), Counter()
    for number in range(64):
        client = Client({})
        async with EngineChoice(config, Metrics("rollout"), lambda client=client: client) as one:
            one.note(0.0, directive(engines=[engine(name) for name in "abcdefgh"]))
            await one.ask(ticket(number, seed=number), [1])
        asked.update(client.asked)
    assert len(asked) == 8
    assert max(asked.values()) < 20


async def test_failed_engine_is_not_asked_again_before_its_lease_could_have_ended(engines, client, short_lease):
    """The idle engine fails, the busy one gets the request; alone, the failed one is asked again after 0.2 s."""
    client.failing["a"] = EngineError("connection refused")
    engines.note(0.0, directive(engines=[engine("a", load=0), engine("b", load=9)]))
    await engines.ask(ticket(), [1])
    assert client.asked == ["a", "b"]
    client.asked.clear()
    engines.note(0.0, directive(engines=[engine("a")]))
    short_lease()
    began = asyncio.get_running_loop().time()
    with pytest.raises(AttemptError, match="connection refused"):
        await engines.ask(ticket(), [1])
    assert client.asked == ["a", "a", "a"]
    assert asyncio.get_running_loop().time() - began >= 0.4


async def test_refused_request_is_not_repeated(engines, client):
    """4xx: the request itself is wrong, so the attempt fails at once."""
    client.failing["a"] = RequestRefusedError("HTTP 400: n is too large")
    engines.note(0.0, directive(engines=[engine("a")]))
    with pytest.raises(AttemptError, match="n is too large"):
        await engines.ask(ticket(), [1])
    assert client.asked == ["a"]


def test_answers_without_the_experts_of_all_tokens_are_asked_for_again(tmp_path, client, monkeypatch):
    """With router replay, in training: otherwise the trainer would choose by itself, and nobody would hear of it."""

    def told(tokens: int, layers: int = 2) -> SampledCompletion:
        return replace(completion([5, 6], [(0, 1, 3)]), routed_experts=np.zeros((tokens, layers, 2), np.int8))

    peer = engine("e", 3)
    check_experts(peer, 3, [told(4), told(4)])
    for wrong in (completion([5, 6], [(0, 1, 3)]), told(5), told(3)):
        with pytest.raises(EngineError, match="and it has computed 4"):
            check_experts(peer, 3, [told(4), wrong])
    with pytest.raises(EngineError, match="experts of completions differ in layers"):
        check_experts(peer, 3, [told(4), told(4, layers=3)])

    async def ask(purpose: str):
        config = ring_config(tmp_path, bus={"lease": 600.0, "resend_after": 600.0})
        trainer = config.trainer.model_copy(update={"router_replay": True})
        replaying = config.model_copy(update={"trainer": trainer})
        async with EngineChoice(replaying, Metrics("rollout"), lambda: client) as made:
            monkeypatch.setattr(made, "_lease", 0.2)
            made.note(0.0, directive(engines=[peer]))
            return await made.ask(ticket().model_copy(update={"purpose": purpose}), [1, 2, 3])

    with pytest.raises(AttemptError, match=r"trainer\.router_replay"):
        asyncio.run(ask("train"))
    assert len(asyncio.run(ask("eval"))) == 2
