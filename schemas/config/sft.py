"""CHORD: supervised examples beside what the policy samples (docs/algorithms.md)."""

from pydantic import Field

from schemas.config.base import Section


class SftConfig(Section):
    """Mixes a supervised loss in: (1 − μ) · policy + μ · supervised, with μ on a schedule (CHORD, as in ms-swift).

    μ is 0 in the first step and rises linearly to the peak, falls to the valley along half a cosine, and stays there.
    None of these keys has a default in ms-swift; its example is a constant μ: peak and valley the same, no steps.
    """

    path: str = Field(min_length=1)
    """A JSON Lines file whose rows have `prompt` (text or messages) and `completion` (text or a message): beside the
    configuration file, else where the command is given."""
    batch_size: int = Field(ge=1)
    """Examples per step, over all ranks."""
    mu_peak: float = Field(ge=0, le=1)
    """μ after the warm-up."""
    mu_valley: float = Field(ge=0, le=1)
    """μ after the decay."""
    mu_warmup_steps: int = Field(ge=0)
    """Steps of the linear rise from 0; 0: the first step has the peak (or the valley, without decay)."""
    mu_decay_steps: int = Field(ge=0)
    """Steps of the fall from peak to valley; 0: the valley follows the warm-up at once."""
    phi: bool = False
    """Multiply the loss of each token by p · (1 − p), p its probability: what the policy is sure of, either way, counts
    less (CHORD-φ)."""
