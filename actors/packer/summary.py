"""The summary of a run, summary.json: a function of its record, the ledger and a few times."""

from collections.abc import Mapping
from typing import Any

from actors.ledger import Machine, Store
from actors.telemetry.clock import per_second
from actors.telemetry.engines import EngineTotals
from actors.telemetry.totals import StepTotals


def summarise(
    values: Mapping[str, Any], totals: StepTotals, engines: EngineTotals, machine: Machine, store: Store, seconds: float
) -> dict[str, Any]:
    """Return the values of summary.json. Medians are of recent steps (`actors.telemetry.totals`).

    No duration includes the time in which the run was stopped.

    Args:
        values: seconds that the run had run at some events, token counts and evaluations of the record.
        totals: totals over all lines of metrics.jsonl.
        engines: token counts and update times of engines.
        machine: the ledger's state machine.
        store: the ledger.
        seconds: how long the run has run, in seconds.
    """
    ran, evals, tokens = values["ran"], values["evals"], values["tokens"]
    train_seconds = ran["last_step"] - ran["first_ticket"]
    trained = int(totals["tokens"].sum)
    # engines report their tokens once a second, so at the end the settled groups may be ahead of the reports
    generated = max(values["generated"] - tokens.get("eval", 0), tokens.get("train", 0))
    # the idle ratio counts from the first step, without the start of all processes
    between = ran["last_step"] - ran["first_step"]
    return {
        "steps": machine.trained_step,
        "reward_first": totals.reward_first,
        "reward_last": totals.reward_last,
        "eval_before": evals.get("0"),  # version 0 is the model as configured
        "eval_after": evals.get(str(machine.settings.max_steps)),
        "wall_seconds": seconds,
        "train_seconds": train_seconds,
        "time_to_first_step_seconds": ran["first_step"],
        "completions_per_second": per_second(totals["num_completions"].sum, train_seconds),
        "generated_tokens": generated + tokens.get("eval", 0),
        "trained_tokens": trained,
        "goodput": trained / generated if generated else None,
        "tokens_per_second": per_second(trained, train_seconds),
        "trainer_idle_ratio": per_second(totals.idle.sum, between),
        "lag_mean": totals["lag_mean"].mean,
        "lag_max": totals["lag_max"].maximum,
        "mismatch_kl": totals["mismatch_kl"].mean,
        "ledger": _balance("train", machine, store),
        "eval_ledger": _balance("eval", machine, store),
        "weight_update_seconds": _weight_update_seconds(totals, engines),
    }


def _balance(purpose: str, machine: Machine, store: Store) -> dict[str, Any]:
    """Return the ledger's balance for a purpose, counted by the database. Evaluated groups count as trained."""
    finished = ("trained", "durable") if purpose == "train" else ("settled",)
    rows = {(state, reason): n for (p, state, reason), n in store.counts().items() if p == purpose}
    counters = machine.groups.counters
    return {
        "issued": machine.groups.num_issued[purpose],
        "trained": sum(n for (state, _), n in rows.items() if state in finished),
        "in_flight": sum(n for (state, _), n in rows.items() if state not in (*finished, "dropped")),
        "dropped": {reason: n for (state, reason), n in rows.items() if state == "dropped"},
        "copies_dropped": counters["copies_dropped"],
        "reissued": counters["reissued"],
        "trained_twice": store.trained_twice(),
    }


def _weight_update_seconds(totals: StepTotals, engines: EngineTotals) -> dict[str, float | None]:
    """Return the median seconds of each part of a weight update."""
    received, written = engines.recent_median("wire"), totals["seconds_publish"].recent_median
    return {
        "pause": engines.recent_median("pause"),
        "gather": totals["seconds_gather"].recent_median,
        # both are on the wire: the trainer's writing and the engine's reading
        "wire": None if received is None or written is None else received + written,
        "load": engines.recent_median("load"),
    }
