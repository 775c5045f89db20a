"""What every engine promises, held against each that ships: over HTTP (`EngineContract`), and in this process."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch

from actors.engines.embedded.decoder import Decoder
from actors.engines.fake import FakeEngine
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import Completion, Engine, EngineStoppedError, RequestError, SampleRequest, TakesTurns
from bus.weights import Weights
from schemas.config.fake_engine import FakeEngineConfig
from tests import models
from tests.actors.engines.engines import WAIT, MakeEngine, ask, policy, sample
from tests.conftest import ModelFolder
from tests.engine_contract import EngineContract, Served, Start

PROMPT = [1, 8, 9, 3]


def weights_of_version(version: int) -> Weights:
    """Weights for either engine, the tiny Qwen3's moved by the version."""
    torch.manual_seed(0)
    state = models.AutoModelForCausalLM.from_config(models.config("qwen3")).state_dict()
    return Weights("full", {n: t + 0.05 * version for n, t in state.items() if n != "lm_head.weight"})


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(engine, stand)`: behind HTTP, under version 1; closed at the end."""
    made: list[Served] = []

    def serve(engine: Engine, stand: threading.Event | None = None) -> Served:
        server = CompletionServer(engine, "tiny", "boot7", "127.0.0.1", 0, WAIT)

        def load(version: int) -> None:
            engine.load(policy(version), weights_of_version(version), WAIT)

        def close() -> None:
            server.close()
            engine.close()

        made.append(
            Served(
                url=f"http://127.0.0.1:{server.port}",
                model="tiny",
                prompt=PROMPT,
                load=load,
                num_running=lambda: engine.status().num_running,
                num_generated=lambda: engine.status().generated_tokens,
                close=close,
                turns=cast(TakesTurns, engine) if hasattr(engine, "rest") else None,
                stand=stand or threading.Event(),
            )
        )
        load(1)
        return made[-1]

    yield serve
    for served in made:
        served.close()


class StandingFake(FakeEngine):
    """A fake engine whose completions stand behind their first token while `stand` is set."""

    def __init__(self) -> None:
        self.stand = threading.Event()
        self._futures: list[Future[list[Completion]]] = []
        super().__init__(FakeEngineConfig(vocab_size=30))

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Note the future: its end lets all go on."""
        self._futures.append(super().submit(request))
        return self._futures[-1]

    def _extend(self, row: Any, request: SampleRequest) -> None:
        while self.stand.is_set() and row.completion.token_ids:
            if self._closed.wait(0.005) or any(future.cancelled() for future in self._futures):
                break
        super()._extend(row, request)


class TestFake(EngineContract):
    @pytest.fixture
    def start(self, serve: Serve) -> Start:
        """Stands as it is told."""

        def start() -> Served:
            engine = StandingFake()
            return serve(engine, engine.stand)

        return start


class TestEmbedded(EngineContract):
    @pytest.fixture
    def start(self, serve: Serve, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Start:
        """Stands before a decode, as long as there is nothing to do between two tokens."""

        def start() -> Served:
            engine, stand, decode = make_engine(eos=models.NEVER), threading.Event(), Decoder.decode
            internals: Any = engine

            def standing(*arguments: Any) -> Any:
                while stand.is_set() and not internals._stopping and internals._update is None:
                    if any(request.future.cancelled() for request in internals._running.requests):
                        break
                    threading.Event().wait(0.005)
                return decode(*arguments)

            monkeypatch.setattr(Decoder, "decode", standing)
            return serve(engine, stand)

        return start


@pytest.fixture(params=["embedded", "fake"])
def engine(request: pytest.FixtureRequest, make_engine: MakeEngine) -> Iterator[Engine]:
    """Each engine, before any weights were loaded into it."""
    made = make_engine() if request.param == "embedded" else FakeEngine(FakeEngineConfig(vocab_size=30))
    yield made
    made.close()


@pytest.fixture
def weights(model_folder: ModelFolder) -> Weights:
    """Other weights for either engine."""
    state = models.plain(model_folder("qwen3", seed=1)).state_dict()
    return Weights("full", {name: tensor for name, tensor in state.items() if name != "lm_head.weight"})


def test_completions_are_as_asked_for(engine: Engine) -> None:
    """As many as n; tokens and logprobs in pairs; `length` at max_tokens, else `stop` with an end of sequence."""
    [completions] = sample(engine, ask(PROMPT, n=4, max_tokens=6))
    assert len(completions) == 4
    for completion in completions:
        assert 1 <= len(completion.token_ids) == len(completion.logprobs) <= 6
        assert all(logprob < 0 for logprob in completion.logprobs)
        assert completion.finish_reason == ("length" if len(completion.token_ids) == 6 else "stop")


def test_a_completion_depends_on_its_seed_alone(engine: Engine) -> None:
    """n completions are n requests with seed, seed + 1, …, alone or among others."""
    [together] = sample(engine, ask(PROMPT, n=3, seed=40))
    alone = [sample(engine, ask(PROMPT, seed=40 + i))[0][0] for i in range(3)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    others = [ask([1, 5 + i, 3], n=2, seed=i) for i in range(3)]
    among = sample(engine, *others, ask(PROMPT, n=3, seed=40))[-1]
    assert [c.token_ids for c in among] == [c.token_ids for c in together]
    assert len({tuple(c.token_ids) for c in together}) == 3


def test_segments_name_the_policy_that_sampled(engine: Engine, weights: Weights) -> None:
    """None before the first version, then the loaded one; status says the same."""
    assert engine.status().policy is None
    assert sample(engine, ask(PROMPT))[0][0].segments == []
    before = sample(engine, ask(PROMPT, seed=1))[0][0].token_ids
    assert engine.load(policy(3), weights, WAIT) >= 0
    assert engine.status().policy == policy(3)
    [[completion]] = sample(engine, ask(PROMPT, seed=1))
    assert completion.segments == [(0, 1, 3)]
    assert completion.token_ids != before


def test_the_same_weights_give_the_same_tokens_again(engine: Engine, weights: Weights) -> None:
    """Whatever was loaded in between."""
    engine.load(policy(1), weights, WAIT)
    first = sample(engine, ask(PROMPT, n=2))
    engine.load(policy(2), Weights("full", {n: t + 0.1 for n, t in weights.tensors.items()}), WAIT)
    assert sample(engine, ask(PROMPT, n=2)) != first
    engine.load(policy(1), weights, WAIT)
    assert sample(engine, ask(PROMPT, n=2)) == first


@pytest.mark.parametrize(
    ("prompt", "problem"), [([], "prompt: is empty"), ([1, 30], "prompt: token ids must be"), ([-1], "from 0 to 29")]
)
def test_a_prompt_that_is_none_is_refused(engine: Engine, prompt: list[int], problem: str) -> None:
    """At once, with the field's name."""
    with pytest.raises(RequestError, match=problem):
        engine.submit(ask(prompt))


def test_a_cancelled_future_leaves_the_engine_well(engine: Engine) -> None:
    """Cancelled at whatever moment, the engine goes on and comes to rest."""
    for _ in range(20):
        engine.submit(ask(PROMPT, n=4, max_tokens=8)).cancel()
    [completions] = sample(engine, ask(PROMPT, n=2))
    assert len(completions) == 2
    resting = threading.Event()
    for _ in range(3000):
        status = engine.status()
        if status.num_running == status.num_waiting == 0:
            resting.set()
            break
        resting.wait(0.01)
    assert resting.is_set()


def test_status_counts_generated_tokens(engine: Engine) -> None:
    """Of all completions since the start."""
    groups = sample(engine, ask(PROMPT, n=3), ask(PROMPT, seed=9))
    assert engine.status().generated_tokens == sum(len(c.token_ids) for group in groups for c in group)


def test_closing_twice_is_closing_once(engine: Engine) -> None:
    """And nothing is taken afterwards."""
    engine.close()
    engine.close()
    with pytest.raises(EngineStoppedError):
        engine.submit(ask(PROMPT))


def test_text_survives_tokens(model_folder: ModelFolder, make_engine: MakeEngine) -> None:
    """The embedded engine's tokenizer is the model's: `<bos>` in front of a prompt, no special tokens in text."""
    engine = make_engine()
    assert engine.tokenize("ab=") == [models.BOS, 4, 5, 3]
    assert engine.detokenize([4, 5, 3, models.EOS]) == "ab="
    assert torch.get_num_threads() == 1


def test_a_fake_engine_answers_no_faster_than_told_and_stops_when_closed() -> None:
    """A pause per token; a request under way fails when the engine is closed."""
    engine = FakeEngine(FakeEngineConfig(vocab_size=30, token_seconds=60.0))
    future = engine.submit(ask(PROMPT))
    assert engine.status().num_running + engine.status().num_waiting == 1
    engine.close()
    with pytest.raises(EngineStoppedError, match="closed"):
        future.result(WAIT)
