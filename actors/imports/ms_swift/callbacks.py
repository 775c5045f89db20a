"""Callbacks of ms-swift by name; early stopping alone has a counterpart."""

from actors.imports.job import Import

_REFUSED = {
    "lisa": "LISA freezes other layers of the model in each interval, and callbacks here change no training",
    "adalora": "AdaLoRA changes ranks of adapters, and callbacks here change no training",
    "activation_cpu_offload": "activations are not moved to the CPU here; model.gradient_checkpointing saves memory",
    "deepspeed_elastic": "`actors up` starts processes again itself",
}
"""Callbacks of ms-swift without counterpart, with the reason."""
_BUILT_IN = {
    "perf_log": "metrics.jsonl has tokens and seconds of each step",
    "graceful_exit": "SIGTERM stops a run in order, with a checkpoint",
    "early_stop": "early_stop_interval is not set, so it never stops",
}
"""Callbacks of ms-swift that change nothing here, with the reason."""


def callbacks(job: Import) -> None:
    """Write early stopping, and report the other names."""
    given = job.given.get("callbacks")
    names = [str(name) for name in (given if isinstance(given, list) else [given])] if given else []
    interval = job.given.get("early_stop_interval")
    if isinstance(interval, str) and interval.isdecimal():
        interval = int(interval)
    if isinstance(interval, int) and interval > 0 and job.run.get("eval.num_prompts") == 0:
        job.refuse("early_stop_interval", "nothing is evaluated, so nothing would stop", "give val_dataset")
        names = [name for name in names if name != "early_stop"]
    elif isinstance(interval, int) and interval > 0:
        keys = {
            "callbacks.0.path": "transformers:EarlyStoppingCallback",
            "callbacks.0.kwargs": {"early_stopping_patience": interval},
        }
        job.convert(
            "early_stop_interval",
            keys,
            f"stops after {interval} evaluations without a better one; ms-swift counts saves",
        )
        names = [name for name in names if name != "early_stop"]
    problems = [f"{name}: {_REFUSED[name]}" for name in names if name in _REFUSED]
    problems += [
        f"{name}: no callback of ms-swift that is known here" for name in names if name not in _REFUSED | _BUILT_IN
    ]
    if problems:
        job.refuse("callbacks", "; ".join(problems), "write a callback of your own in run.yaml if it only reads")
    elif "callbacks" in job.given:
        job.irrelevant("callbacks", "; ".join(_BUILT_IN[name] for name in names) or "empty, or in early_stop_interval")
    job.settle("early_stop_interval", "empty: no early stop")
