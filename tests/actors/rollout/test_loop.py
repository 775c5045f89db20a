"""The rollout actor's decisions: which engine, which reward actor, when again."""

import asyncio
from contextlib import closing

import numpy as np
import pytest
import structlog

import actors.rollout.loop
from actors.datasets import Example
from actors.engines.http.client import EngineError, RequestRefusedError, SampledCompletion
from actors.rollout.loop import AttemptError, RolloutActor, _Held, _Peers, build_group, may_sample
from actors.rollout.reward_choice import Arrivals
from actors.telemetry.metrics import Metrics
from bus.data import Inbox
from bus.topology import Addresses
from schemas import limits
from schemas.config.actors import EmbeddedEngineConfig, FakeEngineConfig
from schemas.config.engines import VllmEngineConfig
from schemas.config.services import BusConfig
from schemas.errors import ConfigError
from schemas.messages import EnginePeer, Policy, RewardPeer, RolloutState, Ticket
from tests.ports import free_port
from tests.ring.harness import ring_config, wait_until

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
    config = ring_config(tmp_path, bus={"beat_interval": 0.1, "lease": 0.2, "resend_after": 5.0})
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


def test_resend_time_doubles_with_each_sending_and_not_with_each_try(actor, clock, monkeypatch):
    """No reward actor has room for a while: tries cost nothing; sent twice, the next time is after 10 s."""
    group = build_group("r", "rollout-0", ticket(), EXAMPLE, [1], [completion([5], [(0, 1, 3)])] * 2)
    held = actor._held[0, 1] = _Held(ticket(), group=group)
    taken_by = None
    monkeypatch.setattr(actor, "_send", lambda group, rewards, avoid: taken_by)
    rewards_of(actor, 1, {"w": "1"})
    for _ in range(2000):
        actor._send_groups()
    assert held.resend_after == 0.0
    taken_by = "w/1"
    actor._send_groups()
    assert held.resend_after == 5.0
    actor._send_groups()
    assert held.resend_after == 5.0, "not late yet"
    clock.states(6.0, actor, {"w": "1"})
    assert held.resend_after == 10.0


@pytest.fixture
def sends(actor, monkeypatch):
    """What the actor sends: (ordinal, address), and nothing goes anywhere."""
    sent = []

    class Box:
        def __init__(self, edge, address, bus, name):
            self.address = address

        def try_send(self, group):
            sent.append((group.ordinal, self.address))
            return True

        def close(self):
            pass

    monkeypatch.setattr(actors.rollout.loop, "Outbox", Box)
    return sent


def rewards_of(
    actor: RolloutActor,
    term: int,
    running: dict[str, str],
    live: list[str] | None = None,
    scoring: tuple[tuple[int, int], ...] = (),
) -> None:
    """A State that names these reward actors: boot ids by name; `live` are those that beat, if they are others."""
    actor._peers = _Peers(
        rewards=[RewardPeer(name=n, boot_id=b, address=f"inproc://{b}", load=0) for n, b in running.items()]
    )
    state = RolloutState(
        run="r", term=term, phase="running", step=0, max_steps=9, tickets=[], engines=[], live_engines=[],
        rewards=actor._peers.rewards, live_rewards=list(running.values()) if live is None else live,
        release=np.zeros((0, 2), np.int64), scoring=np.array(scoring, np.int64).reshape(-1, 2),
    )  # fmt: skip
    actor._note_live(state)
    actor._send_groups()


class ShiftedClock:
    """The monotonic clock, which a test moves forward."""

    def __init__(self, now: float) -> None:
        self.now = now

    def states(self, seconds: float, actor: RolloutActor, running: dict[str, str], term: int = 1, **fields) -> None:
        """Let these seconds pass with a State every tenth of a second."""
        end = self.now + seconds
        while self.now < end - 1e-6:
            self.now += 0.1
            rewards_of(actor, term, running, **fields)

    def silence(self, seconds: float, actor: RolloutActor) -> None:
        """Let these seconds pass without any State; the actor looks every half second, as it does."""
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            actor._send_groups()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until the test moves it."""
    shifted = ShiftedClock(actors.rollout.loop.time.monotonic())
    monkeypatch.setattr(actors.rollout.loop.time, "monotonic", lambda: shifted.now)
    return shifted


def failures_of(actor: RolloutActor) -> list[str]:
    """Return the words of all attempts that have failed."""
    return [held.failure.detail for held in actor._held.values() if held.failure]


def hold_groups(actor: RolloutActor, number: int) -> None:
    """So many sampled groups that nobody has been sent."""
    for ordinal in range(number):
        group = build_group("r", "rollout-0", ticket(ordinal), EXAMPLE, [1], [completion([5], [(0, 1, 3)])] * 2)
        now = actors.rollout.loop.time.monotonic()
        actor._held[ordinal, 1] = _Held(ticket(ordinal), group=group, accepted_at=now)


def test_no_group_is_sent_again_when_a_new_packer_has_not_heard_all_reward_actors_yet(actor, sends):
    """64 groups at 8 reward actors; States of the next term name one of them, then none, then all: nothing is sent."""
    everybody = {f"reward-{i}": f"b{i}" for i in range(8)}
    hold_groups(actor, 64)
    rewards_of(actor, 1, everybody)
    assert len(sends) == 64
    for named in ({"reward-5": "b5"}, {}, everybody):
        rewards_of(actor, 2, named)
    assert len(sends) == 64


def test_a_draining_reward_actor_keeps_what_it_was_sent_and_gets_nothing_new(actor, sends):
    """It beats and is not named; only the group that is sampled after that goes to the other one."""
    hold_groups(actor, 2)
    rewards_of(actor, 1, {"reward-0": "b0"})
    rewards_of(actor, 1, {"reward-1": "b1"}, live=["b0", "b1"])
    assert sends == [(0, "inproc://b0"), (1, "inproc://b0")]
    actor._held[2, 1] = _Held(ticket(2), group=actor._held[0, 1].group)
    rewards_of(actor, 1, {"reward-1": "b1"}, live=["b0", "b1"])
    assert sends[2:] == [(0, "inproc://b1")]


def test_groups_of_a_reward_actor_that_is_gone_are_sent_again(actor, sends, monkeypatch):
    """At once when its name has a new process; after a lease of States without it (0.2 s) when nobody takes over."""
    hold_groups(actor, 1)
    rewards_of(actor, 1, {"reward-0": "b0"})
    rewards_of(actor, 1, {"reward-0": "b0 again"}, live=["b0", "b0 again"])
    assert [address for _, address in sends] == ["inproc://b0", "inproc://b0 again"]
    now = actors.rollout.loop.time.monotonic()
    for seconds in (0.0, 0.1, 0.17, 0.3):
        monkeypatch.setattr(actors.rollout.loop.time, "monotonic", lambda at=now + seconds: at)
        rewards_of(actor, 1, {"reward-1": "b1"})
        assert len(sends) == (3 if seconds == 0.3 else 2)
    assert sends[-1] == (0, "inproc://b1")


def test_a_group_that_a_reward_actor_names_is_not_sent_again_however_long_it_takes(actor, sends, clock):
    """A judge that takes minutes: State names the hold among those that are being scored."""
    hold_groups(actor, 1)
    rewards_of(actor, 1, {"reward-0": "b0", "reward-1": "b1"})
    clock.states(400.0, actor, {"reward-0": "b0", "reward-1": "b1"}, scoring=((0, 1),))
    assert len(sends) == 1


def test_while_the_packer_is_away_no_group_is_sent_again_and_none_fails(actor, sends, clock):
    """64 groups at 8 reward actors for 600 s without a State: they are held and can't be named to anybody (P13).

    States of before the packer was stopped, and those of a new packer that has not heard all, change nothing either.
    """
    everybody = {f"reward-{i}": f"b{i}" for i in range(8)}
    hold_groups(actor, 64)
    rewards_of(actor, 1, everybody)
    assert len(sends) == 64
    clock.silence(600.0, actor)
    rewards_of(actor, 1, everybody)
    clock.silence(600.0, actor)
    rewards_of(actor, 2, {"reward-5": "b5"}, scoring=((5, 1),))
    clock.states(4.0, actor, everybody, term=2, scoring=((5, 1),))
    clock.states(10.0, actor, everybody, term=2, scoring=tuple(actor._held))
    assert len(sends) == 64
    assert failures_of(actor) == []
    assert actor._arrivals._lost == {}, "no reward actor is avoided"


def test_a_group_that_got_lost_before_the_packer_was_away_is_sent_again_when_states_have_come_for_long(
    actor, sends, clock
):
    """`bus.resend_after` (5 s) of States of one packer, and `rollout.group_timeout` of them until the attempt fails."""
    both = {"reward-0": "b0", "reward-1": "b1"}
    configure(actor, "rollout", group_timeout=60.0)
    hold_groups(actor, 1)
    rewards_of(actor, 1, both)
    clock.silence(100.0, actor)
    clock.states(4.8, actor, both)
    clock.states(4.8, actor, both, term=2)
    assert sends == [(0, "inproc://b0")]
    clock.states(0.5, actor, both, term=2)
    assert sends == [(0, "inproc://b0"), (0, "inproc://b1")]
    clock.states(54.0, actor, both, term=2)
    assert failures_of(actor) == []
    clock.states(1.0, actor, both, term=2)
    assert "which has not confirmed it, within 60 s" in failures_of(actor)[0]


def test_a_late_group_goes_to_another_reward_actor_and_the_silent_one_is_avoided_and_named(actor, sends, clock):
    """Nothing sent there is named: later groups go elsewhere, though it has no load; a name makes it good again."""
    both = {"reward-0": "b0", "reward-1": "b1"}
    hold_groups(actor, 1)
    rewards_of(actor, 1, both)
    assert sends == [(0, "inproc://b0")]
    with structlog.testing.capture_logs() as logs:
        clock.states(6.0, actor, both)
    assert sends[1:] == [(0, "inproc://b1")]
    assert [(line["peer"], line["ordinal"]) for line in logs if line["event"].startswith("group not arrived")] == [
        ("reward-0", 0)
    ]
    for ordinal in (1, 2, 3):
        actor._held[ordinal, 1] = _Held(ticket(ordinal), group=actor._held[0, 1].group)
    rewards_of(actor, 1, both, scoring=((0, 1),))
    assert {address for _, address in sends[1:]} == {"inproc://b1"}
    actor._arrivals.arrived("reward-0/b0")
    actor._held[4, 1] = _Held(ticket(4), group=actor._held[0, 1].group)
    rewards_of(actor, 1, both, scoring=((0, 1),))
    assert sends[-1][1] == "inproc://b0"


def test_groups_that_are_lost_together_cost_a_reward_actor_one_pause():
    """Eight groups in one short outage: 60 s, and not 30 · 2⁸ s; the first one after that pause counts again."""
    arrivals = Arrivals(30.0)
    assert [arrivals.lost("reward-0/b0", 100.0) for _ in range(8)] == [60.0] * 8
    assert arrivals.lost("reward-0/b0", 161.0) == 120.0
    arrivals.arrived("reward-0/b0")
    assert arrivals.lost("reward-0/b0", 170.0) == 60.0


def test_a_sampled_group_that_no_reward_actor_has_named_fails_in_words_that_say_so(actor, sends, clock):
    """Not "not sampled": to whom it was sent, or that nobody took it; one that was ever named has the packer's time."""
    configure(actor, "rollout", group_timeout=60.0)
    hold_groups(actor, 3)
    rewards_of(actor, 1, {"reward-1": "b1"}, scoring=((2, 1),))
    clock.states(59.9, actor, {"reward-1": "b1"})
    assert failures_of(actor) == []
    actor._held[1, 1].sent_to = None
    clock.now += 0.15
    rewards_of(actor, 1, {"reward-1": "b1"})
    assert actor._held[0, 1].failure.reason == "timeout"
    assert actor._held[0, 1].failure.detail == (
        "sampled, and sent to reward-1, which has not confirmed it, within 60 s (rollout.group_timeout)"
    )
    assert "not taken by any reward actor (reward-1 at inproc://b1)" in actor._held[1, 1].failure.detail
    assert actor._held[2, 1].failure is None
    sent = len(sends)
    rewards_of(actor, 1, {"reward-1": "b1"})
    assert len(sends) == sent, "a failed attempt sends nothing"


def test_a_reward_actor_that_can_not_be_reached_takes_no_group(actor, tmp_path):
    """It beats and has no load, but nothing listens at its address for this rollout: all go to the other one."""
    inbox = Inbox("groups", Addresses(ring_config(tmp_path, "tcp")), BusConfig(), "reward-0", "b0")
    peers = [
        RewardPeer(name="reward-0", boot_id="b0", address=inbox.address, load=8),
        RewardPeer(name="reward-1", boot_id="b1", address=f"tcp://127.0.0.1:{free_port()}", load=0),
    ]
    actor._peers = _Peers(rewards=peers)
    hold_groups(actor, 20)
    received = 0
    for _ in range(400):
        actor._send_groups()
        received += inbox.receive(0.02) is not None
        if received == 20:
            break
    assert received == 20
    assert {held.sent_to for held in actor._held.values()} == {"reward-0/b0"}
    for box in [inbox, *actor._outboxes.values()]:
        box.close()


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


async def test_group_that_no_reward_actor_would_take_fails_its_attempt_at_once_and_in_words(actor, monkeypatch):
    """Its texts are more than travel: no time-out is waited for, the reason has a word, others are sent."""
    monkeypatch.setattr(limits, "DATA_FRAME_BYTES", 2000)
    long = [SampledCompletion([5], [-1.0], [(0, 1, 3)], "stop", "x" * 1001)] * 2
    for ordinal, completions in ((0, long), (1, Client.ANSWER)):
        group = build_group("r", "rollout-0", ticket(ordinal), EXAMPLE, [1], completions)
        actor._held[ordinal, 1] = _Held(ticket(ordinal), group=group)
    actor._peers = _Peers(rewards=[RewardPeer(name="a", boot_id="a", address="inproc://a", load=0)])
    actor._send_groups()
    failure = actor._held[0, 1].failure
    assert failure.reason == "too_large"
    assert "2006 bytes in one array, and 2000 are the most that travel (texts)" in failure.detail
    assert "rollout.group_size" in failure.detail
    assert actor._held[0, 1].group is None
    assert actor._held[1, 1].sent_to == "a/a"
    for outbox in actor._outboxes.values():
        outbox.close()


async def test_columns_that_no_reward_actor_would_take_fail_the_attempt_before_it_is_sampled(actor):
    """A list longer than a header may have: an engine is not even asked."""
    example = Example(prompt="abc=", columns={"numbers": [0] * (limits.LIST_ITEMS + 1)})
    actor._environments = {("train", "reverse_text"): type("E", (), {"example": lambda self, index: example})()}
    actor._client = Client({})
    with pytest.raises(AttemptError, match="keep what is large in a file") as caught:
        await actor._sample(ticket())
    assert caught.value.reason == "environment"
    assert actor._client.asked == []


async def test_beat_carries_the_oldest_failures_and_words_of_bounded_length(actor):
    """However many attempts fail, the packer takes them in turns."""
    for ordinal in range(300):
        actor._held[ordinal, 1] = held = _Held(ticket(ordinal))
        actor._fail(held, "internal", "x" * 100_000)
    actor._report()
    failures = actor.membership._client._fields["failures"]
    assert [failure.ordinal for failure in failures] == list(range(limits.BEAT_FAILURES))
    assert max(len(failure.detail) for failure in failures) <= limits.DETAIL_CHARACTERS


@pytest.mark.parametrize("bad", ["nonsense", "tcp://127.0.0.1", "tcp://192.0.2.1:5000", "tcp://127.0.0.1:5000#abcdef"])
def test_reward_actor_with_an_address_that_can_not_be_used_is_left_out(actor, bad):
    """It is that peer's fault: it is said now and then, and the group goes to another one."""
    with closing(Inbox("groups", actor.membership.addresses, actor._config.bus, "good", "boot")) as inbox:
        addresses = {"bad": bad, "good": inbox.address}  # the bad one has less to do
        rewards = [
            RewardPeer(name=name, boot_id=name[0], address=address, load=load)
            for load, (name, address) in enumerate(addresses.items())
        ]
        with structlog.testing.capture_logs() as logs:
            for ordinal in range(3):
                held = actor._held[ordinal, 1] = _Held(ticket(ordinal))
                held.group = build_group("r", "rollout-0", ticket(ordinal), EXAMPLE, [1], Client.ANSWER)
                actor._peers = _Peers([], rewards)
                wait_until(lambda held=held: actor._send_groups() or held.sent_to == "good/g", "the good one has it")
        assert inbox.receive(5.0).ordinal == 0
        actor._outboxes["good/g"].close()
    assert [line["peer"] for line in logs if line["event"] == "reward actor left out"] == ["bad/b"]
