"""What holds a run up, and which key to change about it: a pure function of the packer's progress.

A trainer that seldom waits is the limit itself. Else a group's time is spent where most groups are, on the mean of the
last seconds (Little's law: the mean number in a stage is the rate through it × the time in it):

    trainer waits   sampling      scoring     scored, waiting for their step   what limits
    60 %            14.8 of 16    0.4 of 8    0.8                              sampling: all slots are full
    60 %             5.0 of 16    0.4 of 8    2.6                              sampling: admission lets no more begin
    60 %             4.0 of 16    7.9 of 8    0.8                              scoring: all reward actors are busy
    60 %             2.0 of 16    0.4 of 8    5.6                              packing: each step waits for its slowest
     4 %                                                                       training
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal["unknown", "nothing", "sampling", "scoring", "packing", "training"]

TRAINER_IDLE = 0.2
"""A trainer that waits for less of its time is what the others wait for."""
FULL = 0.8
"""Of a stage's room, on the mean: beats tell of it once a second."""
STAGE_OF_ACTOR: dict[str, Stage] = {
    "rollout": "sampling", "inference": "sampling", "reward": "scoring", "trainer": "training",
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """The slowest stage, the figures that say so, and what to change, in words that name the key."""

    stage: Stage
    because: str
    change: str = ""


def limits(progress: Mapping[str, Any]) -> Limit:
    """What limits the run now."""
    if not progress or "queues" not in progress:
        return Limit("unknown", "nothing has been heard of the run yet")
    if progress["phase"] in ("done", "failed"):
        return Limit("nothing", "the run has ended")
    if progress["missing"]:
        return _missing(progress["missing"])
    if progress["eval_open"]:
        return Limit(
            "sampling",
            f"an evaluation comes first: {progress['eval_open']} prompts to go",
            "eval.num_prompts or eval.every_steps, if evaluations take too long",
        )
    idle = progress["idle"]
    if idle is None:
        return Limit("unknown", "two steps must have been trained before the trainer's waits can be told")
    if idle < TRAINER_IDLE:
        return _training(progress, idle)
    return _upstream(progress, f"the trainer waits {idle:.0%} of the time")


def _missing(missing: list[str]) -> Limit:
    """Nobody does the work of a stage."""
    kind = missing[0].partition("-")[0]
    return Limit(
        STAGE_OF_ACTOR[kind],
        f"nobody does it, for {', '.join(missing)} is not there",
        f"start it (actors run {kind}); its log says why it has ended or can't reach bus.control",
    )


def _training(progress: Mapping[str, Any], idle: float) -> Limit:
    settings, means = progress["settings"], progress["means"]
    waiting = means.get("packed", 0.0) + means.get("scored", 0.0)
    changes = [f"trainer.num_ranks (now {settings['trainer.num_ranks']})"]
    changes.append(f"packer.groups_per_step (now {settings['packer.groups_per_step']}), for larger steps")
    if settings["packer.oversampling_factor"] > 1:
        changes.insert(0, f"packer.oversampling_factor (now {settings['packer.oversampling_factor']:g}), lower")
    because = f"the trainer waits only {idle:.0%} of the time, and {waiting:.1f} groups wait for it on average"
    return Limit("training", because, " or ".join(changes))


def _upstream(progress: Mapping[str, Any], because: str) -> Limit:
    """The trainer waits: for the stage that holds most groups."""
    means = progress["means"]
    stage = max(("sampling", "scoring", "scored", "packed"), key=lambda name: means.get(name, 0.0))
    mean, room = means.get(stage, 0.0), progress["queues"][stage][1]
    figures = f"{because}, and most groups are {WHERE[stage]}: {mean:.1f} on average"
    if stage == "sampling":
        return Limit("sampling", f"{figures}, of {room} slots", _for_sampling(progress, mean >= FULL * room))
    if stage == "scoring":
        return Limit("scoring", f"{figures}, of {room} at once", _for_scoring(progress, mean >= FULL * room))
    return Limit("packing", figures, _for_packing(progress, stage))


WHERE = {
    "sampling": "being sampled",
    "scoring": "with reward actors",
    "scored": "scored and wait for the others of their step",
    "packed": "packed and on their way to the trainer",
}


def _for_sampling(progress: Mapping[str, Any], full: bool) -> str:
    settings, slots = progress["settings"], progress["engine_slots"]
    if full and slots and progress["engine_load"] < FULL * slots:
        return (
            f"rollout.max_concurrent_groups (now {settings['rollout.max_concurrent_groups']}): engines have room, "
            f"{progress['engine_load']} completions of {slots}"
        )
    if full:
        return "up.inference, for more engines, or faster ones; up.rollout only if engines have room"
    level = settings["packer.max_async_level"]
    ahead = f"packer.max_async_level (now {level}): slots are free, and admission lets no more be sampled ahead"
    return ahead if level == 0 else f"up.inference, for more engines, or {ahead}"


def _for_scoring(progress: Mapping[str, Any], full: bool) -> str:
    now = progress["settings"]["reward.max_concurrent_groups"]
    if full:
        return f"up.reward, for more reward actors, or reward.max_concurrent_groups (now {now})"
    level = progress["settings"]["packer.max_async_level"]
    return (
        f"the functions of reward.functions, which take long though reward actors have room; packer.max_async_level "
        f"(now {level}) lets more groups be on their way"
    )


def _for_packing(progress: Mapping[str, Any], stage: str) -> str:
    if stage == "packed":
        return "the network or the disk between packer and trainer (bus.host, ledger.path): batches are there too late"
    if progress["settings"]["packer.order"] == "ordinal":
        return "packer.order: arrival, so that a step takes what has come; or shorter completions (rollout.max_tokens)"
    return "packer.oversampling_factor, so that more groups are asked for than a step needs"
