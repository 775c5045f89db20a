"""The rollout actor's attempts and heartbeats; its parts have tests of their own."""

import asyncio
import time

import pytest

from actors.rollout.engine_choice import EngineChoice
from actors.rollout.group import GroupSampler
from actors.rollout.held import HeldTicket
from actors.rollout.loop import RolloutActor
from actors.telemetry.metrics import Metrics
from schemas import limits
from schemas.errors import ConfigError
from tests.actors.rollout.doubles import EXAMPLE, Client, directive, engine, ticket
from tests.ring.harness import ring_config


@pytest.fixture
def make_actor(tmp_path):
    """Makes rollouts that talk to nobody, with a lease of 0.2 s."""
    made = []

    def make(encode=lambda prompt: list(map(ord, prompt)), client=None, **sections):
        config = ring_config(tmp_path, bus={"beat_interval": 0.1, "lease": 0.2, "resend_after": 5.0}, **sections)
        datasets = {("train", "reverse_text"): type("E", (), {"example": lambda self, index: EXAMPLE})()}
        make_client = lambda: client or Client({})  # noqa: E731
        metrics = Metrics("rollout")
        sampler = GroupSampler(config, "rollout-0", datasets, encode, EngineChoice(config, metrics, make_client))
        made.append(RolloutActor(config, "rollout-0", metrics, sampler))
        return made[-1]

    yield make
    for actor in made:
        actor.membership.close()


async def test_prompts_that_can_not_be_encoded_end_the_actor_in_words(make_actor):
    """No chat template, say: no other example would fare better, so no attempt fails and no group is poisoned."""

    def encode(prompt):
        raise ConfigError("model.path: m has no chat template, but a prompt is a list of messages")

    actor = make_actor(encode=encode)
    held = actor.held[0, 1] = HeldTicket(ticket())
    await actor.attempt("r", held)
    assert held.failure is None
    with pytest.raises(ConfigError, match="no chat template"):
        actor.follow()


@pytest.mark.parametrize(
    ("engines", "words"),
    [([], ": no engine serves version 3 or newer"), (["a"], ": a at http://a has not answered")],
    ids=["no engine", "one that hangs"],
)
async def test_timeout_says_what_was_waited_for(make_actor, engines, words):
    """The key, and the engine that does not answer, or what none of them serves."""

    async def hang(*_):
        await asyncio.sleep(60)

    client = Client({})
    client.sample = hang
    actor = make_actor(client=client, rollout={"group_timeout": 0.05})
    actor.engines.note(time.monotonic(), directive(engines=[engine(name) for name in engines]))
    held = actor.held[0, 1] = HeldTicket(ticket())
    async with actor.engines:
        await actor.attempt("r", held)
    assert (held.failure.reason, held.failure.detail) == (
        "timeout",
        f"not sampled within 0.05 s (rollout.group_timeout){words}",
    )


@pytest.mark.slow
async def test_beat_carries_the_oldest_failures_and_words_of_bounded_length(make_actor):
    """However many attempts fail, the packer takes them in turns."""
    actor, metrics = make_actor(), Metrics("rollout")
    for ordinal in range(300):
        actor.held[ordinal, 1] = held = HeldTicket(ticket(ordinal))
        held.fail("internal", "x" * 100_000, metrics)
    actor.follow()
    failures = actor.membership.reported["failures"]
    assert [failure.ordinal for failure in failures] == list(range(limits.HEARTBEAT_FAILURES))
    assert max(len(failure.detail) for failure in failures) <= limits.DETAIL_CHARACTERS
