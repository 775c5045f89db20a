"""Room for the cache of the embedded engine on a GPU: one that grows too large would fail in the middle of a run."""

from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.errors import ConfigError

WORK_BYTES = 1 << 30
"""Memory of a forward beside weights and cache: activations of a prefill, logits, a layer's cache while it grows."""


def check_cache_fits(limits: EmbeddedEngineConfig, token_bytes: int, free_bytes: int) -> None:
    """Check that a full cache fits into the memory that the weights have left.

    Args:
        limits: sequences decoded at once, and their longest length.
        token_bytes: bytes of a token's keys and values.
        free_bytes: memory of the GPU that is free once the weights are there.

    Raises:
        ConfigError: it does not; with the number of sequences that would fit.
    """
    sequence = limits.max_sequence_len * token_bytes
    wanted, room = limits.max_sequences * sequence, free_bytes - WORK_BYTES
    if wanted > room:
        fitting = max(0, room // sequence)
        raise ConfigError(
            f"inference.engine.max_sequences: {limits.max_sequences} sequences of {limits.max_sequence_len} tokens "
            f"(max_sequence_len) need a cache of {wanted / 1e9:.1f} GB, and the GPU has {max(room, 0) / 1e9:.1f} GB "
            f"left beside the weights; {fitting} sequences fit. Lower one of the two, or set inference.engine.type: "
            "vllm, which gives a sequence room in small blocks"
        )
