"""Rows of random trees, with common prefixes computed once: as long as counted, and with the gradients of copies."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from actors.learner.micro_batches import MicroBatch, micro_batch, non_empty
from actors.models import attention, loading
from actors.models.attention import pack_row
from actors.models.token_logprobs import TokenLogprobs
from schemas.config.model import ModelConfig
from schemas.messages import StepBatch
from tests.actors.models import flash_attn, varlen_attn
from tests.actors.rollout.test_trajectory_batches import SEQUENCE_LEN, a_step, built
from tests.conftest import ModelFolder

CPU = torch.device("cpu")
SIZES = [2, 7, 20]
"""Most turns of a tree."""


@pytest.fixture(params=["padded", "varlen", "flash", "flex"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each on a CPU, as in the tests of attention."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    with varlen_attn.kernels_for_cpus():
        yield str(request.param)


def in_copies(batch: StepBatch, number: int, micro: MicroBatch) -> MicroBatch:
    """The micro-batch with a row in which no sample shares anything."""
    first, last = batch.micro_batch_offsets[number : number + 2].tolist()
    start, end = batch.sample_offsets[[first, last]].tolist()
    offsets, prompts = batch.sample_offsets[first : last + 1] - start, batch.prompt_lengths[first:last]
    row = pack_row(batch.token_ids[start:end], offsets, prompts, [0] * (last - first), CPU)
    return replace(micro, row=row)


def computed(model: Any, micro: MicroBatch) -> tuple[list[Tensor], list[Tensor]]:
    """Logprobs and entropies; and the gradients of a sum of both, weighted by token."""
    model.zero_grad(set_to_none=True)
    found = TokenLogprobs(model).of(micro.row, micro.token_ids_T, micro.temperatures_T, entropy_gradient=True)
    weights_T = torch.linspace(-1, 1, len(micro.token_ids_T))
    ((found[0] + 0.1 * found[1]) * weights_T).sum().backward()  # type: ignore[no-untyped-call]
    return [x.detach() for x in found], [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("most_turns", SIZES)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_logprobs_entropies_and_gradients_are_those_of_copies(
    model_folder: ModelFolder, family: str, most_turns: int, kernel: str
) -> None:
    """Mistral has a window that is shorter than the samples."""
    config = ModelConfig(path=str(model_folder(family)), dtype="float32", device="cpu")
    model = loading.load_model(config, torch.float32, attention=attention.NAMES[kernel])
    num_shared = 0
    groups, _, _ = a_step(2, most_turns)
    for batch in built(groups, 2, 1):
        for number in non_empty(batch):
            micro = micro_batch(batch, number, CPU)
            plain = in_copies(batch, number, micro)
            num_shared += len(plain.row.token_ids_R) - len(micro.row.token_ids_R)
            (found, gradients), (expected, wanted) = computed(model, micro), computed(model, plain)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
            for one, other in zip(gradients, wanted, strict=True):
                assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))
    assert num_shared > 0


@pytest.mark.parametrize("most_turns", SIZES)
def test_a_row_holds_the_tokens_that_were_counted_for_it(most_turns: int) -> None:
    """All that it does not share, less the last token of each sample, which predicts nothing."""
    more_than_prompts = 0
    for seed in range(20):
        groups, _, _ = a_step(seed, most_turns)
        for batch in built(groups, 3, 1):
            for number in non_empty(batch):
                first, last = batch.micro_batch_offsets[number : number + 2].tolist()
                micro = micro_batch(batch, number, CPU)
                lengths, shared = np.diff(batch.sample_offsets)[first:last], batch.sample_shared[first:last]
                assert len(micro.row.token_ids_R) == (lengths - shared).sum() - (last - first)
                assert (lengths - shared).sum() <= SEQUENCE_LEN
                assert len(micro.row.source_T) == (lengths - batch.prompt_lengths[first:last]).sum()
                ids = [batch.token_ids[slice(*batch.sample_offsets[b : b + 2])] for b in range(first, last)]
                for b in range(1, last - first):
                    assert ids[b][: shared[b]].tolist() == ids[b - 1][: shared[b]].tolist()
                more_than_prompts += int(lengths.sum() > SEQUENCE_LEN)
    assert more_than_prompts > 0 or most_turns == SIZES[0], "no row of copies would have been too long"
