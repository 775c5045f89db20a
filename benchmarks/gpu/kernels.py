"""Phase `kernels`: attention of packed rows and the chunked output layer, compared with float64 on the CPU.

The reference attention is written out here, sample by sample. Every kernel runs twice: once as in training, and once
with NaN in all memory that torch hands out, so that an element which the kernel does not write is seen.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import counters

from actors.models.attention import PackedRow, implementation, pack_row
from actors.models.attention.flash import flash_attention
from actors.models.attention.flex import flex_row_attention
from actors.models.attention.padded import padded_attention
from actors.models.attention.varlen import varlen_row_attention
from actors.models.logprobs import LogitTransform, chunked_logprobs_and_entropy, logprobs_and_entropy
from benchmarks.gpu.phases import NOT_HERE, NotHereError, Report
from benchmarks.gpu.setting import Setting, relative_error, worst
from benchmarks.trainer_cases import Lengths
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError

KERNELS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "padded": padded_attention,
    "varlen": varlen_row_attention,
    "flash": flash_attention,
    "flex": flex_row_attention,
}
IN_FLOAT32 = ("padded", "flex")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
"""Allowed ‖error‖ / ‖exact‖, by precision of the inputs."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
POISON_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
"""Sizes of blocks that are filled with NaN and freed, for the allocator to hand out again."""


@dataclass(frozen=True)
class Rows:
    """A row and the heads over it."""

    name: str
    lengths: Lengths
    heads: int = 16
    key_heads: int = 8
    dim: int = 128
    window: int | None = None
    softcap: float | None = None

    def row(self, device: torch.device) -> PackedRow:
        """Return the packed row."""
        samples = [(prompt, size) for prompt, sizes in self.lengths for size in sizes]
        offsets = np.cumsum([0, *(prompt + size for prompt, size in samples)])
        prompts = np.array([prompt for prompt, _ in samples])
        # completions of a group share its prompt
        shared = [prompt * (b > 0) for prompt, sizes in self.lengths for b in range(len(sizes))]
        return pack_row(np.zeros(offsets[-1], np.int32), offsets, prompts, shared, device)


SHARED: Lengths = [(1, [1, 6]), (37, [2, 90, 200]), (130, [64, 65, 1, 128])]


def rows(setting: Setting) -> Iterator[Rows]:
    """Yield rows that differ in one thing each; a row of one sample with n + 1 tokens has n."""
    shared = Rows("shared prompts", setting.size(SHARED, [(1, [1, 6]), (7, [2, 9, 20])]))
    yield shared
    yield replace(shared, name="heads 14/2 of 64", heads=14, key_heads=2, dim=64)
    yield replace(shared, name="window", window=setting.size(50, 5))
    yield replace(shared, name="soft cap", softcap=20.0)
    yield Rows("one prompt, 16 completions", [setting.size((200, [40] * 16), (9, [4] * 16))], heads=4, key_heads=2)
    for tokens in setting.size((1, 127, 128, 129, 4097), (1, 16, 17)):
        yield Rows(f"{tokens} tokens", [(1, [tokens])], heads=4, key_heads=2)
    yield replace(shared, name="window and soft cap", window=setting.size(50, 5), softcap=20.0)


def measure(setting: Setting, report: Report) -> None:
    """Compare all kernels, then the output layer, then count the compilations of new lengths."""
    torch.manual_seed(0)
    exact: dict[tuple[str, str], list[Tensor]] = {}
    compiled = [kernel for kernel in KERNELS if kernel == "flex"]  # last: each case compiles for seconds on a GPU
    quick = [kernel for kernel in KERNELS if kernel not in compiled]
    _attention(quick, exact, setting, report)
    for head in _heads(setting):
        with report.case("output layer", vars(head) | {"transform": str(head.transform)}) as found:
            found |= _compared_head(head, setting)
    _lengths(quick, setting, report)
    _attention(compiled, exact, setting, report)
    _lengths(compiled, setting, report)


def _attention(
    kernels: Sequence[str], exact: dict[tuple[str, str], list[Tensor]], setting: Setting, report: Report
) -> None:
    """Compare kernels on all rows. `exact` keeps the references, which all kernels share, by row and precision."""
    for kernel, dtype in itertools.product(kernels, ("bfloat16", "float32")):
        if dtype == "float32" and kernel not in IN_FLOAT32:
            continue
        labels = {"kernel": kernel, "dtype": dtype}
        if words := why_not(kernel, dtype, setting):
            report.add("attention", labels | {NOT_HERE: words})
            continue
        for case in rows(setting):
            with report.case("attention", labels | {"row": case.name}) as found:
                inputs = _inputs(case, DTYPES[dtype])
                torch._dynamo.reset()  # the cases before count against the limit of compilations
                if (case.name, dtype) not in exact:
                    exact[case.name, dtype] = _reference(case, inputs)
                found |= _compared(kernel, case, inputs, exact[case.name, dtype], setting)


def _lengths(kernels: Sequence[str], setting: Setting, report: Report) -> None:
    for kernel in kernels:
        with report.case("new lengths", {"kernel": kernel}) as found:
            check_here(kernel, "bfloat16", setting)
            found |= _compilations(kernel, setting)


def why_not(kernel: str, dtype: str, setting: Setting) -> str:
    """Return why the device has no such kernel; empty if it has. FlexAttention has a forward pass on CPUs."""
    if kernel == "flex" and not setting.on_gpu:
        return ""
    config = ModelConfig.model_validate({"path": "none", "attention": kernel, "dtype": dtype})
    try:
        implementation(config, setting.device)
    except ConfigError as error:
        return str(error)
    return ""


def check_here(kernel: str, dtype: str, setting: Setting) -> None:
    """Raise NotHereError if the device has no such kernel."""
    if words := why_not(kernel, dtype, setting):
        raise NotHereError(words)


# --- attention -------------------------------------------------------------------------------------------------------


def _inputs(case: Rows, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the outputs, on the CPU: (R, heads, dim), already rounded."""
    size = len(case.row(torch.device("cpu")).token_ids_R)
    generator = torch.Generator().manual_seed(size)
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    return [torch.randn(size, number, case.dim, generator=generator).to(dtype) for number in heads]


def _reference(case: Rows, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs and the gradients of queries, keys and values, in float64."""
    row, given = case.row(torch.device("cpu")), [x.double() for x in inputs]
    q, k, v = (x.requires_grad_() for x in given[:3])
    outputs, places, done = [], [], 0
    for index in row.samples:
        # shared tokens are computed with the first sample that has them; indices of a sample rise
        first = int(np.searchsorted(index, done))
        done = max(done, int(index[-1]) + 1)
        keys = torch.from_numpy(index)
        queries, at = keys[first:], torch.arange(first, len(index))
        age = at[:, None] - torch.arange(len(index))[None]
        hidden = (age < 0) | (age >= (case.window or len(index)))
        group = case.heads // case.key_heads
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys].repeat_interleave(group, 1)) * case.dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v[keys].repeat_interleave(group, 1)))
        places.append(queries)
    out = torch.zeros_like(given[3]).index_copy(0, torch.cat(places), torch.cat(outputs))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])]


def _compared(
    kernel: str, case: Rows, inputs: Sequence[Tensor], exact: list[Tensor], setting: Setting
) -> dict[str, Any]:
    with_gradients = setting.on_gpu or kernel != "flex"
    names = ["out", "dq", "dk", "dv"][: 4 if with_gradients else 1]
    tolerance = TOLERANCE[inputs[0].dtype]
    found: dict[str, Any] = {} if with_gradients else {"gradients": "FlexAttention has none on a CPU"}
    for label, memory in (("", contextlib.nullcontext), (" in NaN", lambda: _poisoned(setting, kernel != "flex"))):
        with memory(), config.patch(fail_on_recompile_limit_hit=True):
            computed = _attended(kernel, case, inputs, setting.device, with_gradients)
        errors = [relative_error(one, expected) for one, expected in zip(computed, exact, strict=False)]
        found |= {f"{name}{label}": error for name, error in zip(names, errors, strict=True)}
        found["ok"] = found.get("ok", True) and worst(errors) < tolerance
    return found


def _attended(
    kernel: str, case: Rows, inputs: Sequence[Tensor], device: torch.device, with_gradients: bool
) -> list[Tensor]:
    """Return output and gradients of a kernel, as (R, heads, dim)."""
    # (1, heads, R, dim), as a model's projections have it
    q, k, v, of_out = (x.to(device).transpose(0, 1)[None].detach() for x in inputs)
    options = {"packed_row": case.row(device), "sliding_window": case.window, "softcap": case.softcap}
    if not with_gradients:
        with torch.no_grad():
            out, _ = KERNELS[kernel](None, q, k, v, None, **options)
        return [out[0]]
    for x in (q, k, v):
        x.requires_grad_()
    out, _ = KERNELS[kernel](None, q, k, v, None, **options)
    gradients = torch.autograd.grad(out, (q, k, v), of_out.transpose(1, 2).to(out.dtype))
    return [out[0], *(gradient[0].transpose(0, 1) for gradient in gradients)]


@contextlib.contextmanager
def _poisoned(setting: Setting, by_torch: bool = True) -> Iterator[None]:
    """Fill new memory with NaN.

    Args:
        setting: on a GPU, blocks of several sizes are filled and freed.
        by_torch: torch fills all new tensors itself, in its deterministic mode; compiled code would be compiled again.
    """
    if setting.on_gpu:
        blocks = [setting.randn(size // 4, dtype=torch.float32).fill_(float("nan")) for size in POISON_BYTES]
        del blocks
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(by_torch, warn_only=True)
    settings: Any = torch.utils.deterministic
    assert settings.fill_uninitialized_memory  # torch's default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _compilations(kernel: str, setting: Setting) -> dict[str, Any]:
    """Return the graphs that torch compiles for rows of new lengths, in training and without gradient."""
    counters.clear()
    base = Rows("", [], heads=4, key_heads=2, dim=64)
    with config.patch(fail_on_recompile_limit_hit=True):
        for number in range(setting.size(20, 3)):
            case = replace(base, lengths=[(3 + number, [7 + 13 * number, 5])])
            inputs = _inputs(case, torch.bfloat16)
            for with_gradients in (True, False) if setting.on_gpu or kernel != "flex" else (False,):
                _attended(kernel, case, inputs, setting.device, with_gradients)
    return {"rows": number + 1, "graphs": counters["stats"].get("unique_graphs", 0)}


# --- output layer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A case of the output layer. `temperature` 0 stands for a different temperature of each token."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    learns: bool
    temperature: float
    transform: LogitTransform = field(default_factory=LogitTransform)


def _heads(setting: Setting) -> Iterator[Head]:
    tokens, hidden, vocabulary = setting.size((300, 256, 5_003), (21, 16, 67))
    for dtype, learns, temperature in itertools.product(DTYPES, (False, True), (1.0, 0.6, 0.0)):
        yield Head(tokens, hidden, vocabulary, dtype, learns, temperature)
    for transform in (LogitTransform(cap=5.0), LogitTransform(scale=0.5)):
        yield Head(tokens, hidden, vocabulary, "bfloat16", True, 0.6, transform)
        yield Head(tokens, hidden, vocabulary, "bfloat16", False, 0.6, transform)
    large = setting.size((128, 1_024, 151_936), (21, 16, 331))
    for learns in (False, True):
        yield Head(*large, "bfloat16", learns, 1.0)


def _compared_head(head: Head, setting: Setting) -> dict[str, Any]:
    generator, dtype = torch.Generator().manual_seed(0), DTYPES[head.dtype]
    hidden = torch.randn(head.tokens, head.hidden, generator=generator).to(dtype)
    weight = (3 * head.hidden**-0.5 * torch.randn(head.vocabulary, head.hidden, generator=generator)).to(dtype)
    ids = torch.randint(head.vocabulary, (head.tokens,), generator=generator)
    of_logprobs = torch.randn(head.tokens, generator=generator)
    fixed = torch.full((head.tokens,), head.temperature)
    temperatures = fixed if head.temperature else 0.5 + torch.rand(head.tokens, generator=generator)
    num_gradients = 2 if head.learns else 1

    def gradients(inputs: Sequence[Tensor], found: tuple[Tensor, Tensor]) -> list[Tensor]:
        logprobs, entropy = found
        loss = (logprobs * of_logprobs.to(logprobs)).sum()
        return [logprobs, entropy, *torch.autograd.grad(loss, inputs[:num_gradients])]

    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_(head.learns)]
    logits = exact[0] @ exact[1].T * head.transform.scale
    if np.isfinite(head.transform.cap):
        logits = head.transform.cap * torch.tanh(logits / head.transform.cap)
    expected = gradients(exact, logprobs_and_entropy(logits, ids, temperatures.double()))
    device = setting.device
    given = [hidden.to(device).requires_grad_(), weight.to(device).requires_grad_(head.learns)]
    with _poisoned(setting):
        found = chunked_logprobs_and_entropy(
            given[0],
            given[1],
            None,
            ids.to(device),
            temperatures.to(device),
            head.transform,
            chunk_bytes=4 * head.vocabulary * (head.tokens // 3),  # several chunks
        )
    names = ("logprobs", "entropy", "dhidden", "dweight")
    computed = gradients(given, found)
    errors = [relative_error(one, two) for one, two in zip(computed, expected, strict=True)]
    return dict(zip(names, errors, strict=False)) | {"ok": worst(errors) < TOLERANCE[dtype]}
