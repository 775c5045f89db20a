"""Configurations for each loss, advantage and modifier, as dotted overrides of examples/quickstart/run.yaml, by name.

`{model}` stands for the path of the start model, `{teacher}` for the start model after 150 steps of the quickstart,
`{supervised}` for a file of examples; benchmarks.learning makes these files. A loss with a ratio to the start of the
step gets two minibatches: with one minibatch the ratio is always 1, and the loss is the plain policy gradient.
"""

from pathlib import Path

FUNCTIONS = Path(__file__).parent / "functions.py"
TEACHER = ("trainer.teacher.path={teacher}", "trainer.teacher.dtype=float32")
TWO_UPDATES = "trainer.num_minibatches=2"
CHORD = (
    "trainer.sft.path={supervised}",
    "trainer.sft.batch_size=16",
    "trainer.sft.mu_peak=0.5",
    "trainer.sft.mu_valley=0.05",
    "trainer.sft.mu_warmup_steps=4",
    "trainer.sft.mu_decay_steps=12",
)


def _loss(name: str, *overrides: str) -> tuple[str, ...]:
    return (f"trainer.loss.type={name}", *overrides)


def _advantage(name: str, *overrides: str) -> tuple[str, ...]:
    return (f"reward.advantage.type={name}", *overrides)


DEFAULTS: dict[str, tuple[str, ...]] = {
    "default": _loss(
        "dapo",
        "trainer.loss.old_logprobs=inference",
        "reward.advantage.std=population",
        "reward.advantage.eps=1e-8",
    )
}
"""Default loss and advantage (as in TRL's AsyncGRPOTrainer), written out because the quickstart sets other values."""

LOSSES: dict[str, tuple[str, ...]] = {
    "surogate": _loss("surogate"),
    "grpo": _loss("grpo", TWO_UPDATES),
    "bnpo": _loss("bnpo", TWO_UPDATES),
    "dr_grpo": _loss("dr_grpo", TWO_UPDATES),
    "dapo": _loss("dapo", TWO_UPDATES),
    "gspo": _loss("gspo", TWO_UPDATES),
    "gspo_token": _loss("gspo_token", TWO_UPDATES),
    "luspo": _loss("luspo", TWO_UPDATES),
    "cispo": _loss("cispo", TWO_UPDATES),
    "sapo": _loss("sapo", TWO_UPDATES),
    "gmpo": _loss("gmpo", TWO_UPDATES),
    "rloo": _loss("rloo", TWO_UPDATES),
    "vespo": _loss("vespo", TWO_UPDATES),
    "ipo": _loss("ipo"),
    "dppo": _loss("dppo"),
    "aipo": _loss("aipo"),
    "ref_kl": _loss("ref_kl", *TEACHER),
    "decoupled": _loss("decoupled", TWO_UPDATES, "trainer.loss.rejection_sampling.upper=5.0"),
    "m2po": _loss("m2po", TWO_UPDATES),
    "custom": _loss("custom", f"trainer.loss.path={FUNCTIONS}:policy_gradient"),
}

ADVANTAGES: dict[str, tuple[str, ...]] = {
    "mean": _advantage("mean"),
    "length_weighted_mean": _advantage("length_weighted_mean"),
    "zscore": _advantage("zscore"),
    "batch_std": _advantage("batch_std"),
    "norm": _advantage("norm"),
    "rloo": _advantage("rloo"),
    "reinforce_pp": _advantage("reinforce_pp"),
    "gdpo": _advantage("gdpo"),
    "max_rl": _advantage("max_rl"),
    "process": _advantage("process", f"reward.steps.path={FUNCTIONS}:letters"),
    "gae": _advantage("gae", "reward.advantage.gae_lambda=0.9", "reward.advantage.reward_norm=zscore"),
    "custom": _advantage("custom", f"reward.advantage.path={FUNCTIONS}:ranks"),
}

MODIFIERS: dict[str, tuple[str, ...]] = {
    "correction": _loss("dapo", "trainer.correction.mode=truncate"),
    "correction_sequence": _loss(
        "dapo", "trainer.correction.mode=mask", "trainer.correction.level=sequence", "trainer.correction.high=3.0"
    ),
    "reference_loss": _loss("grpo", TWO_UPDATES, "trainer.reference.beta=0.04"),
    "reference_reward": _loss(
        "decoupled", "trainer.reference.beta=0.04", "trainer.reference.estimator=k1", "trainer.reference.place=reward"
    ),
    "off_policy_mask": _loss("dapo", TWO_UPDATES, "trainer.off_policy_mask_threshold=0.1"),
    "top_entropy_quantile": _loss("dapo", "trainer.top_entropy_quantile=0.5"),
    "entropy_bonus": ("trainer.entropy_coef=0.01",),
    "several_updates": _loss("grpo", TWO_UPDATES, "trainer.num_iterations=2"),
    "filter_zero_advantages": _loss("dppo", "packer.filter_zero_advantages=true"),
    "loss_normalizer": _loss("dapo", TWO_UPDATES, "trainer.loss.compat.loss_normalizer=step_mean"),
    "mask_no_eos_with_zero": _advantage("norm", "reward.mask_no_eos_with_zero=true"),
    "reference_reward_discounted": (
        *_advantage("gae", "reward.advantage.gae_lambda=0.9", "reward.advantage.reward_norm=zscore"),
        *_loss("decoupled", "trainer.reference.beta=0.04", "trainer.reference.place=reward"),
    ),
    "kl_in_reward": (
        *_advantage("rloo"),
        *_loss("dapo", "trainer.reference.beta=0.04", "trainer.reference.estimator=k1"),
        "trainer.reference.place=group_reward",
    ),
    "joint_distillation": (*_loss("dapo", "trainer.distillation.type=joint"), *TEACHER),
    "components": (*_loss("dppo"), "environments.0.rl_weight=0.5", "environments.0.ref_kl_weight=0.5", *TEACHER),
    "rlsd": (*_loss("dapo", TWO_UPDATES, "trainer.distillation.type=rlsd"), *TEACHER),
    "sdar": (*_loss("dapo", TWO_UPDATES, "trainer.distillation.type=sdar"), *TEACHER),
    "adv_norm": ("reward.adv_norm.mean_level=batch",),
    "teacher": ("trainer.loss.teacher_tau=0.5", *TEACHER),
    "chord": CHORD,
    "chord_phi": (*CHORD, "trainer.sft.phi=true"),
}
