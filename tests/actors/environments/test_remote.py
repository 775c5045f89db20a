"""Workers of an environment host: the same calls, and what becomes of them when one side ends or is no friend."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.environments import host as hosts
from actors.environments import pool as pools
from actors.environments import remote
from actors.environments.errors import EpisodeError
from actors.environments.host import EnvironmentHost
from actors.environments.pool import WorkerPool, describe
from actors.environments.spec import EnvironmentSpec, Hosts, Limits
from bus import keys
from schemas.config import dump_config
from schemas.config.services import BusConfig
from schemas.errors import ConfigError
from tests.actors.environments.test_pool import WAIT, play, says, score_until_it_fails, spec, until
from tests.ports import free_port
from tests.processes import has_ended
from tests.ring.harness import ring_config

pytestmark = pytest.mark.slow


@pytest.fixture
def address() -> str:
    """An address that nobody listens on."""
    return f"tcp://127.0.0.1:{free_port()}"


@contextlib.asynccontextmanager
async def hosting(
    address: str, *specs: EnvironmentSpec, bus: BusConfig | None = None
) -> AsyncIterator[EnvironmentHost]:
    """A host of some environments, until the end of the block."""
    host = EnvironmentHost({one.name: one for one in specs}, address, bus or BusConfig())
    task = asyncio.create_task(host.run())
    try:
        yield host
    finally:
        host.stop()
        await asyncio.wait_for(task, WAIT)
        # libzmq closes in the background
        await until(lambda: is_free(address))


def is_free(address: str) -> bool:
    """Whether nobody listens on an address."""
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0


def at(
    one: EnvironmentSpec, *addresses: str, owner: str = "rollout-0", bus: BusConfig | None = None
) -> EnvironmentSpec:
    """The environment as an actor asks hosts for it."""
    return replace(one, hosts=Hosts(addresses, owner, bus or BusConfig()))


def pids(host: EnvironmentHost) -> list[int]:
    """Processes that a host has started."""
    return [one.process.pid for one in host.sessions.values() if one.process.has_spoken]


async def test_episodes_are_played_on_a_host(address: str) -> None:
    """Of two rollout actors at the same time, each with workers of its own, which end with their pools."""
    guess = spec("Guess")
    async with hosting(address, guess) as host:
        async with WorkerPool(at(guess, address)) as pool, WorkerPool(at(guess, address, owner="rollout-1")) as other:
            async with await pool.episode(WAIT) as first, await other.episode(WAIT) as second:
                for episode in (first, second):
                    await episode.reset({"target": 7}, 1)
                    assert (await episode.step(says("7")))["reward"] == 1.0
            started = pids(host)
            assert len(started) == 2
        await until(lambda: not host.sessions)
        assert all(map(has_ended, started))


async def test_an_environment_that_drives_asks_for_samples_from_its_host(address: str) -> None:
    """Frames travel in both directions within a call."""

    async def answer(messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        return says("a" * len(messages))

    drive = spec("drive")
    async with hosting(address, drive), WorkerPool(at(drive, address)) as pool, await pool.episode(WAIT) as episode:
        assert await episode.run({"question": "Why?"}, 0, answer) == {"length": 3.0, "none": None}


async def test_the_host_runs_its_own_file_and_refuses_other_options(address: str, tmp_path: Path) -> None:
    """The path of another machine leads nowhere here; other options would be another environment."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    file = tmp_path / "here" / "env.py"
    file.write_text(
        "class Env:\n"
        "    def __init__(self, size=1): self.size = size\n"
        "    def reset(self): return f'{__file__} {self.size}'\n"
        "    def step(self, answer): return None, 1, True\n"
    )
    one = EnvironmentSpec("one", f"{file}:Env", {"size": 3}, limits=Limits(load=WAIT))
    there = replace(one, path=f"{tmp_path}/there/env.py:Env")
    async with hosting(address, one):
        async with WorkerPool(at(there, address)) as pool, await pool.episode(WAIT) as episode:
            [message] = (await episode.reset({}, 0))["messages"]
            assert message["content"] == f"{file} 3"
        for other, words in (
            (replace(there, options={"size": 4}), "the options of environment one are .*4.* of the actor"),
            (
                replace(there, path=f"{tmp_path}/there/game.py:Env"),
                "is game.py:Env in run.yaml of the actor, and ",
            ),
            (replace(there, name="two"), "run.yaml of the environment host has no environment 'two', but one"),
        ):
            async with WorkerPool(at(other, address)) as pool:
                with pytest.raises(EpisodeError, match=words) as failure:
                    await pool.episode(WAIT)
                assert failure.value.cause == "env_load"


@pytest.mark.parametrize(("way", "words"), [("die", "ended with status 7"), ("kill", "was killed by signal 9")])
async def test_a_remote_worker_that_dies_is_replaced_by_its_host(address: str, way: str, words: str) -> None:
    """With the same words as one of this machine, and the host's address."""
    events: Counter[str] = Counter()
    bad = spec("Bad")
    async with hosting(address, bad), WorkerPool(at(bad, address), lambda event: events.update([event])) as pool:
        async with await pool.episode(WAIT) as episode:
            with pytest.raises(EpisodeError, match=f"{words} .environment host {address}") as failure:
                await play(episode, "step", way)
            assert failure.value.cause == "env_lost"
            assert not failure.value.is_bystander
        async with await pool.episode(WAIT) as again:
            await again.reset({}, 0)
    assert events == {"restart": 1}


async def test_a_remote_call_that_takes_too_long_costs_the_worker_its_life(address: str) -> None:
    """The limit is the actor's; the host kills."""
    bad = spec("Bad", limits=Limits(WAIT, WAIT, 1.0, WAIT, WAIT, WAIT))
    async with hosting(address, bad) as host, WorkerPool(at(bad, address)) as pool:
        async with await pool.episode(WAIT) as episode:
            await episode.reset({"place": "step", "way": "hang"}, 0)
            [pid] = pids(host)
            with pytest.raises(EpisodeError, match=r"a step took more than 1 s") as failure:
                await episode.step(says("a"))
            assert failure.value.cause == "env_timeout"
        await until(lambda: has_ended(pid))
        async with await pool.episode(WAIT) as again:
            await again.reset({}, 0)


async def test_too_many_processes_are_counted_by_the_host(address: str, tmp_path: Path) -> None:
    """And told to the actor, as an event and in words."""
    events: Counter[str] = Counter()
    bad = spec("Bad", limits=Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT, processes=20))
    pool = WorkerPool(at(bad, address), lambda event: events.update([event]))
    async with hosting(address, bad), pool, await pool.episode(WAIT) as episode:
        await episode.reset({"place": "score", "way": "fork", "mark": str(tmp_path / "marks")}, 0)
        with pytest.raises(EpisodeError, match="it had more than 20 processes"):
            await score_until_it_fails(episode)
    assert events["processes"] == 1


async def test_a_host_that_restarts_costs_bystanders_alone(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their failure says so, and the workers are started again without anybody's help."""
    monkeypatch.setattr(pools, "RESTART_SECONDS", 0.01)
    guess = spec("Guess")
    async with WorkerPool(at(guess, address)) as pool:
        async with hosting(address, guess):
            episode = await pool.episode(WAIT)
            await episode.__aenter__()
            await episode.reset({"target": 7}, 1)
        with pytest.raises(EpisodeError, match="the environment host was stopped") as failure:
            await score_until_it_fails(episode)
        assert failure.value.is_bystander
        async with hosting(address, guess), await pool.episode(WAIT) as again:
            await again.reset({"target": 7}, 1)
            assert (await again.step(says("7")))["reward"] == 1.0


async def test_a_worker_that_ends_just_before_a_call_is_sent_fails_the_call_in_words(address: str) -> None:
    """Between the call and its sending the loop may hear of the end."""
    guess = spec("Guess")
    async with hosting(address, guess), WorkerPool(at(guess, address)) as pool:
        episode = await pool.episode(WAIT)
        await episode.reset({"target": 7}, 1)
        call = asyncio.ensure_future(episode.score())
        await asyncio.sleep(0)
        [worker] = pool.workers.values()
        assert worker.calls
        worker.reason = "was lost"
        worker.fail_calls()
        with pytest.raises(EpisodeError, match="was lost"):
            await call


async def test_a_host_that_is_away_is_waited_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the tries that a wrong path has: it may come back."""
    monkeypatch.setattr(remote, "HOST_SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(remote, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(pools, "RESTART_SECONDS", 0.01)
    events: list[str] = []
    guess = spec("Guess")
    async with WorkerPool(at(guess, address), events.append) as pool:
        await until(lambda: len(events) > pools.FAILED_STARTS)
        assert "was silent for 0.05 s; is `actors run environment` running there" in pool.last_end
        monkeypatch.setattr(remote, "HOST_SILENCE_SECONDS", WAIT)
        async with hosting(address, guess), await pool.episode(WAIT) as episode:
            await episode.reset({"target": 7}, 1)


async def test_the_next_host_takes_the_worker_of_one_that_is_away(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers move; those of hosts that answer stay."""
    monkeypatch.setattr(pools, "RESTART_SECONDS", 0.01)
    gone = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setattr(remote, "HOST_SILENCE_SECONDS", 2.0)
    guess = spec("Guess", workers=2)
    async with hosting(address, guess) as host, WorkerPool(at(guess, gone, address)) as pool:
        await until(lambda: pool.num_ready == 2)
        assert len(pids(host)) == 2


async def test_frames_that_are_lost_end_the_worker_and_not_the_environment(address: str) -> None:
    """A call without an answer would count as the environment's hang."""
    guess = spec("Guess")
    async with hosting(address, guess) as host, WorkerPool(at(guess, address)) as pool:
        episode = await pool.episode(WAIT)
        await episode.__aenter__()
        [session] = host.sessions.values()
        session.num_sent += 1
        await until(lambda: "frames were lost with the connection" in pool.last_end)
        with pytest.raises(EpisodeError) as failure:
            await episode.reset({"target": 7}, 1)
        assert failure.value.is_bystander


async def test_an_actor_that_is_silent_loses_its_workers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does whose machine has gone."""
    monkeypatch.setattr(hosts, "ACTOR_SILENCE_SECONDS", 2.0)
    guess = spec("Guess")
    async with hosting(address, guess) as host, WorkerPool(at(guess, address)) as pool:
        await until(lambda: pool.num_ready == 1)
        [pid] = pids(host)
        [one] = pool.workers.values()
        # neither beats nor an end reach the host any more
        monkeypatch.setattr(one.process, "_tell", lambda *_, **__: None)
        monkeypatch.setattr(one.process, "send", lambda data: asyncio.sleep(0))
        await until(lambda: has_ended(pid))


async def test_a_successor_ends_the_workers_of_its_predecessor(address: str) -> None:
    """An actor that was killed leaves none, as soon as its name is there again."""
    guess = spec("Guess")
    async with hosting(address, guess) as host, WorkerPool(at(guess, address)) as pool:
        await until(lambda: pool.num_ready == 1)
        before = pids(host)
        async with WorkerPool(at(guess, address)) as successor:
            await until(lambda: successor.num_ready == 1)
            await until(lambda: all(map(has_ended, before)))
            await until(lambda: "another worker in its place" in pool.last_end)


async def test_a_wrong_key_is_refused_in_words(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stranger, and of one without keys; the right one plays."""
    monkeypatch.setattr(pools, "RESTART_SECONDS", 0.01)
    for name in ("ours", "theirs"):
        keys.make(tmp_path / name)
    ours, theirs = (BusConfig(keys=str(tmp_path / name)) for name in ("ours", "theirs"))
    guess = spec("Guess")
    async with hosting(address, guess, bus=ours):
        async with WorkerPool(at(guess, address, bus=ours)) as pool, await pool.episode(WAIT) as episode:
            await episode.reset({"target": 7}, 1)
        async with WorkerPool(at(guess, address, bus=theirs)) as pool:
            await until(lambda: bool(pool.last_end))
            assert f"environment host {address} refused the connection: " in pool.last_end
            with pytest.raises(EpisodeError, match="refused the connection") as failure:
                await pool.episode(1.0)
            assert failure.value.cause == "env_lost"


async def test_a_host_beyond_loopback_needs_keys() -> None:
    """On both sides."""
    with pytest.raises(ConfigError, match=r"bus.keys: 10.0.0.9:7100 is reachable from other machines"):
        async with WorkerPool(at(spec("Guess"), "tcp://10.0.0.9:7100")):
            pass
    with pytest.raises(ConfigError, match=r"bus.keys: 0.0.0.0:7100 is reachable from other machines"):
        await EnvironmentHost({}, "tcp://0.0.0.0:7100", BusConfig()).run()


async def test_a_port_that_is_taken_is_named(address: str) -> None:
    """With the option to change."""
    async with hosting(address, spec("Guess")):
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match=f"--listen: {address} can't be used: Address already in use"):
            await EnvironmentHost({}, address, BusConfig()).run()


async def test_the_packer_asks_a_host_for_the_number_of_examples(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives up when none answers, with what was tried last."""
    monkeypatch.setattr(remote, "HOST_SILENCE_SECONDS", 0.5)
    chosen = spec("Quiz", limits=Limits(load=1.0))
    with pytest.raises(EpisodeError, match=r"0 of 1 are ready.*was silent for 0.5 s"):
        await describe(at(chosen, address, owner="packer-0"))
    monkeypatch.setattr(remote, "HOST_SILENCE_SECONDS", WAIT)
    quiz = spec("Quiz")
    async with hosting(address, quiz):
        assert await describe(at(quiz, address, owner="packer-0")) == await describe(quiz)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("environment",), "--listen: needed for `actors run environment`"),
        (("rollout", "--listen", "tcp://127.0.0.1:7100"), "--listen: needed for `actors run environment`, and for no"),
        (("environment", "--listen", "tcp://127.0.0.1:7100"), "environments: none of them has workers"),
    ],
)
def test_the_command_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    """An address, or an environment with workers."""
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(ring_config(tmp_path)), encoding="utf-8")
    assert main(["run", *arguments, "--config", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_hosts_of_other_machines_need_keys(tmp_path: Path) -> None:
    """Told when run.yaml is read; an address that is none is refused with its form."""
    one = {"type": "python", "path": "a.py:Env"}
    with pytest.raises(ConfigError, match=r"environments\[\]\.hosts: tcp://10.0.0.9:7100 of python is another machine"):
        ring_config(tmp_path, environments=[one | {"hosts": ["tcp://10.0.0.9:7100"]}], reward={"functions": []})
    with pytest.raises(ConfigError, match=r"hosts.*must be tcp://HOST:PORT"):
        ring_config(tmp_path, environments=[one | {"hosts": ["10.0.0.9"]}], reward={"functions": []})
