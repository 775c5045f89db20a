"""The message of a group whose completions are trajectories."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from actors.rollout.episode import Trajectory
from actors.rollout.held import AttemptError
from schemas.messages import RolloutGroup, Ticket

TURNS_REWARD = "turns"
"""Name of the sum of the rewards of a trajectory's turns."""


def build_trajectory_group(
    run: str, sender: str, ticket: Ticket, columns: Mapping[str, Any], trajectories: Sequence[Trajectory]
) -> RolloutGroup:
    """Return the message of trajectories, each with at least one turn.

    Offsets and segments count tokens over all samples, joined; equal prompts are kept once.

    Raises:
        AttemptError: a reward has the name of the sum of the turns' rewards, beside which it would count twice.
    """
    samples = [(g, sample) for g, one in enumerate(trajectories) for sample in one.tree.samples()]
    prompts: dict[bytes, int] = {}
    prompt_ids: list[np.ndarray[Any, np.dtype[np.int32]]] = []
    sample_prompts = []
    for _, sample in samples:
        ids = np.asarray(sample.prompt_ids, np.int32)
        number = prompts.setdefault(ids.tobytes(), len(prompts))
        if number == len(prompt_ids):
            prompt_ids.append(ids)
        sample_prompts.append(number)
    offsets = _offsets([len(sample.token_ids) for _, sample in samples])
    pairs = list(zip(samples, offsets.tolist(), strict=False))
    segments = [(start + offset, *rest) for (_, sample), offset in pairs for start, *rest in sample.segments]
    temperatures = [sample.temperatures[start] for _, sample in samples for start, *_ in sample.segments]
    names = list(dict.fromkeys(name for one in trajectories for name in one.rewards))
    rewards = [[_number(one.rewards.get(name)) for one in trajectories] for name in names]
    if any(one.turn_rewards for one in trajectories):
        if TURNS_REWARD in names:
            raise AttemptError(
                "env_score",
                f"environment {ticket.environment}: a reward is called {TURNS_REWARD!r}, as is the sum of the rewards "
                "of turns; rename it",
            )
        names.append(TURNS_REWARD)
        rewards.append([sum(r for _, r in one.turn_rewards) if one.turn_rewards else math.nan for one in trajectories])
    return RolloutGroup(
        run=run,
        sender=sender,
        ordinal=ticket.ordinal,
        attempt=ticket.attempt,
        purpose=ticket.purpose,
        environment=ticket.environment,
        example_key=ticket.example_key,
        prompt=trajectories[0].messages[: trajectories[0].num_prompt],
        columns=dict(columns),
        completions=[_last_answer(one) for one in trajectories],
        transcripts=[
            json.dumps([one.messages[: one.num_prompt], one.messages[one.num_prompt :], one.info])
            for one in trajectories
        ],
        stop_conditions=[one.stop for one in trajectories],
        failures=[one.failure for one in trajectories] if any(one.failure for one in trajectories) else [],
        prompt_ids=np.concatenate(prompt_ids),
        prompt_offsets=_offsets([ids.size for ids in prompt_ids]),
        sample_offsets=offsets,
        sample_completions=np.array([g for g, _ in samples], np.int64),
        sample_prompts=np.array(sample_prompts, np.int64),
        token_ids=np.concatenate([np.asarray(sample.token_ids, np.int32) for _, sample in samples]),
        loss_mask=np.concatenate([np.asarray(sample.loss_mask, np.uint8) for _, sample in samples]),
        logprobs=np.concatenate([np.asarray(sample.logprobs, np.float32) for _, sample in samples]),
        segments=np.array(segments, np.int64).reshape(-1, 5),
        segment_temperatures=np.array(temperatures, np.float32),
        counts=np.array(
            [
                (one.tree.num_turns, one.recorder.num_calls, one.num_tool_failures + one.recorder.num_malformed)
                for one in trajectories
            ],
            np.int64,
        ),
        environment_reward_names=names,
        environment_rewards_EG=np.array(rewards, np.float64).reshape(len(names), len(trajectories)),
        turn_rewards=np.array(
            [(g, turn, reward) for g, one in enumerate(trajectories) for turn, reward in one.turn_rewards], np.float64
        ).reshape(-1, 3),
    )


def _last_answer(trajectory: Trajectory) -> str:
    """Return the text of the model's last message."""
    answers = [message for message in trajectory.messages[trajectory.num_prompt :] if message["role"] == "assistant"]
    content = answers[-1].get("content") if answers else ""
    return content if isinstance(content, str) else ""


def _number(reward: float | None) -> float:
    return math.nan if reward is None else reward


def _offsets(lengths: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return np.cumsum([0, *lengths], dtype=np.int64)
