"""The bottleneck of a run, and the key to change: a pure function of the packer's progress.

A trainer that seldom waits is the bottleneck itself. Otherwise most time is spent in the stage with most groups, by the
mean of the last seconds (Little's law: mean number in a stage = rate through the stage × time in the stage):

    trainer waits   sampling      scoring     scored, waiting for their step   bottleneck
    60 %            14.8 of 16    0.4 of 8    0.8                              sampling: all slots are full
    60 %             5.0 of 16    0.4 of 8    2.6                              sampling: no more groups are admitted
    60 %             4.0 of 16    7.9 of 8    0.8                              scoring: all reward actors are busy
    60 %             2.0 of 16    0.4 of 8    5.6                              packing: each step waits for its slowest
     4 %                                                                       training
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from actors.ops.screens.diagnostics import is_early
from actors.process.durations import seconds_in_words

Stage = Literal["unknown", "nothing", "sampling", "scoring", "packing", "training"]

TRAINER_IDLE = 0.2
"""Share of time spent waiting, below which the trainer counts as the bottleneck."""
FULL = 0.8
"""Share of a stage's capacity that counts as full, by the mean. Not 1, since heartbeats tell of groups once a
second."""
STAGE_OF_ACTOR: dict[str, Stage] = {
    "rollout": "sampling", "inference": "sampling", "reward": "scoring", "trainer": "training",
}  # fmt: skip


def evaluation_words(progress: Mapping[str, Any]) -> str:
    """Return how far the running evaluation is: `version 8, 70 of 100 prompts, about 12 s left`."""
    evaluation = progress.get("evaluation")
    if not evaluation:  # of a packer that has not looked yet
        return f"{progress['eval_open']} prompts to go"
    counts = f"version {evaluation['version']}, {evaluation['done']} of {evaluation['total']} prompts"
    seconds = evaluation["seconds_left"]
    return counts if seconds is None else f"{counts}, about {seconds_in_words(seconds)} left"


@dataclass(frozen=True)
class Limit:
    """Bottleneck of a run.

    Args:
        stage: slowest stage.
        because: figures as evidence.
        change: advice with the key to change; empty if there is none.
    """

    stage: Stage
    because: str
    change: str = ""


def limits(progress: Mapping[str, Any]) -> Limit:
    """Return the current bottleneck of a run."""
    if not progress or "queues" not in progress:
        return Limit("unknown", "nothing has been heard of the run yet")
    if progress["phase"] in ("done", "failed"):
        return Limit("nothing", "the run has ended")
    if progress["missing"]:
        missing = progress["missing"]
        kind = missing[0].partition("-")[0]
        if is_early(progress):
            return Limit(STAGE_OF_ACTOR[kind], f"waits for the start of {', '.join(missing)}")
        return Limit(
            STAGE_OF_ACTOR[kind],
            f"stands still, since {', '.join(missing)} is not there",
            f"start it (actors run {kind}); its log says why it has exited or can't reach bus.control",
        )
    if progress["eval_open"]:  # tickets of an evaluation go before those of training (P26)
        return Limit(
            "sampling",
            f"an evaluation comes first: {evaluation_words(progress)}",
            "eval.num_prompts or eval.every_steps, if evaluations take too long",
        )
    idle = progress["idle"]
    if idle is None:
        return Limit("unknown", "not known yet: needs two trained steps")
    if idle < TRAINER_IDLE:
        return _training(progress, idle)
    return _upstream(progress, f"the trainer waits {idle:.0%} of the time")


def _training(progress: Mapping[str, Any], idle: float) -> Limit:
    settings, means = progress["settings"], progress["means"]
    waiting = means.get("packed", 0.0) + means.get("scored", 0.0)
    changes = [f"trainer.num_ranks (now {settings['trainer.num_ranks']})"]
    changes.append(f"packer.groups_per_step (now {settings['packer.groups_per_step']}), for larger steps")
    # more is sampled than a step takes, so the first advice is to sample less
    if settings["packer.oversampling_factor"] > 1:
        changes.insert(0, f"packer.oversampling_factor (now {settings['packer.oversampling_factor']:g}), lower")
    because = f"the trainer waits only {idle:.0%} of the time, and {waiting:.1f} groups wait for it on average"
    return Limit("training", because, " or ".join(changes))


def _upstream(progress: Mapping[str, Any], because: str) -> Limit:
    """Return the stage with most groups, for which the trainer waits."""
    means = progress["means"]
    stage = max(("sampling", "scoring", "scored", "packed"), key=lambda name: means.get(name, 0.0))
    mean, room = means.get(stage, 0.0), progress["queues"][stage][1]
    figures = f"{because}, and most groups are {WHERE[stage]}: {mean:.1f} on average"
    if stage == "sampling":
        return Limit("sampling", f"{figures}, of {room} slots", _for_sampling(progress, mean >= FULL * room))
    settings = progress["settings"]
    if stage == "scoring":
        now, level = settings["reward.max_concurrent_groups"], settings["packer.max_async_level"]
        change = (
            "the functions of reward.functions, which take long though reward actors have room; "
            f"packer.max_async_level (now {level}) lets more groups be on their way"
        )
        if mean >= FULL * room:
            change = f"up.reward, for more reward actors, or reward.max_concurrent_groups (now {now})"
        return Limit("scoring", f"{figures}, of {room} at once", change)
    if stage == "packed":
        disk, network = "the disk (ledger.path)", "the network or the disk (bus.host, ledger.path)"
        change = f"{disk if _on_one_machine(progress) else network}: batches reach the trainer too late"
    elif settings["packer.order"] == "ordinal":
        change = (
            "packer.order: arrival, so that a step takes what has come; or shorter completions (rollout.max_tokens)"
        )
    else:
        change = "packer.oversampling_factor, so that more groups are asked for than a step needs"
    return Limit("packing", figures, change)


WHERE = {
    "sampling": "being sampled",
    "scoring": "with reward actors",
    "scored": "scored and wait for the others of their step",
    "packed": "packed and on their way to the trainer",
}


def _for_sampling(progress: Mapping[str, Any], full: bool) -> str:
    settings, slots = progress["settings"], progress["engine_slots"]
    # rollouts are full and engines are not: more requests at the same time would be answered
    if full and slots and progress["engine_load"] < FULL * slots:
        return (
            f"rollout.max_concurrent_groups (now {settings['rollout.max_concurrent_groups']}): engines have room, "
            f"{progress['engine_load']} completions of {slots}"
        )
    # on one machine more engines only help while there are cores left
    cores, computing = progress.get("cpu_cores"), progress.get("computing", 0)
    if _on_one_machine(progress) and cores and computing >= cores:
        return (
            "rollout.max_tokens, for shorter completions, or another machine (bus.control tcp://…): "
            f"{computing} processes compute on the {cores} cores of this one already"
        )
    if full:
        return "up.inference, for more engines, or faster ones; up.rollout only if engines have room"
    level = settings["packer.max_async_level"]
    ahead = f"packer.max_async_level (now {level}): slots are free, but it does not allow sampling further ahead"
    return ahead if level == 0 else f"up.inference, for more engines, or {ahead}"


def _on_one_machine(progress: Mapping[str, Any]) -> bool:
    control = progress["settings"].get("bus.control", "tcp")
    return not str(control).startswith("tcp")
