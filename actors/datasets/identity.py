"""Identity of a run's data, and its changes since the run was last started (P23: identity keys must not change).

A ticket names an example by its number, so changed or removed rows make another dataset. Rows added at the end do not.
"""

from collections.abc import Mapping
from typing import Any

from actors.datasets import make_dataset
from actors.datasets.base import Dataset
from actors.datasets.jsonl import Jsonl
from schemas.config import RunConfig

Identity = dict[str, Any]
"""`rows` (a number) and `digest` (sha256, hex) of a data file."""


def data_files(config: RunConfig) -> dict[str, Dataset]:
    """Open the train files of a configuration, by label of the environment, without checking rows.

    Raises:
        ConfigError: a file can't be read or has no rows.
    """
    files = [one for one in config.trained if "train" in one.files]
    # unchecked: neither number nor digest needs parsed rows
    return {one.label: make_dataset(one, "train", config.seed, check=False) for one in files}


def identities(datasets: Mapping[str, Dataset]) -> dict[str, Identity]:
    """Return the identity of each environment with a data file, by label; generated environments have none."""
    files = {label: one for label, one in datasets.items() if isinstance(one, Jsonl) and one.path}
    return {label: {"rows": one.num_examples, "digest": one.digest()} for label, one in files.items()}


def data_changes(before: Mapping[str, Identity], datasets: Mapping[str, Dataset]) -> tuple[list[str], list[str]]:
    """Compare the data with the data of the run when it was last started.

    Args:
        before: identities of the last start, by label.
        environments: the datasets of now, by label.

    Returns:
        Messages about changes that make another run, and messages about changes that do not (added rows).
    """
    refused, told = [], []
    for label, dataset in datasets.items():
        known = before.get(label)
        if known is None or not isinstance(dataset, Jsonl) or dataset.path is None:
            continue
        rows, what = dataset.num_examples or 0, f"environments[].{dataset.key}: {dataset.path}"
        # the digest over the first rows alone: rows added at the end do not change it
        if rows >= known["rows"] and dataset.digest(known["rows"]) == known["digest"]:
            if rows > known["rows"]:
                told.append(
                    f"{what} has {rows} rows, {known['rows']} when the run was last started: the current epoch is "
                    "shuffled again, so some of its examples come twice or not at all"
                )
            continue
        refused.append(
            f"{what} is not the data of this run: {known['rows']} rows so far, {rows} now, and earlier rows have "
            "changed; this makes another run (--fork, or another output_dir)"
        )
    return refused, told
