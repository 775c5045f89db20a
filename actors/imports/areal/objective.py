"""Objective of AReaL: loss, reference, weights, rewards and advantages."""

from typing import Any

from actors.imports.areal.tables import LOSS_KEYS, NORM_KEYS
from actors.imports.job import Import
from schemas.errors import ConfigError


def convert_loss(job: Import) -> None:
    """Write the loss, its bounds and its reference."""
    is_decoupled, recomputes = job.value("actor.use_decoupled_loss"), job.value("actor.recompute_logprob")
    flags = ["actor.use_decoupled_loss", "actor.recompute_logprob", "actor.use_sapo_loss"]
    old, threshold = ("step_start" if recomputes else "inference"), job.value("actor.m2_threshold")
    if job.value("actor.use_sapo_loss"):
        if is_decoupled:
            raise ConfigError("actor.use_sapo_loss: AReaL needs use_decoupled_loss: false with it")
        job.convert(flags, {"trainer.loss.type": "sapo", "trainer.loss.old_logprobs": old}, f"sapo, old of {old}")
        job.run.set("trainer.loss.average", "step_tokens", "AReaL's average")
        job.rename("actor.sapo_tau_pos", "trainer.loss.temperature_pos")
        job.rename("actor.sapo_tau_neg", "trainer.loss.temperature_neg")
    elif is_decoupled:
        kind = "decoupled" if threshold is None else "m2po"
        job.convert(flags, {"trainer.loss.type": kind}, kind)
        method = job.value("actor.prox_logp_method")
        if method in ("recompute", "loglinear"):
            job.rename("actor.prox_logp_method", "trainer.loss.prox_logp_method")
        else:
            job.convert(
                "actor.prox_logp_method", {"trainer.loss.prox_logp_method": "recompute"}, f"{method}: recompute"
            )
        if threshold is not None:
            job.rename("actor.m2_threshold", "trainer.loss.m2_threshold")
        _convert_rejection(job)
    else:
        job.convert(flags, {"trainer.loss.type": "dapo", "trainer.loss.old_logprobs": old}, f"dapo, old of {old}")
    if not job.value("actor.use_sapo_loss"):
        job.rename("actor.eps_clip", "trainer.loss.epsilon")
        for theirs, ours in (("eps_clip_higher", "epsilon_high"), ("c_clip", "dual_clip")):
            if job.value(f"actor.{theirs}") is not None:
                job.rename(f"actor.{theirs}", f"trainer.loss.{ours}")
        job.rename("actor.importance_sampling_level", "trainer.loss.importance_sampling_level")
        if not is_decoupled and job.value("actor.importance_sampling_level") == "sequence":
            job.run.set("trainer.loss.compat.advantage_level", "completion", "AReaL's advantage of a sequence")
    for name in LOSS_KEYS:
        job.settle(f"actor.{name}", "without effect on this loss")
    for key in job.keys_below("actor.rejection_sampling"):
        job.settle(key, "only the decoupled loss reads it")
    job.rename("actor.ppo_n_minibatches", "trainer.num_minibatches", job.value("actor.ppo_n_minibatches") or 1)
    _convert_reference(job, "inference" if is_decoupled or not recomputes else "step_start")


def _convert_reference(job: Import, source: str) -> None:
    """Write the KL in the reward, against the policy that `source` names."""
    if (beta := job.value("actor.kl_ctl")) > 0 and job.has("ref") and job.given.get("ref", {}) is not None:
        job.rename("actor.kl_ctl", "trainer.reference.beta")
        job.rename("actor.kl_estimator", "trainer.reference.estimator")
        for name, value in (("place", "reward"), ("old_logprobs", source), ("max_kl", 10.0)):
            job.run.set(f"trainer.reference.{name}", value, "AReaL's KL in the reward")
    else:
        job.settle("actor.kl_ctl", "0: no KL" if beta == 0 else "without ref: there is no reference")
        job.settle("actor.kl_estimator", "no KL")


def _convert_rejection(job: Import) -> None:
    section, target, cap = "actor.rejection_sampling", "trainer.loss.rejection_sampling", "actor.behave_imp_weight_cap"
    if job.has(section) and job.given.get(section, {}) is not None:
        for name in ("level", "action", "metric", "agg", "upper"):
            job.rename(f"{section}.{name}", f"{target}.{name}")
        if job.value(f"{section}.lower") is not None:
            job.rename(f"{section}.lower", f"{target}.lower")
        job.settle(f"{section}.lower", "empty: none")
    else:
        _convert_cap(job, cap, target)


def _convert_cap(job: Import, cap: str, target: str) -> None:
    """Write the bound of the weights in the words of releases before rejection_sampling: a number and a mode."""
    key = "actor.behave_imp_weight_mode"
    mode = job.value(key)
    # the number's default came with the mode
    bound = job.value(cap) if cap in job.given or key not in job.given else 5.0
    if mode == "disabled":
        job.settle(key, "disabled: no bound")
        return
    level, _, kind = str(mode).partition("_")
    if level not in ("token", "sequence") or kind not in ("mask", "truncate"):
        raise ConfigError(f"{key}: {mode!r} is none of token_mask, token_truncate, sequence_mask, sequence_truncate")
    if bound is None:
        job.settle(key, "without behave_imp_weight_cap: no bound")
        return
    if bound <= 1:
        raise ConfigError(f"{cap}: {bound:g} must be above 1, as in AReaL")
    action = "mask" if kind == "mask" else "clamp"
    rules = {"level": level, "action": action, "metric": "ratio", "agg": "mean", "upper": bound}
    text = f"ratios above {bound:g} are {'masked' if action == 'mask' else 'bounded'}"
    job.convert([cap, key], {f"{target}.{name}": value for name, value in rules.items()}, text)


def _convert_overlong(job: Import) -> None:
    """Write the penalty for long completions, which AReaL adds before the shaping, as a function."""
    keys = [f"actor.{name}" for name in ("overlong_reward_penalty", "overlong_tokens", "overlong_penalty_factor")]
    if not job.value(keys[0]):
        for key in keys:
            job.settle(key, "no penalty")
        return
    tokens, factor = job.value(keys[1]), job.value(keys[2])
    if not tokens or factor is None:
        raise ConfigError("actor.overlong_tokens: AReaL needs it, and overlong_penalty_factor, for the penalty")
    # early files gave the length as context_length
    bounds = ("actor.context_length", "actor.max_new_tokens")
    bound = next((key for key in bounds if job.given.get(key) is not None), bounds[1])
    limit = job.value(bound)
    target = "reward.functions.1"
    arguments = {"max_tokens": limit, "overlong_tokens": tokens, "factor": float(factor)}
    text = f"min(−(length − ({limit} − {tokens})) ÷ {tokens} · {factor:g}, 0) is added to the reward"
    job.convert([*keys, bound], {f"{target}.path": "overlong", f"{target}.kwargs": arguments}, text)
    if limit != job.run.get("rollout.max_tokens"):
        job.note(f"the penalty counts from {bound} {limit}, as in AReaL, not from gconfig.max_new_tokens")


def _convert_equal_groups(job: Import) -> None:
    """Write the mask of groups of equal rewards, of releases with actor.dynamic_sampling."""
    key = "actor.dynamic_sampling"
    if not job.value(key):
        job.settle(key, "switched off")
    elif job.run.get("reward.adv_norm.mean_level") is None:
        text = "groups of equal rewards leave the step, and the number of groups varies"
        job.convert(key, {"packer.filter_zero_advantages": True}, text)
    else:
        job.refuse(key, "groups of equal rewards have advantages after adv_norm", "set packer.dynamic_sampling: true")


def convert_rewards(job: Import) -> None:
    """Write shaping, penalties, advantages and their normalisation."""
    for theirs, ours in (("reward_bias", "bias"), ("reward_scaling", "scale"), ("reward_clip", "clip")):
        job.rename(f"actor.{theirs}", f"reward.shaping.{ours}")
    _convert_overlong(job)
    job.rename("actor.mask_no_eos_with_zero", "reward.mask_no_eos_with_zero")
    discount = job.value("actor.discount") * job.value("actor.gae_lambda")
    norm = _norm(job, "actor.reward_norm")
    kind: dict[str, Any]
    if norm is None:
        kind = {"type": "gae", "discount": job.value("actor.discount"), "gae_lambda": job.value("actor.gae_lambda")}
    elif norm["mean_level"] == norm["std_level"] == "group" and not norm["mean_leave1out"] and discount == 1:
        kind = {"type": "zscore", "std": "unbiased" if norm["std_unbiased"] else "population", "eps": norm["eps"]}
    elif norm["mean_level"] == "group" and norm["std_level"] == "none" and discount == 1:
        kind = {"type": "rloo" if norm["mean_leave1out"] else "mean"}
    elif discount == 1:
        kind = {"type": "norm", **norm}
    else:
        scaled = "zscore" if norm["std_level"] != "none" else "mean"
        _note_normalisation(job, norm)
        kind = {"type": "gae", "discount": job.value("actor.discount"), "gae_lambda": job.value("actor.gae_lambda"),
                "reward_norm": scaled}  # fmt: skip
    keys = [key for key in job.keys_below("actor.reward_norm") if not key.endswith(".group_size")]
    keys += ["actor.reward_norm", "actor.group_reward_norm", "actor.discount", "actor.gae_lambda"]
    job.convert(keys, {f"reward.advantage.{name}": value for name, value in kind.items()}, f"{kind}")
    _convert_adv_norm(job)
    _convert_equal_groups(job)


def _note_normalisation(job: Import, norm: dict[str, Any]) -> None:
    """Report what a normalisation loses where rewards are discounted: it is that of a group, with its own reward."""
    key = "actor.reward_norm.mean_leave1out"
    if norm["mean_leave1out"]:
        job.refuse(key, "with a discount the mean has the completion's own reward too here", "set actor.discount to 1")
    if norm["mean_level"] != "group" or norm["std_level"] == "batch":
        levels = f"{norm['mean_level']} and {norm['std_level']}"
        job.note(f"actor.reward_norm of levels {levels}: with a discount rewards are normalised in their group here")


def _convert_adv_norm(job: Import) -> None:
    normed = _norm(job, "actor.adv_norm")
    if normed is None:
        job.settle("actor.adv_norm", "empty: none")
        job.settle("actor.group_adv_norm", "without adv_norm: none")
        return
    if not job.has("actor.adv_norm") or isinstance(job.given.get("actor.adv_norm"), bool):
        targets = {f"reward.adv_norm.{name}": value for name, value in normed.items()}
        job.convert(["actor.adv_norm", "actor.group_adv_norm"], targets, f"over the {normed['mean_level']}")
        if "actor.adv_norm" not in job.given:
            job.note("actor.adv_norm is true by default in that release: advantages are normalised over tokens")
        return
    for name in NORM_KEYS:
        key, target = f"actor.adv_norm.{name}", f"reward.adv_norm.{name}"
        if job.given.get(key) is None:
            job.convert(key, {target: normed[name]}, f"{normed[name]}")
        else:
            job.rename(key, target)
    job.settle("actor.adv_norm", "with the defaults of AReaL")


def _norm(job: Import, section: str) -> dict[str, Any] | None:
    """Return the keys of a normalisation, or None. A level that is null is `none`. Early releases have switches."""
    if section == "actor.reward_norm" and job.value("actor.group_reward_norm"):
        level = {"mean_level": "group", "std_level": "group"}
        return level | {"mean_leave1out": False, "std_unbiased": True, "eps": 1e-9}
    switch = job.value(section) if section == "actor.adv_norm" and not job.keys_below(section) else None
    if isinstance(switch, bool):
        kind = "group" if job.value("actor.group_adv_norm") else "batch"
        level = {"mean_level": kind, "std_level": kind}
        return level | {"mean_leave1out": False, "std_unbiased": False, "eps": 1e-5} if switch else None
    if not job.has(section) or job.given.get(section, {}) is None:
        return None
    unbiased = job.defaults["std_unbiased"]
    base = {"mean_level": "batch", "mean_leave1out": False, "std_level": "batch", "std_unbiased": unbiased, "eps": 1e-5}
    found = {name: job.given.get(f"{section}.{name}", value) for name, value in base.items()}
    for name in ("mean_level", "std_level"):
        found[name] = found[name] or "none"
        if found[name] not in ("batch", "group", "none"):
            raise ConfigError(f"{section}.{name}: {found[name]!r} is none of batch, group, null")
    return found
