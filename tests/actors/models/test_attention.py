"""A packed row computes what separate samples compute, and nothing passes from one sample to another."""

import sys
from collections.abc import Iterator, Sequence
from importlib import invalidate_caches
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from actors.models import attention, loading
from actors.models.attention import pack_row
from actors.models.attention.flex import flex_row_attention
from actors.models.attention.padded import Blocks, padded_attention
from actors.models.attention.rows import RowLengths
from actors.models.logprobs import logprobs_and_entropy
from actors.models.token_logprobs import TokenLogprobs
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from tests import models
from tests.actors.models import flash_attn, varlen_attn
from tests.conftest import ModelFolder

FAMILIES = ("qwen3", "llama", "mistral", "gemma2")
Sample = tuple[list[int], list[int], int]
"""prompt, completion, group"""


def samples(seed: int = 0) -> list[Sample]:
    """Three groups of prompts with 1 to 17 tokens and completions with 1 to 20: samples of several length classes."""
    rng = np.random.default_rng(seed)
    found = []
    for group, (prompt_size, sizes) in enumerate([(1, (1, 6)), (7, (2, 9, 20)), (17, (5, 4, 1))]):
        prompt = rng.integers(3, 30, prompt_size).tolist()
        found += [(prompt, rng.integers(3, 30, size).tolist(), group) for size in sizes]
    return found


def packed_logprobs(model: Any, rows: Sequence[Sample], share: bool = True, padding: int = 0) -> list[Tensor]:
    """Logprobs of each completion, from one packed forward, with padding behind the samples."""
    tokens = np.array(list(chain.from_iterable(p + c for p, c, _ in rows)), np.int32)
    offsets = np.cumsum([0, *(len(p) + len(c) for p, c, _ in rows)])
    prompts = np.array([len(p) for p, _, _ in rows])
    groups = [g for _, _, g in rows] if share else list(range(len(rows)))
    shared = [len(p) * (b > 0 and groups[b - 1] == groups[b]) for b, (p, _, _) in enumerate(rows)]
    row = pack_row(tokens, offsets, prompts, shared, torch.device("cpu"))
    row = row.padded(len(row.token_ids_R) + padding)
    chosen = torch.tensor(list(chain.from_iterable(c for _, c, _ in rows)))
    logits = model(**row.forward_arguments(), logits_to_keep=row.source_T).logits[0]
    flat, _ = logprobs_and_entropy(logits, chosen, torch.ones(len(chosen)))
    return list(flat.split([len(c) for _, c, _ in rows]))


def packing_model(model_folder: ModelFolder, family: str, kernel: str = "padded") -> Any:
    """The model as the trainer loads it."""
    config = ModelConfig(path=str(model_folder(family)), dtype="float32", device="cpu")
    return loading.load_model(config, torch.float32, attention=attention.NAMES[kernel]).eval()


@pytest.fixture(params=["padded", "varlen", "flash", "flex"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each on a CPU: doubles of torch's and flash-attn's kernels, and flex not compiled, without torch's guard."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # eager, it has a backward pass there too
    with varlen_attn.kernels_for_cpus():
        yield str(request.param)


def test_row_holds_a_shared_prompt_once_and_no_last_token() -> None:
    """Prompt 10 11 with completions 12 13 14 and 15 16: two prompt tokens, three inputs, five predictions."""
    tokens = np.array([10, 11, 12, 13, 14, 10, 11, 15, 16], np.int32)
    row = pack_row(tokens, np.array([0, 5, 9]), np.array([2, 2]), [0, 2], torch.device("cpu"))
    assert row.token_ids_R.tolist() == [10, 11, 12, 13, 15]
    assert row.position_ids_R.tolist() == [0, 1, 2, 3, 2]
    assert row.source_T.tolist() == [1, 2, 3, 1, 4]
    assert [block.tolist() for block in row.planned(Blocks.of).indices] == [[[0, 1, 2, 3]], [[0, 1, 4]]]


def test_samples_that_share_nothing_keep_their_own_prompts() -> None:
    """Also if their tokens are equal: what is shared is said, not found."""
    tokens = np.array([5, 6, 7, 8, 5, 9], np.int32)
    row = pack_row(tokens, np.array([0, 2, 4, 6]), np.array([1, 1, 1]), [0, 0, 0], torch.device("cpu"))
    assert row.token_ids_R.tolist() == [5, 7, 5]
    assert row.source_T.tolist() == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_equal_those_of_single_samples(
    model_folder: ModelFolder, family: str, share: bool, kernel: str
) -> None:
    """Several length classes, prompts shared or not, windows and soft caps: within 1e-5 of plain transformers."""
    rows = samples()
    single = models.plain(model_folder(family), models.reference_attention(family))
    with torch.no_grad():
        packed = packed_logprobs(packing_model(model_folder, family, kernel), rows, share)
        for (prompt, completion, _), found in zip(rows, packed, strict=True):
            torch.testing.assert_close(found, models.logprobs(single, prompt, completion), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_a_packed_row_is_the_sum_of_single_gradients(
    model_folder: ModelFolder, family: str, kernel: str
) -> None:
    """A shared prompt collects the gradient of all its completions."""
    rows = samples()
    weights = [0.5 + 0.25 * i for i in range(len(rows))]
    packed = packing_model(model_folder, family, kernel)
    total: Any = sum(w * found.sum() for w, found in zip(weights, packed_logprobs(packed, rows), strict=True))
    total.backward()
    single = models.plain(model_folder(family), models.reference_attention(family))
    for weight, (prompt, completion, _) in zip(weights, rows, strict=True):
        (weight * models.logprobs(single, prompt, completion).sum()).backward()
    for (name, ours), theirs in zip(packed.named_parameters(), single.parameters(), strict=True):
        assert ours.grad is not None
        scale = theirs.grad.abs().max()
        assert (ours.grad - theirs.grad).abs().max() < 1e-5 * scale, name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_padding_behind_the_samples_changes_nothing(model_folder: ModelFolder, family: str, kernel: str) -> None:
    """Logprobs within 1e-5, gradients within 1e-5 of the largest; one token of padding and many."""
    rows, found = samples(), []
    for padding in (0, 1, 70):
        model = packing_model(model_folder, family, kernel)
        logprobs = torch.cat(packed_logprobs(model, rows, padding=padding))
        (logprobs * torch.linspace(0, 2, len(logprobs))).sum().backward()
        found.append([logprobs.detach(), *(parameter.grad for parameter in model.parameters())])
    for padded in found[1:]:
        for one, other in zip(padded, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(
    ("multiple", "longest", "lengths"),
    [
        (1, 0, {1: 1, 77: 77}),
        (128, 1000, {1: 128, 128: 128, 129: 256, 896: 896, 897: 1000, 1000: 1000}),
        (2048, 16384, {1: 2048, 16000: 16384}),
        (8, 20, {30: 30}),
    ],
)
def test_rows_have_few_lengths(multiple: int, longest: int, lengths: dict[int, int]) -> None:
    """Multiples, and the longest row; a row that is longer all the same stays as it is."""
    given = RowLengths(multiple, longest)
    assert {length: given.of(length) for length in lengths} == lengths
    if longest and longest >= multiple:
        assert len({given.of(length) for length in range(1, longest + 1)}) == -(-longest // multiple)


def test_window_is_what_the_sliding_models_are_compared_with(model_folder: ModelFolder) -> None:
    """Without its window Mistral gives other logprobs here, so the comparisons above do see the window."""
    prompt, completion, _ = samples()[4]
    model = models.plain(model_folder("mistral"))
    with torch.no_grad():
        inside = models.logprobs(model, prompt, completion)
        model.config.sliding_window = None
        assert (inside - models.logprobs(model, prompt, completion)).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("changed", [0, 3, 7])
def test_no_sample_sees_another(model_folder: ModelFolder, changed: int, kernel: str) -> None:
    """Other tokens in one completion leave the logprobs of all other samples as they were, bit by bit."""
    model, rows = packing_model(model_folder, "qwen3", kernel), samples()
    prompt, completion, group = rows[changed]
    other = [*rows[:changed], (prompt, [3 + (t + 1) % 27 for t in completion], group), *rows[changed + 1 :]]
    with torch.no_grad():
        before, after = packed_logprobs(model, rows), packed_logprobs(model, other)
    assert not torch.equal(before[changed], after[changed])
    assert all(torch.equal(before[i], after[i]) for i in range(len(rows)) if i != changed)


def test_no_group_sees_the_prompt_of_another(model_folder: ModelFolder, kernel: str) -> None:
    """Another prompt in the middle group changes its own samples only."""
    model, rows = packing_model(model_folder, "qwen3", kernel), samples()
    other = [([3 + (t + 1) % 27 for t in p] if g == 1 else p, c, g) for p, c, g in rows]
    with torch.no_grad():
        before, after = packed_logprobs(model, rows), packed_logprobs(model, other)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [g != 1 for _, _, g in rows]


def test_norms_that_leave_float32_under_autocast_are_no_hindrance(model_folder: ModelFolder, kernel: str) -> None:
    """Qwen3 normalises queries and keys with float32 weights; values are bfloat16, and so are the kernel's inputs."""
    model, rows = packing_model(model_folder, "qwen3", kernel), samples()
    with torch.no_grad():
        exact = torch.cat(packed_logprobs(model, rows))
        with torch.autocast("cpu", torch.bfloat16):
            rounded = torch.cat(packed_logprobs(model, rows))
    assert 0 < (exact - rounded).abs().max() < 0.05


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("given", "dtype", "device", "there", "chosen"),
    [
        ("auto", "bfloat16", CPU, {"varlen", "flash", "compiler"}, "padded"),
        ("auto", "bfloat16", GPU, {"varlen", "flash"}, "varlen"),
        ("auto", "bfloat16", GPU, {"flash", "compiler"}, "flex"),
        ("auto", "float32", GPU, {"varlen", "compiler"}, "flex"),
        ("auto", "float32", GPU, {"varlen"}, "padded"),
        ("padded", "bfloat16", GPU, {"varlen"}, "padded"),
        ("flex", "bfloat16", GPU, {"varlen"}, "flex"),
        ("flash", "bfloat16", GPU, {"flash"}, "flash"),
        ("flash", "bfloat16", GPU, {"varlen"}, "model.attention: flash needs the package flash-attn"),
        ("varlen", "bfloat16", GPU, {"flash"}, "model.attention: varlen needs torch 2.11 or newer"),
        ("flash", "bfloat16", CPU, {"flash"}, "model.attention: flash needs a GPU, and the model is on cpu"),
        ("varlen", "bfloat16", CPU, {"varlen"}, "model.attention: varlen needs a GPU, and the model is on cpu"),
        ("flex", "float32", CPU, {"compiler"}, "model.attention: flex needs a GPU, and the model is on cpu"),
    ],
)
def test_kernel_is_the_best_that_there_is_or_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, given: Any, dtype: Any, device: torch.device, there: set[str], chosen: str
) -> None:
    """What can't run there is refused by name."""
    monkeypatch.setattr(attention, "is_installed", lambda name: "flash" in there)
    monkeypatch.setattr(attention, "has_varlen", lambda: "varlen" in there)
    monkeypatch.setattr(attention, "c_compiler", lambda: "gcc" if "compiler" in there else None)
    config = ModelConfig(path="m", dtype=dtype, attention=given)
    if chosen in attention.NAMES:
        assert attention.implementation(config, device) == attention.NAMES[chosen]
    else:
        with pytest.raises(ConfigError, match=chosen):
            attention.implementation(config, device)


def test_a_folder_of_another_package_is_not_flash_attn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """flash-attn-4 installs flash_attn/cute and no flash_attn/__init__.py."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_spec("flash_attn") is not None, "Python finds the folder"
    with pytest.raises(ConfigError, match="flash needs the package flash-attn, which is not installed"):
        attention.implementation(ModelConfig(path="m", attention="flash"), GPU)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    invalidate_caches()
    assert attention.implementation(ModelConfig(path="m", attention="flash"), GPU) == attention.NAMES["flash"]


def test_a_model_in_host_memory_is_looked_at_without_the_kernel_of_its_gpu(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are loaded on the CPU with the kernel of their GPU, and the output layer is read before they move."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the kernel has no version for CPUs")

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=refuse))
    model = packing_model(model_folder, "gemma2", "flash")
    TokenLogprobs(model)
    assert model.config._attn_implementation == attention.NAMES["flash"]
    with pytest.raises(AssertionError, match="no version for CPUs"):
        packed_logprobs(model, samples())


def test_dropout_of_the_model_is_not_left_out_by_flex() -> None:
    """Which has none: the same random numbers as in padded blocks."""
    x = torch.randn(1, 1, 40, 4)
    row = pack_row(np.arange(41, dtype=np.int32), np.array([0, 41]), np.array([1]), [0], CPU)
    found = []
    for function in (flex_row_attention, padded_attention):
        torch.manual_seed(0)
        found.append(function(None, x, x, x, None, packed_row=row, dropout=0.5)[0])
    assert torch.equal(*found)
    torch.manual_seed(0)
    assert not torch.equal(found[0], padded_attention(None, x, x, x, None, packed_row=row)[0])


@pytest.mark.parametrize("name", ["flash", "varlen"])
def test_kernels_of_16_bits_are_refused_for_float32(name: Any) -> None:
    """Before anything is loaded."""
    with pytest.raises(ValueError, match=f"attention: {name} computes in 16 bits; set dtype bfloat16"):
        ModelConfig(path="m", dtype="float32", attention=name)
