"""The runs that are searched: three train ordinals, two rollouts, two reward actors, two ranks, one engine."""

from typing import Any

from tests.actors.ledger.driver import settings
from tests.explore.world import Scenario


def scenario(name: str, **given: Any) -> Scenario:
    """Three steps of one group and two ranks; what is no field of Scenario is one of Settings."""
    own = {key: given.pop(key) for key in list(given) if key in Scenario.__dataclass_fields__}
    chosen = {"groups_per_step": 1, "max_steps": 3, "num_ranks": 2} | given
    return Scenario(name, settings(**chosen), **own)


STEPS = scenario("three steps of one group")
ONE_STEP = scenario("one step of three groups", groups_per_step=3, max_steps=1)
DROPS = scenario("stale and poisoned groups", order="arrival", max_off_policy_steps=1, cursed=frozenset({"k1"}))
EVALS = scenario("evaluations before and after", num_evals=1, eval_at_start=True, eval_at_end=True)
COMPACTING = scenario("checkpoints at each step, the ledger compacts", max_steps=4, save_every=1)
DEADLINES = scenario("attempts that are late", lease=1.5, group_timeout=0.2, reward_timeout=0.2)
FLAT = frozenset(f"k{number}" for number in range(20))
FILTERS = scenario("all rewards equal for ever", max_resample_times=1, flat=FLAT, max_steps=2, cursed=frozenset({"k1"}))
FORKS = scenario("forked or rewound once", max_steps=4, save_every=1, forks=1, num_rewards=1)
STRAYS = scenario("processes that are started by hand under a name that is taken", strays=("a0", "r0", "t0"))
STRICT = scenario("engines wait for the groups of each version", strict_async_level=True, cursed=frozenset({"k1"}))
TURNS = scenario("trainer and engine take turns on a device", turns=True, num_rollouts=1, num_rewards=1)
ALL = (STEPS, ONE_STEP, DROPS, EVALS, COMPACTING, DEADLINES, FILTERS, FORKS, STRAYS, STRICT, TURNS)
