"""Plans of small simulated runs."""

from dataclasses import replace
from typing import Any

from actors.simulate.models import Times
from actors.simulate.plan import Plan, Size
from actors.simulate.ring import Ring
from schemas.config import RunConfig

CONFIG: dict[str, Any] = {
    "model": {"path": "none"},
    "environments": [{"type": "reverse_text"}],
    "rollout": {"group_size": 2, "max_tokens": 64},
    "reward": {"functions": [{"path": "characters_in_place"}]},
    "packer": {"groups_per_step": 4, "sequence_len": 256},
    "trainer": {"max_steps": 1000, "checkpoint": {"interval": 5}},
    "inference": {"engine": {"type": "fake"}},
    "eval": {"num_prompts": 0},
}
QUICK = Times(
    decode_seconds=0.05,
    decode_sequence_seconds=0.001,
    prefill_token_seconds=0.0001,
    update_pause_seconds=0.1,
    wire_seconds=0.2,
    prompt_tokens=10,
    completion_tokens=20,
    completion_spread=0.5,
    reward_seconds=0.05,
    step_seconds=0.2,
    micro_batch_seconds=0.0,
    train_token_seconds=0.001,
    publish_seconds=0.1,
    checkpoint_seconds=0.0,
    save_seconds=0.5,
    restart_seconds=5.0,
    packer_restart_seconds=5.0,
)


def plan(steps: int = 20, times: Times = QUICK, size: Size | None = None, **sections: dict[str, Any]) -> Plan:
    """A run of CONFIG with other keys of some sections."""
    given = {name: {**CONFIG.get(name, {}), **keys} for name, keys in sections.items()}
    config = RunConfig.model_validate(CONFIG | given)
    return Plan(config, size or Size.of(config), times, steps)


def ran(one: Plan, **changes: Any) -> Ring:
    """The ring of a plan with changes, after its run."""
    ring = Ring(replace(one, **changes))
    ring.run()
    return ring
