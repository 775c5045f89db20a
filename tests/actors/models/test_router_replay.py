"""Router replay: routers take the experts that they are given, whatever the architecture (trainer.router_replay)."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from actors.learner.micro_batches import MicroBatch, micro_batch
from actors.models import attention, loading, router_replay
from actors.models.router_replay import Routing, recording
from actors.models.token_logprobs import TokenLogprobs
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError, RunFailedError
from schemas.routed import UNKNOWN, packed
from tests import models
from tests.actors.learner.steps import batches_of, branched_group, random_samples, scored_group, step_batch
from tests.actors.models.test_row_ranks import Threads

SIZES: dict[str, Any] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
                 "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 2,
        "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "qk_head_dim": 8,
    },
}  # fmt: skip
"""Families whose routers choose in other ways: softmax before or behind the choice, sigmoid with a bias, groups."""


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model with random weights, and biases of routers that are not 0; with our attention."""
    shape = {name: value for name, value in models.SMALL.items() if family != "deepseek_v3" or name != "head_dim"}
    config = AutoConfig.for_model(family, **shape | SIZES[family], tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # grouped products of matrices are not there for float64
        kernel = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.PADDED, **kernel)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()))
    return model.to(dtype)


def row_of(experts: Any = None) -> MicroBatch:
    """Two groups of four samples that share prompts, with experts for all of their tokens or none."""
    batch = step_batch(random_samples())
    if experts is not None:
        pieces, layout = packed(experts)
        batch = batch.model_copy(update={"routed_experts": pieces, "expert_layout": layout})
    return micro_batch(batch, 0, torch.device("cpu"))


def told(num_layers: int, num_experts: int, num_chosen: int, seed: int = 0) -> Any:
    """Made-up experts for each token that the batch of `row_of` tells of."""
    batch = step_batch(random_samples())
    count = batch.token_ids.size - int(batch.sample_shared.sum())
    rng = np.random.default_rng(seed)
    rows = [[rng.permutation(num_experts)[:num_chosen] for _ in range(num_layers)] for _ in range(count)]
    return np.array(rows, np.int8)


def logprobs(model: Any, micro: MicroBatch) -> Tensor:
    """Of all completion tokens."""
    return TokenLogprobs(model).of(micro.row, micro.token_ids_T, None)[0]


def recorded(model: Any, micro: MicroBatch) -> Any:
    """What the model chooses by itself for the tokens of a row, (R, layers, experts per token)."""
    found: list[Any] = []
    with recording(Routing(model), found), torch.no_grad():
        model(**micro.row.forward_arguments())
    return found[0]


def for_samples(micro: MicroBatch, rows: Any) -> Any:
    """Experts of a row's tokens as a batch tells them: behind each sample's tokens one of which nothing is known."""
    found, seen = [], 0
    for index in micro.row.samples:
        own = index[index >= seen]
        found += [rows[own], np.full((1, *rows.shape[1:]), UNKNOWN, rows.dtype)]
        seen = int(index.max()) + 1
    return np.concatenate(found)


@pytest.mark.parametrize("family", SIZES)
def test_the_own_choice_replayed_gives_the_same_bits(family: str) -> None:
    """Of each family; and unknown experts are the model's own choice."""
    model = model_of(family)
    plain = row_of()
    before = logprobs(model, plain)
    own = recorded(model, plain)
    dense = [number for number, block in enumerate(Routing(model).blocks) if block is None]
    assert (own[:, dense] == UNKNOWN).all()
    assert (np.delete(own, dense, 1) >= 0).all()
    router_replay.install(model)
    assert torch.equal(logprobs(model, plain), before)
    experts = for_samples(plain, own)
    assert torch.equal(logprobs(model, row_of(experts)), before)
    assert torch.equal(logprobs(model, row_of(np.full_like(experts, UNKNOWN))), before)


@pytest.mark.parametrize("family", SIZES)
def test_given_experts_are_taken_and_the_gates_keep_their_gradient(family: str) -> None:
    """In float64 the gradient of a router's weights is the slope of the loss, with the choice as it is given."""
    model = model_of(family, torch.float64)
    routing = Routing(model)
    router_replay.install(model)
    micro = row_of(told(len(routing.layers), routing.num_experts, routing.num_chosen))
    chosen: list[Tensor] = []
    block = next(block for block in routing.blocks if block is not None)
    block.experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    loss = logprobs(model, micro).sum()
    number = routing.blocks.index(block)
    assert micro.row.experts_RLK is not None
    assert torch.equal(chosen[-1].view(-1, routing.num_chosen), micro.row.experts_RLK[:, number].long())
    loss.backward()
    router = next(module for name, module in block.named_children() if name in ("gate", "router"))
    weight = router.weight
    direction = torch.randn(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(1))
    slopes = []
    for step in (1e-3, -1e-3):  # routers compute probabilities in float32, which a smaller step would drown in
        with torch.no_grad():
            weight.add_(direction, alpha=step)
            slopes.append(float(logprobs(model, micro).double().sum()) / 2e-3)
            weight.add_(direction, alpha=-step)
    expected = float((weight.grad * direction).sum())
    assert abs(expected) > 1e-4
    assert slopes[0] - slopes[1] == pytest.approx(expected, rel=2e-3)


def test_the_weights_of_given_experts_are_those_of_the_paper() -> None:
    """Qwen3-MoE by hand: probabilities of the given experts, made to sum to 1, times what these experts compute."""
    model = model_of("qwen3_moe", torch.float64)
    routing = Routing(model)
    router_replay.install(model)
    micro = row_of(told(len(routing.layers), 4, 2, seed=3))
    seen: list[tuple[Tensor, Tensor]] = []
    # the last call: before it a short row finds out what the model does to its logits
    routing.blocks[1].register_forward_hook(lambda _, given, out: seen.append((given[0][0], out[0])))
    with torch.no_grad():
        logprobs(model, micro)
        hidden, out = seen[-1]
        block = routing.blocks[1]
        shares = torch.softmax(hidden @ block.gate.weight.T, -1)
        assert micro.row.experts_RLK is not None
        given = micro.row.experts_RLK[:, 1].long()
        weights = shares.gather(-1, given)
        if model.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        expected = torch.zeros_like(out)
        for token in range(len(hidden)):
            for weight, expert in zip(weights[token], given[token], strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
                both = torch.nn.functional.silu(gate) * up
                expected[token] += weight * (block.experts.down_proj[expert] @ both)
    assert (out - expected).abs().max() < 1e-6


@pytest.mark.parametrize("mode", [True, "selective"])
def test_layers_that_are_computed_again_choose_the_same(mode: Any, model_folder: Any) -> None:
    """Gradients are those without recomputation."""
    config = ModelConfig(path=str(model_folder("qwen3_moe")), dtype="float32", device="cpu")
    gradients = []
    for checkpointing in (False, mode):
        model: Any = loading.load_model(config, torch.float32)
        router_replay.install(model)
        if checkpointing:
            loading.checkpoint_gradients(model, config.model_copy(update={"gradient_checkpointing": checkpointing}))
        model.train()
        logprobs(model, row_of(told(2, 4, 2))).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_divide_a_row_take_the_experts_of_their_tokens(size: int) -> None:
    """The row is padded to the ranks; the padding's experts are the model's own."""
    micro = row_of(told(2, 4, 2))
    # one by one: threads share a generator of random numbers
    made = [model_of("qwen3_moe", torch.float64) for _ in range(size + 1)]
    for model in made:
        router_replay.install(model)
    expected = logprobs(made[-1], micro)

    def work(rank: Any) -> Tensor:
        chosen = TokenLogprobs(made[rank.place])
        chosen.row_ranks = rank
        with torch.no_grad():
            return chosen.of(copy.deepcopy(micro).row, micro.token_ids_T, None)[0]

    for found in Threads(size).run(work):
        assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("make", [scored_group, branched_group])
def test_a_batch_brings_the_experts_of_each_token_into_the_row(make: Any) -> None:
    """Each token of a row has the experts of the token in its group, in whatever order samples are packed."""
    groups = []
    for ordinal in range(3):
        group = make(ordinal)
        # one layer: the token's id and its place in the group tell where the experts are from
        ids = np.concatenate([group.prompt_ids, group.token_ids])
        pieces, layout = packed(np.stack([ids, ids + 100], -1)[:, None].astype(np.int16))
        groups.append(group.model_copy(update={"routed_experts": pieces, "expert_layout": layout}))
    for batch in batches_of(groups, 2, sequence_len=60):
        for number in range(len(batch.micro_batch_offsets) - 1):
            row = micro_batch(batch, number, torch.device("cpu"), 60).row
            assert row.experts_RLK is not None
            assert torch.equal(row.experts_RLK[:, 0, 0].long(), row.token_ids_R)
            assert torch.equal(row.experts_RLK[:, 0, 1].long(), row.token_ids_R + 100)


def test_groups_of_which_nothing_is_known_leave_the_choice_to_the_model() -> None:
    """Sampled before the run asked for experts: others of the step have theirs."""
    known, unknown = scored_group(0), scored_group(1)
    count = len(known.prompt_ids) + len(known.token_ids)
    pieces, layout = packed(np.ones((count, 2, 2), np.int8))
    (batch,) = batches_of([known.model_copy(update={"routed_experts": pieces, "expert_layout": layout}), unknown])
    rows = [micro_batch(batch, number, torch.device("cpu")).row for number in range(len(batch.micro_batch_offsets) - 1)]
    found = torch.cat([row.experts_RLK for row in rows if row.experts_RLK is not None])
    assert set(found.unique().tolist()) == {UNKNOWN, 1}
    (plain,) = batches_of([scored_group(0), unknown])
    assert plain.experts_of(0, 2) == []


def test_models_without_such_a_choice_are_refused(model_folder: Any, tmp_path: Path) -> None:
    """Dense ones, and experts of another model than the trainer's."""
    with pytest.raises(ConfigError, match=r"router_replay: Qwen3ForCausalLM has no layers with experts"):
        router_replay.install(models.plain(model_folder("qwen3")))


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        (told(2, 4, 3), "the engine tells 3 experts in 2 layers, and the model chooses 2 in 2"),
        (told(3, 4, 2), "the engine tells 2 experts in 3 layers"),
        (told(2, 4, 2) + 1, "the engine tells experts 1 to 4, and layers of the model have 4"),
        (told(2, 4, 2) - 2, "the engine tells experts -2 to 1"),
    ],
)
def test_experts_of_another_model_are_refused_before_a_layer_runs(experts: Any, problem: str) -> None:
    """On a GPU a wrong index would end the process without a word on it."""
    batch = step_batch(random_samples())
    routing = router_replay.install(model_of("qwen3_moe"))
    router_replay.check(batch, routing)
    pieces, layout = packed(experts)
    with pytest.raises(RunFailedError, match=problem):
        router_replay.check(batch.model_copy(update={"routed_experts": pieces, "expert_layout": layout}), routing)


def test_a_layer_that_runs_its_experts_itself_is_replayed() -> None:
    """As in Gemma 4: router and experts are children of the decoder layer."""
    plain, nested = model_of("qwen3_moe"), model_of("qwen3_moe")
    for layer in loading.layers_of(nested):
        inner = layer.mlp
        layer.experts = inner.experts  # found before the module inside
    routing = Routing(nested)
    assert routing.blocks == routing.layers
    micro = row_of(told(2, 4, 2))
    for model in (plain, nested):
        router_replay.install(model)
    assert torch.equal(logprobs(nested, micro), logprobs(plain, micro))
    assert not torch.equal(logprobs(nested, micro), logprobs(nested, row_of()))


def test_a_router_that_chooses_twice_is_refused_in_words() -> None:
    """Its choice can't be told, while rows without experts are computed as before."""
    model = model_of("qwen3_moe")
    for block in Routing(model).blocks:
        once = block.gate.forward
        block.gate.forward = lambda hidden, once=once: once(hidden) and once(hidden)
    router_replay.install(model)
    assert torch.isfinite(logprobs(model, row_of())).all()
    with pytest.raises(RunFailedError, match="the router of layer 0 chose experts 2 times, not once"):
        logprobs(model, row_of(told(2, 4, 2)))
