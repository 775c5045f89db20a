"""Report of a simulation: in words first, then a table. Pure functions of results."""

from collections.abc import Mapping, Sequence

from actors.simulate.costs import Split, cost_per_step, gpus_of
from actors.simulate.limit import WORTH_SAYING, Advice, Experiment
from actors.simulate.plan import Plan
from actors.simulate.result import Result

LIMITS = {
    "training": "training: a step twice as fast",
    "sampling": "sampling: engines twice as fast",
    "reward": "the reward functions: twice as fast",
    "environment": "the environments: answers twice as fast",
    "weights": "the way of new weights to the engines: twice as fast",
    "slots": "the sampling slots (up.rollout × rollout.max_concurrent_groups): twice as many",
    "level": "the lag that is allowed (packer.max_async_level): one level more",
}
"""Words on each limit, followed by the gain."""
ROLE_WORDS = {"engines": ("engine", "engines"), "rewards": ("reward actor", "reward actors")}
ROLE_WORDS |= {"rollouts": ("rollout actor", "rollout actors"), "trainers": ("trainer rank", "trainer ranks")}


def describe(
    plan: Plan,
    result: Result,
    found: Sequence[Experiment] | None,
    advice: Advice | None,
    prices: Mapping[str, float],
    splits: Sequence[Split] = (),
) -> str:
    """Return the whole report.

    Args:
        plan: what was simulated.
        result: its figures.
        found: changes with their gains, the greatest first. None: no experiments were made.
        advice: more processes that lift the limit; None: none do.
        prices: price of a GPU hour by role; empty: no costs.
        splits: splits of a number of GPUs, the cheapest first; empty: none was asked for.
    """
    lines = [waiting_words(result), *([] if found is None else limit_words(result, found, advice))]
    if result.deaths or result.wasted_share:
        lines.append(waste_words(result))
    lines += [
        f"After {seconds(one.seconds)} {one.role} {one.before} → {one.wanted}: {one.because}." for one in result.scaled
    ]
    if any(prices.values()):
        lines.append(
            f"A step costs {money(cost_per_step(prices, gpus_of(plan.config, plan.size), result.steps_per_second))}."
        )
    if splits:
        lines.append(split_words(plan, splits, prices))
    return "\n".join(
        [*lines, "", *table(rows_of(plan, result)), *(["", *split_table(splits, prices)] if splits else [])]
    )


def waiting_words(result: Result) -> str:
    """Return the first sentence: the rate, and where time is spent waiting."""
    return (
        f"{rate(result.steps_per_second)}: the trainer waits {share(result.trainer_idle)} of the time for samples, "
        f"the engines stand idle {share(result.engine_idle)}, the lag is {result.lag_mean:.2f} on average and "
        f"{result.lag_max} at most."
    )


def limit_words(result: Result, found: Sequence[Experiment], advice: Advice | None) -> list[str]:
    """Return the limit of the run, and the number of processes that lifts it."""
    if not found or found[0].gain < WORTH_SAYING:
        return [f"Nothing alone limits the run: no change that was tried brings {share(WORTH_SAYING)} more steps."]
    others = [one for one in found[1:] if one.gain >= WORTH_SAYING]
    text = f"The limit is {LIMITS[found[0].name]} would bring {share(found[0].gain)} more steps."
    lines = [text, *(["Next: " + "; ".join(_next_words(one) for one in others) + "."] if others else [])]
    if advice is not None and advice.more > 0:
        gain = advice.result.steps_per_second / result.steps_per_second - 1.0
        if gain >= WORTH_SAYING:
            words = ROLE_WORDS[advice.role][advice.more > 1]
            lines.append(
                f"{advice.more} more {words} would bring {rate(advice.result.steps_per_second)} ({share(gain)} more), "
                f"and the trainer would wait {share(advice.result.trainer_idle)} of the time."
            )
    return lines


def _next_words(one: Experiment) -> str:
    return f"{LIMITS[one.name]} would bring {share(one.gain)}"


def waste_words(result: Result) -> str:
    """Return the sentence on tokens that are never trained."""
    parts = [f"{number} {reason}" for reason, number in result.wasted_tokens.items() if number]
    deaths = f"{result.deaths} processes died" if result.deaths != 1 else "1 process died"
    dropped = ", ".join(f"{number} {reason}" for reason, number in result.dropped.items())
    ends = f"; groups dropped: {dropped}" if dropped else ""
    wasted = f"{share(result.wasted_share)} of the sampled tokens are wasted ({', '.join(parts) or '0'})"
    return f"{deaths}, and {wasted}{ends}."


def split_words(plan: Plan, splits: Sequence[Split], prices: Mapping[str, float]) -> str:
    """Return the sentence on the cheapest split."""
    best = splits[0]
    now = gpus_of(plan.config, plan.size)
    cost = money(best.cost) if any(prices.values()) else f"{best.cost:.1f} GPU seconds"
    return (
        f"The cheapest split of {sum(best.gpus.values())} GPUs is {best.gpus['trainer']} for training and "
        f"{best.gpus['inference']} for sampling: {rate(best.result.steps_per_second)} at {cost} a step "
        f"(now {now['trainer']} and {now['inference']})."
    )


def rows_of(plan: Plan, result: Result) -> list[tuple[str, str]]:
    """Return the table of a run, a row per figure."""
    size, dropped = plan.size, sum(result.dropped.values())
    return [
        ("steps simulated", f"{result.steps}, {seconds(result.seconds)} from the first to the last"),
        ("steps per second", f"{result.steps_per_second:.4g}"),
        ("trained tokens per second", f"{result.tokens_per_second:.4g}"),
        ("trainer waits", f"{share(result.trainer_idle)} of the time, {size.trainers} ranks"),
        ("engines idle", f"{share(result.engine_idle)} of the time, {size.engines} engines"),
        ("engines paused for weights", share(result.engine_paused)),
        ("completions per engine", f"{result.completions_per_engine:.1f} at once"),
        ("scoring slots idle", f"{share(result.reward_idle)} of the time, {size.rewards} reward actors"),
        ("sampling slots idle", f"{share(result.rollout_idle)} of the time, {size.rollouts} rollout actors"),
        ("lag", f"{result.lag_mean:.2f} mean, {result.lag_max} at most"),
        ("groups", f"{result.issued} issued = {result.trained} trained + {dropped} dropped + {result.open} open"),
        ("tokens wasted", f"{share(result.wasted_share)} of {result.sampled_tokens}"),
    ]  # fmt: skip


def split_table(splits: Sequence[Split], prices: Mapping[str, float]) -> list[str]:
    """Return the table of the splits, in the order of the GPUs for training."""
    unit = "cost/step" if any(prices.values()) else "GPU s/step"
    head = ("training GPUs", "sampling GPUs", "steps/s", "trainer waits", "engines idle", unit)
    rows = [
        (
            str(one.gpus["trainer"]),
            str(one.gpus["inference"]),
            f"{one.result.steps_per_second:.4g}",
            share(one.result.trainer_idle),
            share(one.result.engine_idle),
            f"{one.cost:.4g}",
        )
        for one in sorted(splits, key=lambda one: one.gpus["trainer"])
    ]
    return table([head, *rows])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def share(value: float) -> str:
    """Return a share in percent: 0.431 is `43 %`; below 10 % with a digit after the point."""
    return f"{100 * value:.0f} %" if abs(value) >= 0.0995 or not value else f"{100 * value:.1f} %"


def rate(steps_per_second: float) -> str:
    """Return a rate in words: steps per second, or seconds per step below 1."""
    if steps_per_second >= 1:
        return f"{steps_per_second:.2f} steps per second"
    return f"{seconds(1 / steps_per_second)} per step"


def seconds(value: float) -> str:
    """Return a time with a unit that fits: `42.0 s`, `13 min`, `5.2 h`."""
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def money(value: float) -> str:
    """Return an amount with three digits that count; the unit is that of the prices."""
    return f"{value:.3g}"
