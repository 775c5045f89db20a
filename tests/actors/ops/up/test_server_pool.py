"""Which servers get an actor, and for how long; the actors are sleeping processes."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.assembly import replica_index
from actors.cli import main
from actors.ops.up import server_pool as module
from actors.ops.up.child import Child, plan
from actors.ops.up.server_pool import Directory, ServerPool, addresses, listens, name_of
from schemas.config import dump_config
from tests.ports import free_port
from tests.ring.harness import ring_config, wait_until

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); " + SLEEP
A, B = "http://127.0.0.1:1", "http://127.0.0.2:2"

MakePool = Callable[..., ServerPool]


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    """`make_pool(servers, code)`: a pool over a list that may change, whose actors run that code."""
    monkeypatch.setattr(module, "listens", lambda url: True)
    monkeypatch.setattr("actors.ops.up.child.PROGRAM", (sys.executable,))
    made: list[ServerPool] = []

    def make(servers: list[str], code: str = SLEEP) -> ServerPool:
        inference: Any = {"engine": {"type": "sglang"}, "pool": {"urls": [A], "sync_interval": 30.0}}
        config = ring_config(tmp_path, inference=inference)
        made.append(ServerPool(config, "inference-pool-0", ["-c", code], lambda: servers))
        return made[-1]

    yield make
    for one in made:
        for child in one.children:
            if child.running:
                child.signal(9)


def actors_of(pool: ServerPool, url: str) -> list[Child]:
    """The actors that are there for a server, with those that are about to leave."""
    return [child for child in pool.children if child.name == name_of(url)]


def test_each_server_that_listens_has_one_actor(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often one looks; with its URL and a name that tells it; who does not listen yet gets one later."""
    there = {A}
    monkeypatch.setattr(module, "listens", there.__contains__)
    pool = make_pool([A, B])
    pool.look()
    [first], [second] = actors_of(pool, A), actors_of(pool, B)
    process = first.process
    assert process is not None
    assert 'inference.engine.urls=["http://127.0.0.1:1"]' in process.args  # type: ignore[operator]
    assert first.name == "inference-127.0.0.1-1-server"
    assert not second.running
    there.add(B)
    pool.look()
    assert len(pool.children) == 2
    assert first.process is process
    assert second.running


def test_a_server_that_leaves_has_its_actor_leave(make_pool: MakePool) -> None:
    """The others stay; when it comes again it gets a new one."""
    servers = [A, B]
    pool = make_pool(servers)
    pool.look()
    [leaver], [stayer] = actors_of(pool, A), actors_of(pool, B)
    servers.remove(A)
    pool.look()
    wait_until(lambda: not leaver.running, "the actor's end")
    pool.tend()
    assert (pool.children, stayer.running) == ([stayer], True)
    servers.append(A)
    pool.look()
    [again] = actors_of(pool, A)
    assert again.running
    assert again is not leaver


def test_an_actor_that_does_not_leave_is_ended(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.1)
    servers = [A]
    pool = make_pool(servers, STUBBORN)
    pool.look()
    [child] = pool.children
    wait_until(lambda: b"deaf" in child.log.read_bytes(), "its start")
    servers.clear()
    pool.look()

    def ended() -> bool:
        pool.tend()
        return not child.running

    wait_until(ended, "its end by force")


def test_an_actor_that_ends_is_tried_again_later_and_later(make_pool: MakePool) -> None:
    """It fails no run: its server may be starting, or be replaced."""
    pool = make_pool([A], "print('the server has version 7'); raise SystemExit(2)")
    waits = []
    for _ in range(3):
        pool.look()
        [child] = pool.children
        wait_until(lambda child=child: not child.running, "its end")
        pool.tend()
        waits.append(child.start_at)
        pool.look()
        assert not child.running  # not yet
        child.start_at = 0.0
    assert waits[1] - waits[0] > 25
    assert waits[2] - waits[1] > 50
    assert child.last_words() == ["the server has version 7"]


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of IPv4, else of IPv6; with https for itself."""
    four = [(socket.AF_INET, None, None, "", (host, 8000)) for host in ("10.0.0.2", "10.0.0.1", "10.0.0.1")]
    six = [(socket.AF_INET6, None, None, "", ("fd00::1", 8000, 0, 0))]
    known: list[Any] = four + six
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    assert addresses("http://engines:8000") == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    del known[:3]
    assert addresses("http://engines:8000") == ["http://[fd00::1]:8000"]
    assert Directory(["https://engines:8000"])() == ["https://engines:8000"]


def test_a_name_that_nobody_knows_at_the_moment_keeps_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is away takes no engine along."""
    directory = Directory(["http://localhost:8000", "http://127.0.0.9:1"])
    both = ["http://127.0.0.1:8000", "http://127.0.0.9:1"]
    assert directory() == both

    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror("try again")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert directory() == both


def test_who_listens_is_found_by_asking() -> None:
    """A connection, nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listens(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert not listens(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize("url", ["http://10.0.0.7:30000", "http://[fd00::1]:8000", "https://engines.cluster.local:443"])
def test_names_are_files_and_no_ordinals(url: str) -> None:
    """Port or address are not taken for the number of an actor."""
    name = name_of(url)
    assert name.startswith("inference-")
    assert not set("/:[]") & set(name)
    assert replica_index(name) == 0


def test_up_starts_the_pool_in_place_of_inference_actors(tmp_path: Path) -> None:
    """One process, whatever `up.inference` says; the trainer has the cores to itself."""
    inference: Any = {"engine": {"type": "sglang"}, "pool": {"urls": [A]}}
    children = {
        child.name: child for child in plan(ring_config(tmp_path, inference=inference, up={"inference": 3}), None)
    }
    assert sorted(children) == ["inference-pool-0", "packer-0", "reward-0", "rollout-0", "trainer-0"]
    assert children["trainer-0"].environment["OMP_NUM_THREADS"] == str(os.cpu_count())


def test_a_run_without_a_pool_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`actors run inference-pool` says which key is missing."""
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(ring_config(tmp_path)), encoding="utf-8")
    assert main(["run", "inference-pool", "--config", str(path)]) == 2
    assert "inference.pool: is not set" in capsys.readouterr().err
