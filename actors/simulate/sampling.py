"""Sampling of one attempt at a group, from its ticket to its last token."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.ledger import Group
from actors.simulate.engine import Engine, Turn
from schemas.messages import PolicyVersion

if TYPE_CHECKING:
    from actors.simulate.rollout import Rollout

Hold = tuple[int, int]
"""(ordinal, attempt)."""


@dataclass(eq=False)
class Sampling:
    """Attempt at a group, held by a rollout actor."""

    group: Group
    """Row of the ledger; the ticket says the same."""
    rollout: "Rollout"
    attempt: int
    prompt_tokens: int
    lengths: list[int]
    """Tokens of each completion."""
    num_turns: int
    engine: Engine | None = None
    """Engine that samples; None while none is chosen."""
    oldest: int | None = None
    """Version of the oldest token."""
    policies: set[PolicyVersion] = field(default_factory=set)
    """Policies of the first tokens of all turns."""
    turns_left: list[int] = field(default_factory=list)
    """Turns that each completion has still to begin."""
    num_open: int = 0
    """Completions that have not ended."""
    is_over: bool = False
    """True once the attempt has been sampled or given up."""
    is_sampled: bool = False
    reward: str = ""
    """Identity of the reward actor that the group was sent to last; empty: none."""

    @property
    def hold(self) -> Hold:
        """Ordinal and attempt."""
        return self.group.ordinal, self.attempt

    @property
    def tokens(self) -> int:
        """Tokens of all completions."""
        return sum(self.lengths)

    def begin(self, engine: Engine) -> list[Turn]:
        """Start from nothing at an engine; return the first turn of each completion."""
        self.engine, self.oldest, self.num_open = engine, None, len(self.lengths)
        self.policies.clear()
        self.turns_left = [self.num_turns] * len(self.lengths)
        # engines prefill a prompt once for all completions of a request
        return [self.next_turn(number, 0 if number else self.prompt_tokens) for number in range(len(self.lengths))]

    def next_turn(self, number: int, prompt: int = 0) -> Turn:
        """Return the next turn of a completion. The tokens are divided evenly; the last turn has the rest."""
        length, left = self.lengths[number], self.turns_left[number]
        share = max(1, length // self.num_turns)
        self.turns_left[number] = left - 1
        tokens = share if left > 1 else max(1, length - share * (self.num_turns - 1))
        return Turn(self, number, tokens, prompt)

    def started(self, engine: Engine) -> None:
        """Note the version by which the first token of a turn is sampled."""
        policy = engine.policy
        assert policy is not None
        if policy not in self.policies:
            self.policies.add(policy)
            self.oldest = policy.version if self.oldest is None else min(self.oldest, policy.version)
