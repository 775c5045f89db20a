"""With the engine's experts the trainer's logprobs are nearer to the engine's (trainer.router_replay)."""

from typing import Any

import numpy as np
import torch

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import SampleRequest
from actors.learner.learner import TorchLearner
from schemas.config import RunConfig
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.routed import packed, unknown
from tests.actors.learner.steps import Sampled, run_config, step_batch
from tests.conftest import ModelFolder

PROMPTS = [[1, *range(first, first + 4)] for first in range(4, 24, 4)]


def sampled_batch(config: RunConfig) -> Any:
    """Completions of the embedded engine, with the experts that it tells."""
    limits = EmbeddedEngineConfig(max_sequences=32, max_sequence_len=64)
    engine = EmbeddedEngine(config.model, limits, "interrupt", Decoder(config.model, limits, tells_experts=True))
    samples, experts = [], []
    for ordinal, prompt in enumerate(PROMPTS):
        completions = engine.submit(SampleRequest(prompt, 4, 12, seed=ordinal * 10)).result(60.0)
        for number, one in enumerate(completions):
            samples.append(Sampled(prompt, one.token_ids, one.logprobs, (-1.0) ** number, ordinal))
            assert one.routed_experts is not None
            whole = np.concatenate([one.routed_experts, unknown(1, one.routed_experts)])
            experts.append(whole[len(prompt) if number else 0 :])  # a group's prompt is there once
    engine.close()
    pieces, layout = packed(np.concatenate(experts))
    return step_batch(samples), {"routed_experts": pieces, "expert_layout": layout}


def mismatch(learner: TorchLearner, batch: Any) -> float:
    """Largest difference between the logprobs of engine and trainer, in the first update of a step."""
    return learner.step(batch)["mismatch_max"]


def test_experts_of_the_engine_keep_logprobs_near_where_routers_differ(model_folder: ModelFolder) -> None:
    """The trainer's gates are a little off: without replay some tokens take other experts; in one model they agree."""
    config = run_config(model_folder("qwen3_moe"), learning_rate=1e-12)
    batch, told = sampled_batch(config)
    replaying = config.model_copy(update={"trainer": config.trainer.model_copy(update={"router_replay": True})})
    assert mismatch(TorchLearner(replaying), batch.model_copy(update=told)) < 1e-4
    found = {}
    for name, each, made in (("own", config, batch), ("replayed", replaying, batch.model_copy(update=told))):
        learner = TorchLearner(each)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in (p for n, p in learner.model.named_parameters() if n.endswith("mlp.gate.weight")):
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.005)
        found[name] = mismatch(learner, made)
    assert found["replayed"] < 0.3 * found["own"]
