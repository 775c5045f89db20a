"""The rollout actor: main loop, signs of life of peers, choice of a reward actor for each group."""
