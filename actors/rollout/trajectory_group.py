"""The message of a group whose completions are trajectories."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.rollout.episode import Trajectory
from actors.rollout.held import AttemptError
from actors.trajectories.images import ShownImage
from actors.trajectories.tree import Sample
from schemas import limits, routed
from schemas.messages import TURNS_REWARD, ImagePlace, RolloutGroup, Ticket
from schemas.routed import Experts


def head_of(run: str, sender: str, ticket: Ticket) -> dict[str, Any]:
    """Return the fields of a group that its ticket decides."""
    return {
        "run": run,
        "sender": sender,
        "ordinal": ticket.ordinal,
        "attempt": ticket.attempt,
        "purpose": ticket.purpose,
        "environment": ticket.environment,
        "example_key": ticket.example_key,
    }


def build_trajectory_group(
    run: str, sender: str, ticket: Ticket, columns: Mapping[str, Any], trajectories: Sequence[Trajectory]
) -> RolloutGroup:
    """Return the message of trajectories, each with at least one turn.

    Raises:
        AttemptError: a reward has the name of the sum of the turns' rewards, beside which it would count twice; or
            there are more rewards than a message holds.
    """
    counts = [
        (one.tree.num_turns, one.recorder.num_calls, one.num_tool_failures + one.recorder.num_malformed)
        for one in trajectories
    ]
    turn_rewards = [(g, turn, reward) for g, one in enumerate(trajectories) for turn, reward in one.turn_rewards]
    rewards = _rewards(ticket.environment, trajectories)
    samples = [(g, sample) for g, one in enumerate(trajectories) for sample in one.tree.samples()]
    return RolloutGroup(
        **head_of(run, sender, ticket),
        **_tokens(samples),
        **_images(samples, trajectories),
        **(_experts(samples) if ticket.purpose == "train" else {}),
        prompt=trajectories[0].messages[: trajectories[0].num_prompt],
        columns=dict(columns),
        completions=[_last_answer(one) for one in trajectories],
        transcripts=[
            json.dumps([one.messages[: one.num_prompt], one.messages[one.num_prompt :], one.info])
            for one in trajectories
        ],
        stop_conditions=[one.stop for one in trajectories],
        failures=[one.failure for one in trajectories] if any(one.failure for one in trajectories) else [],
        counts=np.array(counts, np.int64),
        environment_reward_names=list(rewards),
        environment_rewards_EG=np.array(list(rewards.values()), np.float64).reshape(len(rewards), len(trajectories)),
        turn_rewards=np.array(turn_rewards, np.float64).reshape(-1, 3),
    )


def _tokens(samples: Sequence[tuple[int, Sample]]) -> dict[str, NDArray[Any]]:
    """Return the fields on tokens, from pairs of completion and sample.

    Offsets and segments count tokens over all samples, joined; equal prompts are kept once.
    """
    prompts = _prompts(samples)
    offsets = _offsets([len(sample.token_ids) for _, sample in samples])
    pairs = list(zip(samples, offsets.tolist(), strict=False))
    segments = [(start + offset, *rest) for (_, sample), offset in pairs for start, *rest in sample.segments]
    temperatures = [sample.temperatures[start] for _, sample in samples for start, *_ in sample.segments]

    def joined(name: str, dtype: type) -> NDArray[Any]:
        return np.concatenate([np.asarray(getattr(sample, name), dtype) for _, sample in samples])

    return {
        "prompt_ids": np.concatenate([np.array(ids, np.int32) for ids, _ in prompts]),
        "prompt_offsets": _offsets([len(ids) for ids, _ in prompts]),
        "sample_offsets": offsets,
        "sample_completions": np.array([g for g, _ in samples], np.int64),
        "sample_prompts": np.array([prompts[_prompt(sample)] for _, sample in samples], np.int64),
        "token_ids": joined("token_ids", np.int32),
        "loss_mask": joined("loss_mask", np.uint8),
        "logprobs": joined("logprobs", np.float32),
        "segments": np.array(segments, np.int64).reshape(-1, 5),
        "segment_temperatures": np.array(temperatures, np.float32),
    }


_PromptKey = tuple[tuple[int, ...], tuple[ShownImage, ...]]
"""Token ids of a prompt, and its images: prompts with equal tokens may have different ones."""


def _prompts(samples: Sequence[tuple[int, Sample]]) -> dict[_PromptKey, int]:
    """Return the different prompts of samples with their numbers."""
    return {prompt: number for number, prompt in enumerate(dict.fromkeys(_prompt(sample) for _, sample in samples))}


def _prompt(sample: Sample) -> _PromptKey:
    size = len(sample.prompt_ids)
    return tuple(sample.prompt_ids), tuple(image for image in sample.images if image.start < size)


def _images(samples: Sequence[tuple[int, Sample]], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the fields on images: each file once, and places in the prompts and then in the samples."""
    shown, start = list[ShownImage](), 0
    for ids, images in _prompts(samples):
        shown += [image.moved(start) for image in images]
        start += len(ids)
    for _, sample in samples:
        size = len(sample.prompt_ids)
        shown += [image.moved(start - size) for image in sample.images if image.start >= size]
        start += len(sample.token_ids)
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(image.digest for image in shown))}
    owners = {image.digest: trajectories[g].recorder.images for g, sample in samples for image in sample.images}
    return {
        "images": [owners[digest].data(digest) for digest in numbers],
        "image_places": [
            ImagePlace(image=numbers[image.digest], start=image.start, length=image.length) for image in shown
        ],
    }


def _experts(samples: Sequence[tuple[int, Sample]]) -> dict[str, Any]:
    """Return the fields on experts: of prompts, each as in its first sample, and of samples; empty if unknown."""
    found = [sample.experts for _, sample in samples if sample.experts is not None]
    if len(found) < len(samples) or not found:
        return {}
    of_prompt: dict[_PromptKey, Experts] = {}
    behind: list[Experts] = []
    for (_, sample), experts in zip(samples, found, strict=True):
        size = len(sample.prompt_ids)
        of_prompt.setdefault(_prompt(sample), experts[:size])
        behind.append(experts[size:])
    pieces, layout = routed.packed(np.concatenate([*of_prompt.values(), *behind]))
    return {"routed_experts": pieces, "expert_layout": layout}


def _rewards(environment: str, trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Return the rewards of the environment by name, one for each trajectory; raise as `build_trajectory_group`."""
    names = dict.fromkeys(name for one in trajectories for name in one.rewards)
    if len(names) > limits.LIST_ITEMS:
        raise AttemptError(
            "env_score",
            f"environment {environment} gave {len(names)} rewards with different names, and at most "
            f"{limits.LIST_ITEMS} travel with a group; a reward has the same name in each episode",
        )
    rewards = {name: [_number(one.rewards.get(name)) for one in trajectories] for name in names}
    if not any(one.turn_rewards for one in trajectories):
        return rewards
    if TURNS_REWARD in rewards:
        raise AttemptError(
            "env_score",
            f"environment {environment}: a reward is called {TURNS_REWARD!r}, as is the sum of the rewards of turns; "
            "rename it",
        )
    sums = [sum(reward for _, reward in one.turn_rewards) if one.turn_rewards else math.nan for one in trajectories]
    return rewards | {TURNS_REWARD: sums}


def _last_answer(trajectory: Trajectory) -> str:
    """Return the text of the model's last message."""
    answers = [message for message in trajectory.messages[trajectory.num_prompt :] if message["role"] == "assistant"]
    content = answers[-1].get("content") if answers else ""
    return content if isinstance(content, str) else ""


def _number(reward: float | None) -> float:
    return math.nan if reward is None else reward


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *lengths], dtype=np.int64)
