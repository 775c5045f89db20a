"""Engines tell which experts their routers chose, for every token that they have computed (trainer.router_replay)."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.external.continuation import cut_at_stop, joined
from actors.engines.http import binary
from actors.engines.protocol import Completion
from actors.engines.vllm.answers import completions_of
from actors.engines.vllm.process import command
from actors.models.file_names import file_names
from actors.models.loading import full_tensors
from actors.models.router_replay import Routing
from bus.weights import Weights
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.messages import PolicyVersion
from tests import models
from tests.actors.engines.engines import WAIT, ask, held, load_in_thread, policy, sample
from tests.conftest import ModelFolder

ENDLESS = models.NEVER


@pytest.fixture
def engine(model_folder: ModelFolder) -> Iterator[EmbeddedEngine]:
    """Four experts in each layer, of which each token takes two."""
    model = ModelConfig(path=str(model_folder("qwen3_moe", eos=ENDLESS)), dtype="float32", device="cpu")
    config = EmbeddedEngineConfig(max_sequences=8, max_sequence_len=64, max_prefill_tokens=16)
    made = EmbeddedEngine(model, config, "interrupt", Decoder(model, config, tells_experts=True))
    yield made
    made.close()


def published(model: Any) -> Weights:
    """All weights, expert by expert as in files."""
    return Weights("full", {name: t.clone() for name, t in file_names(model).views(full_tensors(model).items())})


def chosen_by(model: Any, tokens: list[int]) -> Any:
    """What transformers' own routers choose, (tokens, layers, experts per token), in its order."""
    seen: list[torch.Tensor] = []
    hooks = [
        block.experts.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
        for block in Routing(model).blocks
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy()


def test_all_computed_tokens_have_the_experts_of_transformers(
    engine: EmbeddedEngine, model_folder: ModelFolder
) -> None:
    """Prompt and completion but for the last token; requests share a prefill, prompts, and rows that others leave."""
    model = models.plain(model_folder("qwen3_moe", eos=ENDLESS))
    requests = [
        ask([1, 5, 9, 13], n=3, max_tokens=3),
        ask([1, 7, *range(4, 20)], max_tokens=12, seed=5),
        ask([1, 8], n=2, max_tokens=20, seed=7),
        ask([1], max_tokens=1),
    ]
    for request, completions in zip(requests, sample(engine, *requests), strict=True):
        for completion in completions:
            tokens = request.prompt_ids + completion.token_ids
            expected = chosen_by(model, tokens[:-1])
            assert completion.routed_experts is not None
            assert completion.routed_experts.dtype == np.int8
            assert np.array_equal(completion.routed_experts, expected)


def test_experts_stay_those_with_which_a_token_was_computed_first(
    engine: EmbeddedEngine, model_folder: ModelFolder
) -> None:
    """An update in the middle computes keys and values again; what was sampled before has the old model's experts."""
    old, new = (models.plain(model_folder("qwen3_moe", seed=seed, eos=ENDLESS)) for seed in (0, 1))
    engine.load(policy(1), published(old), WAIT)
    prompt = [1, 5, 9, 13]
    with held(engine, 9, ask(prompt, max_tokens=20)) as [future]:
        done = load_in_thread(engine, 2, published(new))
    assert done.result(WAIT) >= 0
    [completion] = future.result(WAIT)
    tokens = prompt + completion.token_ids
    seam = len(prompt) + completion.segments[1][0] - 1
    assert completion.routed_experts is not None
    assert np.array_equal(completion.routed_experts[:seam], chosen_by(old, tokens[:-1])[:seam])
    assert np.array_equal(completion.routed_experts[seam:], chosen_by(new, tokens[:-1])[seam:])


def test_an_engine_that_is_not_asked_tells_none(model_folder: ModelFolder) -> None:
    """It has the same tokens and logprobs."""
    model = ModelConfig(path=str(model_folder("qwen3_moe")), dtype="float32", device="cpu")
    config, found = EmbeddedEngineConfig(max_sequences=8, max_sequence_len=64), []
    for tells in (False, True):
        made = EmbeddedEngine(model, config, "interrupt", Decoder(model, config, tells_experts=tells))
        found.append(sample(made, ask([1, 5, 9], n=4, max_tokens=12))[0])
        made.close()
    assert all(completion.routed_experts is None for completion in found[0])
    assert found[0] == found[1]  # experts are not compared


def test_answers_to_rollout_actors_bring_experts() -> None:
    """And refuse bytes that are no whole token."""
    experts = np.arange(5 * 2 * 3, dtype=np.int16).reshape(5, 2, 3)
    told = Completion([4, 5], [-1.0, -2.0], [(0, 1, 1)], "stop", routed_experts=experts)
    silent = Completion([4], [-1.0], [(0, 1, 1)], "stop")
    boot, [(first, _), (second, _)] = binary.decode(binary.encode("b", [told, silent], ["x", "y"]))
    assert boot == "b"
    assert np.array_equal(first.routed_experts, experts)
    assert first.routed_experts.dtype == np.int16
    assert second.routed_experts is None
    import msgpack

    for change in ({"routed_experts": b"123"}, {"expert_layout": [2, 2]}, {"expert_layout": [2, 2, 0]}):
        body = msgpack.unpackb(binary.encode("b", [told], ["x"]))
        body["choices"][0] |= change
        with pytest.raises(ValueError, match=r"expert|no answer"):
            binary.decode(msgpack.packb(body))


def test_a_continued_completion_keeps_the_experts_of_its_first_part() -> None:
    """The second answer tells of all tokens; behind an abort before the first token it is all there is."""

    def part(tokens: list[int], rows: int | None, value: int, reason: str) -> Completion:
        experts = None if rows is None else np.full((rows, 1, 2), value, np.int8)
        return Completion(tokens, [0.0] * len(tokens), [(0, 1, value)], reason, routed_experts=experts)

    # a prompt of 4 tokens
    whole = joined(part([7, 8], 5, 1, "abort"), part([9, 3], 7, 2, "stop"))
    assert whole.routed_experts is not None
    assert whole.routed_experts[:, 0, 0].tolist() == [1] * 5 + [2] * 2
    cut = cut_at_stop(whole, ["8"], lambda ids: "".join(map(str, ids)))
    assert cut.token_ids == [7, 8]
    assert cut.routed_experts is not None
    assert len(cut.routed_experts) == 5
    late = joined(part([], None, 1, "abort"), part([9, 3], 5, 2, "stop"))
    assert late.routed_experts is not None
    assert len(late.routed_experts) == 5
    # a rest with tokens and without experts leaves none
    assert joined(part([7, 8], 5, 1, "abort"), part([9], None, 2, "stop")).routed_experts is None
    early = joined(part([7, 8], 5, 1, "abort"), part([], None, 2, "stop"))
    assert early.routed_experts is not None
    assert len(early.routed_experts) == 5


TOLD = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDgsIDIsIDIpLCB9ICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAwMAAAEDAgADAgEAAgIBAAIBAgIA"
    "AgEAAgACAgACAw=="
)
"""As vLLM 0.32 told it: two layers, four experts, two for each token."""
VLLM: dict[str, Any] = {
    "request_id": "generate-tokens-9b0fcbefec3ce401",
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [13, 1, 15, 19, 6],
            "logprobs": {"content": [{"token": "x", "logprob": -1.0, "top_logprobs": []}] * 5},
            "routed_experts": TOLD,
            "weight_versions": [{"version": "w", "start": 0, "end": 5}],
        }
    ],
}
"""Its answer to a prompt of four tokens."""


def test_what_vllm_tells_is_read() -> None:
    """An array of numpy in base64, of the prompt's tokens and of all sampled ones but the last."""
    labels = {"w": PolicyVersion(lineage=1, version=1)}
    [completion] = completions_of(VLLM, ask([1, 8, 9, 3], max_tokens=5), frozenset(), labels)
    assert completion.routed_experts is not None
    assert completion.routed_experts.shape == (8, 2, 2)
    assert completion.routed_experts[:2].tolist() == [[[0, 3], [3, 0]], [[0, 1], [3, 2]]]
    many = io.BytesIO()
    np.save(many, np.full((8, 2, 2), 300, np.uint16))
    answer = {"choices": [VLLM["choices"][0] | {"routed_experts": base64.b64encode(many.getvalue()).decode()}]}
    [completion] = completions_of(answer, ask([1, 8, 9, 3], max_tokens=5), frozenset(), labels)
    assert completion.routed_experts is not None
    assert (completion.routed_experts.dtype, int(completion.routed_experts.max())) == (np.int16, 300)
    [completion] = completions_of(
        {"choices": [VLLM["choices"][0] | {"routed_experts": None}]}, ask([1], max_tokens=5), frozenset(), labels
    )
    assert completion.routed_experts is None


def test_a_server_is_asked_for_experts_by_its_command_line() -> None:
    """Only with router replay: vLLM refuses it for dense models."""
    model, config = ModelConfig(path="m"), VllmEngineConfig(type="vllm")
    assert "--enable-return-routed-experts" in command(model, config, False, 8001, tells_experts=True)
    assert "--enable-return-routed-experts" not in command(model, config, False, 8001)
