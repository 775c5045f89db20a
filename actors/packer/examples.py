"""Examples of a run: draws for training, prompts of evaluations, difficulty as measured by rewards."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import structlog

from actors.algorithms.curriculum import Curriculum
from actors.algorithms.difficulty_pools import FILTERED_POOLS
from actors.datasets import Dataset
from actors.datasets.prompts import Prompts
from actors.ledger import ExampleRef
from actors.telemetry.metrics import Metrics
from schemas.errors import ConfigError
from schemas.messages import ScoredGroup

log = structlog.get_logger("packer")

DRAWS_IN_A_ROW = 5000
"""Examples without end that may be left out in a row, before the limit of their prompts counts as a mistake."""


class Examples:
    """Examples of all data sets.

    Args:
        train, evaluation: data sets by label.
        curriculum: draws the next train example; its state is saved with each commit that issues a ticket.
        num_eval_prompts: greatest number of prompts of an evaluation, by label.
        metrics: destination of the pools' sizes.
        prompts: encoder of prompts, by which long ones are left out; None: none is.
    """

    def __init__(
        self,
        train: Mapping[str, Dataset],
        evaluation: Mapping[str, Dataset],
        curriculum: Curriculum,
        num_eval_prompts: Mapping[str, int],
        metrics: Metrics,
        prompts: Prompts | None = None,
    ) -> None:
        self.train, self._prompts = train, prompts
        self._left_out: dict[str, set[int]] = {label: set() for label in train}
        """Train examples left out so far, because their prompts are too long."""
        for label in train:
            metrics.set("grpo_packer_long_prompts", 0, environment=label)
        self._evaluation, self._num_eval_prompts = evaluation, num_eval_prompts
        self._labels, self._curriculum, self._metrics = list(train), curriculum, metrics
        for label, level in zip(self._labels, curriculum.levels, strict=True):
            metrics.set("grpo_packer_level", level.level if level else 0, environment=label)

    @property
    def counts(self) -> list[int]:
        """Number of examples drawn from each data set: the state of the curriculum."""
        return list(self._curriculum.counts)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each data set in the draws, by label."""
        return dict(zip(self._labels, self._curriculum.shares, strict=True))

    def draw(self, excluded: Collection[str] = ()) -> ExampleRef:
        """Return the example of the next train ordinal, not of the excluded data sets.

        An example with a prompt that is too long (`environments[].max_prompt_tokens`) is left out, and the next one is
        drawn. The draws are counted as usual, so a restarted packer leaves out the same ones.

        Raises:
            ConfigError: all prompts of an environment are too long, or as many in a row as there may be by chance.
        """
        num_drawn: Counter[str] = Counter()
        while True:
            drawn = self._drawn(excluded)
            label = drawn.environment
            example = self.train[label].example(drawn.index)
            if self._prompts is None or not self._prompts.is_left_out(label, example):
                return drawn
            num_drawn[label] += 1
            self._note_left_out(drawn, num_drawn[label])

    def _note_left_out(self, drawn: ExampleRef, in_a_row: int) -> None:
        """Count an example that is left out; raise if there is none to be found."""
        label, found = drawn.environment, self._left_out[drawn.environment]
        size = self.train[label].num_examples
        if drawn.index not in found:
            found.add(drawn.index)
            self._metrics.set("grpo_packer_long_prompts", len(found), environment=label)
            # at 1, 2, 4, 8, …: enough to be seen, and no flood
            if len(found).bit_count() == 1:
                log.warning(
                    "examples are left out, since their prompts are too long (environments[].max_prompt_tokens)",
                    environment=label,
                    left_out=len(found),
                    of=size or "any number",
                    newest=drawn.index,
                )
        # two epochs, as difficulty pools may have set all others aside
        if len(found) == size or in_a_row >= 2 * (size or DRAWS_IN_A_ROW):
            raise ConfigError(
                f"environments[].max_prompt_tokens: of {label} no prompt is short enough; raise it, or set "
                "long_prompts: truncate_left"
            )

    def _drawn(self, excluded: Collection[str]) -> ExampleRef:
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
            found, left_out, asked = list[ExampleRef](), 0, self._num_eval_prompts[label]
            # num_examples is None for a generated data set, which has no end
            for index in itertools.count() if dataset.num_examples is None else range(dataset.num_examples):
                if len(found) >= asked or left_out >= DRAWS_IN_A_ROW:
                    break
                example = dataset.example(index)
                if self._prompts is not None and self._prompts.is_left_out(label, example):
                    left_out += 1
                else:
                    found.append(ExampleRef(label, index, example.key(label)))
            if left_out:
                log.warning(
                    "examples are left out of evaluations, since their prompts are too long "
                    "(environments[].max_prompt_tokens)",
                    environment=label,
                    left_out=left_out,
                    evaluated=len(found),
                )
            examples += found
        return examples

    def note_difficulty(self, example: ExampleRef, group: ScoredGroup) -> None:
        """Record how difficult a train example is, by its group's mean reward."""
        scores = group.rewards_G[~np.isnan(group.rewards_G)]
        # a group that no function could score says nothing about its example; a fork may have other data
        if group.purpose != "train" or not scores.size or example.environment not in self.train:
            return
        environment, mean = self._labels.index(example.environment), float(scores.mean())
        if self._curriculum.pools is not None:
            self._curriculum.pools.note(environment, example.index, mean)
        if self._curriculum.note(environment, example.index, mean):
            level = self._curriculum.levels[environment]
            assert level is not None
            self._metrics.set("grpo_packer_level", level.level, environment=example.environment)
            log.info("level", environment=example.environment, level=level.level, of=level.num_levels)

    def take_levels(self) -> dict[str, Any]:
        """Return the value of all levels for the next commit, if one has changed since the last call; else nothing."""
        levels = {label: one for label, one in zip(self._labels, self._curriculum.levels, strict=True) if one}
        changed = [one.take_changed() for one in levels.values()]
        if not any(changed):
            return {}
        return {"levels": {label: one.state for label, one in levels.items()}}

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
