"""Logprobs, entropy and gradients by Triton's kernels, in Triton's interpreter: those of torch in float64."""

import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.learner.learner import TorchLearner
from actors.models import choices, triton_trial
from actors.models.logprobs import LogitTransform, chunked_logprobs_and_entropy
from actors.process.packages import is_installed
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder

CPU = torch.device("cpu")
TRANSFORMS = [LogitTransform(), LogitTransform(scale=2.0, cap=3.0)]


@pytest.fixture
def needs_triton() -> None:
    """Skip where Triton is missing, which torch for CPUs does not bring along. tests/conftest.py has it interpreted."""
    if not is_installed("triton"):
        words = "not run: install triton"
        pytest.fail(words) if os.environ.get("CI") == "true" else pytest.skip(words)


class Layer:
    """Hidden states, an output layer with a bias, temperatures from 0 to 2 or none, and weights of a loss."""

    def __init__(self, dtype: torch.dtype, tokens: int, vocabulary: int, tempered: bool, learns_head: bool) -> None:
        rng = torch.Generator().manual_seed(0)
        shapes = (tokens, 6), (vocabulary, 6), (vocabulary,)
        self.given = [torch.randn(*s, dtype=torch.float64, generator=rng).to(dtype).requires_grad_() for s in shapes]
        self.learned = self.given if learns_head else self.given[:1]
        for tensor in self.given[len(self.learned) :]:
            tensor.requires_grad_(False)
        self.ids = torch.randint(0, vocabulary, (tokens,), generator=rng)
        self.temperatures = torch.linspace(0, 2, tokens) if tempered else None
        self.of_both = [torch.randn(tokens, dtype=torch.float64, generator=rng).to(dtype) for _ in range(2)]

    def exact(self, transform: LogitTransform) -> tuple[Tensor, Tensor]:
        """By the formulas, all logits at once."""
        z = linear(*self.given) * transform.scale
        z = z if transform.cap == math.inf else transform.cap * torch.tanh(z / transform.cap)
        if self.temperatures is not None:
            z = z / torch.where(self.temperatures > 0, self.temperatures, 1.0).to(z.dtype)[:, None]
        log_p = z.log_softmax(-1)
        return log_p.gather(1, self.ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def chunked(self, transform: LogitTransform, entropy: bool, fused: bool = True) -> tuple[Tensor, Tensor]:
        """In chunks of two tokens."""
        return chunked_logprobs_and_entropy(
            *self.given, self.ids, self.temperatures, transform, entropy, 2 * 4 * len(self.given[1]), fused
        )

    def results(self, found: tuple[Tensor, Tensor], entropy: bool) -> list[Tensor]:
        """Logprobs, entropies and gradients of what is learned, in float64."""
        loss = (found[0] * self.of_both[0]).sum() + ((found[1] * self.of_both[1]).sum() if entropy else 0.0)
        return [x.detach().double() for x in (*found, *torch.autograd.grad(loss, self.learned))]


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
@pytest.mark.parametrize("tempered", [True, False], ids=["tempered", "untempered"])
@pytest.mark.parametrize(("entropy", "learns_head"), [(True, True), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 3), (5, 17), (3, 4099)], ids=str)
def test_values_and_gradients_are_those_of_float64(
    tokens: int, vocabulary: int, entropy: bool, learns_head: bool, tempered: bool, transform: LogitTransform
) -> None:
    """float64 to 1e-6, in which the kernels get scale and cap as float32 on a GPU; float32 to 1e-5."""
    reference = Layer(torch.float64, tokens, vocabulary, tempered, learns_head)
    expected = reference.results(reference.exact(transform), entropy)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        layer = Layer(dtype, tokens, vocabulary, tempered, learns_head)
        for one, other in zip(layer.results(layer.chunked(transform, entropy), entropy), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * max(1.0, float(other.abs().max())))


@pytest.mark.usefixtures("needs_triton")
def test_chunks_in_bfloat16_are_torchs_within_its_rounding() -> None:
    """Logits leave the product rounded, in both; after that all is float32, and gradients are rounded once."""
    layer = Layer(torch.bfloat16, 5, 301, True, True)
    found, expected = (
        layer.results(layer.chunked(LogitTransform(), True, fused), entropy=True) for fused in (True, False)
    )
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=1e-5)
    for one, other in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)


@pytest.mark.usefixtures("needs_triton")
def test_logits_far_apart_do_not_overflow() -> None:
    """The largest logit last, after blocks of much smaller ones, and the other way round."""
    from actors.models import fused_output_layer

    logits = torch.linspace(-3000, 3000, 9000)[None].repeat(2, 1)
    logits[1] = logits[1].flip(0)
    ids = torch.tensor([8999, 8999])
    logprobs, normalisers, entropies = fused_output_layer.read(logits, ids, None, 1.0, math.inf)
    expected = logits.double().log_softmax(-1)
    # numbers about 3000 are 2.4e-4 apart in float32
    torch.testing.assert_close(logprobs.double(), expected[:, 8999], rtol=1e-6, atol=2.4e-4)
    torch.testing.assert_close(normalisers.double(), logits.double().logsumexp(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(entropies.double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("learns_head", [False, True], ids=["frozen", "full"])
def test_memory_does_not_depend_on_the_vocabulary(learns_head: bool) -> None:
    """Bytes alive at once in forward and backward pass, without the layer's own gradient: those of a chunk of 1 MB."""
    peaks = [peak(260, vocabulary, learns_head, fused=False) for vocabulary in (2_000, 16_000, 128_000)]
    assert max(peaks) <= 4 << 20
    assert max(peaks) < 1.1 * peaks[0]


@pytest.mark.usefixtures("needs_triton")
def test_the_kernels_need_less_memory_than_torch() -> None:
    """The logits of a chunk, and in the interpreter a copy of them; torch has three tensors of that size at once."""
    fused, plain = (peak(2, 128_000, learns_head=False, fused=fused) for fused in (True, False))
    assert fused <= 2.1 * (1 << 20)
    assert plain >= 2.8 * (1 << 20)


def peak(tokens: int, vocabulary: int, learns_head: bool, fused: bool) -> int:
    """Bytes of forward and backward pass, with chunks of 1 MB, less the gradient of the layer."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(number, 4, generator=generator) for number in (tokens, vocabulary))
    layer, ids = (hidden.requires_grad_(), weight.requires_grad_(learns_head)), torch.arange(tokens)
    with LiveBytes() as live:
        logprobs, _ = chunked_logprobs_and_entropy(*layer, None, ids, None, chunk_bytes=1 << 20, fused=fused)
        torch.autograd.grad(logprobs.sum(), layer[: 1 + learns_head])
    return live.most - 4 * weight.numel() * learns_head


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made inside, at the moment of the most."""

    def __init__(self) -> None:
        super().__init__()
        self._now: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in given | self._now.keys():
                self._now[key] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self._now.pop, key, None)
        self.most = max(self.most, sum(self._now.values()))
        return found


@pytest.mark.usefixtures("needs_triton")
def test_a_step_by_the_kernels_is_torchs(model_folder: ModelFolder) -> None:
    """Loss, norm, entropy and weights of the learner, with an entropy bonus, packed in two rows."""
    learners, measured = [], []
    for kernel in ("torch", "triton"):
        config = run_config(model_folder(), entropy_coef=0.01, optimizer={"eps": 1e-4})
        model = config.model.model_copy(update={"output_layer": kernel})
        learners.append(TorchLearner(config.model_copy(update={"model": model})))
        measured.append(learners[-1].step(step_batch(random_samples(), micro_batches=2)))
    for name in ("loss", "grad_norm", "entropy"):
        assert measured[1][name] == pytest.approx(measured[0][name], rel=1e-4, abs=1e-6), name
    for one, other in zip(*(learner.model.parameters() for learner in learners), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("needs_triton")
def test_kernels_that_differ_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` computes with torch and says why; `triton` ends with the reason."""
    from actors.models import fused_output_layer

    assert triton_trial.trial(CPU, torch.float32) == ""
    assert triton_trial.trial(CPU, torch.bfloat16) == ""

    def wrong(*given: Any) -> Tensor:
        return plain(*given).mul_(1.1)

    plain = fused_output_layer.overwrite
    monkeypatch.setattr(fused_output_layer, "overwrite", wrong)
    assert "differ from torch by" in triton_trial.trial(CPU, torch.float32)
    monkeypatch.setattr(fused_output_layer, "overwrite", None)
    assert "do not run: TypeError" in triton_trial.trial(CPU, torch.float32)
    with pytest.raises(ConfigError, match=r"model\.output_layer: triton: the kernels do not run.*use auto or torch"):
        triton_trial.takes_triton(ModelConfig(path="m", output_layer="triton"), CPU, torch.float32)


COMPILES = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from actors.models import fused_output_layer as kernels

for function in (kernels._read, kernels._overwrite):
    for dtype, flag in (("*bf16", False), ("*fp32", True)):
        constants = {name: flag for name in function.arg_names if name.startswith("HAS_")}
        constants |= {"EXACT": tl.float32, "SIZE": 4096}
        types = {"logits": dtype, "ids": "*i64", "V": "i32", "scale": "fp32", "cap": "fp32"}
        signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in function.arg_names}
        values = {(function.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=function, signature=signature, constexprs=values)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
        print("compiled")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("needs_triton")
def test_the_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """Without a GPU, to machine code; with and without temperatures, entropy and cap."""
    given = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILES], env=given, capture_output=True, text=True, timeout=200)
    assert done.stdout.count("compiled") == 4, done.stderr[-2000:]


def test_triton_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"model\.output_layer: triton needs a GPU, and the model is on cpu"):
        triton_trial.takes_triton(ModelConfig(path="m", output_layer="triton"), CPU, torch.float32)
    assert not triton_trial.takes_triton(ModelConfig(path="m"), CPU, torch.float32)


@pytest.mark.parametrize(
    ("keys", "on_gpu", "has", "taken", "words"),
    [
        ({}, False, True, "torch", "on a CPU"),
        ({}, True, True, "triton", "those of torch at the start"),
        ({}, True, False, "torch", "triton is not installed"),
        ({"output_layer": "torch"}, True, True, "torch", "as configured"),
    ],
)
def test_the_choice_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], on_gpu: bool, has: bool, taken: str, words: str
) -> None:
    """By key, value and words."""
    monkeypatch.setattr(choices, "is_installed", lambda name: has)
    monkeypatch.setattr(choices, "c_compiler", lambda: "gcc")
    found = choices.output_layer(ModelConfig.model_validate({"path": "m"} | keys), on_gpu)
    assert found.taken == taken
    assert words in str(found)


def test_a_gpu_without_a_c_compiler_computes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would fail at the first row."""
    monkeypatch.setattr(choices, "is_installed", lambda name: True)
    monkeypatch.setattr(choices, "c_compiler", lambda: None)
    assert "C compiler" in str(choices.output_layer(ModelConfig(path="m"), on_gpu=True))
