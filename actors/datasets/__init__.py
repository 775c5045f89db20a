"""Datasets: sources of the examples that are sampled, by number.

`environments` of run.yaml lists datasets, with shares. CONTRIBUTING.md has the steps to add one.

Packer and rollout actors build equal datasets from the configuration, so a ticket carries only an example's number.
"""

from actors.datasets.base import Dataset, Example
from actors.datasets.generated import Arithmetic, ReverseText
from actors.datasets.jsonl import Jsonl
from actors.datasets.numbered import Numbered
from actors.datasets.prepared import Prepared
from actors.datasets.table import Table
from schemas.config import RunConfig
from schemas.config.data import ArithmeticConfig, DatasetConfig, JsonlConfig, ReverseTextConfig, Split
from schemas.config.environments import EnvironmentConfig, PythonConfig


def make_dataset(
    config: EnvironmentConfig,
    split: Split,
    seed: int,
    check: bool = True,
    num_examples: int | None = None,
    prepared: Prepared | None = None,
) -> Dataset:
    """Make the dataset of one split of an environment; equal arguments give equal examples in every process.

    Args:
        config: one entry of `environments`.
        split: `train` or `eval`.
        seed: of the run, for generated examples.
        check: parse and check every row of a file now. False: a row is parsed when the example is read.
        num_examples: number of examples that the environment has itself; None: without end, or as configured.
        prepared: folder of everything that is made once from the run's data; a `dataset` needs one. None: nothing is
            written, and images at URLs are not looked at.

    Raises:
        ConfigError: the file can't be read, has no rows, or (with `check`) has a faulty row; or an image can't be
            downloaded.
    """
    if isinstance(config, ReverseTextConfig):
        return ReverseText(config, split, seed)
    if isinstance(config, ArithmeticConfig):
        return Arithmetic(config, split, seed)
    if isinstance(config, JsonlConfig):
        return Jsonl(config, split, check, prepared)
    if isinstance(config, DatasetConfig):
        assert prepared is not None
        return Table(config, split, prepared)
    if isinstance(config, PythonConfig) and config.rows is not None:
        return Jsonl(config.as_jsonl(config.rows), split, check, of_environment=True)
    return Numbered(split, num_examples or (config.num_examples if split == "train" else None))


def prepared_folder(config: RunConfig) -> Prepared:
    """Return the folder of everything that is made once from the data of a run."""
    return Prepared(config.output / "prepared")


__all__ = ["Dataset", "Example", "make_dataset", "prepared_folder"]
