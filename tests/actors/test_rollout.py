"""The rollout actor's decisions: which engine, which reward actor, when again."""

import asyncio

import numpy as np
import pytest

from actors.engines.client import EngineError, RequestRefusedError, SampledCompletion
from actors.environments import Example
from actors.rollout import AttemptError, RolloutActor, _Held, _Peers, build_group, may_sample
from actors.telemetry.metrics import Metrics
from schemas.config.actors import EmbeddedEngineConfig, FakeEngineConfig
from schemas.config.engines import VllmEngineConfig
from schemas.errors import ConfigError
from schemas.messages import EnginePeer, Policy, RewardPeer, Ticket
from tests.ring.harness import ring_config

EXAMPLE = Example(prompt="abc=", columns={"answer": "cba"})


def ticket(ordinal: int = 0, **changes) -> Ticket:
    """A ticket for two completions of the example."""
    fields = {
        "ordinal": ordinal, "attempt": 1, "purpose": "train", "environment": "reverse_text", "index": 0,
        "example_key": EXAMPLE.key("reverse_text"), "seed": 7, "num_completions": 2, "temperature": 0.5, "top_p": 1.0,
        "max_tokens": 8, "min_version": 3,
    }  # fmt: skip
    return Ticket(**fields | changes)


def engine(name: str, version: int = 3, load: int = 0, lineage: int = 1) -> EnginePeer:
    """An engine whose boot id is its name."""
    policy = Policy(lineage=lineage, version=version)
    return EnginePeer(name=name, boot_id=name, url=f"http://{name}", policy=policy, load=load)


def completion(tokens: list[int], segments: list[tuple[int, int, int]]) -> SampledCompletion:
    """A completion whose logprobs are −1."""
    return SampledCompletion(tokens, [-1.0] * len(tokens), segments, "stop", "text")


class Client:
    """Fails where it is told to, and remembers whom it asked."""

    ANSWER = [completion([5, 6], [(0, 1, 3)]), completion([7], [(0, 1, 3)])]

    def __init__(self, failing: dict[str, Exception]) -> None:
        self.failing, self.asked = failing, []
        self.answers: dict[str, list[SampledCompletion]] = {}

    async def sample(self, engine: EnginePeer, ticket: Ticket, prompt_ids: list[int]) -> list[SampledCompletion]:
        """Two completions of version 3."""
        self.asked.append(engine.name)
        await asyncio.sleep(0)
        if engine.name in self.failing:
            raise self.failing[engine.name]
        return self.answers.get(engine.name, self.ANSWER)

    async def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def actor(tmp_path):
    """A rollout that talks to nobody, with a lease of 0.2 s."""
    config = ring_config(tmp_path, bus={"lease": 0.2, "resend_after": 5.0})
    environments = {("train", "reverse_text"): type("E", (), {"example": lambda self, index: EXAMPLE})()}
    made = RolloutActor(
        config, "rollout-0", Metrics("rollout"), environments, lambda prompt: list(map(ord, prompt)), Client
    )
    yield made
    made.membership.close()


def configure(actor: RolloutActor, section: str, **values: object) -> None:
    """Give it a configuration that differs in these keys of a section."""
    changed = getattr(actor._config, section).model_copy(update=values)
    actor._config = actor._config.model_copy(update={section: changed})


def test_ticket_names_the_oldest_version_or_exactly_one_policy():
    """min_version 3 is served by 3 and 4, not by 2; an evaluation of 1.3 not even by 2.3."""
    assert [may_sample(engine("e", version), ticket()) for version in (2, 3, 4)] == [False, True, True]
    evaluation = ticket(policy=Policy(lineage=1, version=3))
    assert may_sample(engine("e", 3), evaluation)
    assert not may_sample(engine("e", 4), evaluation)
    assert not may_sample(engine("e", 3, lineage=2), evaluation)


def test_group_joins_completions_with_offsets_and_segments():
    """Two completions of 3 and 1 tokens, the first one interrupted after 2: segments start at 0, 2 and 3."""
    group = build_group(
        "r",
        "rollout-0",
        ticket(),
        EXAMPLE,
        [1, 2],
        [completion([5, 6, 7], [(0, 1, 3), (2, 1, 4)]), completion([8], [(0, 1, 4)])],
    )
    assert group.completion_offsets.tolist() == [0, 3, 4]
    assert group.token_ids.tolist() == [5, 6, 7, 8]
    assert group.segments.tolist() == [[0, 1, 3], [2, 1, 4], [3, 1, 4]]
    assert group.segment_temperatures.tolist() == [0.5, 0.5, 0.5]
    assert group.oldest_version == 3
    assert group.loss_mask.tolist() == [1, 1, 1, 1]


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
async def test_answer_that_lacks_something_is_asked_for_again_in_place(actor, completions):
    """Two full completions with logprobs and policies from another engine; none is taken from the first answer."""
    actor._client = Client({})
    actor._client.answers["a"] = completions
    actor._peers = _Peers(engines=[engine("a", load=0), engine("b", load=9)])
    assert await actor._ask_engines(ticket(), [1]) == Client.ANSWER
    assert actor._client.asked == ["a", "b"]
    actor._peers = _Peers(engines=[engine("a")])
    with pytest.raises(AttemptError, match=r"a at http://a: .* (completions for 2|lacks logprobs)") as caught:
        await actor._ask_engines(ticket(), [1])
    assert caught.value.reason == "engine"


async def test_requests_under_way_count_into_an_engines_load(actor):
    """Two tickets at the same moment go to two engines, though States say that both are idle."""
    actor._client = Client({})
    actor._peers = _Peers(engines=[engine("a"), engine("b")])
    await asyncio.gather(actor._ask_engines(ticket(0), [1]), actor._ask_engines(ticket(1), [1]))
    assert sorted(actor._client.asked) == ["a", "b"]
    assert set(actor._asked.values()) == {0}


async def test_failed_engine_is_not_asked_again_before_its_lease_could_have_ended(actor):
    """The idle engine fails, the busy one gets the request; alone, the failed one is asked again after 0.2 s."""
    actor._client = Client({"a": EngineError("connection refused")})
    actor._peers = _Peers(engines=[engine("a", load=0), engine("b", load=9)])
    await actor._ask_engines(ticket(), [1])
    assert actor._client.asked == ["a", "b"]
    actor._client.asked.clear()
    actor._peers = _Peers(engines=[engine("a")])
    began = asyncio.get_running_loop().time()
    with pytest.raises(AttemptError, match="connection refused"):
        await actor._ask_engines(ticket(), [1])
    assert actor._client.asked == ["a", "a", "a"]
    assert asyncio.get_running_loop().time() - began >= 0.4


async def test_refused_request_is_not_repeated(actor):
    """4xx: the request itself is wrong, so the attempt fails at once."""
    actor._client = Client({"a": RequestRefusedError("HTTP 400: n is too large")})
    actor._peers = _Peers(engines=[engine("a")])
    with pytest.raises(AttemptError, match="n is too large"):
        await actor._ask_engines(ticket(), [1])
    assert actor._client.asked == ["a"]


async def test_example_that_differs_from_the_packers_fails_the_attempt(actor):
    """Another file on this machine: the key tells, before anything is sampled."""
    with pytest.raises(AttemptError, match="do both read the same file"):
        await actor._sample(ticket(example_key="0123456789abcdef"))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (FakeEngineConfig(), "packer.sequence_len 64"),
        (EmbeddedEngineConfig(max_sequence_len=50), "inference.engine.max_sequence_len 50"),
        (VllmEngineConfig(max_model_len=50), "inference.engine.max_model_len 50"),
    ],
)
async def test_prompt_that_leaves_no_room_fails_the_attempt_by_name(actor, engine, words):
    """60 prompt tokens and 8 new ones exceed packer.sequence_len, or what the engine takes where that is less."""
    configure(actor, "inference", engine=engine)
    actor._encode = lambda prompt: [1] * 60
    with pytest.raises(AttemptError, match=f"60 prompt tokens and rollout.max_tokens 8 exceed {words}") as caught:
        await actor._sample(ticket())
    assert caught.value.reason == "prompt_too_long"


async def test_prompts_that_can_not_be_encoded_end_the_actor_in_words(actor):
    """No chat template, say: no other example would fare better, so no attempt fails and no group is poisoned."""

    def encode(prompt):
        raise ConfigError("model.path: m has no chat template, but a prompt is a list of messages")

    actor._encode = encode
    held = actor._held[0, 1] = _Held(ticket())
    await actor._attempt(held)
    assert held.failure is None
    with pytest.raises(ConfigError, match="no chat template"):
        actor._follow()


@pytest.mark.parametrize(
    ("engines", "words"),
    [([], ": no engine serves version 3 or newer"), (["a"], ": a at http://a has not answered")],
    ids=["no engine", "one that hangs"],
)
async def test_timeout_says_what_was_waited_for(actor, engines, words):
    """The key, and the engine that does not answer, or what none of them serves."""

    async def hang(*_):
        await asyncio.sleep(60)

    configure(actor, "rollout", group_timeout=0.05)
    actor._client = Client({})
    actor._client.sample = hang
    actor._peers = _Peers(engines=[engine(name) for name in engines])
    held = actor._held[0, 1] = _Held(ticket())
    await actor._attempt(held)
    assert (held.failure.reason, held.failure.detail) == (
        "timeout",
        f"not sampled within 0.05 s (rollout.group_timeout){words}",
    )


def test_resend_time_doubles_with_each_sending_and_not_with_each_try(actor, monkeypatch):
    """No reward actor has room for a while: tries cost nothing; sent twice, the next time is after 10 s."""
    group = build_group("r", "rollout-0", ticket(), EXAMPLE, [1], [completion([5], [(0, 1, 3)])] * 2)
    held = actor._held[0, 1] = _Held(ticket(), group=group)
    taken_by = None
    monkeypatch.setattr(actor, "_send", lambda group, rewards: taken_by)
    actor._peers = _Peers(rewards=[RewardPeer(name="w", boot_id="1", address="inproc://w", load=0)])
    for _ in range(2000):
        actor._send_groups()
    assert held.resend_after == 0.0
    taken_by = "w/1"
    actor._send_groups()
    assert held.resend_after == 5.0
    actor._send_groups()
    assert held.resend_after == 5.0, "not late yet"
    held.sent_at -= 6.0
    actor._send_groups()
    assert held.resend_after == 10.0


def test_group_goes_to_the_least_loaded_reward_actor(actor):
    """Loads 1 and 0, and one group already on its way to the second: the third goes to either, by name."""
    peers = [RewardPeer(name=n, boot_id="1", address=f"inproc://{n}", load=load) for n, load in (("v", 1), ("w", 0))]
    actor._peers = _Peers(rewards=peers)
    group = build_group("r", "rollout-0", ticket(), EXAMPLE, [1], [completion([5], [(0, 1, 3)])] * 2)
    for ordinal in range(3):
        actor._held[ordinal, 1] = _Held(ticket(ordinal), group=group)
    actor._send_groups()
    assert [held.sent_to for held in actor._held.values()] == ["w/1", "v/1", "w/1"]
    assert np.array_equal(group.lengths_G, [1, 1])
    for outbox in actor._outboxes.values():
        outbox.close()
