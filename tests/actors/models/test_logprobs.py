"""Logprobs of chosen tokens, with numbers to check by hand; by chunks and from all logits."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from actors.models.logprobs import LogitTransform, chunked_logprobs_and_entropy, logprobs_and_entropy

LOGITS = torch.tensor([[math.log(1), math.log(2), math.log(5)]])
"""Probabilities 1/8, 2/8, 5/8."""
TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.5), LogitTransform(cap=3.0), LogitTransform(scale=2.0, cap=3.0)]
Computation = Callable[..., tuple[Tensor, Tensor]]


def by_chunks(
    logits: Tensor, ids: Tensor, temperatures: Tensor, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Chunks of two tokens; the hidden states are the logits, the output layer an identity."""
    weight = torch.eye(logits.shape[1], dtype=logits.dtype)
    size = 2 * 4 * logits.shape[1]
    return chunked_logprobs_and_entropy(
        logits, weight, None, ids, temperatures, LogitTransform(), entropy_gradient, size
    )


BOTH = pytest.mark.parametrize("computation", [logprobs_and_entropy, by_chunks])


@BOTH
def test_logprob_is_that_of_the_softmax(computation: Computation) -> None:
    """2 of 8."""
    logprobs, entropy = computation(LOGITS, torch.tensor([1]), torch.ones(1))
    assert math.exp(float(logprobs)) == pytest.approx(2 / 8)
    assert float(entropy) == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)))


@BOTH
def test_each_token_has_its_own_temperature_and_greedy_means_untempered(computation: Computation) -> None:
    """Rows at 0.5, which squares the weights (1 + 4 + 25), at 0 (greedy) and at 1."""
    logprobs, _ = computation(LOGITS.expand(3, 3), torch.tensor([2, 2, 0]), torch.tensor([0.5, 0.0, 1.0]))
    assert logprobs.exp().tolist() == pytest.approx([25 / 30, 5 / 8, 1 / 8])


@BOTH
def test_bfloat16_logits_are_normalised_in_float32(computation: Computation) -> None:
    """The result has float32's precision: the probabilities of all tokens sum to 1."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    logprobs, _ = computation(logits.expand(1000, 1000), torch.arange(1000), torch.ones(1000))
    assert logprobs.dtype == torch.float32
    assert float(logprobs.exp().sum()) == pytest.approx(1.0, abs=1e-5)


@BOTH
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_do_not_depend_on_whose_gradient_is_asked_for(computation: Computation, temperature: float) -> None:
    """Bit by bit, so that a ratio of the two is exactly 1."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    arguments = (logits, torch.arange(5), torch.full((5,), temperature))
    with torch.no_grad():
        expected, _ = computation(*arguments)
    for entropy_gradient in (False, True):
        assert torch.equal(computation(*arguments, entropy_gradient=entropy_gradient)[0], expected)


@BOTH
def test_entropy_has_a_gradient_where_it_is_asked_for(computation: Computation) -> None:
    """dH/dz_i = −p_i (log p_i + H), at temperature 0.5 twice that of the tempered logits; else there is none."""
    logits = LOGITS.clone().requires_grad_()
    arguments = (logits, torch.tensor([1]), torch.tensor([0.5]))
    assert not computation(*arguments)[1].requires_grad
    computation(*arguments, entropy_gradient=True)[1].sum().backward()
    p = [1 / 30, 4 / 30, 25 / 30]
    entropy = -sum(x * math.log(x) for x in p)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-2 * x * (math.log(x) + entropy) for x in p], abs=1e-6)


class Layer:
    """11 hidden states, an output layer for 17 tokens, temperatures from 0 to 2, and weights of a loss."""

    def __init__(self, dtype: torch.dtype, learns_head: bool = True, tempered: bool = True) -> None:
        rng = torch.Generator().manual_seed(0)
        self.hidden, self.weight, self.bias = (
            torch.randn(*shape, dtype=dtype, generator=rng) for shape in ((11, 6), (17, 6), (17,))
        )
        self.inputs = [self.hidden, self.weight, self.bias][: 3 if learns_head else 1]
        for tensor in self.inputs:
            tensor.requires_grad_()
        self.ids = torch.randint(0, 17, (11,), generator=rng)
        self.temperatures = torch.arange(11) / 5 if tempered else torch.ones(11)
        self.of_logprobs, self.of_entropy = (torch.randn(11, dtype=dtype, generator=rng) for _ in range(2))

    def plain(self, transform: LogitTransform, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """All logits at once, and autograd's own gradients."""
        logits = linear(self.hidden, self.weight, self.bias) * transform.scale
        logits = logits if transform.cap == math.inf else transform.cap * torch.tanh(logits / transform.cap)
        return logprobs_and_entropy(logits, self.ids, self.temperatures, entropy_gradient)

    def chunked(self, transform: LogitTransform, entropy_gradient: bool, tokens: int = 4) -> tuple[Tensor, Tensor]:
        """In chunks of this many tokens at most."""
        layer = (self.hidden, self.weight, self.bias)
        return chunked_logprobs_and_entropy(
            *layer, self.ids, self.temperatures, transform, entropy_gradient, chunk_bytes=tokens * 4 * 17
        )

    def gradients(self, found: tuple[Tensor, Tensor], entropy_gradient: bool) -> list[Tensor]:
        """Of a loss with both; logprobs and entropy stand before them."""
        loss = (found[0] * self.of_logprobs).sum()
        if entropy_gradient:
            loss = loss + (found[1] * self.of_entropy).sum()
        return [*found, *torch.autograd.grad(loss, self.inputs)]


@pytest.mark.slow
@pytest.mark.parametrize("tempered", [True, False], ids=["tempered", "untempered"])
@pytest.mark.parametrize("learns_head", [True, False], ids=["full", "frozen"])
@pytest.mark.parametrize("entropy_gradient", [True, False], ids=["entropy", "alone"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)
def test_chunks_have_the_logprobs_and_gradients_of_all_logits_at_once(
    transform: LogitTransform, entropy_gradient: bool, learns_head: bool, tempered: bool
) -> None:
    """11 tokens in chunks of at most 4; in float32 to 1e-5, in float64 to 1e-10 and equal to finite differences."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        layer = Layer(dtype, learns_head, tempered)
        expected = layer.gradients(layer.plain(transform, entropy_gradient), entropy_gradient)
        found = layer.gradients(layer.chunked(transform, entropy_gradient), entropy_gradient)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    wanted = 2 if entropy_gradient else 1
    assert torch.autograd.gradcheck(lambda *_: layer.chunked(transform, entropy_gradient)[:wanted], layer.inputs)


@pytest.mark.parametrize("learns_head", [True, False], ids=["full", "frozen"])
def test_autocast_computes_logits_and_gradients_as_a_linear_layer_under_it_does(learns_head: bool) -> None:
    """bfloat16 logits bit by bit, float32 after them; gradients to bfloat16's precision."""
    layer = Layer(torch.float32, learns_head)
    with torch.autocast("cpu", torch.bfloat16):
        plain, chunked = layer.plain(LogitTransform(), False), layer.chunked(LogitTransform(), False, tokens=11)
    assert chunked[0].dtype == torch.float32
    torch.testing.assert_close(chunked, plain, rtol=0, atol=1e-5)
    pairs = zip(layer.gradients(chunked, False), layer.gradients(plain, False), strict=True)
    for found, expected in pairs:
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_chunks_of_a_layer_in_bfloat16_are_added_in_float32() -> None:
    """512 equal tokens, a chunk each: 512 times the gradient of one. A sum in bfloat16 stands still at 256 times."""
    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=rng).bfloat16() for shape in ((1, 6), (17, 6)))
    bias, found = torch.zeros(17, dtype=torch.bfloat16), []
    for number in (1, 512):
        layer = [tensor.clone().requires_grad_() for tensor in (weight, bias)]
        ids, ones = torch.zeros(number, dtype=torch.long), torch.ones(number)
        logprobs, _ = chunked_logprobs_and_entropy(hidden.expand(number, 6), *layer, ids, ones, chunk_bytes=4 * 17)
        found.append(torch.autograd.grad(logprobs.sum(), layer))
    for one, many in zip(*found, strict=True):
        assert many.dtype == torch.bfloat16
        assert torch.equal(many, 512 * one)


def test_the_same_chunks_have_the_same_bits() -> None:
    """Twice the same: logprobs, entropy, all gradients."""
    first, second = (
        [layer := Layer(torch.float32), layer.gradients(layer.chunked(LogitTransform(), True), True)] for _ in "ab"
    )
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_no_token_is_no_chunk() -> None:
    """A micro-batch whose tokens are all masked has logprobs of size 0, and gradients of 0."""
    layer = Layer(torch.float32)
    none = layer.ids[:0], layer.temperatures[:0]
    logprobs, _ = chunked_logprobs_and_entropy(layer.hidden[:0], layer.weight, layer.bias, *none)
    assert not any(gradient.any() for gradient in torch.autograd.grad(logprobs.sum(), layer.inputs))
