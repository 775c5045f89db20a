"""Import of prime-rl: TOML files of `rl`, or of trainer, orchestrator and inference, from summer 2025 on."""

from collections.abc import Sequence
from pathlib import Path

from actors.imports.job import Import, Options
from actors.imports.keys import check_types, coerced, flat
from actors.imports.prime_rl import early, sampling, serving, training
from actors.imports.prime_rl.files import read_tree
from actors.imports.prime_rl.names import KEYS, defaults_of, era_of, today

WHOLE = frozenset({"args", "extra_body", "kwargs"})
"""Maps that are one value: arguments of the user's own code."""


def read(files: Sequence[Path], arguments: Sequence[str], options: Options) -> Import:
    """Return the finished import.

    Args:
        files: TOML files; later ones take precedence.
        arguments: words `--a.b-c VALUE`, which take precedence over files.
        options: values that no file says.

    Raises:
        ConfigError: a file can't be read, or prime-rl itself refuses the values.
    """
    tree, is_whole = read_tree(files, arguments)
    given, names, times = today(flat(early.with_evaluations(tree), WHOLE))
    era, reason = era_of(options.version, times)
    # pydantic reads texts as numbers
    given = coerced(given, KEYS)
    check_types(given, KEYS, names)
    job = Import(given, defaults_of(era), f"prime-rl {era}", options, names)
    if reason and options.version is None:
        job.note(f"{reason} is a key of {era}, so the defaults of that time hold; --from-version says otherwise")
    if era < "2026-05":
        job.defaults["orchestrator.concurrency.max_inflight"] = None
    _convert(job, era, is_whole)
    return job


def _convert(job: Import, era: str, is_whole: bool) -> None:
    """Report each key once, section by section."""
    sources = sampling.sources_of(job, "train")
    steps = training.finite_steps(job)
    serving.convert_names(job)
    serving.convert_seed(job, era)
    training.convert_model(job)
    serving.convert_template(job)
    sampling.convert_environments(job, sources, era)
    sampling.convert_batches(job, sources)
    sampling.convert_lengths(job, sources, era)
    sampling.convert_sampling(job, sources)
    if not early.convert_clipped_loss(job):
        training.convert_loss(job, era)
    sampling.convert_advantages(job, sources)
    early.convert_advantage(job)
    sampling.convert_filters(job, era)
    sampling.convert_lag(job, era < "2026-08")
    sampling.convert_pools(job)
    early.convert_rest(job)
    training.convert_optimizer(job)
    training.convert_schedule(job, steps)
    training.convert_checkpoints(job)
    training.convert_machines(job, is_whole)
    training.convert_transfer(job, era)
    serving.convert_engine(job)
    sampling.convert_evaluation(job, sources, era)
    serving.convert_trackers(job)
    serving.sweep(job)
    job.finish(list(KEYS))
