"""Tickets, engines and completions for tests of the rollout actor, and a client that asks nobody."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.datasets import Example
from actors.engines.http.client import SampledCompletion
from actors.rollout.group import build_group
from schemas.config.sampling import SamplingParams
from schemas.messages import (
    EngineAddress,
    EnginePeer,
    Neighbours,
    PolicyVersion,
    RewardAddress,
    RewardPeer,
    RolloutDirective,
    RolloutGroup,
    Ticket,
)

EXAMPLE = Example(prompt="abc=", columns={"answer": "cba"})


def ticket(ordinal: int = 0, **changes) -> Ticket:
    """A ticket for two completions of the example."""
    fields = {
        "ordinal": ordinal, "attempt": 1, "purpose": "train", "environment": "reverse_text", "index": 0,
        "example_key": EXAMPLE.key("reverse_text"), "seed": 7, "num_completions": 2, "max_tokens": 8, "min_version": 3,
        "sampling": SamplingParams(temperature=0.5),
    }  # fmt: skip
    return Ticket(**fields | changes)


def engine(name: str, version: int = 3, load: int = 0, lineage: int = 1) -> EnginePeer:
    """An engine whose boot id is its name."""
    policy = PolicyVersion(lineage=lineage, version=version)
    return EnginePeer(name=name, boot_id=name, url=f"http://{name}", policy=policy, load=load)


def completion(tokens: list[int], segments: list[tuple[int, int, int]]) -> SampledCompletion:
    """A completion whose logprobs are −1."""
    return SampledCompletion(tokens, [-1.0] * len(tokens), segments, "stop", "text")


class Client:
    """Fails where it is told to, and remembers whom it asked."""

    ANSWER = [completion([5, 6], [(0, 1, 3)]), completion([7], [(0, 1, 3)])]

    def __init__(self, failing: dict[str, Exception]) -> None:
        self.failing, self.asked = failing, []
        self.images: list[list[tuple[int, bytes]]] = []
        self.answers: dict[str, list[SampledCompletion]] = {}

    async def sample(
        self,
        engine: EnginePeer,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Any = (),
        form: Any = None,
        images: Any = (),
    ) -> list[SampledCompletion]:
        """Two completions of version 3."""
        self.asked.append(engine.name)
        self.images.append([(image.start, image.data) for image in images])
        await asyncio.sleep(0)
        if engine.name in self.failing:
            raise self.failing[engine.name]
        return self.answers.get(engine.name, self.ANSWER)

    async def close(self) -> None:
        """Nothing to close."""


def group(ordinal: int = 0, completions: list[SampledCompletion] | None = None) -> RolloutGroup:
    """A sampled group of two completions of one token."""
    return build_group(
        "r", "rollout-0", ticket(ordinal), EXAMPLE, [1], completions or [completion([5], [(0, 1, 3)])] * 2
    )


def directive(
    term: int = 1,
    engines: Sequence[EnginePeer] = (),
    rewards: Sequence[RewardPeer] = (),
    live: list[str] | None = None,
    scoring: tuple[tuple[int, int], ...] = (),
) -> RolloutDirective:
    """A directive that names these peers; `live`: boot ids of further reward actors, which take no new groups."""
    open_ones = {peer.boot_id for peer in rewards}
    closed = [boot_id for boot_id in live or () if boot_id not in open_ones]
    shown = [*rewards, *(RewardPeer(name=f"of {b}", boot_id=b, address="", load=0) for b in closed)]
    table = Neighbours.of(
        "r",
        [EngineAddress(name=one.name, boot_id=one.boot_id, url=one.url) for one in engines],
        [RewardAddress(name=one.name, boot_id=one.boot_id, address=one.address) for one in shown],
    )
    policies = list(dict.fromkeys(one.policy for one in engines))
    return RolloutDirective(
        run="r", term=term, phase="running", step=0, max_steps=9, tickets=[], neighbours=table, policies=policies,
        engine_policies=np.array([policies.index(one.policy) for one in engines], np.int8),
        open_rewards=np.array([one.boot_id in open_ones for one in shown], np.uint8),
        neighbour_loads=np.array([one.load for one in [*engines, *shown]], np.int16),
        release=np.zeros((0, 2), np.int64), scoring=np.array(scoring, np.int64).reshape(-1, 2),
    )  # fmt: skip
