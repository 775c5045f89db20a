"""Identity of a run's data, and its changes since the run was last started (P23: identity keys must not change).

A ticket names an example by its number, so changed or removed rows make another dataset. Rows added at the end of a
`jsonl` environment do not.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from actors.datasets import make_dataset, prepared_folder
from actors.datasets.base import Dataset
from actors.datasets.jsonl import Jsonl
from actors.datasets.table import Source, Table
from schemas.config import RunConfig
from schemas.config.data import DatasetConfig

Identity = dict[str, Any]
"""`rows` (a number) and `digest` (sha256, hex) of a `jsonl` environment, a TableIdentity of a `dataset`."""
OTHER_RUN = "this makes another run (--fork, or another output_dir)"


def data_files(config: RunConfig) -> dict[str, Dataset | Source]:
    """Open the train files of a configuration, by label of the environment, without checking or selecting rows.

    Raises:
        ConfigError: a file can't be read or has no rows.
    """
    found: dict[str, Dataset | Source] = {}
    for one in config.trained:
        if isinstance(one, DatasetConfig):
            # not opened: neither digest nor commit needs rows, and a filter is code of the user
            found[one.label] = Source(one, "train", prepared_folder(config))
        elif "train" in one.files:
            # unchecked: neither number nor digest needs parsed rows
            found[one.label] = make_dataset(one, "train", config.seed, check=False)
    return found


def identities(datasets: Mapping[str, Dataset]) -> dict[str, Identity]:
    """Return the identity of each environment with data, by label; generated environments have none."""
    found: dict[str, Identity] = {}
    for label, one in datasets.items():
        if isinstance(one, Jsonl) and one.path:
            found[label] = {"rows": one.num_examples, "digest": one.digest()}
        elif isinstance(one, Table):
            found[label] = dict(one.identity())
    return found


def pinned_commits(before: Mapping[str, Identity]) -> dict[str, str]:
    """Return the commits of data sets on the hub that a run has, by `name@revision`."""
    return {pin: commit for known in before.values() for pin, commit in known.get("commits", {}).items()}


def data_changes(
    before: Mapping[str, Identity], datasets: Mapping[str, Dataset | Source]
) -> tuple[list[str], list[str]]:
    """Compare the data with the data of the run when it was last started.

    Args:
        before: identities of the last start, by label.
        datasets: the datasets of now, by label.

    Returns:
        Messages about changes that make another run, and messages about changes that do not (added rows).
    """
    refused, told = list[str](), list[str]()
    for label, dataset in datasets.items():
        known = before.get(label)
        if known is None:
            continue
        if isinstance(dataset, Jsonl) and dataset.path and "digest" in known:
            changes = _changes_of_lines(known, dataset)
            refused, told = refused + changes[0], told + changes[1]
        elif isinstance(dataset, Table | Source) and "files" in known:
            refused += _changes_of_table(known, dataset)
    return refused, told


def _changes_of_lines(known: Identity, dataset: Jsonl) -> tuple[list[str], list[str]]:
    rows, what = dataset.num_examples or 0, f"environments[].{dataset.key}: {dataset.path}"
    # the digest over the first rows alone: rows added at the end do not change it
    if rows < known["rows"] or dataset.digest(known["rows"]) != known["digest"]:
        changed = f"{known['rows']} rows so far, {rows} now, and earlier rows have changed"
        return [f"{what} is not the data of this run: {changed}; {OTHER_RUN}"], []
    if rows == known["rows"]:
        return [], []
    more = f"{what} has {rows} rows, {known['rows']} when the run was last started"
    return [], [f"{more}: the current epoch is shuffled again, so some of its examples come twice or not at all"]


def _changes_of_table(known: Identity, dataset: Table | Source) -> list[str]:
    now, refused = dict[str, Any](dataset.identity()), list[str]()
    source = dataset.source if isinstance(dataset, Table) else dataset
    what = f"environments[].{source.key}"
    for before, after in zip_longest(known["files"], now["files"]):
        if before is None:
            refused.append(f"{what}: {after['path']} is not in the data of this run")
        elif after is None:
            refused.append(f"{what}: {before['path']} was in the data of this run, and is not now")
        elif before["digest"] != after["digest"]:
            refused.append(
                f"{what}: {after['path']} is not the data of this run: so far {before['bytes']} bytes with digest "
                f"{before['digest'][:12]} in {before['path']}, now {after['bytes']} bytes with digest "
                f"{after['digest'][:12]}"
            )
    for pin, commit in known["commits"].items():
        if now["commits"].get(pin, commit) != commit:
            refused.append(
                f"{what}: {pin} is not the data of this run: commit {commit} so far, {now['commits'][pin]} now"
            )
    # with other files the filter has other rows in any case; a source that is not opened has no selection
    if not refused and now.get("selection", known["selection"]) != known["selection"]:
        refused.append(
            f"environments[].filter: {source.config.filter} keeps other rows of {source.path} than at the last start: "
            f"{known['rows']} rows so far, {now['rows']} now"
        )
    return [f"{text}; {OTHER_RUN}" for text in refused]
