"""A prompt that several completions share is computed once, and output and gradients are those of copies."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.models.attention.flash import Sequences as Copies
from actors.models.attention.padded import padded_attention
from actors.models.attention.rows import PackedRow, ends_of, pack_row
from actors.models.attention.shared_prompts import Segments, merged
from actors.models.attention.varlen import varlen_row_attention
from tests.actors.models import varlen_attn

Groups = list[tuple[int, list[int]]]
"""Tokens of the prompt, and of each of its completions."""
GROUPS: Groups = [(1, [1, 6]), (5, [9]), (7, [2, 9, 20, 1]), (17, [5, 4, 1]), (3, [1, 1]), (4, [2, 1])]


def row_of(groups: Groups) -> PackedRow:
    """The row of these groups."""
    return tree_of([(prompt * (b > 0), prompt, size) for prompt, sizes in groups for b, size in enumerate(sizes)])


def tree_of(samples: list[tuple[int, int, int]], has_many_copies: bool = False) -> PackedRow:
    """The row of samples: tokens shared with the sample before, tokens of the prompt, tokens of the completion."""
    offsets = np.cumsum([0, *(prompt + size for _, prompt, size in samples)])
    prompts, shared = np.array([prompt for _, prompt, _ in samples]), [shared for shared, *_ in samples]
    return pack_row(np.zeros(offsets[-1], np.int32), offsets, prompts, shared, torch.device("cpu"), has_many_copies)


def inputs(size: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output: (1, heads, R, dim), as a model's projections have it."""
    generator = torch.Generator().manual_seed(size)
    shapes = [(1, size, number, dim) for number in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes]


def attended(function: Any, row: PackedRow, given: list[Tensor], **options: Any) -> list[Tensor]:
    """Output (1, R, heads, dim), and the gradients of query, key and value."""
    q, k, v = (x.detach().requires_grad_() for x in given[:3])
    with varlen_attn.kernels_for_cpus():
        out, _ = function(None, q, k, v, None, packed_row=row, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3].transpose(1, 2))]


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("options", [{}, {"scaling": 0.7}, {"sliding_window": 26}], ids=str)
def test_output_and_gradients_are_exact(heads: int, key_heads: int, options: dict[str, Any]) -> None:
    """In float64, to its rounding; the longest sample has 26 tokens, so that the window hides nothing."""
    row = row_of(GROUPS)
    assert row.planned(Segments.of).longest_sample == 26
    given = inputs(len(row.token_ids_R), heads, key_heads, 8, torch.float64)
    for found, expected in zip(
        attended(varlen_row_attention, row, given, **options),
        attended(padded_attention, row, given, **options),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


TREE = [(0, 4, 9), (10, 13, 5), (15, 16, 4), (10, 10, 3), (3, 6, 7), (6, 6, 2), (0, 5, 3), (5, 5, 2)]
"""A chain of branches, a branch without a prompt of its own, one inside the prompt, a retry; and another tree."""


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}], ids=str)
def test_branches_of_branches_are_exact(options: dict[str, Any]) -> None:
    """Three levels of shared runs, merged; and with a window, whose copies are made again in the backward pass."""
    row = tree_of(TREE, has_many_copies=True)
    assert len(row.planned(Segments.of).levels) == 3
    given = inputs(len(row.token_ids_R), 4, 2, 8, torch.float64)
    plain = attended(padded_attention, tree_of(TREE), given, **options)
    for function in (varlen_row_attention, padded_attention):
        for found, expected in zip(attended(function, row, given, **options), plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_a_row_holds_a_branch_behind_the_tokens_it_shares() -> None:
    """Prompt of 2 with 3 tokens, a branch after one of them, and one behind the prompt."""
    row = tree_of([(0, 2, 3), (3, 4, 1), (2, 2, 1)])
    assert [index.tolist() for index in row.samples] == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1]]
    assert row.position_ids_R.tolist() == [0, 1, 2, 3, 3]
    assert row.source_T.tolist() == [1, 2, 3, 4, 1]
    assert ends_of(row).tolist() == [5, 5, 5, 4, 5]


def test_the_kernels_of_windows_are_exact_with_copies() -> None:
    """A window shorter than a sample."""
    row = row_of(GROUPS)
    given = inputs(len(row.token_ids_R), 4, 2, 8, torch.float64)
    found, expected = (
        attended(function, row, given, sliding_window=25) for function in (varlen_row_attention, padded_attention)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_the_calls_hold_each_token_once() -> None:
    """Prompt of 3 with completions of 3 and 2 tokens, and a sample of 2 + 2; last tokens predict nothing."""
    segments = Segments.of(row_of([(3, [4, 3]), (2, [3])]))
    assert segments.own.query_starts.tolist() == segments.own.key_starts.tolist() == [0, 3, 6, 8, 12]
    (level,) = segments.levels
    assert level.queries_C.tolist() == [3, 4, 5, 6, 7]
    assert level.keys_P.tolist() == [0, 1, 2]
    assert level.sequences.query_starts.tolist() == [0, 5]
    assert level.sequences.key_starts.tolist() == [0, 3]
    assert (level.sequences.longest_query, level.sequences.longest_key) == (5, 3)


def test_rows_without_a_shared_prompt_are_one_call() -> None:
    """Also where all but one completion of a group has a single token, which predicts nothing."""
    segments = Segments.of(row_of([(3, [4]), (2, [1, 5, 1])]))
    assert segments.levels == ()
    assert segments.own.query_starts.tolist() == [0, 6, 12]


def test_a_groups_prompt_costs_the_same_for_any_number_of_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores computed: the prompt's own once; with copies, once per completion."""
    computed: list[int] = []

    def counted(query: Tensor, key: Tensor, causal: bool, scale: float | None, reach: int) -> Any:
        computed.append(len(query) * len(key))
        return plain(query, key, causal, scale, reach)

    plain = varlen_attn.scores_of
    monkeypatch.setattr(varlen_attn, "scores_of", counted)
    prompt, completion = 40, 5
    for number in (2, 5, 16):
        row = row_of([(prompt, [completion + 1] * number)])
        given = inputs(len(row.token_ids_R), 2, 1, 8, torch.float32)
        computed.clear()
        attended(varlen_row_attention, row, given)
        forward_and_backward = 2 * (prompt**2 + number * completion * (prompt + completion))
        assert sum(computed) == forward_and_backward
        computed.clear()
        attended(varlen_row_attention, row, given, sliding_window=prompt)
        assert sum(computed) == 2 * number * (prompt + completion) ** 2


@pytest.mark.parametrize("completions", [2, 16, 64])
def test_gradients_of_a_prompt_are_rounded_once(completions: int) -> None:
    """In bfloat16 the error of keys and values does not grow with the group, as that of added copies does."""
    row = row_of([(20, [9] * completions)])
    given = inputs(len(row.token_ids_R), 4, 2, 16, torch.bfloat16)
    exact = attended(padded_attention, row, [x.double() for x in given])
    found = attended(varlen_row_attention, row, given)

    def error(gradients: list[Tensor]) -> float:
        of_prompt = [x[:, :, :20].double() for x in gradients[2:]]
        wanted = [x[:, :, :20] for x in exact[2:]]
        return max(float((one - two).norm() / two.norm()) for one, two in zip(of_prompt, wanted, strict=True))

    # 2⁻⁹ is the largest relative error of one rounding; the kernel rounds its output too, and each call its gradient
    assert error(found) < 2 * 2**-9


def test_copies_of_a_prompt_are_what_the_kernel_would_need() -> None:
    """What sharing saves: 64 copies of the prompt."""
    row = row_of([(200, [9] * 64)])
    assert len(row.planned(Copies.of).index_N) == 64 * 208
    segments = row.planned(Segments.of)
    (level,) = segments.levels
    assert int(segments.own.key_starts[-1] + level.sequences.key_starts[-1]) == 200 + 64 * 8 + 200


@pytest.mark.parametrize("larger", [0.0, 40.0, 1000.0])
def test_merge_of_two_calls_is_the_softmax_over_both(larger: float) -> None:
    """Also where one of them has all the weight."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64)
    scores[..., 4:] += larger
    values = torch.randn(11, 3, 8, generator=generator, dtype=torch.float64)

    def over(keys: slice) -> tuple[Tensor, Tensor]:
        weights = scores[..., keys].softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values[keys]), scores[..., keys].logsumexp(-1)

    for one, other in zip(merged(*over(slice(4)), *over(slice(4, 11))), over(slice(11)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_a_kernel_with_another_log_sum_exp_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch documents no layout of its operator; a wrong one would train on wrong gradients."""

    def transposed(*given: Any, **named: Any) -> Any:
        out, lse, *others = plain(*given, **named)
        return out, lse.T.contiguous(), *others

    plain = varlen_attn.forward
    monkeypatch.setattr(varlen_attn, "forward", transposed)
    row = row_of(GROUPS)
    with pytest.raises(RuntimeError, match=r"returns the log-sum-exp as \(\d+, 4\) and not as \(4, \d+\)"):
        attended(varlen_row_attention, row, inputs(len(row.token_ids_R), 4, 2, 8, torch.float32))
