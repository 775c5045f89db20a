"""No process is left behind: whoever dies (actor, worker or guard), everything below the worker dies as well."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.environments.errors import EpisodeError
from actors.environments.local import LocalPlace
from actors.environments.pool import WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from tests.actors.environments.test_pool import WAIT, says, spec, until
from tests.processes import has_ended

pytestmark = pytest.mark.slow
KINDS = 6
"""Processes that `litter` names: the worker, its guard, and four that it has started."""
PLAYER = """
import asyncio, sys
from pathlib import Path
from actors.environments.local import LocalPlace
from actors.environments.pool import WorkerPool
from tests.actors.environments.test_pool import WAIT, says, spec
async def main(place, mark):
    async with WorkerPool(spec("Litters")) as pool, await pool.episode(WAIT) as episode:
        await episode.reset({"place": place, "way": "hang", "mark": mark}, 0)
        await episode.step(says("a"))
        await episode.score()
asyncio.run(main(*sys.argv[1:]))
"""
SCORER = """
import sys
from actors.reward.workers import WorkerHost
from schemas.config.data import RewardFunctionConfig
from tests.actors.environments.test_pool import WAIT, WORLDS
host = WorkerHost(WAIT)
config = RewardFunctionConfig(path=f"{WORLDS}:litters_and_hangs", python="same")
function = host.add("litters", config.path, "reward.functions.0.path", config, {})
host.wait_until_loaded()
function(completions=["a"], mark=[sys.argv[1]])
"""


@contextlib.asynccontextmanager
async def actor(script: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in the role of an actor, which runs workers and is killed."""
    command = [sys.executable, "-c", script, *arguments]
    process = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[3])
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def left(mark: Path) -> list[int]:
    """Ids of the worker, its guard and its children, once all have started."""
    await until(mark.exists)
    pids = [int(word) for word in mark.read_text().split()]
    assert len(pids) == KINDS
    assert not any(map(has_ended, pids))
    return pids


@pytest.mark.parametrize("place", ["reset", "step", "score"])
async def test_nothing_outlives_a_rollout_actor_that_is_killed(tmp_path: Path, place: str) -> None:
    """Neither the worker that hangs, nor its children, whatever their session, group or parent."""
    mark = tmp_path / "mark"
    async with actor(PLAYER, place, str(mark)) as process:
        pids = await left(mark)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: all(map(has_ended, pids)))


async def test_nothing_outlives_a_reward_actor_that_is_killed(tmp_path: Path) -> None:
    """Its workers live on the event loop of a thread."""
    mark = tmp_path / "mark"
    async with actor(SCORER, str(mark)) as process:
        pids = await left(mark)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: all(map(has_ended, pids)))


async def test_nothing_outlives_a_worker_that_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what no look of the actor has seen."""

    async def look(self: LocalPlace) -> None:
        pass

    monkeypatch.setattr(LocalPlace, "look", look)
    mark = tmp_path / "mark"
    async with WorkerPool(spec("Litters")) as pool:
        async with await pool.episode(WAIT) as episode:
            row = {"place": "step", "way": "exit", "mark": str(mark)}
            await episode.reset(row, 0)
            with pytest.raises(EpisodeError, match="ended with status 3"):
                await episode.step(says("a"))
        pids = [int(word) for word in mark.read_text().split()]
        assert len(pids) == KINDS
        await until(lambda: all(map(has_ended, pids)))


async def test_nothing_outlives_a_guard_that_is_killed(tmp_path: Path) -> None:
    """By the user's code, say: the worker dies with the guard, and the actor kills what it has seen below."""
    mark = tmp_path / "mark"
    mark.with_suffix(".pause").write_text("3600")
    async with WorkerPool(spec("Litters")) as pool:
        async with await pool.episode(WAIT) as episode:
            await episode.reset({"place": "step", "way": "hang", "mark": str(mark)}, 0)
            [one] = pool.workers.values()
            step = asyncio.create_task(episode.step(says("a")))
            pids = await left(mark)
            await until(lambda: set(pids) <= one.process.seen.keys())
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(EpisodeError, match="was killed by signal 9"):
                await step
        await until(lambda: all(map(has_ended, pids)))


@pytest.mark.parametrize("groups", ["one", "own"])
async def test_a_fork_bomb_ends_before_it_has_gone_off(tmp_path: Path, groups: str) -> None:
    """The guard does not wait for a look of the actor, and leaves no process, whatever group it is in."""
    mark = tmp_path / "mark"
    limits = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT, processes=40)
    events: list[str] = []
    async with WorkerPool(spec("Bomb", limits=limits), events.append) as pool:
        async with await pool.episode(WAIT) as episode:
            await episode.reset({"mark": str(mark), "groups": groups}, 0)
            [one] = pool.workers.values()
            worker = one.hello.result()["pid"]
            with pytest.raises(EpisodeError, match="it had more than 40 processes"):
                await episode.step(says("a"))
        assert events[0] == "processes"
        assert has_ended(worker)
        assert not bombs(mark)
    assert mark.stat().st_size >= 39
    if groups == "one":
        # all of them would have written 2 + 4 + … + 2¹⁰ marks
        assert mark.stat().st_size < 2**11 - 2


def bombs(mark: Path) -> list[str]:
    """Processes that have the file open."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # a process may end meanwhile
        with contextlib.suppress(OSError):
            found += [str(link) for link in (folder / "fd").iterdir() if str(link.readlink()) == str(mark)]
    return found


async def test_a_signal_to_the_own_process_group_reaches_the_worker_alone(tmp_path: Path) -> None:
    """As a tool ends its helpers: the guard tells how the worker has ended."""
    file = tmp_path / "env.py"
    file.write_text(
        "import os, signal\n"
        "class Env:\n"
        "    def reset(self): os.killpg(0, signal.SIGUSR1)\n"
        "    def step(self, answer): return None, 1, True\n"
    )
    one = EnvironmentSpec("group", f"{file}:Env", limits=Limits(load=WAIT))
    async with WorkerPool(one) as pool, await pool.episode(WAIT) as episode:
        with pytest.raises(EpisodeError, match=f"was killed by signal {signal.SIGUSR1.value}"):
            await episode.reset({}, 0)


async def test_an_orphan_of_a_worker_that_lives_on_is_waited_for(tmp_path: Path) -> None:
    """No zombie stays, which would count as a process of the machine."""
    file = tmp_path / "env.py"
    file.write_text(
        "import subprocess\n"
        "class Env:\n"
        "    def reset(self):\n"
        "        return subprocess.run(['sh', '-c', 'sleep 0.1 & echo $!'], capture_output=True, text=True).stdout\n"
        "    def step(self, answer): return None, 1, True\n"
    )
    one = EnvironmentSpec("orphan", f"{file}:Env", limits=Limits(load=WAIT))
    async with WorkerPool(one) as pool, await pool.episode(WAIT) as episode:
        [message] = (await episode.reset({}, 0))["messages"]
        orphan = Path("/proc") / message["content"].strip()
        await until(lambda: not orphan.exists())
        assert (await episode.step(says("a")))["done"]
