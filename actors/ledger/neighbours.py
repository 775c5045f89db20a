"""Engines and reward actors, as all rollout actors are told of them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.ledger.engines import Engines
from actors.ledger.peers import Peers
from schemas import limits
from schemas.messages import (
    EngineAddress,
    InferenceHeartbeat,
    Neighbours,
    PolicyVersion,
    RewardAddress,
    RewardHeartbeat,
)


@dataclass(frozen=True)
class Shown:
    """Fields of a `RolloutDirective` that are equal for all rollout actors."""

    fields: dict[str, Any]
    """Processes and policies: a change of these is told to everybody at once."""
    loads: NDArray[np.int16]
    """Loads of engines, then of reward actors, which change with nearly every heartbeat of an engine."""


class Neighbourhood:
    """Maker of `Shown`. Equal fields stay the same object over rounds, so that nothing is made or encoded again."""

    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()
        """Numbers of changes of what `_shown` was made of."""
        self._rows: Any = None
        """Content of the fields, as plain values."""
        self._shown: Shown | None = None

    def shown(self, run: str, peers: Peers, engines: Engines) -> Shown:
        """Return what rollout actors are told of the live engines and reward actors."""
        seen = (peers.changes[InferenceHeartbeat], peers.changes[RewardHeartbeat], engines.dead_lineage)
        if self._shown is not None and seen == self._seen:
            return self._shown
        # by identity, whoever was heard first: another packer of the run makes the same table of the same processes
        live = dict(sorted(peers.all(InferenceHeartbeat).items()))
        # a draining actor still scores what it has, so its groups stay there (P13); in phase `done` it has left
        rewards = [b for _, b in sorted(peers.all(RewardHeartbeat).items()) if b.phase != "done"]
        serving = engines.serving(live)
        rows = (
            [(b.name, b.boot_id, b.url) for b in live.values()],
            [(b.name, b.boot_id, b.address) for b in rewards],
            # plain numbers, which are compared faster than policies
            [(b.policy.lineage, b.policy.version) if i in serving and b.policy else None for i, b in live.items()],
            [b.phase == "running" for b in rewards],
        )
        told = [b.load for b in live.values()] + [b.load for b in rewards]
        loads = np.array([max(0, min(load, limits.LOAD_SHOWN)) for load in told], np.int16)
        same = self._shown is not None and rows == self._rows
        fields = self._shown.fields if self._shown is not None and same else self._fields(run, *rows)
        self._seen, self._rows, self._shown = seen, rows, Shown(fields, loads)
        return self._shown

    def _fields(
        self,
        run: str,
        engines: list[tuple[str, str, str]],
        rewards: list[tuple[str, str, str]],
        served: list[tuple[int, int] | None],
        is_open: list[bool],
    ) -> dict[str, Any]:
        if self._shown is not None and (engines, rewards) == self._rows[:2]:
            table = self._shown.fields["neighbours"]
        else:
            table = Neighbours.of(
                run,
                [EngineAddress(name=name, boot_id=boot_id, url=url) for name, boot_id, url in engines],
                [RewardAddress(name=name, boot_id=boot_id, address=address) for name, boot_id, address in rewards],
            )
        # the newest: an engine that is further behind is no use to anybody
        policies = sorted({policy for policy in served if policy is not None}, reverse=True)[: limits.POLICIES_SHOWN]
        places: dict[tuple[int, int] | None, int] = {policy: place for place, policy in enumerate(policies)}
        return {
            "neighbours": table,
            "policies": [PolicyVersion(lineage=lineage, version=version) for lineage, version in policies],
            "engine_policies": np.array([places.get(policy, -1) for policy in served], np.int8),
            "open_rewards": np.array(is_open, np.uint8),
        }
