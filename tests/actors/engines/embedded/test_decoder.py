"""The model side of the embedded engine computes as the trainer does."""

from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.embedded import decoder
from actors.engines.embedded.decoder import Decoder, single_rows_round_otherwise
from actors.models import loading
from actors.models.attention import PADDED, pack_row
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import LoraConfig, ModelConfig, QuantizationConfig
from tests.conftest import ModelFolder

IDS = np.random.default_rng(0).integers(3, 30, 24).astype(np.int32)
CPU = torch.device("cpu")


def _decoder(config: ModelConfig, max_sequences: int = 4) -> Decoder:
    return Decoder(config, EmbeddedEngineConfig(max_sequences=max_sequences, max_sequence_len=64))


@pytest.mark.slow
def test_an_adapter_in_16_bits_gives_the_trainers_own_logits(model_folder: ModelFolder) -> None:
    """peft keeps the adapter in float32; both sides compute it in bfloat16, so there is no mismatch to the last bit."""
    lora = LoraConfig(rank=4)
    config = ModelConfig(path=str(model_folder()), dtype="bfloat16", device="cpu", lora=lora)
    engine = _decoder(config)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in loading.adapter_tensors(engine.model).items():
        if "lora_B" in name:  # zeros at the start, so that an adapter changes nothing
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 5)
    trained: Any = loading.load_model(config, torch.bfloat16, attention=PADDED)
    trained = loading.add_lora(trained, config).train()
    loading.copy_into(loading.adapter_tensors(trained), loading.adapter_tensors(engine.model), "the engine")
    for size in range(4, IDS.size):
        row = pack_row(IDS[: size + 1], np.array([0, size + 1]), np.array([size]), [0], CPU)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as the learner computes
            expected = trained(**row.forward_arguments(), logits_to_keep=row.source_T).logits[0]
        assert torch.equal(engine.prefill([IDS[:size]], [0]), expected), size


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "adapter"])
def test_an_exact_head_gives_float32_logits(model_folder: ModelFolder, lora: LoraConfig | None) -> None:
    """Of hidden states and weights that are rounded, as in the trainer; and of new weights from their next call on."""
    config = ModelConfig(path=str(model_folder()), dtype="bfloat16", device="cpu", lora=lora, head_dtype="float32")
    engine = _decoder(config)
    seen: list[torch.Tensor] = []
    body: Any = engine.model.get_decoder()  # type: ignore[operator]
    body.norm.register_forward_hook(lambda module, given, output: seen.append(output))
    head: Any = engine.model.get_output_embeddings()  # type: ignore[operator]
    for factor in (1, 3):
        head.weight.data *= factor
        logits = engine.prefill([IDS], [0])
        assert logits.dtype == torch.float32
        expected = seen[-1][0, -1:].double() @ head.weight.double().T
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_single_row_is_computed_among_two_where_it_would_round_otherwise(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only one sequence may run at a time; the logits are those of the one."""
    config = ModelConfig(path=str(model_folder()), dtype="float32", device="cpu")
    expected = _decoder(config, 1)
    expected.prefill([IDS], [0])
    monkeypatch.setattr(decoder, "single_rows_round_otherwise", lambda *_: True)
    padded = _decoder(config, 1)
    padded.prefill([IDS], [0])
    rows: list[int] = []
    head: Any = padded.model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape[1]))
    for token in (5, 9):
        at = np.array([IDS.size + len(rows)])
        logits = padded.decode(np.array([token], np.int32), at)
        torch.testing.assert_close(logits, expected.decode(np.array([token], np.int32), at), rtol=0, atol=1e-5)
    assert rows == [2, 2]


@pytest.mark.parametrize(
    ("quantized", "device", "otherwise"), [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)]
)
def test_single_rows_round_otherwise_for_quantised_layers_on_a_gpu_alone(
    quantized: bool, device: str, otherwise: bool
) -> None:
    """bitsandbytes has a kernel for single rows there."""
    config = ModelConfig(
        path="m", lora=LoraConfig(), quantization=QuantizationConfig(type="nf4") if quantized else None
    )
    assert single_rows_round_otherwise(config, torch.device(device)) == otherwise
