"""Checks of everything named in a configuration, before the start: files, functions, packages, programs, data.

Needs no GPU, model or network. `places` checks folders, room and keys, `requirements` packages and programs,
`functions` the functions of the user, `environments` environments with turns, `fit` whether model, data and functions
go together.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from actors.ops.device_plan import Actor, largest_of, plan_here
from actors.ops.environments import environment_problems, environments_of, missing_of_workers, template_findings
from actors.ops.fit import (
    Finding,
    cache_findings,
    column_findings,
    image_findings,
    model_findings,
    prompt_findings,
    sight_problems,
)
from actors.ops.functions import call_findings, function_problems, missing_columns, worker_notes
from actors.ops.places import folder_problems, key_problems, room_problems, token_problems
from actors.ops.requirements import not_installed
from actors.process.packages import is_installed
from actors.reward.sandbox.confine import landlock_version
from schemas.config import RunConfig
from schemas.config.data import DatasetConfig, JsonlConfig, Split
from schemas.config.environments import EnvironmentBase, EnvironmentConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from actors.datasets.jsonl import Jsonl
    from actors.datasets.table import Preview

MODEL_FILES = ("config.json", "tokenizer.json")
"""Files in a model's directory without which no actor can start."""
Tables = dict[tuple[str, Split], "Jsonl | Preview"]
"""Data files, read once, by environment and split."""


def preflight(config: RunConfig, *, starts: bool = True, actors: Sequence[Actor] | None = None) -> list[str]:
    """Check everything outside the configuration on which the run relies.

    Args:
        config: configuration of the run.
        starts: True if the run starts here and now. With False, missing files, packages, programs and room are only
            warnings, since a configuration may be checked on a machine without the data.
        actors: processes of this machine, which must have their GPUs; None: all of the run.

    Returns:
        Warnings: likely mistakes, and with `starts=False` everything missing on this machine, as `path.to.key: …`.

    Raises:
        ConfigError: with all problems found, each as `path.to.key: what is wrong, what is allowed`.
    """
    files = [(key, path) for key, path in _data_files(config) if not path.exists()]
    packages, workers = list(not_installed(config)), list(missing_of_workers(config))
    looks = (_model, folder_problems, key_problems, function_problems, environment_problems, _supervised)
    tables: Tables = {}
    problems = [problem for look in looks for problem in look(config)] + list(_rows(config, tables))
    found: list[Finding] = []
    # these checks read the same files again, so they run only if the files are sound
    if not problems:
        found += model_findings(config)
        # without a chat template prompts of messages can't be judged
        found += list(template_findings(config)) or _fit(config, tables)
    found += [*worker_notes(config), *_hub_notes(config), *_download_notes(config)]
    here = list(_programs(config))
    machine = list(_devices(config, largest_of(config) if actors is None else actors))
    # this machine must have the GPUs only if the run starts here
    if starts:
        found += machine
        machine = []
    # findings about this machine are problems only if the run starts here
    problems += [finding.words for finding in found if finding.fatal]
    notes = [finding.words for finding in (*found, *machine) if not (finding in found and finding.fatal)]
    room, tokens = list(room_problems(config)), list(token_problems(config))
    if starts:
        problems += tokens
        problems += room
        problems += [f"{key}: there is no file {path}" for key, path in files]
        problems += [f"{key}: {words}" for key, words in workers]
        problems += [f"{key}: needs {name}, which is not installed; install {extra}" for key, name, extra in packages]
    if problems:
        raise ConfigError(*problems)
    missing = [f"{key}: {path} is not here; `actors up` needs it" for key, path in files]
    missing += [f"{key}: {words}; `actors up` needs it on this machine" for key, words in workers]
    missing += [
        f"{key}: {name} is not installed here; a run needs it, install {extra}" for key, name, extra in packages
    ]
    missing += [f"{words}; a run needs it" for words in tokens]
    return [*room, *missing, *notes, *here]


def image_bytes(config: RunConfig) -> float:
    """Return the bytes of the images of a training example: the mean of the environment with most, by its files here.

    Raises:
        ConfigError: a file can't be read, or a row is faulty.
    """
    with_files = (one for one in config.trained if one.files or isinstance(one, DatasetConfig))
    opened = (_opened(one, "train", config) for one in with_files if not isinstance(one, EnvironmentBase))
    return max((rows.image_bytes / rows.num_read for rows in opened if rows and rows.num_read), default=0.0)


def _data_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield the data files, each with its key."""
    for environment in config.environments:
        for key, path in environment.files.values():
            yield f"environments[].{key}", Path(path)
        if isinstance(environment, DatasetConfig):
            yield from ((f"environments[].{key}", Path(path)) for key, path in environment.local_places.values())
    if config.trainer.sft is not None:
        yield "trainer.sft.path", Path(config.trainer.sft.path)


def _devices(config: RunConfig, actors: Sequence[Actor]) -> Iterator[Finding]:
    """Check that this machine has the GPUs for its processes, and that an engine's cache fits on its GPU."""
    try:
        plan = plan_here(config, actors)
    except ConfigError as error:
        yield from map(Finding, error.problems)
        return
    used = {gpu for actor, gpus in plan.of.items() if actor.kind == "inference" for gpu in gpus} if plan else set()
    if plan and (memories := [memory for gpu in used if (memory := plan.gpus[gpu].memory)]):
        yield from cache_findings(config, min(memories))


def _model(config: RunConfig) -> Iterator[str]:
    """Check that a local directory holds a model. A name on the hub is not looked up."""
    if not config.inference.engine.loads_model:
        return
    teacher = config.trainer.teacher
    for key, path in (("model.path", config.model.path), ("trainer.teacher.path", teacher.path if teacher else "")):
        folder = Path(path)
        if not folder.is_absolute():
            continue
        if not folder.is_dir():
            yield (
                f"{key}: there is no folder {folder}; a relative path is looked for next to the configuration file, "
                "then in the working directory; a name on the hub reads organisation/model"
            )
        else:
            yield from (f"{key}: {folder} has no {name}" for name in MODEL_FILES if not (folder / name).is_file())


def _supervised(config: RunConfig) -> Iterator[str]:
    """Check every row of the supervised data. Lengths in tokens are checked by the trainer."""
    sft = config.trainer.sft
    if sft is None or not Path(sft.path).exists():
        return
    # imported here, since it loads numpy: most runs have no supervised data
    from actors.datasets.supervised import KEY, SupervisedRows

    try:
        rows = SupervisedRows(sft)
        num_with_images = sum(bool(example.images) for example in rows)
    except ConfigError as error:
        yield from error.problems
        return
    if num_with_images:
        have = f"{KEY}: {num_with_images} of {len(rows)} rows of {rows.path} have images"
        yield from sight_problems(config, have)


def _rows(config: RunConfig, tables: Tables) -> Iterator[str]:
    """Check that every row of the data files is an example and has the columns needed by built-in functions.

    Args:
        config: configuration of the run.
        tables: filled with the files read, so that later checks need not read them again.
    """
    with_files = [one for one in config.environments if one.files or isinstance(one, DatasetConfig)]
    for environment, split in itertools.product(with_files, get_args(Split)):
        try:
            rows = _opened(environment, split, config)
        except ConfigError as error:
            yield from error.problems
            continue
        if rows is None:
            continue
        tables[environment.label, split] = rows
        # an environment may add columns, which are known once it is played
        if isinstance(environment, EnvironmentBase):
            continue
        if rows.num_examples and (use := _use_of(config, environment, split)):
            yield from missing_columns(config, use, rows)


def _use_of(config: RunConfig, environment: EnvironmentConfig, split: Split) -> Split | None:
    """Return what the rows of a file are used for; None: for nothing."""
    if split == "train" and environment.train:
        return "train"
    evaluated = {one.environment.label for one in config.evaluations.values()}
    return "eval" if split == environment.evaluated_split and environment.label in evaluated else None


def _opened(environment: EnvironmentConfig, split: Split, config: RunConfig) -> "Jsonl | Preview | None":
    """Return the rows of a split for checks; None if there are none, or none at hand.

    A `jsonl` file is read as a whole, a `dataset` in part. Nothing is loaded from the hub.

    Raises:
        ConfigError: a file can't be read, or a row is faulty.
    """
    # imported here, since it loads numpy
    from actors.datasets import make_dataset
    from actors.datasets.jsonl import Jsonl
    from actors.datasets.table import Preview

    if isinstance(environment, DatasetConfig):
        is_local = split in environment.sources and split in environment.local_places
        missing = is_local and not Path(environment.local_places[split][1]).exists()
        # without its package no row can be read; both are reported elsewhere
        lacks = any(not is_installed(name) for _, name in environment.packages)
        return Preview(environment, split) if is_local and not missing and not lacks else None
    if split in environment.files and not Path(environment.files[split][1]).exists():
        return None  # reported as a missing file
    rows = make_dataset(environment, split, config.seed)
    assert isinstance(rows, Jsonl)
    return rows


def _programs(config: RunConfig) -> Iterator[str]:
    """Tell where this machine's kernel does not confine the files of programs that the policy writes."""
    if any(function.path == "code_tests" for function in config.reward.functions) and landlock_version() < 1:
        yield (
            "reward.functions[].path: code_tests: this kernel has no Landlock (Linux 5.13, with landlock among its "
            "security modules), so programs of answers read and write each file that this user can"
        )


def _hub_notes(config: RunConfig) -> Iterator[Finding]:
    """Tell which data sets are checked at the start only, since a check needs no network."""
    for one in config.environments:
        if isinstance(one, DatasetConfig):
            for split in one.sources.keys() - one.local_places.keys():
                key, path, _ = one.sources[split]
                words = f"{path} is loaded from the hub at the start, and not checked before"
                yield Finding(f"environments[].{key}: {words}", fatal=False)


def _download_notes(config: RunConfig) -> Iterator[Finding]:
    """Tell which images are looked at when the run starts, since a check needs no network."""
    rows = [one.images for one in config.environments if isinstance(one, JsonlConfig | DatasetConfig)]
    sections = [("environments[].images", images) for images in rows]
    if config.trainer.sft is not None:
        sections.append(("trainer.sft.images", config.trainer.sft.images))
    for section, images in sections:
        if images.origins:
            words = f"images at {', '.join(images.origins)} are downloaded at the start, and not checked before"
            yield Finding(f"{section}.origins: {words}", fatal=False)


def _fit(config: RunConfig, tables: Tables) -> Iterator[Finding]:
    """Check prompts and columns of each file against the model and the functions."""
    played = {environment.label for environment in environments_of(config)}
    environments = {environment.label: environment for environment in config.environments}
    for (label, split), rows in tables.items():
        use = _use_of(config, environments[label], split)
        if not rows.num_examples or use is None:
            continue
        key = f"environments[].{rows.key}"
        yield from image_findings(config, rows, key)
        yield from column_findings(config, rows, key)
        yield from prompt_findings(config, rows, key, environments[label])
        wanted = config.packer.groups_per_step
        if use == "train" and len(config.trained) == 1 and rows.num_examples < wanted:
            yield Finding(
                f"packer.groups_per_step: {wanted}, but {rows.path} has {rows.num_examples} rows; each step repeats "
                "some",
                fatal=False,
            )
        if label not in played:
            yield from call_findings(config, use, rows.columns)
