"""Rows that several ranks compute together: the logprobs and gradients of one that computes all of it."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from actors.learner.micro_batches import MicroBatch, micro_batch
from actors.models import attention
from actors.models.attention.row_ranks import with_all_heads, with_all_tokens
from actors.models.attention.rows import UNPADDED, RowLengths
from actors.models.heads import check_divides, undividable
from actors.models.token_logprobs import TokenLogprobs
from schemas.config.trainer import TrainerConfig
from schemas.errors import ConfigError
from tests import models
from tests.actors.learner.steps import batches_of, branched_group, random_samples, step_batch

FAMILIES = ["qwen3", "llama", "mistral", "gemma2"]


class Threads:
    """Ranks as threads of this process, with an exchange through memory. Frozen ranks are a matter of real groups."""

    def __init__(self, size: int) -> None:
        self.size, self._sent = size, list[Any]([None] * size)
        self._barrier = threading.Barrier(size, timeout=60)

    def run(self, work: "Callable[[Rank], Any]") -> list[Any]:
        """Results of all ranks."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, [Rank(self, place) for place in range(self.size)]))

    def exchange(self, place: int, parts: Tensor) -> Tensor:
        """All-to-all."""
        assert parts.is_contiguous()
        assert len(parts) == self.size
        self._sent[place] = parts.detach().clone()
        self._barrier.wait()
        arrived = torch.stack([sent[place] for sent in self._sent])
        self._barrier.wait()
        return arrived


class Rank:
    """One of the threads."""

    def __init__(self, threads: Threads, place: int) -> None:
        self._threads, self.place, self.size = threads, place, threads.size
        self.has_own_heads = False

    def all_to_all(self, parts: Tensor) -> Tensor:
        """As all threads do."""
        return self._threads.exchange(self.place, parts)


def together(size: int) -> TrainerConfig:
    """Ranks that all compute the same row."""
    return TrainerConfig(max_steps=1, num_ranks=size, context_parallel=size)


def model_of(config: PretrainedConfig) -> Any:
    """With packed attention and random weights, in float64."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.PADDED).double()


def single_turns() -> MicroBatch:
    """Two groups of four completions with a prompt each, at temperature 0.7."""
    samples = random_samples()
    for sample in samples:
        sample.temperature = 0.7
    return micro_batch(step_batch(samples), 0, torch.device("cpu"))


def branches() -> MicroBatch:
    """Trajectories with branches, and tokens of a tool: only some tokens are wanted."""
    batch = batches_of([branched_group(0)], sequence_len=400)[0]
    micro = micro_batch(batch, 0, torch.device("cpu"), capacity=10)
    assert micro.row.has_many_copies
    assert len(micro.wanted_K) < len(micro.token_ids_T)
    return micro


def few_tokens(number: int) -> MicroBatch:
    """Only the last tokens are in the loss."""
    batch = step_batch(random_samples())
    batch.loss_mask[: batch.loss_mask.size - number] = 0
    return micro_batch(batch, 0, torch.device("cpu"))


def computed(chosen: TokenLogprobs, micro: MicroBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs and entropies of a row, and the gradients of a loss with both."""
    model = chosen.model
    model.zero_grad()
    logprobs_T, entropy_T = chosen.of(micro.row, micro.token_ids_T, micro.temperatures_T, micro.wanted_K, True)
    (logprobs_T.exp().sum() + entropy_T.square().sum() + (logprobs_T * micro.advantages_T).sum()).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return [logprobs_T.detach(), entropy_T.detach()], grads


def assert_same_when_divided(model: Any, micro: MicroBatch, size: int, lengths: RowLengths = UNPADDED) -> None:
    """Each rank has all logprobs, and the gradients of all ranks add up to that of one."""
    expected, gradients = computed(TokenLogprobs(model, lengths=lengths), micro)

    def work(rank: Rank) -> Any:
        chosen = TokenLogprobs(copy.deepcopy(model), lengths=lengths)
        chosen.row_ranks = rank
        return computed(chosen, copy.deepcopy(micro))

    found = Threads(size).run(work)
    # the softmax of capped scores is computed in float32
    limit = 1e-5 if model.config.model_type == "gemma2" else 1e-9
    for values, _ in found:
        torch.testing.assert_close(values, expected, rtol=limit, atol=limit)
    for name, gradient in gradients.items():
        total = torch.stack([of_rank[name] for _, of_rank in found]).sum(0)
        torch.testing.assert_close(
            total, gradient, rtol=10 * limit, atol=limit, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_divided_row_has_the_logprobs_and_gradients_of_a_whole_one(family: str, size: int) -> None:
    """Windows, soft caps, head norms; with 4 ranks there are more ranks than heads of keys."""
    assert_same_when_divided(model_of(models.config(family)), single_turns(), size)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_shared_prefixes_cross_the_parts_of_a_divided_row(family: str) -> None:
    """Branches continue tokens that are in the part of another rank; their copies are computed again."""
    assert_same_when_divided(model_of(models.config(family)), branches(), 2)


@pytest.mark.parametrize("number", [1, 3, 0])
def test_ranks_without_a_result_of_their_own_take_part(number: int) -> None:
    """Fewer results than ranks, or none."""
    assert_same_when_divided(model_of(models.config("qwen3")), few_tokens(number), 4)


def test_rows_are_padded_to_their_lengths_and_to_the_ranks() -> None:
    """Lengths of rows that no number of ranks divides."""
    assert_same_when_divided(model_of(models.config("qwen3")), single_turns(), 4, RowLengths(13, 1000))


@pytest.mark.parametrize("mode", [True, "selective"])
def test_recomputed_layers_exchange_again_in_the_backward_pass(mode: Any) -> None:
    """Gradient checkpointing, of all and of some operations."""
    from actors.models.loading import checkpoint_gradients
    from schemas.config.model import ModelConfig

    model = model_of(models.config("qwen3"))
    checkpoint_gradients(model, ModelConfig(path="tiny", gradient_checkpointing=mode))
    assert_same_when_divided(model.train(), single_turns(), 2)


def test_an_output_layer_with_an_adapter_is_divided_too() -> None:
    """Logits are computed all at once there, of each rank's results alone."""

    class Scaled(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            assert hidden.shape[1] <= 15, "logits of more than this rank's results"
            return super().forward(hidden) * 1.5

    model = model_of(models.config("llama"))
    head = Scaled(32, len(models.VOCABULARY), bias=False).double()
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head
    micro = few_tokens(30)
    expected = _all_at_once(model, micro)
    found = Threads(2).run(lambda rank: _of_rank(copy.deepcopy(model), rank, micro))
    for values in found:
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)


def _all_at_once(model: Any, micro: MicroBatch) -> Tensor:
    head = model.lm_head
    plain = nn.Linear(32, len(models.VOCABULARY), bias=False).double()
    plain.load_state_dict({"weight": head.weight * 1.5})
    other = copy.deepcopy(model)
    other.lm_head = plain
    found, _ = computed(TokenLogprobs(other), micro)
    return found[0]


def _of_rank(model: Any, rank: Rank, micro: MicroBatch) -> Tensor:
    chosen = TokenLogprobs(model)
    chosen.row_ranks = rank
    found, _ = computed(chosen, copy.deepcopy(micro))
    return found[0]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 4), (8, 2, 4), (24, 6, 4), (12, 1, 3)])
def test_heads_keep_their_keys(heads: int, kv_heads: int, size: int) -> None:
    """Query head i belongs to key head i · kv_heads / heads, on whichever rank both are."""
    tokens, dim = 4 * size, 2
    query = torch.arange(heads).float()[None, :, None, None].expand(1, heads, tokens, dim)
    key = torch.arange(kv_heads).float()[None, :, None, None].expand(1, kv_heads, tokens, dim)

    def work(rank: Rank) -> Any:
        part = slice(rank.place * 4, rank.place * 4 + 4)
        return with_all_tokens([query[:, :, part], key[:, :, part]], rank)

    owners = []
    for q, k in Threads(size).run(work):
        assert q.shape == (1, heads // size, tokens, dim)
        group = q.shape[1] // k.shape[1]
        owners += list(zip(q[0, :, 0, 0].tolist(), k[0, :, 0, 0].repeat_interleave(group).tolist(), strict=True))
    assert owners == [(i, i * kv_heads // heads) for i in range(heads)]


def test_tokens_come_back_in_their_places() -> None:
    """There and back is the identity, for values that differ by token, head and dimension."""
    whole = torch.from_numpy(np.arange(4 * 6 * 3, dtype=np.float64).reshape(1, 4, 6, 3))

    def work(rank: Rank) -> Tensor:
        (moved,) = with_all_tokens([whole[:, :, rank.place * 3 : rank.place * 3 + 3]], rank)
        assert torch.equal(moved, whole[:, rank.place * 2 : rank.place * 2 + 2])
        return with_all_heads(moved.transpose(1, 2), rank)

    assert torch.equal(torch.cat(Threads(2).run(work), 1), whole.transpose(1, 2))


@pytest.mark.parametrize(
    ("size", "said"), [(3, "can't divide the 4 attention heads of model.path (2 for keys and values); set 1, 2 or 4")]
)
def test_heads_that_do_not_divide_are_refused_with_the_numbers_that_do(size: int, said: str) -> None:
    """Before anything is computed."""
    with pytest.raises(ConfigError, match=r"trainer.context_parallel: 3 ranks") as caught:
        check_divides(model_of(models.config("qwen3")), together(size))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "longrope"},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        {"text_config": {"rope_parameters": {"rope_type": "dynamic"}, "num_attention_heads": 4}},
    ],
)
def test_rotary_embeddings_that_depend_on_the_longest_position_are_refused(rope: dict[str, Any]) -> None:
    """Each rank would take other frequencies, and its tokens would have other logprobs without a word."""
    assert "depends on the longest position" in undividable(
        {"num_attention_heads": 4} | rope, together(2), "model.path"
    )
    assert undividable({"num_attention_heads": 4} | rope, together(1), "model.path") == ""


def test_yarn_is_divided() -> None:
    """Its frequencies are fixed."""
    config = models.config("llama")
    config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0,
                              "original_max_position_embeddings": 8}  # fmt: skip
    assert_same_when_divided(model_of(config), single_turns(), 2)


def test_models_that_see_images_are_refused() -> None:
    """Their features are not divided."""
    model = models.auto_class("qwen3_vl").from_config(models.config("qwen3_vl"))
    check_divides(model, together(1))
    with pytest.raises(ConfigError, match="vision tower"):
        check_divides(model, together(2))
