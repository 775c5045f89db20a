"""Calls of one episode: where they run, in which order, and what becomes of those that fail or are given up."""

import asyncio
import datetime
import math
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from tests.actors.environments.test_pool import WAIT, WORLDS, says, spec, until

pytestmark = pytest.mark.slow


def holds(path: Path, text: str) -> bool:
    """Whether a file has this text."""
    return path.exists() and path.read_text() == text


async def never(messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """Sample nothing."""
    raise AssertionError


async def test_all_calls_of_an_episode_share_a_thread_and_a_task(tmp_path: Path) -> None:
    """What sqlite3, or a session with a cancel scope, demands of its callers."""
    mark = tmp_path / "mark"
    async with WorkerPool(spec("Places")) as pool:
        first, second = await pool.episode(WAIT), await pool.episode(WAIT)
        async with first, second:
            for episode in (first, second):
                await episode.reset({"mark": str(mark)}, 0)
            for _ in range(3):
                await asyncio.gather(first.step(says("a")), second.step(says("b")))
            assert await first.score() == await second.score() == {"Places": 1.0}
        assert mark.read_text() == "closed"


async def test_a_close_waits_for_the_call_that_was_given_up(tmp_path: Path) -> None:
    """The user's function goes on after its caller was cancelled, and keeps the place of its episode."""
    gate, mark = tmp_path / "gate", tmp_path / "mark"

    async def play(pool: WorkerPool) -> None:
        async with await pool.episode(WAIT) as episode:
            await episode.reset({"gate": str(gate), "mark": str(mark)}, 0)
            await episode.step(says("a"))

    async with WorkerPool(spec("Waits", episodes=1)) as pool:
        playing = asyncio.create_task(play(pool))
        await until(lambda: holds(mark, "waits"))
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        with pytest.raises(EpisodeError, match="1 of 1 are ready, with 1 episodes"):
            await pool.episode(0.05)
        gate.touch()
        async with await pool.episode(WAIT):
            assert mark.read_text() == "after the step"


async def test_a_call_that_was_given_up_keeps_its_limit(tmp_path: Path) -> None:
    """A function that hangs would otherwise hold its worker for ever."""
    mark = tmp_path / "mark"
    events: list[str] = []
    limits = Limits(WAIT, WAIT, 1.0, WAIT, WAIT, WAIT)
    async with WorkerPool(spec("Waits", limits=limits), events.append) as pool, await pool.episode(WAIT) as episode:
        await episode.reset({"gate": str(tmp_path / "none"), "mark": str(mark)}, 0)
        step = asyncio.create_task(episode.step(says("a")))
        await until(mark.exists)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await until(lambda: events == ["timeout", "restart"])


async def test_a_run_is_cancelled_when_its_episode_is_closed(tmp_path: Path) -> None:
    """Nobody waits for its rewards any more; the object is closed after it."""
    mark = tmp_path / "mark"
    async with WorkerPool(spec("Driver", options={"mark": str(mark)})) as pool:
        async with await pool.episode(WAIT) as episode:
            run = asyncio.create_task(episode.run({"way": "waits"}, 0, never))
            await until(lambda: holds(mark, "runs"))
            run.cancel()
        await until(lambda: holds(mark, "cancelled closed"))


async def test_a_class_that_drives_is_made_in_a_thread_and_closed(tmp_path: Path) -> None:
    """Its constructor may take long, and would hold up all episodes on the event loop."""
    mark = tmp_path / "mark"
    async with WorkerPool(spec("Driver", options={"mark": str(mark)})) as pool:
        async with await pool.episode(WAIT) as episode:
            assert await episode.run({"way": ""}, 0, never) == {"Driver": 1.0}
        assert mark.read_text() == " closed"


async def test_samples_under_way_end_with_their_run(tmp_path: Path) -> None:
    """What the user's code has asked for and not awaited is sampled for nobody."""
    ends: list[str] = []

    async def answer(messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "asked").touch()
        try:
            await asyncio.sleep(WAIT)
        finally:
            ends.append("ended")
        return says("late")

    driver = spec("Driver", options={"mark": str(tmp_path / "mark")})
    async with WorkerPool(driver) as pool, await pool.episode(WAIT) as episode:
        await episode.run({"way": "leaves", "asked": str(tmp_path / "asked")}, 0, answer)
        assert ends == ["ended"]


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("cancelled", "CancelledError"),
        ("cancels itself", "CancelledError"),
        ("surrogate", r"ValueError: bad \\ud800"),
        ("silent", "Silent .its text can't be made: RuntimeError"),
        ("nan", "the reward is nan, but must be a finite number"),
        ("inf", "the reward is inf, but must be a finite number"),
    ],
)
async def test_every_failure_of_a_step_is_answered(way: str, words: str) -> None:
    """In words, at once; the episode goes on."""
    async with WorkerPool(spec("Ways")) as pool, await pool.episode(WAIT) as episode:
        await episode.reset({"way": way}, 0)
        for _ in range(2):
            with pytest.raises(EpisodeError, match=words) as failure:
                await episode.step(says("a"))
            assert failure.value.cause == "env_step"


async def test_a_reward_that_is_no_finite_number_is_a_failure(tmp_path: Path) -> None:
    """One of them would spoil the advantages of its whole group."""
    async with WorkerPool(spec("Ways")) as pool, await pool.episode(WAIT) as episode:
        await episode.reset({"way": "-inf"}, 0)
        with pytest.raises(EpisodeError, match="the reward 'Ways' is -inf") as failure:
            await episode.score()
        assert failure.value.cause == "env_score"
    driver = spec("Driver", options={"mark": str(tmp_path / "mark")})
    async with WorkerPool(driver) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError, match="the reward 'Driver' is nan"):
            await episode.run({"way": "nan"}, 0, never)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out variables of whoever runs the tests."""
    for name in ("PYTHONSAFEPATH", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("plain")
async def test_processes_of_the_user_are_as_without_a_worker(tmp_path: Path) -> None:
    """Scripts import what lies beside them; classes of the file are found by processes of a pool."""
    (tmp_path / "beside.py").write_text("print('found')\n")
    (tmp_path / "script.py").write_text("import beside\n")
    async with WorkerPool(spec("Script")) as pool, await pool.episode(WAIT) as episode:
        opening = await episode.reset({"script": str(tmp_path / "script.py")}, 0)
        assert opening["messages"][0]["content"] == "[] found\n"
        assert (await episode.step(says("4")))["messages"][0]["content"] == "8"


@pytest.mark.usefixtures("plain")
async def test_variables_of_the_user_are_kept() -> None:
    """Also those that the worker needs for itself otherwise."""
    one = spec("Script", variables={"PYTHONSAFEPATH": "1"})
    async with WorkerPool(one) as pool, await pool.episode(WAIT) as episode:
        opening = await episode.reset({"script": "-V"}, 0)
        assert opening["messages"][0]["content"].startswith("['PYTHONSAFEPATH'] Python 3")


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), 2**64, "x" * (17 << 20)], ids=["date", "int", "long"])
async def test_a_row_that_can_not_be_sent_is_a_failure_of_its_episode(value: Any) -> None:
    """With the reason."""
    async with WorkerPool(spec("Seeded")) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError, match="a reset can't be sent") as failure:
            await episode.reset({"when": value}, 0)
        assert failure.value.cause == "env_reset"


@pytest.mark.parametrize("text", ["7" * 5000, "1.0", "0.5", "2.25"])
async def test_no_part_of_another_number_is_an_action(text: str) -> None:
    """Neither of a decimal fraction, nor of more digits than Python converts; a full stop is no part of a number."""
    async with WorkerPool(spec("Lake")) as pool, await pool.episode(WAIT) as episode:
        await episode.reset({}, 0)
        assert (await episode.step(says(text)))["info"] == {"invalid": True}
        assert (await episode.step(says("My move is 2.")))["messages"][0]["content"] == "..x"


async def test_an_environment_of_ms_swift_gets_settings_and_row() -> None:
    """The settings in its constructor, the row as `config.data_dict`."""
    async with WorkerPool(spec("Swift")) as pool, await pool.episode(WAIT) as episode:
        opening = await episode.reset({"problem": "Find it", "env_config": {"level": 3}}, 0)
        assert opening["messages"][1]["content"] == "Find it at level 3"


async def test_an_episode_that_can_not_be_closed_is_gone_all_the_same() -> None:
    """Its worker forgets it; the failure is logged."""
    with capture_logs() as logs:
        async with WorkerPool(spec("BadClose", episodes=1)) as pool:
            async with await pool.episode(WAIT) as episode:
                await episode.reset({}, 0)
            with pytest.raises(EpisodeError, match="there is no episode"):
                await episode.step(says("a"))
            async with await pool.episode(WAIT):
                pass
    assert [line["reason"] for line in logs if line["event"] == "episode not closed"] == [
        "environment badclose, close: ValueError: stays open"
    ]


async def test_an_episode_that_is_never_entered_holds_no_place() -> None:
    """Whoever is cancelled in between leaves nothing behind."""
    async with WorkerPool(spec("Guess", episodes=1)) as pool:
        await pool.episode(WAIT)
        async with await pool.episode(WAIT) as episode:
            await episode.reset({"target": 1}, 0)


async def test_who_waits_for_a_worker_hears_of_the_end_of_the_pool() -> None:
    """At once, and not at the end of the wait."""
    async with WorkerPool(spec("Guess", episodes=1)) as pool, await pool.episode(WAIT):
        waits = asyncio.create_task(pool.episode(math.inf))
        await asyncio.sleep(0)
    async with asyncio.timeout(WAIT):
        with pytest.raises(EpisodeError, match="its workers were ended"):
            await waits


@pytest.mark.parametrize("name", ["workers", "episodes"])
def test_a_pool_without_places_is_refused(name: str) -> None:
    """No episode could ever begin."""
    with pytest.raises(ValueError, match=f"{name} is 0, but must be at least 1"):
        EnvironmentSpec("none", f"{WORLDS}:Guess", **{name: 0})  # type: ignore[arg-type]


@pytest.mark.usefixtures("plain")
async def test_sets_have_the_same_order_in_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise members of a group would play different examples. Processes of the user are as without a worker."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "env.py").write_text(
        "import os\n"
        "class Env:\n"
        "    def reset(self):\n"
        "        return f'{hash(str(self.__class__))} {os.environ.get(\"PYTHONHASHSEED\")}'\n"
        "    def step(self, answer):\n"
        "        return None, 1, True\n"
    )
    seen = set()
    async with WorkerPool(EnvironmentSpec("sets", f"{tmp_path}/env.py:Env", workers=2)) as pool:
        await until(lambda: pool.num_ready == 2)
        async with await pool.episode(WAIT) as first, await pool.episode(WAIT) as second:
            for episode in (first, second):
                seen.add((await episode.reset({}, 0))["messages"][0]["content"])
    assert len(seen) == 1
    assert seen.pop().endswith(" None")
