"""Tokens and operations of a training step, with numbers to check by hand."""

import numpy as np
import pytest

from actors.learner.micro_batches import micro_batch
from benchmarks.gpu.trainer import SAMPLES, rates
from benchmarks.trainer_cases import (
    QWEN3,
    Lengths,
    Shape,
    batch_of,
    row_tokens,
    sample_tokens,
    scored_group,
    step_batch,
)

TINY = Shape(10, 4, 6, 2, 3, 1, 5)
"""Parameters: 2 × (2 × (3 + 1) × 5 × 4 + 3 × 4 × 6) + 10 × 4."""
GROUP: Lengths = [(3, [2, 4])]
"""Samples of 5 and 7 tokens; 9 tokens with the prompt once, of which two are last ones."""


def test_operations_count_heads_of_any_size() -> None:
    """4 × 504 × 9 + 6 × 2 × 15 × (25 + 49) with LoRA, and 6 in place of the 4 without."""
    assert TINY.parameters == 504
    assert TINY.flops(GROUP, lora=True) == 18_144 + 13_320
    assert TINY.flops(GROUP, lora=False) == 27_216 + 13_320


@pytest.mark.parametrize(
    ("samples", "lora", "full"), [("1 × 16k", 8.02, 9.21), ("4 × 4k", 3.79, 4.99), ("8 × 2k", 3.09, 4.28)]
)
def test_operations_per_token_of_qwen3(samples: str, lora: float, full: float) -> None:
    """In 10⁹: attention is 70 % at 16 384 tokens, 23 % at 2 048."""
    lengths = SAMPLES[samples]
    assert QWEN3.parameters == 595_984_384
    for is_lora, expected in ((True, lora), (False, full)):
        assert QWEN3.flops(lengths, is_lora) / 16_384 / 1e9 == pytest.approx(expected, abs=0.006)


def test_tokens_of_rows_count_a_prompt_once_and_samples_each_time() -> None:
    """The row of the packer's own batch has as many tokens."""
    assert (row_tokens(GROUP), sample_tokens(GROUP)) == (7, 12)
    batch = step_batch(GROUP, 10, 12, 1)
    import torch

    assert len(micro_batch(batch, 0, torch.device("cpu")).row.token_ids_R) == 7
    assert batch.token_ids.size == 12


@pytest.mark.parametrize("samples", SAMPLES)
def test_the_measured_samples_fill_one_row(samples: str) -> None:
    """16 384 tokens, as the packer counts them."""
    assert sample_tokens(SAMPLES[samples]) == 16_384
    assert len(step_batch(SAMPLES[samples], 320, 16_384, 1).micro_batch_offsets) == 2


def test_rates_are_of_rows_and_of_samples() -> None:
    """In half a second, on a device of 10⁶ operations a second; without a data sheet there is no MFU."""
    found = rates(TINY, GROUP, True, 0.5, 1e6)
    assert found["row_tokens_per_second"] == 14
    assert found["sample_tokens_per_second"] == 24
    assert found["mfu"] == pytest.approx(31_464 / 0.5 / 1e6)
    assert rates(TINY, GROUP, True, 0.5, None)["mfu"] is None


def test_a_group_of_given_completions_keeps_tokens_and_logprobs() -> None:
    """Completions of two lengths, in the order given."""
    group = scored_group(0, [5, 6], [[7], [8, 9]], [[-1.0], [-2.0, -3.0]], np.array([0.0, 1.0]))
    batch = batch_of([group], 8, 2)
    assert sorted(batch.token_ids.tolist()) == [5, 5, 6, 6, 7, 8, 9]
    logprobs = dict(zip(batch.token_ids.tolist(), batch.logprobs.tolist(), strict=True))
    assert logprobs == {5: 0.0, 6: 0.0, 7: -1.0, 8: -2.0, 9: -3.0}
    assert batch.step == 2
