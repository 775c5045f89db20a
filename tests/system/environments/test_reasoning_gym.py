"""reasoning_gym through its adapter: questions, answers, and the package's own scores."""

from pathlib import Path
from typing import Any

import pytest

from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool, describe
from actors.trajectories.recorder import TurnLimits
from tests.system.environments.playing import WAIT, adapter, computed, contents, play_one, spec

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

INDEX = 3
NO_ANSWER = "no idea"
"""What the model says where reasoning_gym has no answer of its own."""
SCORES = """
import json, sys
import reasoning_gym
index, no_answer = json.loads(sys.argv[1])
scores = {}
for name in sorted(reasoning_gym.factory.DATASETS):
    if name != "composite":
        dataset = reasoning_gym.create_dataset(name, size=10_000, seed=0)
        entry = dataset[index]
        answer = no_answer if entry["answer"] is None else entry["answer"]
        scores[name] = [entry["question"], entry["answer"], dataset.score_answer(answer.strip(), entry)]
print()
print(json.dumps(scores))
"""
MIXED: list[dict[str, Any]] = [
    {"task": "chain_sum", "weight": 3, "level": 2},
    {"task": "leg_counting", "options": {"max_animals": 3}},
]


def oracle(seen: str, columns: dict[str, Any]) -> str:
    """The right answer, with thoughts before it."""
    return f"Let me think.\n<answer>wrong</answer> No!\n<answer>{columns['answer']}</answer>"


async def test_every_task_gives_the_score_that_the_package_gives() -> None:
    """All 105, with the package's own answer; where it has none, with another."""
    expected = computed(SCORES, INDEX, NO_ANSWER)
    assert len(expected) == 105
    full, without = 0, []
    async with WorkerPool(spec(Path(__file__).with_name("every_task.py"))) as pool:
        for task, (question, answer, score) in expected.items():
            text = NO_ANSWER if answer is None else f"<answer>{answer}</answer>"
            trajectory, columns = await play_one(pool, [text], {"task": task, "index": INDEX})
            assert columns == {"answer": answer, "task": task}
            assert contents(trajectory)[0] == question
            assert trajectory.rewards == {"reasoning_gym": score}, task
            full += score == 1.0
            without += [task] * (answer is None)
    assert without == ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]
    assert full >= 100


async def test_several_tasks_are_mixed_by_weight_and_level() -> None:
    """The answer is the last that is marked; an example is the same each time; evaluation has others."""
    mixed = adapter("reasoning_gym", task=MIXED, size=50, eval_size=20, seed=5, system_prompt="simple")
    async with WorkerPool(mixed) as pool:
        tasks, questions = [], {}
        for split, count in (("train", 30), ("eval", 20)):
            for index in range(count):
                trajectory, columns = await play_one(pool, oracle, {"index": index, "split": split}, seed=index)
                assert (trajectory.stop, trajectory.rewards) == ("done", {"reasoning_gym": 1.0})
                assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant"]
                questions[split, index] = contents(trajectory)[1]
                tasks.append(columns["task"])
        assert pool.examples == {"train": 50, "eval": 20}
        assert 25 < tasks.count("chain_sum") < 48
        assert "leg_counting" in tasks
        train = {question for (split, _), question in questions.items() if split == "train"}
        assert not train & {question for (split, _), question in questions.items() if split == "eval"}
        again, _ = await play_one(pool, oracle, {"index": 7, "split": "train"}, seed=999)
        assert contents(again)[1] == questions["train", 7]
        with pytest.raises(EpisodeError, match="index 20 of eval: there are 20 examples"):
            await play_one(pool, oracle, {"index": 20, "split": "eval"})
    # another process, another hash seed
    async with WorkerPool(mixed) as pool:
        again, _ = await play_one(pool, oracle, {"index": 7, "split": "train"})
        assert contents(again)[1] == questions["train", 7]


async def test_levels_make_harder_questions() -> None:
    """Of one attribute, while the others stay."""
    lengths = []
    for level in (0, 4):
        levels = {"num_digits": level}
        async with WorkerPool(adapter("reasoning_gym", task="chain_sum", levels=levels)) as pool:
            trajectory, _ = await play_one(pool, oracle, {"index": 0, "split": "train"})
        lengths.append(len(contents(trajectory)[0]))
    assert lengths[0] + 4 < lengths[1]


async def test_an_index_says_the_level_and_the_question() -> None:
    """Training has the levels one behind the other, evaluation in turn; another process makes the same questions."""
    moving = adapter("reasoning_gym", task="chain_sum", size=5, eval_size=6, seed=3, moving_levels=3)
    found: list[dict[tuple[str, int], tuple[str, int]]] = []
    for _ in range(2):
        async with WorkerPool(moving) as pool:
            questions = {}
            for split, count in (("train", 15), ("eval", 6)):
                for index in range(count):
                    trajectory, columns = await play_one(pool, oracle, {"index": index, "split": split})
                    assert trajectory.rewards == {"reasoning_gym": 1.0}
                    questions[split, index] = (contents(trajectory)[0], columns["level"])
            assert pool.examples == {"train": 15, "eval": 6}
            with pytest.raises(EpisodeError, match="index 15 of train: there are 5 examples of each of 3 levels"):
                await play_one(pool, oracle, {"index": 15, "split": "train"})
        found.append(questions)
    assert found[0] == found[1]
    assert [level for (split, _), (_, level) in found[0].items() if split == "train"] == [0] * 5 + [1] * 5 + [2] * 5
    assert [level for (split, _), (_, level) in found[0].items() if split == "eval"] == [0, 1, 2] * 2
    assert len({question for question, _ in found[0].values()}) == 21
    lengths = [len(found[0]["train", index][0]) for index in range(15)]
    assert sum(lengths[:5]) < sum(lengths[5:10]) < sum(lengths[10:])


async def test_an_answer_that_can_not_be_scored_counts_as_none() -> None:
    """The scorer of this task raises for what is no number; the reason is in the info. No answer is scored the same."""
    async with WorkerPool(adapter("reasoning_gym", task="prime_factorization")) as pool:
        row = {"index": 0, "split": "train"}
        trajectory, _ = await play_one(pool, ["two times three"], row)
        assert trajectory.rewards == {"reasoning_gym": 0.0}
        async with await pool.episode(WAIT) as episode:
            await episode.reset(row, 0)
            turn = await episode.step({"role": "assistant", "content": "two"})
            assert turn["info"]["unreadable"].startswith("ValueError: invalid literal for int()")
        cut, _ = await play_one(pool, ["2 × 3"], row, limits=TurnLimits(100_000, 2))
        assert (cut.stop, cut.rewards) == ("length", {"reasoning_gym": 0.0})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "missing 1 required positional argument: 'task'"),
        ({"task": "riddles"}, "reasoning_gym has no task 'riddles'; its tasks are ab, acre"),
        ({"task": "countdown"}, "countdown: reasoning_gym scores it by running the model's answer .* set run_answers"),
        ({"task": "chain_sum", "size": 0}, "size is 0, but must be from 1"),
        ({"task": "chain_sum", "min_terms": -1}, "min_terms"),
        ({"task": "chain_sum", "levels": {"x": 1}}, "levels.x: the curriculum of chain_sum has no such attribute"),
        ({"task": "chain_sum", "level": 3, "max_terms": 3}, "max_terms: a level of chain_sum decides it"),
        ({"task": "gsm_symbolic", "level": 1}, "no curriculum for gsm_symbolic"),
        ({"task": "chain_sum", "level": 1, "moving_levels": 2}, "curriculum: no task has a level that could move"),
        ({"task": "acre", "moving_levels": 2}, "curriculum: no task has a level that could move"),
        ({"task": "chain_sum", "size": 1 << 28, "moving_levels": 3}, "size is 268435456 for each of 3 levels"),
        ({"task": MIXED, "level": 1}, "level: give them in the entries of task"),
    ],
)
async def test_wrong_options_are_told_before_the_first_episode(options: dict[str, Any], words: str) -> None:
    """The environment can't be loaded."""
    with pytest.raises(EpisodeError, match=words) as failure:
        await describe(adapter("reasoning_gym", **options))
    assert failure.value.cause == "env_load"
