"""Choice of the checkpoint to push next: a function of what is saved, what is pushed, and the strategy."""

from collections.abc import Collection, Sequence

from actors.uploader.files import Saved
from schemas.config.push_to_hub import PushToHubConfig


def pushes_all(config: PushToHubConfig) -> bool:
    """Return whether each checkpoint is pushed, and not the newest alone."""
    return config.hub_strategy != "end" and (config.hub_always_push or config.hub_strategy == "all_checkpoints")


def due(saved: Sequence[Saved], pushed: Collection[str], config: PushToHubConfig, *, is_end: bool) -> list[Saved]:
    """Return the checkpoints to push, in order.

    Saved are steps 10, 20, 30, and 10 is pushed: `every_save` is due with 30 alone, `all_checkpoints` with 20 and 30,
    `end` with 30 once the run has ended.

    Args:
        saved: checkpoints of the living history, oldest first.
        pushed: chains of the checkpoints on the hub.
        config: strategy.
        is_end: True once training has ended.
    """
    if config.hub_strategy == "end" and not is_end:
        return []
    if pushes_all(config):
        return [one for one in saved if one.chain not in pushed]
    return [one for one in saved[-1:] if one.chain not in pushed]


def updates_model(one: Saved, saved: Sequence[Saved], pushed: Collection[str]) -> bool:
    """Return whether a push replaces the model of the repository: not by an older one than is there."""
    return all(other.step <= one.step for other in saved if other.chain in pushed)
