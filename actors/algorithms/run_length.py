"""Length of a run and of its parts in steps, given in epochs or as shares."""

import math

from schemas.config.trainer import TrainerConfig


def steps_of_epochs(num_examples: int, groups_per_step: int, num_epochs: float) -> int:
    """Return the number of steps of a run of some epochs; 0 if an epoch has less than a step.

    An epoch has ⌊num_examples ÷ groups_per_step⌋ steps, as in TRL, which leaves out the examples that fill no whole
    step. 100 examples in steps of 8 groups: 12 steps in an epoch, 18 in 1.5 epochs.
    """
    return math.ceil(num_examples // groups_per_step * num_epochs)


def steps_of_share(share: float, max_steps: int) -> int:
    """Return the number of steps of a share of the run, rounded up as in transformers."""
    return math.ceil(share * max_steps)


def checkpoint_interval(trainer: TrainerConfig) -> int:
    """Return the steps between two checkpoints. `max_steps` must be known."""
    checkpoint, share = trainer.checkpoint, trainer.checkpoint.interval_share
    if checkpoint.interval_epochs is not None and trainer.max_epochs is not None:
        # whole epochs end at whole steps; a part of an epoch ends at the nearest step
        return max(1, round(trainer.max_steps * checkpoint.interval_epochs / trainer.max_epochs))
    return checkpoint.interval if share is None else steps_of_share(share, trainer.max_steps)
