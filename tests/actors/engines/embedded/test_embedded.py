"""The embedded engine against plain transformers: what it samples, in which company, and under which weights."""

import json
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from actors.engines.embedded import cache, decoder
from actors.engines.embedded.cache import SlotCache
from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import MAX_FAILED, EmbeddedEngine
from actors.engines.protocol import Completion, EngineStoppedError, RequestError, SampleRequest, SamplingError
from bus.weights import Weights
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig
from tests import models
from tests.actors.engines.engines import (
    WAIT,
    Gate,
    MakeEngine,
    ask,
    held,
    load_in_thread,
    policy,
    sample,
    until_stopped,
)
from tests.conftest import ModelFolder

PROMPTS = ([1, 8, 3], [1, 20, 9, 14, 5, 6, 7, 3], [1, 4, 5, 3])
ENDLESS = models.NEVER


def weights_of(model: Any) -> Weights:
    """What a trainer would publish of a plain model."""
    tied = model.config.tie_word_embeddings
    return Weights("full", {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")})


def close_to(completion: Completion, expected: Tensor, first: int = 0, end: int | None = None) -> bool:
    """Whether the logprobs of a run of tokens are the expected ones, to 1e-4."""
    found = torch.tensor(completion.logprobs[first:end])
    return bool((found - expected[first:end]).abs().max() < 1e-4)


# --- what is sampled -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma2"])
def test_greedy_completions_equal_those_of_transformers(
    model_folder: ModelFolder, make_engine: MakeEngine, family: str
) -> None:
    """Prompts of several lengths at once, token by token what `generate` gives."""
    plain = models.plain(model_folder(family), models.reference_attention(family))
    groups = sample(make_engine(family), *(ask(prompt, max_tokens=12, temperature=0.0) for prompt in PROMPTS))
    for prompt, [completion] in zip(PROMPTS, groups, strict=True):
        whole = plain.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0].tolist()
        assert completion.token_ids == whole[len(prompt) :]
        assert close_to(completion, models.logprobs(plain, prompt, completion.token_ids))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (1.5, 0.8)])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    model_folder: ModelFolder, make_engine: MakeEngine, temperature: float, top_p: float
) -> None:
    """Tempered, cut to the nucleus, renormalised; computed again from plain logits, a token at a time."""
    plain = models.plain(model_folder())
    [completions] = sample(make_engine(), ask(PROMPTS[1], n=4, max_tokens=10, temperature=temperature, top_p=top_p))
    for completion in completions:
        ids = torch.tensor([PROMPTS[1] + completion.token_ids])
        with torch.no_grad():
            probabilities_TV = (plain(ids).logits[0, len(PROMPTS[1]) - 1 : -1] / temperature).softmax(-1)
        for token, logprob, p_V in zip(completion.token_ids, completion.logprobs, probabilities_TV, strict=True):
            more_probable = p_V[p_V > p_V[token]].sum()
            assert more_probable < top_p
            nucleus = 0.0
            for p in sorted(p_V.tolist(), reverse=True):
                nucleus += p
                if nucleus >= top_p:
                    break
            assert logprob == pytest.approx(float((p_V[token] / min(nucleus, 1.0)).log()), abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral", "qwen3_moe"])
def test_decodes_have_few_shapes_where_shapes_are_filled_up(
    model_folder: ModelFolder, make_engine: MakeEngine, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: sequences that come and go, up to all slots and the longest context, with the same logprobs."""
    monkeypatch.setattr(decoder, "SHAPES", {"cpu": (4, 16)})
    shapes: set[tuple[int, int]] = set()
    real = cache.slot_attention

    def seen(module: Any, query: Tensor, *given: Any, cache_plan: Any, **more: Any) -> Any:
        if cache_plan.packed_row is None:
            shapes.add((query.shape[2], cache_plan.length))
        return real(module, query, *given, cache_plan=cache_plan, **more)

    AttentionInterface.register(cache.NAME, seen)
    try:
        engine = make_engine(family, max_sequences=6, eos=ENDLESS)
        requests = [ask(PROMPTS[0], n=3, max_tokens=40), *(ask(PROMPTS[1], max_tokens=2 + i, seed=i) for i in range(6))]
        requests.append(ask(PROMPTS[1], max_tokens=64 - len(PROMPTS[1])))
        found = sample(engine, *requests)
    finally:
        AttentionInterface.register(cache.NAME, real)
    plain = models.plain(model_folder(family, eos=ENDLESS), models.reference_attention(family))
    for request, completions in zip(requests, found, strict=True):
        for completion in completions:
            assert len(completion.token_ids) == request.max_tokens
            assert close_to(completion, models.logprobs(plain, request.prompt_ids, completion.token_ids))
    # sequences 4 and 6 (all slots), contexts 16, 32, 48 and 64
    assert shapes <= {(rows, length) for rows in (4, 6) for length in (16, 32, 48, 64)}
    assert len({length for _, length in shapes}) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("penalty", [1.5, -0.5])
def test_a_presence_penalty_is_for_tokens_that_the_completion_has_already(
    model_folder: ModelFolder, make_engine: MakeEngine, temperature: float, penalty: float
) -> None:
    """Once for each token, before the temperature, beside the bias; never for tokens of the prompt alone."""
    plain, divisor, engine = models.plain(model_folder()), temperature or 1.0, make_engine(eos=ENDLESS)
    asked = {"n": 3, "max_tokens": 12, "temperature": temperature, "logit_bias": {PROMPTS[1][-1]: 1.0}}
    completions, others = sample(engine, ask(PROMPTS[1], **asked, presence_penalty=penalty), ask(PROMPTS[1], **asked))
    assert [c.token_ids for c in completions] != [c.token_ids for c in others]
    for completion in completions:
        tokens = completion.token_ids
        with torch.no_grad():
            logits_TV = plain(torch.tensor([PROMPTS[1] + tokens])).logits[0, len(PROMPTS[1]) - 1 : -1]
        logits_TV[:, PROMPTS[1][-1]] += 1.0
        for place in range(len(tokens)):
            logits_TV[place, sorted(set(tokens[:place]))] -= penalty
        logprobs_TV = (logits_TV / divisor).log_softmax(-1)
        expected = logprobs_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert temperature or tokens == logprobs_TV.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_repetition_and_frequency_penalties_are_for_tokens_that_are_there_already(
    model_folder: ModelFolder, make_engine: MakeEngine, temperature: float
) -> None:
    """The repetition penalty counts the prompt too, the frequency penalty each occurrence in the completion."""
    plain, divisor, engine = models.plain(model_folder()), temperature or 1.0, make_engine(eos=ENDLESS)
    asked = {"n": 3, "max_tokens": 12, "temperature": temperature}
    [completions] = sample(engine, ask(PROMPTS[1], **asked, frequency_penalty=0.5, repetition_penalty=1.5))
    for completion in completions:
        tokens = completion.token_ids
        with torch.no_grad():
            logits_TV = plain(torch.tensor([PROMPTS[1] + tokens])).logits[0, len(PROMPTS[1]) - 1 : -1]
        for place in range(len(tokens)):
            for token in set(PROMPTS[1] + tokens[:place]):
                logit = logits_TV[place, token]
                logits_TV[place, token] = logit / 1.5 if logit > 0 else logit * 1.5
            for token in tokens[:place]:
                logits_TV[place, token] -= 0.5
        logprobs_TV = (logits_TV / divisor).log_softmax(-1)
        expected = logprobs_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_completion_does_not_end_before_its_least_number_of_tokens(
    model_folder: ModelFolder, make_engine: MakeEngine
) -> None:
    """The end of sequence has probability 0 until then, which the logprobs tell; no stop string counts either."""
    plain, engine = models.plain(model_folder()), make_engine(max_sequences=80)
    asked: dict[str, Any] = {"n": 40, "max_tokens": 40, "logit_bias": {models.EOS: 3.0}}
    [free, late] = sample(engine, ask(PROMPTS[1], **asked), ask(PROMPTS[1], **asked, min_tokens=6))
    assert min(len(c.token_ids) for c in free) < 6
    assert min(len(c.token_ids) for c in late) == 7
    for completion in late[:4]:
        tokens = completion.token_ids
        with torch.no_grad():
            logits_TV = plain(torch.tensor([PROMPTS[1] + tokens])).logits[0, len(PROMPTS[1]) - 1 : -1]
        logits_TV[:, models.EOS] += 3.0
        logits_TV[:6, models.EOS] = -torch.inf
        expected = logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    seed = next(i for i, c in enumerate(late) if len(c.token_ids) > 8)
    stop = tuple(engine.detokenize([token]) for token in set(late[seed].token_ids[:-1]))
    [[ended]] = sample(engine, ask(PROMPTS[1], **asked | {"n": 1}, seed=seed, min_tokens=6, stop=stop))
    assert ended.token_ids == late[seed].token_ids[:7]
    assert ended.stop_reason == engine.detokenize(ended.token_ids[-1:])


def test_the_end_of_sequence_may_be_ignored(model_folder: ModelFolder, make_engine: MakeEngine) -> None:
    """The tokens before it stay the same, and the logprobs are of the whole distribution."""
    plain, engine = models.plain(model_folder()), make_engine(max_sequences=32)
    [ended, endless] = sample(
        engine, ask(PROMPTS[1], n=16, max_tokens=30), ask(PROMPTS[1], n=16, max_tokens=30, ignore_eos=True)
    )
    assert any(c.finish_reason == "stop" for c in ended)
    for first, whole in zip(ended, endless, strict=True):
        assert (len(whole.token_ids), whole.finish_reason) == (30, "length")
        assert whole.token_ids[: len(first.token_ids)] == first.token_ids
        assert close_to(whole, models.logprobs(plain, PROMPTS[1], whole.token_ids))


def test_samples_are_distributed_as_the_model_says(model_folder: ModelFolder, make_engine: MakeEngine) -> None:
    """1 000 first tokens: each token's share is its probability, within four standard errors."""
    plain = models.plain(model_folder())
    p_V = plain(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).detach()
    engine = make_engine(max_sequences=500)
    groups = sample(engine, *(ask(PROMPTS[0], n=500, max_tokens=1, seed=seed) for seed in (0, 500)))
    counts_V = torch.bincount(torch.tensor([c.token_ids[0] for g in groups for c in g]), minlength=len(p_V))
    error_V = (p_V * (1 - p_V) / 1000).sqrt()
    assert ((counts_V / 1000 - p_V).abs() <= 4 * error_V + 1e-3).all()


# --- in company ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_completion_is_the_same_alone_and_among_others_that_come_and_go(make_engine: MakeEngine) -> None:
    """Requests of all lengths and settings join now and later, their ends make rows move: no token changes."""
    engine = make_engine(max_sequences=7)
    requests = [
        ask(PROMPTS[i % 3], 1 + i % 3, 3 + 5 * i % 17, 100 * i, temperature=(1.0, 0.5)[i % 2], top_p=(0.8, 1.0)[i % 2])
        for i in range(12)
    ]
    alone = [sample(engine, request)[0] for request in requests]
    with held(engine, 4, *reversed(requests[:3])) as first:  # the third one is the longest
        later = [engine.submit(request) for request in requests[3:]]
    together = [future.result(WAIT) for future in [*reversed(first), *later]]
    for expected, found in zip(alone, together, strict=True):
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        for one, other in zip(expected, found, strict=True):
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_a_request_joins_and_ends_while_another_runs(make_engine: MakeEngine) -> None:
    """The long one has not ended when the short one, which came later, has."""
    engine = make_engine(eos=ENDLESS)
    gate = Gate(engine, 3, 9)
    long = engine.submit(ask(PROMPTS[0], max_tokens=40))
    gate.wait()
    short = engine.submit(ask(PROMPTS[1], max_tokens=4))
    gate.open()
    gate.wait()
    assert (long.done(), short.done()) == (False, True)
    gate.open()
    assert [len(future.result(WAIT)[0].token_ids) for future in (long, short)] == [40, 4]


def test_what_does_not_fit_waits_for_slots(make_engine: MakeEngine) -> None:
    """Four slots: two requests of two run, three wait, all end."""
    engine = make_engine(max_sequences=4, eos=ENDLESS)
    requests = [ask(PROMPTS[i % 3], n=2, max_tokens=5 + i, seed=i) for i in range(5)]
    gate = Gate(engine, 2, 3)
    futures = [engine.submit(requests[0])]
    gate.wait()
    futures += [engine.submit(request) for request in requests[1:]]
    gate.open()
    gate.wait()
    status = engine.status()
    assert (status.num_running, status.num_waiting) == (4, 6)
    gate.open()
    for request, future in zip(requests, futures, strict=True):
        assert [len(c.token_ids) for c in future.result(WAIT)] == 2 * [request.max_tokens]


def seen_prefills(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of what each prefill of any engine takes from now on."""
    seen: list[list[int]] = []
    original = Decoder.prefill

    def prefill(self: Decoder, sequences: Any, *others: Any) -> Any:
        seen.append([sequence.size for sequence in sequences])
        return original(self, sequences, *others)

    monkeypatch.setattr(Decoder, "prefill", prefill)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "expected"), [(16384, [[3, 8, 4]]), (12, [[3, 8], [4]]), (2, [[3], [8], [4]])])
def test_requests_that_wait_together_are_computed_together(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, budget: int, expected: list[list[int]]
) -> None:
    """As many prompts as the budget takes (at least one) between two tokens; completions are the same."""
    requests = [ask(prompt, n=2, max_tokens=10, seed=5) for prompt in PROMPTS]
    alone = [sample(make_engine(), request)[0] for request in requests]
    engine = make_engine(max_prefill_tokens=budget)
    with held(engine, 1, ask(PROMPTS[0], max_tokens=3)):
        prefills = seen_prefills(monkeypatch)
        futures = [engine.submit(request) for request in requests]
    together = [future.result(WAIT) for future in futures]
    assert prefills == expected
    assert [[c.token_ids for c in group] for group in together] == [[c.token_ids for c in group] for group in alone]


def test_the_running_ones_go_on_between_two_parts_of_a_long_queue(make_engine: MakeEngine) -> None:
    """Six prompts of eight tokens, a budget of eight: the one that runs gets a token after each of them."""
    engine = make_engine(eos=ENDLESS, max_prefill_tokens=8)
    order: list[str] = []
    with held(engine, 2, ask(PROMPTS[0], max_tokens=12, on_piece=lambda *_: order.append("old"))) as [running]:
        futures = [
            engine.submit(ask(PROMPTS[1], max_tokens=1, on_piece=lambda *_: order.append("new"))) for _ in range(6)
        ]
    for future in [running, *futures]:
        future.result(WAIT)
    assert order == ["old"] + ["old", "new"] * 6 + ["old"] * 5


@pytest.mark.slow
def test_an_update_computes_all_keys_again_within_the_budget(
    make_engine: MakeEngine, model_folder: ModelFolder
) -> None:
    """Three running sequences, a budget smaller than each: the result is that of one forward."""
    found = []
    for budget in (16384, 5):
        engine = make_engine(eos=ENDLESS, max_prefill_tokens=budget)
        completion = updated_at(engine, 9, models.plain(model_folder(seed=1, eos=ENDLESS)))
        found.append(completion.token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (ask([1] * 60, max_tokens=5), "max_tokens: 60 prompt tokens and 5 new ones exceed 64 .*max_sequence_len"),
        (ask([1], n=9), r"n: 9 exceeds 8 \(inference\.engine\.max_sequences\)"),
    ],
)
def test_what_can_never_be_served_is_refused(make_engine: MakeEngine, request_: Any, problem: str) -> None:
    """At once, and the message names field and key; what just fits is served."""
    engine = make_engine()
    with pytest.raises(RequestError, match=problem):
        engine.submit(request_)
    [completions] = sample(engine, ask([1] * 60, n=8, max_tokens=4))
    assert len(completions) == 8


def test_cancelling_frees_slots(make_engine: MakeEngine) -> None:
    """A running request that is cancelled makes room at the next token; a waiting one never starts."""
    engine = make_engine(max_sequences=4, eos=ENDLESS)
    with held(engine, 3, ask(PROMPTS[0], n=4, max_tokens=60)) as [running]:
        waiting = engine.submit(ask(PROMPTS[0], n=4, max_tokens=60))
        last = engine.submit(ask(PROMPTS[2], n=4, max_tokens=3))
        assert running.cancel()
        assert waiting.cancel()
    assert len(last.result(WAIT)) == 4
    assert engine.status().generated_tokens == 4 * (3 + 3)


@pytest.mark.slow
def test_cancelling_at_any_moment_never_ends_the_engine(make_engine: MakeEngine) -> None:
    """A client's cancel races with the engine's result, 200 times; the engine still serves."""
    engine = make_engine()
    for i in range(200):
        future = engine.submit(ask(PROMPTS[0], max_tokens=1 + i % 3, seed=i))
        threading.Event().wait(0.0001 * (i % 30))
        future.cancel()
    assert len(sample(engine, ask(PROMPTS[0]))[0]) == 1


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def old(model_folder: ModelFolder) -> Any:
    """The model that the engine starts with."""
    return models.plain(model_folder(eos=ENDLESS))


@pytest.fixture
def new(model_folder: ModelFolder) -> Any:
    """The model that it is updated to."""
    return models.plain(model_folder(seed=1, eos=ENDLESS))


def updated_at(engine: EmbeddedEngine, token: int, new: Any) -> Completion:
    """A completion of 20 tokens with version 1 → 2 behind its token number `token`."""
    with held(engine, token, ask(PROMPTS[1], n=3, max_tokens=20)) as [future]:
        done = load_in_thread(engine, 2, weights_of(new))
    assert done.result(WAIT) >= 0
    return future.result(WAIT)[2]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_interrupt_goes_on_as_if_the_new_weights_had_read_everything(
    model_folder: ModelFolder, make_engine: MakeEngine, family: str
) -> None:
    """Before the switch logprobs are the old model's, after it the new model's over the whole prefix."""
    first, second = (models.plain(model_folder(family, seed=s, eos=ENDLESS)) for s in (0, 1))
    engine = make_engine(family, mode="interrupt", eos=ENDLESS)
    engine.load(policy(1), weights_of(first), WAIT)
    completion = updated_at(engine, 9, second)
    assert completion.segments == [(0, 1, 1), (9, 1, 2)]
    assert close_to(completion, models.logprobs(first, PROMPTS[1], completion.token_ids), 0, 9)
    assert close_to(completion, models.logprobs(second, PROMPTS[1], completion.token_ids), 9)


def test_inflight_goes_on_with_the_keys_and_values_of_the_old_weights(
    make_engine: MakeEngine, old: Any, new: Any
) -> None:
    """After the switch logprobs are the new model's over a cache that the old one has written."""
    engine = make_engine(mode="inflight", eos=ENDLESS)
    engine.load(policy(1), weights_of(old), WAIT)
    completion = updated_at(engine, 9, new)
    assert completion.segments == [(0, 1, 1), (9, 1, 2)]
    cached, rest = PROMPTS[1] + completion.token_ids[:8], completion.token_ids[8:]
    past = old(torch.tensor([cached]), use_cache=True).past_key_values
    logits = new(torch.tensor([rest[:-1]]), past_key_values=past).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(rest[1:])[:, None])[:, 0]
    assert completion.logprobs[9:] == pytest.approx(expected.tolist(), abs=1e-4)
    assert not close_to(completion, models.logprobs(new, PROMPTS[1], completion.token_ids), 9)


@pytest.mark.slow
def test_drain_finishes_what_runs_under_the_old_weights(make_engine: MakeEngine, old: Any, new: Any) -> None:
    """A request that comes while the update waits is sampled by the new version, though there was room for it."""
    engine = make_engine(mode="drain", eos=ENDLESS)
    engine.load(policy(1), weights_of(old), WAIT)
    with held(engine, 8, ask(PROMPTS[1], max_tokens=20)) as [running]:
        done = load_in_thread(engine, 2, weights_of(new))
        later = engine.submit(ask(PROMPTS[1], max_tokens=20))
    done.result(WAIT)
    for future, model, version in ((running, old, 1), (later, new, 2)):
        [completion] = future.result(WAIT)
        assert completion.segments == [(0, 1, version)]
        assert close_to(completion, models.logprobs(model, PROMPTS[1], completion.token_ids))


def test_a_drain_that_takes_too_long_leaves_the_old_version(make_engine: MakeEngine, old: Any, new: Any) -> None:
    """TimeoutError names the keys; held back requests are admitted again."""
    engine = make_engine(mode="drain", eos=ENDLESS)
    engine.load(policy(1), weights_of(old), WAIT)
    with (
        held(engine, 2, ask(PROMPTS[0], max_tokens=20)),
        pytest.raises(TimeoutError, match=r"weights 1\.2 .*weights\.timeout, weights\.update_mode drain"),
    ):
        engine.load(policy(2), weights_of(new), 0.01)
    assert sample(engine, ask(PROMPTS[0]))[0][0].segments == [(0, 1, 1)]
    assert engine.status().policy == policy(1)


def test_no_prompt_of_the_old_version_is_served_again(make_engine: MakeEngine, old: Any, new: Any) -> None:
    """The same prompt before and after an update: both times the logprobs of the version that is named."""
    engine = make_engine(eos=ENDLESS)
    for version, model in ((1, old), (2, new)):
        engine.load(policy(version), weights_of(model), WAIT)
        [[completion]] = sample(engine, ask(PROMPTS[0]))
        assert close_to(completion, models.logprobs(model, PROMPTS[0], completion.token_ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda t: t | {"model.norm.weight": torch.ones(7)}, r"model\.norm\.weight has shape \(7,\)"),
        (lambda t: {n: x for n, x in t.items() if n != "model.norm.weight"}, r"missing \['model\.norm\.weight'\]"),
        (lambda t: t | {"extra": torch.ones(1)}, r"unknown \['extra'\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_version_goes_on(
    make_engine: MakeEngine, old: Any, new: Any, damage: Any, problem: str
) -> None:
    """Named, and completions under way do not notice."""
    engine = make_engine(eos=ENDLESS)
    engine.load(policy(1), weights_of(old), WAIT)
    [expected] = sample(engine, ask(PROMPTS[0], max_tokens=20))
    with held(engine, 8, ask(PROMPTS[0], max_tokens=20)) as [running]:
        done = load_in_thread(engine, 2, Weights("full", damage(weights_of(new).tensors)))
    with pytest.raises(ValueError, match=problem):
        done.result(WAIT)
    assert running.result(WAIT) == expected
    assert engine.status().policy == policy(1)


def test_an_adapter_for_a_full_model_is_refused(make_engine: MakeEngine) -> None:
    """And the other way round; the message names model.lora."""
    for lora, content in ((False, "adapter"), (True, "full")):
        with pytest.raises(ValueError, match=rf"publishes {content} weights.*model\.lora"):
            make_engine(lora=lora).load(policy(1), Weights(content, {}), WAIT)  # type: ignore[arg-type]


# --- ends ------------------------------------------------------------------------------------------------------------


def refuses(engine: EmbeddedEngine) -> bool:
    """Whether a request is refused."""
    try:
        engine.submit(ask(PROMPTS[0])).cancel()
    except EngineStoppedError:
        return True
    return False


def test_closing_fails_what_is_under_way(make_engine: MakeEngine, new: Any) -> None:
    """Running and waiting requests, and later ones and updates at once."""
    engine = make_engine(mode="drain", max_sequences=1, eos=ENDLESS)
    with held(engine, 2, ask(PROMPTS[0], max_tokens=60)) as [running]:
        waiting = engine.submit(ask(PROMPTS[0]))
        update = load_in_thread(engine, 2, weights_of(new))
        closing = threading.Thread(target=engine.close)
        closing.start()
        while not refuses(engine):
            threading.Event().wait(0.001)
    for future in (running, waiting, update):
        with pytest.raises(EngineStoppedError, match="closed"):
            future.result(WAIT)
    closing.join(WAIT)
    with pytest.raises(EngineStoppedError, match="closed"):
        engine.load(policy(2), weights_of(new), WAIT)


def test_a_thread_that_fails_is_seen_by_all(make_engine: MakeEngine, new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request under way, status, later requests and updates: all say what happened, none waits."""
    engine = make_engine()

    def fail(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Decoder, "decode", fail)
    with pytest.raises(EngineStoppedError, match="out of memory"):
        sample(engine, ask(PROMPTS[0]))
    for call in (
        engine.status,
        lambda: engine.submit(ask(PROMPTS[0])),
        lambda: engine.load(policy(1), weights_of(new), WAIT),
    ):
        with pytest.raises(EngineStoppedError, match=r"the engine has failed: .*out of memory"):
            call()
    engine.close()


@pytest.mark.slow
def test_a_request_that_can_not_begin_fails_alone_and_in_words(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that came with it are sampled as ever, and the same request again fails again: the engine serves on."""
    engine = make_engine(max_sequences=12)
    expected = sample(engine, *[ask(prompt, n=2) for prompt in PROMPTS[:3]])
    _run_out_of_memory(monkeypatch, at=7)
    with held(engine, 2, ask(PROMPTS[0], max_tokens=4)):  # so that the others begin together
        bad = engine.submit(ask([5] * 7, n=3))
        good = [engine.submit(ask(prompt, n=2)) for prompt in PROMPTS[:3]]
    words = "3 completions of a prompt of 7 tokens could not start: OutOfMemoryError: CUDA out of memory"
    for _ in range(3):
        with pytest.raises(SamplingError, match=f"^{words}$"):
            bad.result(WAIT)
        bad = engine.submit(ask([5] * 7, n=3))
    found = [[completion.token_ids for completion in future.result(WAIT)] for future in good]
    assert found == [[completion.token_ids for completion in group] for group in expected]


@pytest.mark.slow
def test_an_engine_on_which_nothing_can_begin_ends(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is its own then, and its actor starts another one."""
    engine = make_engine()
    _run_out_of_memory(monkeypatch, at=7)
    for _ in range(MAX_FAILED):
        with pytest.raises(SamplingError):
            engine.submit(ask([5] * 7)).result(WAIT)
    assert "out of memory" in until_stopped(engine)


def test_cancelled_requests_behind_one_that_does_not_fit_wait_no_more(make_engine: MakeEngine) -> None:
    """They count in no load, and hold their prompts no longer."""
    engine = make_engine(max_sequences=2, eos=ENDLESS)
    waiting: list[int] = []

    def note(*_: Any) -> None:
        waiting.append(engine.status().num_waiting)

    with held(engine, 2, ask(PROMPTS[0], max_tokens=10, on_piece=note)) as [running]:
        head = engine.submit(ask(PROMPTS[1], n=2, max_tokens=5))
        behind = [engine.submit(ask(PROMPTS[2], n=2, max_tokens=5)) for _ in range(3)]
        assert engine.status().num_waiting == 8
        for future in behind:
            future.cancel()
    running.result(WAIT)
    head.result(WAIT)
    assert waiting == [0, 0] + [2] * 8, "beside the first request the one that does not fit waits alone"


def _run_out_of_memory(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Have every prefill with a prompt of so many tokens raise what a device without memory raises."""
    prefill = Decoder.prefill

    def limited(self: Decoder, sequences: Any, *others: Any) -> Any:
        if any(sequence.size == at for sequence in sequences):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(self, sequences, *others)

    monkeypatch.setattr(Decoder, "prefill", limited)


@pytest.mark.slow
def test_logits_that_are_not_finite_end_the_engine(make_engine: MakeEngine, new: Any) -> None:
    """Weights with a NaN fit the model; sampling from them would be noise, so the engine says whose they are."""
    engine = make_engine()
    engine.load(policy(6), Weights("full", {n: t * float("nan") for n, t in weights_of(new).tensors.items()}), WAIT)
    with pytest.raises(EngineStoppedError, match=r"not finite under policy 1\.6"):
        sample(engine, ask(PROMPTS[0]))


def test_a_model_with_scaled_positions_may_use_all_of_them(model_folder: ModelFolder, tmp_path: Path) -> None:
    """96 positions with YaRN of factor 4 are 384; without it the engine ends at 96."""
    folder = shutil.copytree(model_folder(), tmp_path / "scaled")
    limits = EmbeddedEngineConfig(max_sequences=1, max_sequence_len=256)
    model = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    assert Decoder(model, limits).max_length == 96
    tree = json.loads((folder / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}
    (folder / "config.json").write_text(json.dumps(tree | {"rope_scaling": yarn}))
    assert Decoder(model, limits).max_length == 256


def test_a_completion_across_rests_is_the_same_to_the_bit(make_engine: MakeEngine) -> None:
    """Stopped after its 3rd and its 9th token, with others beside it."""
    engine = make_engine(eos=models.NEVER)
    request = SampleRequest([1, 8, 9, 3], 3, 16, 7)
    expected = engine.submit(request).result(WAIT)
    reached = {3: threading.Event(), 9: threading.Event()}
    counted: Counter[int] = Counter()

    def count(number: int, piece: Completion) -> None:
        counted[number] += len(piece.token_ids)
        for tokens, event in reached.items():
            if counted[0] >= tokens:
                event.set()

    future = engine.submit(replace(request, on_piece=count))
    for event in reached.values():
        assert event.wait(WAIT)
        engine.rest(WAIT)
        before = engine.status().generated_tokens
        assert not future.done() or counted[0] == 16
        assert engine.status().generated_tokens == before
        engine.wake(WAIT)
    assert future.result(WAIT) == expected


def test_an_engine_at_rest_can_be_closed_and_takes_no_weights(make_engine: MakeEngine) -> None:
    """A version given to it waits for its turn; requests end with the engine."""
    engine = make_engine(eos=models.NEVER)
    engine.rest(WAIT)
    with pytest.raises(TimeoutError, match="were not switched in"):
        engine.load(policy(2), Weights("full", {}), 0.2)
    future = engine.submit(SampleRequest([1, 8, 9, 3], 1, 4, 0))
    engine.close()
    with pytest.raises(EngineStoppedError):
        future.result(WAIT)


def test_a_cache_moves_whole_to_the_host() -> None:
    """With fake tensors of torch, since no GPU is needed to see where they are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        cache = SlotCache(4, 32)
        for layer in range(2):
            cache.keys[layer], cache.values[layer] = (torch.zeros(4, 2, 16, 8, device="cuda") for _ in range(2))
        cache.move(torch.device("cpu"))
        tensors = [*cache.keys.values(), *cache.values.values()]
        assert [tensor.device.type for tensor in tensors] == ["cpu"] * 4
