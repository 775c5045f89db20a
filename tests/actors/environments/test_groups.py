"""Groups on one worker, the environment's own examples, and its columns for reward functions."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.environments.errors import EpisodeError
from actors.environments.pool import GroupCalls, WorkerPool, describe
from actors.environments.spec import EnvironmentSpec, Limits
from tests.actors.environments.test_calls import holds, never
from tests.actors.environments.test_pool import WAIT, says, spec, until

pytestmark = pytest.mark.slow
ROW = {"index": 4, "split": "eval"}


async def answered(group: GroupCalls, *texts: str) -> None:
    """Play episodes of Quiz, one for each text."""
    for episode, text in zip(group, texts, strict=True):
        await episode.reset(ROW, 0)
        await episode.step(says(text))


# --- examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("Quiz", {"size": 9}, {"train": None, "eval": 9}),
        ("Quiz", {}, {"train": None, "eval": 3}),
        ("counted_guess", {}, {"train": 5, "eval": 0}),
        ("made_guess", {}, None),
        ("Guess", {}, None),
        ("drive", {}, None),
        ("TOOLS", {}, None),
        ("Shelf", {}, None),
    ],
)
async def test_an_environment_says_how_many_examples_it_has(
    name: str, options: dict[str, Any], expected: dict[str, int | None] | None
) -> None:
    """By split, None for no end; nothing where it has none of its own."""
    assert await describe(spec(name, options=options, workers=2)) == expected


async def test_the_module_of_a_factory_says_how_many_examples_it_has(tmp_path: Path) -> None:
    """With the options that its function has parameters for."""
    (tmp_path / "made.py").write_text(
        "class Env:\n"
        "    def reset(self, index, split):\n"
        "        return f'{split} {index}'\n"
        "    def step(self, answer):\n"
        "        return None, 1, True\n"
        "def make(size, level=0):\n"
        "    return Env()\n"
        "def examples(split, size):\n"
        "    return size\n"
    )
    one = EnvironmentSpec("made", f"{tmp_path}/made.py:make", {"size": 8, "level": 1}, limits=Limits(load=WAIT))
    async with WorkerPool(one) as pool, await pool.episode(WAIT) as episode:
        assert pool.examples == {"train": 8, "eval": 8}
        opening = await episode.reset({"index": 3, "split": "train"}, 0)
        assert opening["messages"][0]["content"] == "train 3"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoCount", r"examples\('train'\) returned 'many', but must return a count"),
        ("NoStatic", "NoStatic.examples needs an object; make it a @staticmethod"),
        ("scored_drive", r"score_group needs an object of each episode; let a class with run\(example, policy\) drive"),
    ],
)
async def test_what_a_target_says_wrongly_of_itself_is_told_at_once(name: str, words: str) -> None:
    """It can't be loaded."""
    with pytest.raises(EpisodeError, match=words) as failure:
        await describe(spec(name))
    assert failure.value.cause == "env_load"


# --- columns ---------------------------------------------------------------------------------------------------------


async def test_columns_of_an_example_come_with_its_reset() -> None:
    """And stay with the episode; an attribute of another meaning is left alone."""
    async with WorkerPool(spec("Quiz")) as pool, await pool.episode(WAIT) as episode:
        assert episode.columns == {}
        opening = await episode.reset(ROW, 0)
        assert opening["columns"] == {"answer": "4", "task": "eval", "parts": [1, {"a": None}], "size": 3}
        assert episode.columns == opening["columns"]
        assert (await episode.step(says("4")))["columns"] == {}
        async with await pool.episode(WAIT) as other:
            assert (await other.reset(ROW | {"way": "width"}, 0))["columns"] == {}


@pytest.mark.parametrize(
    ("way", "words"),
    [("date", "the column 'answer' can't be sent: date is neither"), ("number", "the name of a column is 7, but must")],
)
async def test_a_column_that_can_not_be_sent_is_a_failure(way: str, words: str) -> None:
    """With its name."""
    async with WorkerPool(spec("Quiz")) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError, match=words) as failure:
            await episode.reset(ROW | {"way": way}, 0)
        assert failure.value.cause == "env_reset"


async def test_an_environment_that_drives_has_columns_at_its_end() -> None:
    """Those of its object; a function has none."""
    async with WorkerPool(spec("Chosen")) as pool, await pool.episode(WAIT) as episode:
        assert await episode.run(ROW, 0, never) == {"Chosen": 1.0}
        assert episode.columns == {"index": 4}


# --- groups ----------------------------------------------------------------------------------------------------------


async def test_a_group_is_scored_together_on_one_worker() -> None:
    """A map, a number or nothing for each episode, in their order; only those that are asked for."""
    async with WorkerPool(spec("Quiz", workers=2)) as pool, await pool.episode(WAIT) as other:
        assert pool.has_group_scores
        async with await pool.group(4, WAIT) as group:
            await answered(group, "7", "5", "9", "none")
            first, second, third, fourth = await group.score()
            assert (first["rank"], second["rank"], third, fourth) == (1.0, 0.0, {"Quiz_group": 2.0}, {})
            assert first["pid"] == second["pid"]
            assert [one["rank"] for one in await group.score([group[1], group[0]])] == [0.0, 1.0]
            assert await other.reset(ROW, 0)


async def test_a_function_of_the_class_is_no_tool_and_a_method_of_its_name_is() -> None:
    """And `get_reward` may name several rewards."""
    async with WorkerPool(spec("Shelf")) as pool, await pool.group(2, WAIT) as group:
        for episode in group:
            opening = await episode.reset({}, 0)
            assert [tool["function"]["name"] for tool in opening["tools"]] == ["examples"]
        call = {"id": "1", "function": {"name": "examples", "arguments": '{"topic": "moss"}'}}
        turn = await group[1].step(says("", tool_calls=[call]))
        assert turn["messages"][0]["content"] == "an example of moss"
        assert await group[1].score() == {"read": 1.0, "liked": None}
        assert await group.score() == [{"read": 0.0}, {"read": 1.0}]


async def test_environments_that_drive_are_scored_as_a_group() -> None:
    """By their objects."""
    async with WorkerPool(spec("Chosen")) as pool, await pool.group(2, WAIT) as group:
        for index, episode in enumerate(group):
            await episode.run(ROW | {"index": index}, 0, never)
        assert await group.score() == [{"Chosen_group": 0.0}, {"Chosen_group": 0.5}]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("raise", "ValueError: no ranks"),
        ("few", "score_group returned 0 results, but must return a list with one result for each of 1"),
        ("nan", "the reward 'Quiz_group' is nan"),
        ("die", "ended with status 7"),
    ],
)
async def test_a_group_that_can_not_be_scored_is_a_failure(answer: str, words: str) -> None:
    """Never a reward."""
    async with WorkerPool(spec("Quiz")) as pool, await pool.group(1, WAIT) as group:
        await group[0].reset(ROW, 0)
        if answer == "die":
            with pytest.raises(EpisodeError, match=words):
                await group[0].step(says(answer))
        else:
            await group[0].step(says(answer))
        with pytest.raises(EpisodeError, match=words) as failure:
            await group.score()
        assert failure.value.cause == ("env_lost" if answer == "die" else "env_score")


async def test_a_group_without_episodes_or_scores_is_told_so() -> None:
    """In words."""
    async with WorkerPool(spec("Quiz")) as pool, await pool.group(1, WAIT) as group:
        with pytest.raises(EpisodeError, match=r"there is no episode \d+ here, or it has not begun"):
            await group.score()
    async with WorkerPool(spec("Guess")) as pool, await pool.group(1, WAIT) as group:
        assert not pool.has_group_scores
        with pytest.raises(EpisodeError, match=r"has no score_group\(environments\)"):
            await group.score()


async def test_a_group_is_scored_when_all_its_calls_have_ended(tmp_path: Path) -> None:
    """Also those whose caller was cancelled."""
    gate, mark = tmp_path / "gate", tmp_path / "mark"
    async with WorkerPool(spec("WaitsInGroup")) as pool, await pool.group(1, WAIT) as group:
        await group[0].reset({"gate": str(gate), "mark": str(mark)}, 0)
        step = asyncio.create_task(group[0].step(says("a")))
        await until(lambda: holds(mark, "waits"))
        step.cancel()
        scores = asyncio.create_task(group.score())
        done, _ = await asyncio.wait([scores], timeout=0.5)
        assert not done
        gate.touch()
        assert await scores == [{"WaitsInGroup_group": 1.0}]


async def test_a_group_takes_all_its_places_or_none() -> None:
    """Who waits in vain is told what to raise; an episode that is closed early gives its own place back."""
    async with WorkerPool(spec("Quiz", episodes=4)) as pool:
        await pool.group(4, WAIT)
        async with await pool.group(3, WAIT) as group:
            with pytest.raises(
                EpisodeError, match=r"had room for 2 episodes for 0.05 s: 1 of 1 are ready, with 3 epis"
            ):
                await pool.group(2, 0.05)
            async with group[0]:
                await group[0].reset(ROW, 0)
            async with await pool.group(2, WAIT) as second:
                assert len(second) == 2
        async with await pool.group(4, WAIT):
            pass


async def test_groups_that_no_worker_can_hold_are_refused() -> None:
    """With what to raise; and no episode of a group begins without it."""
    async with WorkerPool(spec("Quiz", episodes=4)) as pool:
        with pytest.raises(ValueError, match=r"a group of 5 needs .* but episodes is 4; raise episodes to at least 5"):
            await pool.group(5, WAIT)
        with pytest.raises(ValueError, match="a group of 0"):
            await pool.group(0, WAIT)
        group = await pool.group(2, WAIT)
        with pytest.raises(RuntimeError, match="entered with its group"):
            async with group[0]:
                pass


# --- adapters --------------------------------------------------------------------------------------------------------


async def test_an_adapter_does_not_hide_the_package_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has the package's name; what it imports is the package."""
    from actors.environments.worker import loading

    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/some_game.py").write_text("import some_game\nEnv = some_game.NAME\n")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/some_game.py").write_text("NAME = 'the package'\n")
    monkeypatch.setattr(loading, "ADAPTERS", tmp_path / "adapters")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    assert loading.load(f"{tmp_path}/adapters/some_game.py:Env") == "the package"
