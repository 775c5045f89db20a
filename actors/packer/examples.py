"""Examples of a run: draws for training, prompts of evaluations, difficulty as measured by rewards."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import structlog

from actors.algorithms.curriculum import Curriculum
from actors.algorithms.difficulty_pools import FILTERED_POOLS
from actors.datasets import Dataset
from actors.ledger import ExampleRef
from actors.telemetry.metrics import Metrics
from schemas.messages import ScoredGroup

log = structlog.get_logger("packer")


class Examples:
    """Examples of all data sets.

    Args:
        train, evaluation: data sets by label.
        curriculum: draws the next train example; its state is saved with each commit that issues a ticket.
        num_eval_prompts: greatest number of prompts of an evaluation, by label.
        metrics: destination of the pools' sizes.
    """

    def __init__(
        self,
        train: Mapping[str, Dataset],
        evaluation: Mapping[str, Dataset],
        curriculum: Curriculum,
        num_eval_prompts: Mapping[str, int],
        metrics: Metrics,
    ) -> None:
        self.train = train
        self._evaluation, self._num_eval_prompts = evaluation, num_eval_prompts
        self._labels, self._curriculum, self._metrics = list(train), curriculum, metrics

    @property
    def counts(self) -> list[int]:
        """Number of examples drawn from each data set: the state of the curriculum."""
        return list(self._curriculum.counts)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each data set in the draws, by label."""
        return dict(zip(self._labels, self._curriculum.shares, strict=True))

    def draw(self, excluded: Collection[str] = ()) -> ExampleRef:
        """Return the example of the next train ordinal, not of these data sets."""
        dataset, index = self._curriculum.draw([self._labels.index(label) for label in excluded])
        # the curriculum knows data sets by number, ledger and messages by label
        label = self._labels[dataset]
        for number, num_examples in self._curriculum.take_given_back():
            log.warning(
                "all examples of an environment were easy or hard; they are drawn again (packer.pools)",
                environment=self._labels[number],
                examples=num_examples,
            )
        return ExampleRef(label, index, self.train[label].example(index).key(label))

    def is_still_there(self, example: ExampleRef) -> bool:
        """Return whether an example drawn earlier is still in the data, unchanged."""
        dataset = self.train.get(example.environment)
        # a data set without end (num_examples None) has every index
        if dataset is None or (dataset.num_examples or example.index + 1) <= example.index:
            return False
        return dataset.example(example.index).key(example.environment) == example.key

    def of_evaluation(self) -> list[ExampleRef]:
        """Return the examples of all evaluations: the first ones of each data set."""
        examples = []
        for label, dataset in self._evaluation.items():
            asked = self._num_eval_prompts[label]
            # num_examples is None for a generated data set, which has no end
            size = asked if dataset.num_examples is None else min(asked, dataset.num_examples)
            examples += [ExampleRef(label, index, dataset.example(index).key(label)) for index in range(size)]
        return examples

    def note_difficulty(self, example: ExampleRef, group: ScoredGroup) -> None:
        """Record how difficult a train example is, by its group's mean reward."""
        scores = group.rewards_G[~np.isnan(group.rewards_G)]
        # a group that no function could score says nothing about its example
        if self._curriculum.pools is not None and group.purpose == "train" and scores.size:
            self._curriculum.pools.note(self._labels.index(example.environment), example.index, float(scores.mean()))

    def take_moved(self) -> dict[str, str]:
        """Return the examples that have changed their pool since the last call, for the next commit."""
        pools = self._curriculum.pools
        if pools is None:
            return {}
        for pool in FILTERED_POOLS:
            self._metrics.set("grpo_packer_pool_examples", pools.sizes[pool], pool=pool)
        return pools.take_changes()

    def give_back(self, values: Mapping[str, Any], started_at: float | None, seed: str) -> dict[str, Any]:
        """Move examples back to the normal difficulty pool when the run is started again. Return values to store.

        A restart after a crash changes nothing: the time of the `actors up` command is the same. Without this time
        each start of the packer counts as a start of the run.

        Args:
            values: values stored by earlier packers.
            started_at: wall-clock time of the `actors up` command; None without `actors up`.
            seed: seed of the choice of examples.
        """
        pools = self._curriculum.pools
        if pools is None or (started_at is not None and values.get("pools_begun") == started_at):
            return {}
        num_examples = pools.begin_again(seed)
        log.info("pools", given_back=num_examples, **{pool: pools.sizes[pool] for pool in FILTERED_POOLS})
        return {"pools_begun": started_at}
