"""Phase `engine`: the embedded engine with Qwen3-0.6B: decoding, prefill, updates, agreement with the trainer."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.nn.attention import SDPBackend, sdpa_kernel

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import Completion, SampleRequest
from actors.learner.learner import TorchLearner
from benchmarks.gpu.phases import Report
from benchmarks.gpu.setting import Setting
from benchmarks.trainer_cases import batch_of, scored_group
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.model import ModelConfig
from schemas.messages import PolicyVersion

EOS = 2
TIMEOUT = 120.0
NO_END = {EOS: -1e4}
MISMATCH = {"float32": 1e-4, "bfloat16": 0.1}
"""Allowed mean difference of the logprobs of trainer and engine, in nats a token."""
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def measure(setting: Setting, report: Report) -> None:
    """Measure decoding, prefill and updates, and compare logprobs with the trainer's."""
    contexts = setting.size((128, 1_024), (8, 24))
    batches = setting.size((1, 32, 256), (1, 4))
    for lora in (False, True):
        for context in contexts:
            with contextlib.ExitStack() as stack:
                engines: list[EmbeddedEngine] = []
                labels = {"lora": lora, "context": context}
                with report.case("engines", labels):
                    engines.append(stack.enter_context(_engine(setting, lora, batches[-1], context)))
                for size in batches if engines else ():
                    with report.case("decode", labels | {"sequences": size}) as found:
                        found |= _decode(engines[0], size, context, setting)
            setting.fresh()
    with report.case("token by token", {}) as found:
        found |= _token_by_token(setting)
    with report.case("prefill", {}) as found:
        found |= _prefill(setting)
    for dtype in ("bfloat16", "float32"):
        for lora in (True, False):
            with report.case("with trainer", {"dtype": dtype, "lora": lora}) as found:
                found |= _with_trainer(dtype, lora, setting)
            setting.fresh()


def _model(setting: Setting, lora: bool, dtype: str = "bfloat16") -> ModelConfig:
    keys = {"path": str(setting.model()), "device": setting.device.type, "dtype": dtype, "lora": {} if lora else None}
    return ModelConfig.model_validate(keys)


@contextlib.contextmanager
def _engine(
    setting: Setting, lora: bool, sequences: int, context: int, dtype: str = "bfloat16"
) -> Iterator[EmbeddedEngine]:
    """Yield an engine with room for `context` tokens and 128 new ones in each sequence."""
    limits = EmbeddedEngineConfig(max_sequences=sequences, max_sequence_len=context + 128)
    engine = EmbeddedEngine(_model(setting, lora, dtype), limits, "interrupt")
    try:
        yield engine
    finally:
        engine.close()


def _sampled(
    engine: EmbeddedEngine, number: int, context: int, new: int, bias: dict[int, float] = NO_END
) -> tuple[float, list[Completion]]:
    """Return the seconds of a request for completions of `new` tokens, and the completions.

    Without an end of sequence the logprobs are of another distribution than the trainer's.
    """
    prompt = np.random.default_rng(context).integers(3, engine._decoder.vocab_size, context).tolist()
    request = SampleRequest(prompt, number, new, 0, logit_bias=bias)
    started = time.perf_counter()
    completions = engine.submit(request).result(TIMEOUT)
    return time.perf_counter() - started, completions


def _decode(engine: EmbeddedEngine, number: int, context: int, setting: Setting) -> dict[str, float]:
    """Return the tokens per second between the fifth and the last token of a request, sampling included."""
    few, many = 4, setting.size(64, 12)
    _sampled(engine, number, context, few)
    differences = []
    for _ in range(setting.size(3, 1)):
        short, long = (_sampled(engine, number, context, new)[0] for new in (few, few + many))
        differences.append(long - short)
    seconds = statistics.median(differences)
    return {"ms_per_token": 1e3 * seconds / many, "tokens_per_second": number * many / seconds}


def _token_by_token(setting: Setting) -> dict[str, Any]:
    """Return the milliseconds of each decode over a growing length, with torch's choice of kernels and without cuDNN.

    Each length is passed twice: a plan that is built for a new length costs the first pass alone.
    """
    number, context, new = setting.size((32, 512, 64), (4, 8, 4))
    config = _model(setting, lora=False)
    decoder = Decoder(config, EmbeddedEngineConfig(max_sequences=number, max_sequence_len=context + new + 1))
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, decoder.vocab_size, number).astype(np.int32)
    prompts = [rng.integers(3, decoder.vocab_size, context).astype(np.int32) for _ in range(number)]
    found: dict[str, Any] = {"sequences": number, "first_length": context + 1}
    for name, choice in (("default", contextlib.nullcontext()), ("without cuDNN", sdpa_kernel(WITHOUT_CUDNN))):
        with choice:
            for turn in ("first", "second"):
                decoder.prefill(prompts, range(number))
                times = []
                for position in range(context, context + new):
                    setting.synchronize()
                    started = time.perf_counter()
                    decoder.decode(tokens, np.full(number, position))
                    setting.synchronize()
                    times.append(1e3 * (time.perf_counter() - started))
                found[f"{name}, {turn}"] = {"median_ms": statistics.median(times), "largest_ms": max(times)}
    return found


def _prefill(setting: Setting) -> dict[str, float]:
    number, length = setting.size((16, 1_024), (2, 16))
    limits = EmbeddedEngineConfig(max_sequences=number, max_sequence_len=length, max_prefill_tokens=number * length)
    decoder = Decoder(_model(setting, lora=False), limits)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, decoder.vocab_size, length).astype(np.int32) for _ in range(number)]
    found = setting.timed(lambda: decoder.prefill(prompts, range(number)), setting.size(5, 2))
    return found | {"tokens_per_second": 1e3 * number * length / found["ms"]}


def _with_trainer(dtype: str, lora: bool, setting: Setting) -> dict[str, Any]:
    """Return the pause of updates, and the difference of the logprobs of engine and trainer.

    The trainer has taken a step, so its weights are no longer those of the model's files.
    """
    number, context, new = setting.size((32, 256, 64), (4, 8, 8))
    length = number * (context + new)
    config = setting.config(setting.model(), length, {"dtype": dtype, "lora": {} if lora else None}, learning_rate=1e-5)
    learner = TorchLearner(config)
    with _engine(setting, lora, number, context, dtype) as engine:
        _, completions = _sampled(engine, number, context, new, {})
        learner.step(_batch(engine, completions, context, length, 1))
        weights, found = learner.weights(), {}
        found["idle_pause_ms"] = 1e3 * engine.load(PolicyVersion(lineage=1, version=1), weights, TIMEOUT)
        running = engine.submit(SampleRequest([3] * context, number, new, 0, logit_bias=NO_END))
        before = engine.status().generated_tokens
        while engine.status().generated_tokens < before + number:
            time.sleep(0.001)
        found["busy_pause_ms"] = 1e3 * engine.load(PolicyVersion(lineage=1, version=2), weights, TIMEOUT)
        running.result(TIMEOUT)
        _, completions = _sampled(engine, number, context, new, {})
        values = learner.step(_batch(engine, completions, context, length, 2))
    for key in ("mismatch_abs", "mismatch_max", "mismatch_kl", "entropy"):
        found[key] = values[key]
    return found | {"ok": values["mismatch_abs"] < MISMATCH[dtype]}


def _batch(engine: EmbeddedEngine, completions: list[Completion], context: int, length: int, step: int) -> Any:
    """Return the batch of a step with the engine's completions and logprobs."""
    prompt = np.random.default_rng(context).integers(3, engine._decoder.vocab_size, context)
    tokens, logprobs = [one.token_ids for one in completions], [one.logprobs for one in completions]
    group = scored_group(0, prompt, tokens, logprobs, np.arange(len(completions), dtype=np.float64))
    return batch_of([group], length, step)
