"""Workers that fail to start, or that die soon, are started again with pauses; only a hopeless pool gives up."""

import asyncio
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors.environments import local
from actors.environments import pool as pools
from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from tests.actors.environments.test_pool import WAIT, says, spec, until

pytestmark = pytest.mark.slow
LIMITS = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT)
PLAIN = "class Env:\n    def reset(self): return 'go'\n    def step(self, answer): return None, 1, True\n"


async def test_a_pool_that_has_loaded_survives_a_start_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that was held, a file system that was away: later starts find things better."""
    monkeypatch.setattr(pools, "RESTART_SECONDS", 0.01)
    monkeypatch.setattr(pools, "LONGEST_RESTART_SECONDS", 0.01)
    good, file = tmp_path / "good", tmp_path / "env.py"
    file.write_text(f"import pathlib\nif not pathlib.Path({str(good)!r}).exists(): raise OSError('held')\n{PLAIN}")
    good.touch()
    events: list[str] = []
    async with WorkerPool(EnvironmentSpec("lock", f"{file}:Env", limits=LIMITS), events.append) as pool:
        async with await pool.episode(WAIT):
            good.unlink()
            [one] = pool.workers.values()
            one.kill("was killed by the test")
            await until(lambda: len(events) > 4)
        good.touch()
        async with await pool.episode(WAIT) as episode:
            await episode.reset({}, 0)


async def test_one_of_two_workers_that_fails_at_first_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the other one still loads, the path may be right."""
    monkeypatch.setattr(pools, "RESTART_SECONDS", 0.01)
    failed, file = tmp_path / "failed", tmp_path / "env.py"
    # the first to make the folder fails; the other one goes on when the pool has noticed
    file.write_text(
        "import os, pathlib, time\n"
        f"mark = pathlib.Path({str(failed)!r})\n"
        "try:\n    mark.mkdir()\nexcept FileExistsError:\n"
        "    while not (mark / 'noticed').exists(): time.sleep(0.01)\n"
        f"else:\n    raise OSError('once')\n{PLAIN}"
    )
    events: list[str] = []
    two = EnvironmentSpec("two", f"{file}:Env", workers=2, limits=LIMITS)
    async with WorkerPool(two, events.append) as pool:
        await until(lambda: events == ["restart"])
        (failed / "noticed").touch()
        async with await pool.episode(WAIT) as episode:
            await episode.reset({}, 0)


async def test_an_error_of_any_kind_in_starting_is_told() -> None:
    """A value that is no text in the variables, say: not a pool that only waits."""
    one = spec("Guess", variables={"X": 1})
    async with WorkerPool(one) as pool:
        with pytest.raises(EpisodeError, match="can't be run: TypeError: expected str") as failure:
            await pool.episode(WAIT)
        assert failure.value.cause == "env_load"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "answered a load with the shape None"),
        ({"kind": "sample"}, "what is no message of the protocol: KeyError"),
        ({"kind": "answer", "call": []}, "what is no message of the protocol: TypeError"),
    ],
)
async def test_a_worker_of_another_make_that_breaks_the_protocol_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, object], words: str
) -> None:
    """It is killed with the reason, and the pool gives up in the end."""
    monkeypatch.setattr(pools, "RESTART_SECONDS", 0.01)
    program = tmp_path / "program.py"
    program.write_text(
        "import msgpack, sys, time, zmq\n"
        "socket = zmq.Context().socket(zmq.DEALER)\n"
        "socket.setsockopt(zmq.IDENTITY, sys.argv[2].encode())\n"
        "socket.connect(sys.argv[1])\n"
        "socket.send(msgpack.packb({'kind': 'hello', 'protocol': 1}))\n"
        "call = None\n"
        "while call is None:\n    call = msgpack.unpackb(socket.recv()).get('call')\n"
        f"socket.send(msgpack.packb({{'kind': 'answer', 'call': call, **{content!r}}}))\n"
        "time.sleep(3600)\n"
    )
    monkeypatch.setattr(local, "PROGRAM", program)
    async with WorkerPool(spec("Guess", python=sys.executable)) as pool:
        with pytest.raises(EpisodeError, match=words):
            await pool.episode(WAIT)


async def test_a_worker_that_loads_and_dies_is_started_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading alone proves nothing; an episode does."""
    monkeypatch.setattr(pools, "RESTART_SECONDS", 0.01)
    dies, file = tmp_path / "dies", tmp_path / "env.py"
    file.write_text(f"import os\n{PLAIN}    def close(self): pass\n")
    with capture_logs() as logs:
        async with WorkerPool(EnvironmentSpec("dies", f"{file}:Env", limits=LIMITS)) as pool:
            for _ in range(3):
                async with await pool.episode(WAIT):
                    [one] = pool.workers.values()
                    one.kill(f"was killed by the test: {dies}")
            async with await pool.episode(WAIT) as episode:
                await episode.reset({}, 0)
                await episode.step(says("a"))
            [one] = pool.workers.values()
            one.kill("was killed after an episode")
            async with await pool.episode(WAIT):
                pass
    assert [line["pause"] for line in logs if line["event"] == "worker ended"] == [0.02, 0.04, 0.08, 0.01]


async def test_no_call_fails_for_a_pause_of_its_rollout_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has come in time; only this process has not read it yet."""
    monkeypatch.setattr(pools, "GRACE_SECONDS", WAIT, raising=False)
    limits = Limits(WAIT, WAIT, 2.0, WAIT, WAIT, WAIT)
    events: list[str] = []
    async with WorkerPool(spec("Guess", limits=limits), events.append) as pool, await pool.episode(WAIT) as episode:
        await episode.reset({"target": 7}, 0)
        [one] = pool.workers.values()
        step = asyncio.create_task(episode.step(says("3")))
        while not (one.calls or step.done()):
            await asyncio.sleep(0)
        # the call is sent
        for _ in range(3):
            await asyncio.sleep(0)
        time.sleep(4.0)
        assert (await step)["reward"] == 0.0
    assert events == []


async def test_no_worker_counts_as_silent_after_a_pause_of_its_rollout_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beats are there, and still to be read."""
    looks: list[bool] = []

    async def look(may_be_silent: bool) -> None:
        looks.append(may_be_silent)

    async with WorkerPool(spec("Guess")) as pool:
        monkeypatch.setattr(pool, "_look", look)
        await until(lambda: bool(looks))
        looks.clear()
        time.sleep(4.0)
        await until(lambda: bool(looks))
        assert looks[0] is False
