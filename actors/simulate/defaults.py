"""Figures of the models for a configuration without a run to go by."""

from actors.simulate.models import Times
from schemas.config import RunConfig
from schemas.config.fake_engine import FakeEngineConfig

FAKE = {
    "decode_sequence_seconds": 0.0,
    "prefill_token_seconds": 0.0,
    "update_pause_seconds": 0.0,
    "wire_seconds": 0.01,
    "prompt_tokens": 20.0,
    # uniform from 4 to 11
    "completion_tokens": 7.5,
    "completion_spread": 0.3,
    "reward_seconds": 0.002,
    "step_seconds": 0.005,
    "micro_batch_seconds": 0.0,
    "train_token_seconds": 0.0,
    "publish_seconds": 0.005,
    "checkpoint_seconds": 0.0,
    "save_seconds": 0.1,
    "restart_seconds": 5.0,
}
"""Figures of the engine for dry runs, with the trainer that only waits."""
SMALLEST_DECODE_SECONDS = 0.0005
"""Seconds of a decoding step of the engine for dry runs, whose thread needs a little even without a pause."""


def times_of(config: RunConfig) -> Times:
    """Return the default figures of a configuration."""
    engine = config.inference.engine
    if isinstance(engine, FakeEngineConfig):
        return Times(decode_seconds=engine.token_seconds + SMALLEST_DECODE_SECONDS, **FAKE)
    # environments of one turn have no such key; of the others half of the limit is a guess as good as any
    most = max((getattr(one, "max_turns", 1) for one in config.trained), default=1)
    return Times(turns=max(1.0, most / 2))
