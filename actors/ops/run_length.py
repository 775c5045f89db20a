"""Number of steps of a run with a length in epochs (`trainer.max_epochs`)."""

from collections.abc import Mapping

from actors.algorithms.run_length import steps_of_epochs
from actors.datasets import Dataset, make_dataset, prepared_folder
from actors.environments.own_examples import must_be_asked, own_examples
from schemas.config import RunConfig
from schemas.config.data import DatasetConfig
from schemas.errors import ConfigError


def with_run_length(config: RunConfig, datasets: Mapping[str, Dataset] | None = None) -> RunConfig:
    """Return the configuration with `trainer.max_steps`, counted from the examples if the length is given in epochs.

    Args:
        config: configuration of the run.
        datasets: train data sets by label. None: the files are opened here, with the prepared folder of the run, and
            workers of environments are asked.

    Raises:
        ConfigError: an environment has no known number of examples, or too few for a step; or data can't be read.
    """
    trainer, wanted = config.trainer, config.packer.groups_per_step
    if trainer.max_steps or trainer.max_epochs is None:
        return config
    found = _train_datasets(config) if datasets is None else datasets
    endless = [label for label, dataset in found.items() if dataset.num_examples is None]
    if endless:
        raise ConfigError(
            f"trainer.max_epochs: environment {endless[0]} makes examples without end, so it has no epochs; set "
            "trainer.max_steps instead"
        )
    num_examples = sum(dataset.num_examples or 0 for dataset in found.values())
    steps = steps_of_epochs(num_examples, wanted, trainer.max_epochs)
    if not steps:
        raise ConfigError(
            f"trainer.max_epochs: an epoch of {num_examples} examples has no step of packer.groups_per_step {wanted}; "
            "lower that, or set trainer.max_steps"
        )
    return config.with_steps(steps)


def run_length_note(config: RunConfig) -> str:
    """Return how many steps the epochs of a run are, as a text for people; empty if the run is given in steps.

    No worker of an environment is started, and nothing is written.

    Raises:
        ConfigError: as `with_run_length`.
    """
    epochs = config.trainer.max_epochs
    if epochs is None:
        return ""
    to_ask = [one.label for one in config.trained if must_be_asked(one) or isinstance(one, DatasetConfig)]
    if to_ask and not config.trainer.max_steps:
        return f"trainer.max_epochs: the steps are counted at the start, when environment {to_ask[0]} is opened"
    return f"trainer.max_epochs: {epochs:g} epochs are {with_run_length(config).trainer.max_steps} steps"


def _train_datasets(config: RunConfig) -> dict[str, Dataset]:
    prepared = prepared_folder(config)
    return {
        one.label: make_dataset(
            one,
            "train",
            config.seed,
            check=False,
            num_examples=own_examples(one, config.bus, "up")["train"],
            prepared=prepared,
        )
        for one in config.trained
    }
