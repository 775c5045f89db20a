"""Pauses of reward actors at which groups were lost."""

import pytest

from actors.rollout.reward_choice import LONGEST_PAUSE_SECONDS, RewardChoice


@pytest.mark.parametrize("losses", [1, 30, 2000])
def test_the_pause_doubles_up_to_a_limit_however_many_groups_were_lost(losses: int) -> None:
    """A reward actor behind a firewall for weeks loses thousands of groups."""
    choice, now = RewardChoice(3.0), 0.0
    for loss in range(1, losses + 1):
        pause = choice.lost("reward-0/1", now)
        assert pause == min(3.0 * 2 ** min(loss, 20), LONGEST_PAUSE_SECONDS)
        now += pause
