"""A killed process leaves nothing: not an actor, not an environment host, however many processes its workers have."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from actors.environments import host as hosts
from actors.environments.worker.guard import END_SECONDS
from tests.actors.environments.test_guard import actor
from tests.actors.environments.test_pool import WAIT, spec, until
from tests.actors.environments.test_remote import hosting
from tests.marks import first_of
from tests.ports import free_port
from tests.processes import has_ended

pytestmark = pytest.mark.slow
SIZES = pytest.mark.parametrize(("workers", "children"), first_of([(4, 4), (1, 1), (8, 8)]))
COMMON = """
import asyncio, sys
from dataclasses import replace
from actors.environments.host import EnvironmentHost
from actors.environments.pool import WorkerPool
from actors.environments.spec import Hosts
from actors.reward.workers import WorkerHost
from schemas.config.data import RewardFunctionConfig
from schemas.config.services import BusConfig
from tests.actors.environments.test_pool import WAIT, WORLDS, spec
place, folder, workers, children, address = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
options = {"place": place, "folder": folder, "children": children}
family = spec("Family", options=options, workers=workers, episodes=1)
"""
PLAYER = """
async def main():
    one = replace(family, hosts=Hosts((address,), "rollout-0", BusConfig())) if address else family
    async def play(pool):
        async with await pool.episode(WAIT) as episode:
            await episode.reset({}, 0)
    async with WorkerPool(one) as pool:
        await asyncio.gather(*(play(pool) for _ in range(workers)))
asyncio.run(main())
"""
HOST = """
asyncio.run(EnvironmentHost({"family": family}, address, BusConfig()).run())
"""
SCORER = """
host = WorkerHost(WAIT)
config = RewardFunctionConfig(path=f"{WORLDS}:family_reward", python="same")
functions = [host.add(f"family-{n}", config.path, f"reward.functions.{n}.path", config, {}) for n in range(workers)]
host.wait_until_loaded()
arguments = {"completions": ["a"], "folder": [folder], "children": [children]}
calls = [function.submit(arguments, lambda values: values) for function in functions]
for call in calls:
    call.result()
"""


async def all_of(folder: Path, workers: int, children: int) -> list[int]:
    """Ids of all workers, guards, children and grandchildren, once all have started."""
    await until(lambda: len(list(folder.glob("*.pids"))) == workers)
    pids = [int(word) for file in folder.glob("*.pids") for word in file.read_text().split()]
    assert len(pids) == len(set(pids)) == workers * (2 + 2 * children)
    assert not any(map(has_ended, pids))
    return pids


async def killed(process: asyncio.subprocess.Process, pids: list[int], seconds: float = END_SECONDS) -> None:
    """Kill a process; nothing of these is there after the time that a guard allows itself."""
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(seconds):
        await until(lambda: all(map(has_ended, pids)))


@SIZES
@pytest.mark.parametrize("place", ["load", "reset"])
async def test_of_a_rollout_actor(tmp_path: Path, place: str, workers: int, children: int) -> None:
    """Also while its workers load."""
    async with actor(COMMON + PLAYER, place, str(tmp_path), str(workers), str(children), "") as process:
        await killed(process, await all_of(tmp_path, workers, children))


@SIZES
async def test_of_a_reward_actor(tmp_path: Path, workers: int, children: int) -> None:
    """With a worker for each of its functions with `python`."""
    async with actor(COMMON + SCORER, "", str(tmp_path), str(workers), str(children), "") as process:
        await killed(process, await all_of(tmp_path, workers, children))


@SIZES
async def test_of_an_environment_host(tmp_path: Path, workers: int, children: int) -> None:
    """The rollout actor lives on, and waits for another host."""
    arguments = ("reset", str(tmp_path), str(workers), str(children), f"tcp://127.0.0.1:{free_port()}")
    async with actor(COMMON + HOST, *arguments) as host, actor(COMMON + PLAYER, *arguments) as player:
        await killed(host, await all_of(tmp_path, workers, children))
        assert player.returncode is None


async def test_of_a_rollout_actor_with_workers_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host kills them when it has not heard of the actor for some time, and lives on."""
    monkeypatch.setattr(hosts, "ACTOR_SILENCE_SECONDS", 2.0)
    address, options = f"tcp://127.0.0.1:{free_port()}", {"place": "reset", "folder": str(tmp_path), "children": 4}
    family = spec("Family", options=options, workers=4, episodes=1)
    arguments = ("reset", str(tmp_path), "4", "4", address)
    async with hosting(address, family) as host, actor(COMMON + PLAYER, *arguments) as player:
        await killed(player, await all_of(tmp_path, 4, 4), WAIT)
        await until(lambda: not host.sessions)
