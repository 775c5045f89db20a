"""Phase `ceilings`: the limits of this GPU for the sizes of Qwen3-0.6B: copies, products, attention, plans of cuDNN."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from actors.models.attention import pack_row
from actors.models.attention.flex import flex_row_attention
from actors.models.attention.varlen import varlen_row_attention
from benchmarks.gpu.kernels import check_here
from benchmarks.gpu.phases import NotHereError, Report
from benchmarks.gpu.setting import Setting
from benchmarks.machine import peak_flops

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def measure(setting: Setting, report: Report) -> None:
    """Measure the limits one after the other."""
    torch.manual_seed(0)
    report.put("data_sheet_flops", peak_flops(torch.cuda.get_device_name()) if setting.on_gpu else None)
    for kind in ("on the device", "to the host", "to the host, pinned", "from the host, pinned"):
        with report.case("copies", {"copy": kind}) as found:
            found |= _copy(kind, setting)
    for name, rows, inputs, outputs in _products(setting):
        with report.case("products", {"product": name, "sizes": [rows, inputs, outputs]}) as found:
            a, b = setting.randn(rows, inputs), setting.randn(inputs, outputs)
            found |= setting.timed(lambda a=a, b=b: a @ b)
            found["tflops"] = 2 * rows * inputs * outputs / found["ms"] / 1e9
    for length in setting.size((2_048, 4_096, 16_384), (16, 32)):
        number = setting.size(16_384, 32) // length
        for name in (*BACKENDS, "varlen", "flex"):
            with report.case("attention", {"kernel": name, "samples": f"{number} × {length}"}) as found:
                found |= _attention(name, number, length, setting)
    for name in BACKENDS:
        with report.case("new lengths", {"kernel": name}) as found:
            found |= _new_lengths(BACKENDS[name], setting)


def _copy(kind: str, setting: Setting) -> dict[str, float]:
    if kind != "on the device" and not setting.on_gpu:
        raise NotHereError("on a CPU the host's memory is the device's")
    size = setting.size(4 << 30, 1 << 22) if kind == "on the device" else setting.size(1 << 30, 1 << 22)
    near = torch.empty(size, dtype=torch.uint8, device=setting.device)
    if kind == "on the device":
        far = torch.empty_like(near)
        found = setting.timed(lambda: far.copy_(near))
        return found | {"gigabytes_per_second": 2 * size / found["ms"] / 1e6}
    far = torch.zeros(size, dtype=torch.uint8, pin_memory="pinned" in kind)
    to, source = (near, far) if kind.startswith("from") else (far, near)
    found = setting.timed(lambda: to.copy_(source, non_blocking="pinned" in kind))
    return found | {"gigabytes_per_second": size / found["ms"] / 1e6}


def _products(setting: Setting) -> Sequence[tuple[str, int, int, int]]:
    """Return name, rows, inputs and outputs of the products of a row of 16 384 tokens, and a large square."""
    shape, rows = setting.shape, setting.size(16_384, 64)
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    square = setting.size(8_192, 128)
    return (
        ("square", square, square, square),
        ("queries", rows, width, queries),
        ("keys, values", rows, width, keys),
        ("out", rows, queries, width),
        ("gate, up", rows, width, inner),
        ("down", rows, inner, width),
        ("output layer, a chunk", setting.size(883, 64), width, shape.vocab_size),
        ("adapter, in", rows, width, 16),
        ("adapter, out", rows, 16, queries),
    )


def _attention(name: str, number: int, length: int, setting: Setting) -> dict[str, float]:
    """Return times of forward and backward pass of causal attention, heads as in Qwen3-0.6B.

    Keys are repeated for torch's three kernels, of which not all know groups of heads.
    """
    shape = setting.shape
    heads, keys = shape.num_attention_heads, shape.num_key_value_heads
    if name in BACKENDS:
        q, k, v = (setting.randn(number, heads, length, shape.head_dim).requires_grad_() for _ in range(3))
        attend = _sdpa(BACKENDS[name], q, k, v, setting)
    else:
        check_here(name, "bfloat16", setting)
        tokens = number * length
        # a prompt of 1 and a completion of `length` tokens: the last one predicts nothing and is left out
        offsets, prompts = np.arange(number + 1) * (length + 1), np.ones(number, np.int64)
        row = pack_row(np.zeros(offsets[-1], np.int32), offsets, prompts, [0] * number, setting.device)
        q, k, v = (setting.randn(1, n, tokens, shape.head_dim) for n in (heads, keys, keys))
        if setting.on_gpu:  # FlexAttention refuses on a CPU
            for x in (q, k, v):
                x.requires_grad_()
        function: Any = {"varlen": varlen_row_attention, "flex": flex_row_attention}[name]

        def attend() -> Tensor:
            return function(None, q, k, v, None, packed_row=row)[0]

    flops = 2 * heads * shape.head_dim * length**2 * number  # two products over half of length²
    with torch.no_grad():
        forward = setting.timed(attend)
    found = {f"forward_{key}": value for key, value in forward.items()}
    found["forward_tflops"] = flops / forward["ms"] / 1e9
    if name == "flex" and not setting.on_gpu:
        return found
    of_out = torch.randn_like(attend())
    both = setting.timed(lambda: torch.autograd.grad(attend(), (q, k, v), of_out))
    backward = both["ms"] - forward["ms"]
    return found | {"backward_ms": backward, "backward_tflops": 2.5 * flops / backward / 1e9}


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Callable[[], Tensor]:
    if not setting.on_gpu and backend is not SDPBackend.FLASH_ATTENTION:
        raise NotHereError("a kernel for GPUs")

    def attend() -> Tensor:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def _new_lengths(backend: SDPBackend, setting: Setting) -> dict[str, Any]:
    """Return the milliseconds of the program for the first and for the second call at lengths not seen before."""
    shape, first, second = setting.shape, [], []
    for length in range(1_001, 1_001 + setting.size(8, 2)):
        q, k, v = (setting.randn(4, shape.num_attention_heads, length, shape.head_dim) for _ in range(3))
        attend = _sdpa(backend, q, k, v, setting)
        for times in (first, second):
            setting.synchronize()
            started = time.perf_counter()
            attend()
            setting.synchronize()
            times.append(1e3 * (time.perf_counter() - started))
    return {"first_ms": first, "second_ms": second}
