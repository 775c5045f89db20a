"""Length of a run in steps, given in epochs."""

import math


def steps_of_epochs(num_examples: int, groups_per_step: int, num_epochs: float) -> int:
    """Return the number of steps of a run of some epochs; 0 if an epoch has less than a step.

    An epoch has ⌊num_examples ÷ groups_per_step⌋ steps, as in TRL, which leaves out the examples that fill no whole
    step. 100 examples in steps of 8 groups: 12 steps in an epoch, 18 in 1.5 epochs.
    """
    return math.ceil(num_examples // groups_per_step * num_epochs)
