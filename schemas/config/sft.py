"""Keys of `trainer.sft`: supervised examples mixed into training (CHORD, docs/reference/losses.md)."""

from pydantic import Field

from schemas.config.base import Section
from schemas.config.images import ImagesConfig


class SftConfig(Section):
    """Supervised loss mixed in: (1 − μ) · policy + μ · supervised, with μ on a schedule (CHORD, as in ms-swift).

    μ is 0 in the first step, rises linearly to mu_peak, falls along half a cosine to mu_valley, and stays there. For a
    constant μ, as in ms-swift's example, set equal peak and valley and 0 steps.
    """

    path: str = Field(min_length=1)
    """JSON Lines file with `prompt` (text or messages) and `completion` (text or one message) per row. A relative path
    is looked up next to the configuration file first, then in the current directory."""
    images: ImagesConfig = ImagesConfig()
    """Images of prompts, for models that see them; paths are relative to the folder of the file."""
    batch_size: int = Field(ge=1)
    """Supervised examples per step over all ranks; at least `trainer.num_minibatches`."""
    mu_peak: float = Field(ge=0, le=1)
    """μ at the end of the warm-up."""
    mu_valley: float = Field(ge=0, le=1)
    """μ at the end of the decay."""
    mu_warmup_steps: int = Field(ge=0)
    """Steps of the linear rise from 0 to mu_peak. 0: the first step has mu_peak (mu_valley if there is no decay)."""
    mu_decay_steps: int = Field(ge=0)
    """Steps of the fall from mu_peak to mu_valley. 0: mu_valley follows the warm-up at once."""
    phi: bool = False
    """Factor p · (1 − p) on each token's loss, p the token's probability, without gradient: tokens near probability 0
    or 1 count less (CHORD-φ)."""
