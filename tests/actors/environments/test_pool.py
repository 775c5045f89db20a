"""Real worker processes: episodes of each form, and everything that user code can do to them."""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.environments.errors import EpisodeError
from actors.environments.pool import EpisodeCalls, WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from tests.processes import has_ended

pytestmark = pytest.mark.slow
WORLDS = Path(__file__).parent / "worlds.py"
WAIT = 60.0


def spec(name: str, **keys: Any) -> EnvironmentSpec:
    """An environment of worlds.py, with limits that only a hang passes."""
    keys.setdefault("limits", Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT))
    return EnvironmentSpec(name.lower(), f"{WORLDS}:{name}", **keys)


def says(text: str, **more: Any) -> dict[str, Any]:
    """A message of the model."""
    return {"role": "assistant", "content": text} | more


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.01)


async def play(episode: EpisodeCalls, place: str, way: str) -> None:
    """An episode of Bad that fails somewhere."""
    await episode.reset({"place": place, "way": way}, 0)
    await episode.step(says("a"))
    await episode.score()


async def score_until_it_fails(episode: EpisodeCalls) -> None:
    """Its watch looks once a second."""
    async with asyncio.timeout(WAIT):
        while True:
            await episode.score()


# --- episodes --------------------------------------------------------------------------------------------------------


async def test_a_stepped_environment_plays_several_episodes_at_once() -> None:
    """Each with its own object; a turn has messages, a reward and whether it was the last."""
    async with WorkerPool(spec("Guess")) as pool:
        first, second = await pool.episode(WAIT), await pool.episode(WAIT)
        async with first, second:
            assert not first.is_driving
            opening = await first.reset({"target": 7, "unused": "column"}, seed=1)
            assert opening["messages"] == [{"role": "user", "content": "Guess a number from 1 to 9."}]
            await second.reset({"target": 2}, seed=1)
            turn = await first.step(says("3"))
            assert (turn["messages"][0]["content"], turn["reward"], turn["done"]) == ("Higher.", 0.0, False)
            assert (await second.step(says("3")))["messages"][0]["content"] == "Lower."
            turn = await first.step(says("7"))
            assert (turn["messages"][0]["content"], turn["reward"], turn["done"]) == ("Right.", 1.0, True)
            assert await first.score() == {}


async def test_seed_whole_message_and_info_travel() -> None:
    """What msgpack can't hold is left out of the info, and nothing else is."""
    async with WorkerPool(spec("Seeded")) as pool, await pool.episode(WAIT) as episode:
        opening = await episode.reset({"b": 1, "a": 2}, seed=11)
        assert opening["messages"] == [{"role": "system", "content": "11 ['a', 'b']"}]
        turn = await episode.step(says("x"))
        assert (turn["messages"], turn["reward"], turn["done"], turn["info"]) == ([], None, True, {"score": 3})


async def test_public_methods_of_a_class_are_tools() -> None:
    """An answer without a call ends the episode; get_reward is a column under the name of the class."""
    async with WorkerPool(spec("Counter")) as pool, await pool.episode(WAIT) as episode:
        opening = await episode.reset({"start": 5}, seed=0)
        assert [tool["function"]["name"] for tool in opening["tools"]] == ["add", "explode"]
        calls = [
            {"id": "1", "function": {"name": "add", "arguments": '{"number": 2}'}},
            {"id": "2", "function": {"name": "explode", "arguments": "{}"}},
        ]
        turn = await episode.step(says("", tool_calls=calls))
        assert [message["content"] for message in turn["messages"]] == ["7", "{'error': 'boom'}"]
        assert (turn["tool_failures"], turn["done"]) == (["RuntimeError: boom"], False)
        assert (await episode.step(says("Done.")))["done"]
        assert await episode.score() == {"Counter": 7.0}


async def test_a_list_of_functions_is_an_environment_of_tools() -> None:
    """Without a reset of its own."""
    async with WorkerPool(spec("TOOLS")) as pool, await pool.episode(WAIT) as episode:
        opening = await episode.reset({}, seed=0)
        assert (opening["messages"], len(opening["tools"])) == ([], 1)
        call = {"id": "1", "function": {"name": "lookup", "arguments": '{"key": "a"}'}}
        assert (await episode.step(says("", tool_calls=[call])))["messages"][0]["content"] == "A"


async def test_gymnasium_acts_by_the_last_number() -> None:
    """A text without an action costs a turn and is told the actions; the end of time is no success."""
    async with WorkerPool(spec("Lake")) as pool, await pool.episode(WAIT) as episode:
        opening = await episode.reset({"options": {"start": 3}}, seed=2**40 + 5)
        assert (opening["messages"][0]["content"], opening["info"]) == ("...x", {"seed": 5})
        turn = await episode.step(says("north"))
        assert "Discrete(4)" in turn["messages"][0]["content"]
        assert (turn["reward"], turn["done"], turn["info"]) == (None, False, {"invalid": True})
        assert not (await episode.step(says("12")))["done"], "12 is no action either"
        turn = await episode.step(says("Not 1 but 3"))
        assert (turn["reward"], turn["done"], turn["truncated"]) == (1.0, True, False)
        for _ in range(2):
            turn = await episode.step(says("2"))
        assert (turn["reward"], turn["done"], turn["truncated"]) == (0.0, True, True)


async def test_a_gym_of_ms_swift_gets_the_conversation() -> None:
    """Its reset has three values, its step sees all messages."""
    async with WorkerPool(spec("Gym")) as pool, await pool.episode(WAIT) as episode:
        opening = await episode.reset({"env_config": {"level": 3}}, seed=0)
        assert [(m["role"], m["content"]) for m in opening["messages"]] == [
            ("system", "You play."),
            ("user", "level 3"),
        ]
        turn = await episode.step(says("a"))
        assert (turn["messages"][0]["content"], turn["reward"], turn["done"]) == ("3 messages", 0.5, False)
        assert (await episode.step(says("b")))["done"]


async def test_a_coroutine_drives_and_asks_for_samples() -> None:
    """It names its rewards; None stays None."""
    asked: list[Any] = []

    async def answer(messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        asked.append((messages, options))
        return says("a" * len(asked))

    async with WorkerPool(spec("drive")) as pool, await pool.episode(WAIT) as episode:
        assert episode.is_driving
        assert await episode.run({"question": "Why?"}, 0, answer) == {"length": 2.0, "none": None}
    assert asked[0] == ([{"role": "user", "content": "Why?"}], {"max_tokens": 5})
    assert [message["role"] for message in asked[1][0]] == ["user", "assistant", "user"]


async def test_a_sample_that_fails_is_an_error_in_the_users_code() -> None:
    """Here nobody catches it, so the episode fails with its words."""

    async def answer(messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no tokens left")

    async with WorkerPool(spec("drive")) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError, match="SampleError: RuntimeError: no tokens left") as failure:
            await episode.run({"question": "Why?"}, 0, answer)
    assert failure.value.cause == "env_step"


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["raise", "exit"])
@pytest.mark.parametrize("place", ["reset", "step", "score"])
async def test_an_exception_is_a_typed_failure_of_its_episode_alone(place: str, way: str) -> None:
    """With the user's traceback; the worker and its other episodes go on."""
    async with WorkerPool(spec("Bad")) as pool:
        async with await pool.episode(WAIT) as other, await pool.episode(WAIT) as episode:
            opening = await other.reset({}, 0)
            assert opening["messages"][0]["content"] == "go"
            with pytest.raises(EpisodeError, match=r"ValueError: the world ended|SystemExit: leaving") as failure:
                await play(episode, place, way)
            assert failure.value.cause == f"env_{place}"
            assert "worlds.py" in failure.value.trace
            before = (await other.step(says("b")))["messages"]
        async with await pool.episode(WAIT) as again:
            await again.reset({}, 0)
            assert (await again.step(says("b")))["messages"] == before, "the same process"


@pytest.mark.parametrize(("way", "words"), [("die", "ended with status 7"), ("kill", "was killed by signal 9")])
async def test_a_worker_that_dies_loses_its_episodes_and_is_replaced(way: str, words: str) -> None:
    """Each of them fails with how the process ended; later ones find a new process."""
    events: Counter[str] = Counter()
    async with WorkerPool(spec("Bad"), lambda event: events.update([event])) as pool:
        async with await pool.episode(WAIT) as other, await pool.episode(WAIT) as episode:
            await other.reset({}, 0)
            first = (await other.step(says("b")))["messages"]
            await episode.reset({"place": "step", "way": way}, 0)
            for one in (episode, other):
                with pytest.raises(EpisodeError, match=words) as failure:
                    await one.step(says("a"))
                assert failure.value.cause == "env_lost"
        async with await pool.episode(WAIT) as again:
            await again.reset({}, 0)
            assert (await again.step(says("b")))["messages"] != first
    assert events == {"restart": 1}


@pytest.mark.parametrize("way", ["hang", "stop"])
async def test_a_call_that_takes_too_long_costs_the_worker_its_life(way: str) -> None:
    """Nothing else ends a function that hangs. Other episodes of the worker are lost, not timed out."""
    limits = Limits(WAIT, WAIT, 1.0, WAIT, WAIT, WAIT)
    async with WorkerPool(spec("Bad", limits=limits)) as pool:
        async with await pool.episode(WAIT) as other, await pool.episode(WAIT) as episode:
            await other.reset({}, 0)
            await episode.reset({"place": "step", "way": way}, 0)
            with pytest.raises(EpisodeError, match=r"a step took more than 1 s \(limit of step\)") as failure:
                await episode.step(says("a"))
            assert failure.value.cause == "env_timeout"
            with pytest.raises(EpisodeError, match="was killed: a step took more than 1 s") as lost:
                await other.step(says("a"))
            assert lost.value.cause == "env_lost"
        async with await pool.episode(WAIT) as again:
            await again.reset({}, 0)


async def test_an_async_function_that_blocks_is_seen_by_the_silence() -> None:
    """It holds up all episodes of its process, so it is killed before its own call's limit."""
    limits = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, silence=2.0)
    async with WorkerPool(spec("Blocking", limits=limits)) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError, match=r"not a beat for \d+ s .*blocks its event loop"):
            await episode.reset({}, 0)


async def test_a_hundred_megabytes_of_output_cost_a_bounded_log() -> None:
    """And the episode goes on."""
    with capture_logs() as logs:
        async with WorkerPool(spec("Bad")) as pool, await pool.episode(WAIT) as episode:
            await episode.reset({"place": "step", "way": "print"}, 0)
            await episode.step(says("a"))
    told = [line for line in logs if line.get("stream") == "stdout"]
    assert 0 < len(told) < 1000
    assert sum(len(line["event"]) for line in told) < 1_000_000
    assert any("bytes of output were dropped" in line["event"] for line in told)


async def test_a_worker_with_too_many_processes_is_killed_with_all_of_them(tmp_path: Path) -> None:
    """Also those that have left its session."""
    marks = tmp_path / "marks"
    limits = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT, processes=20)
    async with WorkerPool(spec("Bad", limits=limits)) as pool, await pool.episode(WAIT) as episode:
        await episode.reset({"place": "score", "way": "fork", "mark": str(marks)}, 0)
        with pytest.raises(EpisodeError, match="it had more than 20 processes"):
            await score_until_it_fails(episode)
    children = [int(line) for line in marks.read_text().splitlines()]
    assert len(children) > 10  # the last ones may be killed before they write their number
    await until(lambda: all(map(has_ended, children)))


async def test_an_error_of_any_size_is_cut() -> None:
    """Fifty megabytes of text reach us as some thousand characters."""
    async with WorkerPool(spec("Bad")) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError) as failure:
            await episode.reset({"place": "reset", "way": "huge"}, 0)
    assert len(str(failure.value)) < 5000
    assert len(failure.value.trace) < 5000


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere.py:Env", "there is no file"),
        (f"{WORLDS}:Missing", "has no 'Missing'"),
        ("no_such_package.env:Env", "ModuleNotFoundError"),
        ("Env", "must be file.py:name"),
    ],
)
async def test_an_environment_that_cannot_be_loaded_is_told_at_once(path: str, words: str) -> None:
    """No worker is tried again: the same file fails everywhere."""
    async with WorkerPool(EnvironmentSpec("bad", path, limits=Limits(load=WAIT))) as pool:
        with pytest.raises(EpisodeError, match=words) as failure:
            await pool.episode(WAIT)
        assert failure.value.cause == "env_load"


async def test_an_interpreter_that_is_not_there_is_told_after_three_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name."""
    monkeypatch.setattr("actors.environments.pool.RESTART_SECONDS", 0.01)
    async with WorkerPool(spec("Guess", python="/no/such/python")) as pool:
        with pytest.raises(EpisodeError, match=r"could start 3 times in a row: can't be started: .*no/such/python"):
            await pool.episode(WAIT)


async def test_a_full_worker_takes_no_more_until_one_is_over() -> None:
    """And who waits in vain is told what to raise."""
    async with WorkerPool(spec("Guess", episodes=1)) as pool:
        async with await pool.episode(WAIT):
            with pytest.raises(EpisodeError, match="1 of 1 are ready, with 1 episodes; raise workers or episodes"):
                await pool.episode(0.05)
        async with await pool.episode(WAIT):
            pass


async def test_slow_episodes_do_not_hold_up_quick_ones() -> None:
    """Within one worker: each function that is not async has a thread."""
    async with WorkerPool(spec("Slow")) as pool:
        slow, quick = await pool.episode(WAIT), await pool.episode(WAIT)
        async with slow, quick:
            await slow.reset({"seconds": 5.0}, 0)
            waits = asyncio.create_task(slow.step(says("a")))
            await quick.reset({"seconds": 0.0}, 0)
            for _ in range(20):
                await quick.step(says("b"))
            assert not waits.done()
            assert (await waits)["done"]


# --- the process -----------------------------------------------------------------------------------------------------


async def test_a_worker_shares_no_name_with_us(tmp_path: Path) -> None:
    """A user's modules named like ours, or like the worker's own, are the user's."""
    for name in ("actors", "schemas", "bus", "tools", "wire", "shapes", "service"):
        (tmp_path / f"{name}.py").write_text(f"NAME = 'mine: {name}'\n")
    (tmp_path / "env.py").write_text(
        "import actors, bus, schemas, service, shapes, sys, tools, wire\n"
        "class Env:\n"
        "    def reset(self):\n"
        "        ours = [name for name in sys.modules if name.startswith(('torch', 'pydantic', 'structlog'))]\n"
        "        return f'{[m.NAME for m in (actors, bus, schemas, service, shapes, tools, wire)]} {ours}'\n"
        "    def step(self, answer):\n"
        "        return None, 1, True\n"
    )
    one = EnvironmentSpec("mine", f"{tmp_path}/env.py:Env", limits=Limits(load=WAIT))
    async with WorkerPool(one) as pool, await pool.episode(WAIT) as episode:
        [message] = (await episode.reset({}, 0))["messages"]
    assert message["content"].count("mine: ") == 7
    assert message["content"].endswith(" []")


async def test_workers_end_with_their_rollout_actor(tmp_path: Path) -> None:
    """Killed or not: an environment that hangs must not stay."""
    script = (
        "import asyncio, os, sys\n"
        "from actors.environments.pool import *\n"
        "from tests.actors.environments.test_pool import spec\n"
        "async def main():\n"
        "    async with WorkerPool(spec('Bad')) as pool, await pool.episode(60) as episode:\n"
        "        await episode.reset({'place': 'step', 'way': 'hang'}, 0)\n"
        "        print(pool.workers.popitem()[1].process.pid, flush=True)\n"
        "        await episode.step({})\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    worker = int(await asyncio.wait_for(process.stdout.readline(), WAIT))
    assert not has_ended(worker)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: has_ended(worker))


async def test_the_context_ends_all_workers_at_once() -> None:
    """Also while one hangs; nothing is left behind."""
    async with WorkerPool(spec("Bad", workers=2)) as pool:
        await until(lambda: pool.num_ready == 2)
        pids = [one.process.pid for one in pool.workers.values() if one.process]
        episode = await pool.episode(WAIT)
        await episode.reset({"place": "step", "way": "hang"}, 0)
        hanging = asyncio.create_task(episode.step(says("a")))
        await asyncio.sleep(0)
        began = time.monotonic()
    assert time.monotonic() - began < WAIT
    with pytest.raises(EpisodeError, match="was ended with its actor"):
        await hanging
    assert all(map(has_ended, pids))


async def test_a_class_of_no_known_form_is_told_the_forms(tmp_path: Path) -> None:
    """At the first episode, when there is an object to look at."""
    (tmp_path / "env.py").write_text("class Env:\n    pass\n")
    one = EnvironmentSpec("none", f"{tmp_path}/env.py:Env", limits=Limits(load=WAIT))
    async with WorkerPool(one) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError, match=r"Env has no method reset; an environment has reset\(\*\*row\)"):
            await episode.reset({}, 0)
