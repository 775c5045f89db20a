"""Formulas of losses and words for rules, as docs/reference/losses.md has them, for pages with the numbers."""

from schemas.config.losses import LossConfig

SYMBOLS = (
    "logp: the trainer's logprob; q: the engine's; old: the trainer's before the step's first update, q with "
    "old_logprobs inference; A: advantage; r = exp(logp − q), ρ = exp(logp − old), ρ_s = exp(mean over the completion "
    "of logp − old); sg[x]: x without gradient; clip(x): x between 1 − epsilon and 1 + epsilon_high"
)
"""Symbols of the formulas."""
FORMULAS = {
    "surogate": "−sg[c]·logp if kept, c = R·(adv_tau·A + teacher_tau·(teacher − logp) − kl_tau·(logp − q)); R = r, or "
    "of the completion min(exp(min(Σ(logp − q), 10)), sequence_clip_high)",
    "grpo": "−min(ρA, clip(ρ)·A)",
    "bnpo": "as grpo",
    "dr_grpo": "as grpo",
    "dapo": "as grpo",
    "gspo": "−min(ρ_s·A, clip(ρ_s)·A)",
    "gspo_token": "as gspo with sg[ρ_s]·exp(logp − sg[logp]): the value of the completion, the gradient of the token",
    "luspo": "as gspo; summed over a completion, so × T",
    "cispo": "−sg[min(ρ, epsilon_high)]·A·logp",
    "sapo": "−A·(4/τ)·sigmoid(τ(ρ − 1)), τ = temperature_pos if A > 0, else temperature_neg",
    "gmpo": "−A·exp(mean over the completion of c), c = logp − old, cut at epsilon_high if A > 0, else at −epsilon",
    "rloo": "as grpo with ρ = exp(Σ over the completion of logp − old)",
    "vespo": "−sg[φ(w)]·A·logp, φ = exp(λ + k·log w − λw), w = exp(Σ over the completion of logp − old), log w in "
    "[ln 1e-8, 20]; k and λ by the sign of A",
    "ipo": "−A·min(r, ratio_clip) if kept, + kl_tau·(logp − q)² on all tokens; dropped: probability lower than the "
    "engine's by more than ipo_mask_low, or higher by more than ipo_mask_high",
    "dppo": "−A·r if kept, + kl_tau·(logp − q)² on all tokens; dropped: A > 0 and too high, or A ≤ 0 and too low",
    "aipo": "−A·min(r, token_mask_high)",
    "ref_kl": "−sg[teacher − logp]·r if kept, + kl_tau·(logp − q)² on all tokens; dropped: probability lower than the "
    "engine's by more than 0.2",
    "decoupled": "max(−ρ'A, −clip(ρ')·A)·exp(prox − q), ρ' = exp(logp − prox), on tokens that rejection keeps",
    "m2po": "as decoupled without the tokens of largest (q − prox)², as few as bring the mean of the rest below "
    "m2_threshold",
}
"""Loss of a token before the average, by type of loss."""
RULES = {
    "low": "masked: the probability fell too far from the engine to the trainer",
    "high": "masked: the probability rose too far from the engine to the trainer",
    "geo": "masked with its completion: the geometric mean of the ratios is out of bounds",
    "sequence": "masked with its completion: the smallest or largest ratio is out of bounds",
    "clip_low": "clipped: the ratio is below the range, and the advantage is negative",
    "clip_high": "clipped: the ratio is above the range, and the advantage is positive",
    "cap": "capped: the ratio is above its cap",
    "rejected": "masked: rejected by the ratio of the trainer to the engine",
    "m2": "masked: among the tokens of the largest second moment of the ratio",
    "top_entropy_quantile": "masked: its entropy is not among the highest",
    "off_policy": "masked: a negative advantage, and a completion that is too far off policy",
}
"""Words for the rules that mask or clip tokens."""
AVERAGES = {
    "step_tokens": "÷ loss tokens of the step",
    "micro_batch_tokens": "÷ loss tokens of the micro-batch ÷ micro-batches of the step",
    "completion_means": "÷ loss tokens of the completion ÷ completions of the step",
    "completion_sums": "÷ completions of the step",
    "max_length": "÷ (completions of the step × rollout.max_tokens)",
}
"""Divisor by which the value of a token becomes a part of the step's loss."""


def formula_of(loss: str) -> str:
    """Return the formula of a type of loss, with that of the loss that it refers to; empty if it is not known."""
    formula = FORMULAS.get(loss, "")
    base = formula.removeprefix("as ").split()[0].rstrip(";,:") if formula.startswith("as ") else ""
    return f"{formula}, where {base} is {FORMULAS[base]}" if base else formula


def keys_of(loss: LossConfig) -> dict[str, object]:
    """Return the keys of a loss with their values, as far as they are plain values."""
    dumped = loss.model_dump(mode="json", exclude={"type", "compat"})
    return {name: value for name, value in dumped.items() if not isinstance(value, dict | list)}
