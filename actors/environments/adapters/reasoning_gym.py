"""Tasks of reasoning_gym as an environment of one turn: a question, an answer, and the package's own score.

Works with reasoning-gym 0.1.25. Options are in docs/reference/environments.md.
"""

import dataclasses
import functools
import json
import threading
from typing import Any

import reasoning_gym
from reasoning_gym.factory import CURRICULA, DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

EVAL_SEED = 1 << 31
"""Distance between the seeds of both splits: an example has the seed of its split plus its index, up to 32 bits."""
LARGEST_SIZE = LARGEST_SEED = 1 << 29
RUN_ANSWERS = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
)
"""Tasks whose score runs the answer as Python code, by `eval` or by sympy's parser."""
LOCK = threading.Lock()
"""Held for questions and scores: datasets keep state, and episodes have threads of their own."""

Json = dict[str, Any]


class Env:
    """One example of a task.

    Args:
        task: name of a task; or a list of maps with `task`, and optionally `weight`, `options`, `level` and `levels`.
        size: number of examples for training.
        eval_size: number of examples for evaluation.
        seed: first seed of the examples; those of evaluation have others.
        level: level of all attributes of the task's curriculum; beyond the last of an attribute, its last.
        levels: levels of single attributes by name.
        system_prompt: a text, or the name of one of reasoning_gym's: default, DeepSeekZero, simple, direct,
            chain_of_draft.
        run_answers: allow tasks whose score runs the answer as Python code.
        moving_levels: number of levels, from 0, of all tasks with a curriculum and without a level of their own. There
            are `size` examples for training of each level: index `level · size + place`. Examples of evaluation have
            all levels in turn. 0: the level does not move.
        options: options of the task.
    """

    def __init__(
        self,
        task: str | list[Json],
        size: int = 10_000,
        eval_size: int = 100,
        seed: int = 0,
        level: int | None = None,
        levels: dict[str, int] | None = None,
        system_prompt: str = "",
        run_answers: bool = False,
        moving_levels: int = 0,
        **options: Any,
    ) -> None:
        if isinstance(task, list) and (options or levels or level is not None):
            given = sorted(options) + ["levels"] * bool(levels) + ["level"] * (level is not None)
            raise ValueError(f"{', '.join(given)}: give them in the entries of task, for task is a list")
        entries = (
            task if isinstance(task, list) else [{"task": task, "options": options, "level": level, "levels": levels}]
        )
        _check(entries, size, eval_size, seed, run_answers)
        if moving_levels:
            _check_moving(entries, size, moving_levels)
        self._entries, self._moving_levels = entries, moving_levels
        self._sizes, self._seeds = {"train": size, "eval": eval_size}, {"train": seed, "eval": seed + EVAL_SEED}
        self._system = SYSTEM_PROMPTS.get(system_prompt, system_prompt)
        self._score: float | None = None
        self.columns: Json = {}

    @classmethod
    def examples(cls, split: str, **options: Any) -> int:
        """Return the number of examples; make the dataset, so that wrong options are told before the first episode."""
        env = cls(**options)
        for level in range(max(1, env._moving_levels)):
            env._dataset_of(level, split)
        return env._sizes[split] * (env._moving_levels if env._moving_levels and split == "train" else 1)

    def reset(self, index: int, split: str = "train") -> list[Json]:
        """Return the question."""
        level, place, size = 0, index, self._sizes[split]
        if self._moving_levels:
            level, place = divmod(index, size) if split == "train" else (index % self._moving_levels, index)
        if not (0 <= place < size and 0 <= level < max(1, self._moving_levels)):
            many = f" of each of {self._moving_levels} levels" if self._moving_levels and split == "train" else ""
            raise IndexError(f"index {index} of {split}: there are {size} examples{many}")
        with LOCK:
            self._dataset = self._dataset_of(level, split)
            self._entry = self._dataset[place]
        self._task = self._entry["metadata"].get("source_dataset") or self._entries[0]["task"]
        self.columns = {"answer": self._entry["answer"], "task": self._task}
        if self._moving_levels:
            self.columns["level"] = level
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self._entry["question"]}]

    def step(self, answer: str) -> tuple[None, None, bool, Json]:
        """Score the answer: what stands in the last `<answer>…</answer>`, or the whole text."""
        found = extract_answer(answer)
        given = answer.strip() if found is None else found
        try:
            self._score = self._scored(given)
        except Exception as error:  # noqa: BLE001 - of the package's, by the task
            # some scorers raise for what is no number, say: then the answer counts as none, if that can be scored
            self._score = self._scored(None)
            return None, None, True, {"unreadable": f"{type(error).__name__}: {error}"[:199]}
        return None, None, True, {}

    def get_reward(self) -> dict[str, float]:
        """Return the package's score of the answer; if the model has not come to one, its score of None."""
        return {"reasoning_gym": self._scored(None) if self._score is None else self._score}

    def _dataset_of(self, level: int, split: str) -> Any:
        """Return the examples of a level."""
        entries, size, seed = self._entries, self._sizes[split], self._seeds[split]
        if self._moving_levels:
            entries = [{**entry, "level": level} if _moves(entry) else entry for entry in entries]
            # an index has a seed of its own, whatever its level
            seed += level * size if split == "train" else 0
        # one text of all that decides the examples, by which episodes share a dataset
        return _dataset(json.dumps(entries, sort_keys=True), size, seed)

    def _scored(self, answer: str | None) -> float:
        with LOCK:
            return float(self._dataset.score_answer(answer, self._entry))


def _check(entries: list[Json], size: int, eval_size: int, seed: int, run_answers: bool) -> None:
    """Refuse what no dataset can be made of."""
    for name, value in (("size", size), ("eval_size", eval_size)):
        if not 1 <= value <= LARGEST_SIZE:
            raise ValueError(f"{name} is {value}, but must be from 1 to {LARGEST_SIZE}")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed is {seed}, but must be from 0 to {LARGEST_SEED}")
    if not entries:
        raise ValueError("task is an empty list; name at least one task")
    for entry in entries:
        if unknown := sorted(entry.keys() - {"task", "weight", "options", "level", "levels"}):
            raise ValueError(f"{unknown[0]}: no key of an entry of task; task, weight, options, level and levels are")
        name = str(entry.get("task"))
        if name not in DATASETS or name == "composite":
            raise ValueError(f"reasoning_gym has no task {name!r}; its tasks are {', '.join(sorted(DATASETS))}")
        if name in RUN_ANSWERS and not run_answers:
            raise ValueError(
                f"{name}: reasoning_gym scores it by running the model's answer as Python code; set run_answers to "
                "true where a worker may run any code"
            )


def _moves(entry: Json) -> bool:
    """Return whether the level of an entry moves: its task has levels, and it names none."""
    return entry["task"] in CURRICULA and entry.get("level") is None and not entry.get("levels")


def _check_moving(entries: list[Json], size: int, levels: int) -> None:
    """Refuse levels that can't move."""
    if not any(map(_moves, entries)):
        raise ValueError(
            "curriculum: no task has a level that could move; leave out level and levels of the options, or take a "
            "task of which reasoning_gym has a curriculum"
        )
    if size * levels > LARGEST_SIZE:
        raise ValueError(f"size is {size} for each of {levels} levels, but must be at most {LARGEST_SIZE // levels}")


@functools.lru_cache(maxsize=128)
def _dataset(key: str, size: int, seed: int) -> Any:
    """Return the dataset of some tasks, which all episodes of this process share."""
    entries = json.loads(key)
    if len(entries) == 1:
        entry = entries[0]
        return reasoning_gym.create_dataset(entry["task"], size=size, seed=seed, **_options(entry))
    specs = [
        reasoning_gym.composite.DatasetSpec(entry["task"], entry.get("weight", 1.0), _options(entry))
        for entry in entries
    ]
    return reasoning_gym.create_dataset("composite", size=size, seed=seed, datasets=specs)


def _options(entry: Json) -> Json:
    """Return the options of a task, those of its levels included."""
    task, options = entry["task"], dict(entry.get("options") or {})
    if reserved := sorted(options.keys() & {"size", "seed"}):
        raise ValueError(f"{reserved[0]}: give it beside task, not in the options of {task}")
    level, levels = entry.get("level"), entry.get("levels") or {}
    if level is None and not levels:
        return options
    if task not in CURRICULA:
        raise ValueError(f"reasoning_gym has no curriculum for {task}; leave out level and levels")
    curriculum = CURRICULA[task]()
    if level is not None:
        curriculum.set_global_level(level)
    for name, value in levels.items():
        if name not in curriculum.attributes:
            known = ", ".join(curriculum.attributes)
            raise ValueError(f"levels.{name}: the curriculum of {task} has no such attribute; it has {known}")
        curriculum.set_attr_level(name, value)
    configured = curriculum.generate_configuration(options)
    fields = [one.name for one in dataclasses.fields(configured) if one.init and one.name not in ("size", "seed")]
    result = {name: getattr(configured, name) for name in fields}
    for name, value in options.items():
        if result[name] != value:
            raise ValueError(f"{name}: a level of {task} decides it; leave it out, or leave out the level")
    return result
