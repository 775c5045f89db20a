"""KL divergence of the policy from the reference on a rank's batch, before the first update of a step."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from actors.algorithms.advantages.kl import (
    advantages_with_kl,
    kl_message,
    with_adv_norm_over_ranks,
    with_advantages,
    with_token_advantages,
)
from actors.algorithms.advantages.tokens import reward_discount
from actors.algorithms.losses import LossInputs
from actors.algorithms.losses.modifiers import kl_estimate, kl_in_reward
from actors.learner.micro_batches import micro_batch, non_empty
from actors.learner.reference_models import FixedLogprobs
from schemas.config import RunConfig
from schemas.config.objective import ObjectiveConfig, ReferenceConfig
from schemas.messages import StepBatch


def computes_advantages(config: RunConfig) -> bool:
    """Return whether advantages depend on the KLs of the whole step, and are thus computed by the gang's ranks."""
    reference = config.trainer.reference
    if reference is None or reference.place == "loss":
        return False
    return reference.place == "group_reward" or config.reward.adv_norm is not None


def needs_old(config: RunConfig) -> bool:
    """Return whether these KLs need the policy's logprobs before the first update."""
    reference = config.trainer.reference
    return computes_advantages(config) and reference is not None and reference.old_logprobs == "step_start"


def objective_of(config: RunConfig) -> ObjectiveConfig:
    """Return the objective of the loss. A KL already included in the advantages is not added per token again."""
    reference = config.trainer.reference
    if reference is None or not computes_advantages(config):
        return config.trainer
    # place `group_reward` adds nothing to the loss
    return config.trainer.model_copy(update={"reference": reference.model_copy(update={"place": "group_reward"})})


def with_advantages_of_step(
    batches: Sequence[StepBatch],
    fixed: Sequence[Mapping[int, FixedLogprobs]],
    config: RunConfig,
    exchange: Callable[[bytes], list[bytes]],
    device: torch.device,
) -> Sequence[StepBatch]:
    """Return the batches with advantages of rewards including the reference KL, normalised afterwards.

    Args:
        batches: batches of the ranks computed by this process, the process's own rank last.
        fixed: logprobs of each batch, by micro-batch.
        exchange: sends this rank's message; returns the messages of all ranks, in order.

    Raises:
        RanksBrokenError: another rank is gone.
    """
    reference, reward = config.trainer.reference, config.reward
    if reference is None or not computes_advantages(config):
        return batches
    # every rank gets here or none: the exchanges below are in the same order on all
    both = list(zip(batches, fixed, strict=True))
    if reference.place == "group_reward":
        messages = [kl_message(batch, completion_kls(batch, found, reference, device)) for batch, found in both]
        advantages = advantages_with_kl([*messages[:-1], *exchange(messages[-1])], reward.advantage, reference.beta)
        batches = [with_advantages(batch, advantages) for batch in batches]
    else:
        discount = reward_discount(reward.advantage)
        batches = [
            with_token_advantages(batch, advantages_less_kl(batch, found, config.trainer, discount, device))
            for batch, found in both
        ]
    if reward.adv_norm is None:
        return batches
    return with_adv_norm_over_ranks(batches, reward.adv_norm, reward.advantage.type == "process", exchange)


def completion_kls(
    batch: StepBatch, fixed: Mapping[int, FixedLogprobs], config: ReferenceConfig, device: torch.device
) -> list[float]:
    """Return the estimated KL of each sample, summed over the loss tokens, in the order of the samples."""
    found: list[float] = []
    for number in non_empty(batch):
        micro, logprobs = micro_batch(batch, number, device), fixed[number]
        policy_T = micro.inference_logprobs_T if config.old_logprobs == "inference" else logprobs.old_T
        assert policy_T is not None
        assert logprobs.reference_T is not None
        # tokens outside the loss mask have no logprobs
        kl_T = kl_estimate((policy_T - logprobs.reference_T).masked_fill(~micro.loss_mask_T, 0.0), config.estimator)
        kl_T = (kl_T if config.max_kl is None else kl_T.clamp(-config.max_kl, config.max_kl)).double()
        sums_B = kl_T.new_zeros(micro.num_completions).index_add(0, micro.completion_of_T, kl_T)
        found += sums_B.tolist()
    return found


def advantages_less_kl(
    batch: StepBatch,
    fixed: Mapping[int, FixedLogprobs],
    objective: ObjectiveConfig,
    discount: float,
    device: torch.device,
) -> NDArray[np.float64]:
    """Return the advantages of all completion tokens less the KL of later tokens, in the order of the samples."""
    found = [np.zeros(0)]  # empty, for a rank without samples
    for number in non_empty(batch):
        micro, logprobs = micro_batch(batch, number, device), fixed[number]
        inputs = LossInputs(
            logprobs_T=micro.inference_logprobs_T if logprobs.old_T is None else logprobs.old_T,
            inference_logprobs_T=micro.inference_logprobs_T,
            advantages_T=micro.advantages_T,
            loss_mask_T=micro.loss_mask_T,
            completion_of_T=micro.completion_of_T,
            num_completions=micro.num_completions,
            loss_tokens=1,  # unused: no average is computed here
            old_logprobs_T=logprobs.old_T,
            reference_logprobs_T=logprobs.reference_T,
            reward_discount=discount,
        )
        found.append(kl_in_reward(inputs, objective).double().cpu().numpy())
    return np.concatenate(found)
