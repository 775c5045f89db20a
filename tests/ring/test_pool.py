"""Servers come and go while a run goes on: real processes, stub servers of SGLang."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from actors.ops.up.server_pool import ServerPool, name_of
from schemas.config import RunConfig
from tests.actors.engines.sglang.stub import StubServer
from tests.conftest import ModelFolder
from tests.ports import free_port
from tests.ring.harness import check_promise, processes, ring_config, steps_recorded, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE = 120.0


@pytest.fixture
def stubs() -> Iterator[ExitStack]:
    """Whatever is entered here is closed at the end."""
    with ExitStack() as stack:
        yield stack


def pool_config(folder: Path, model: Path, urls: list[str], **pool: Any) -> RunConfig:
    """A run whose engines are attached to; stubs make logprobs up, so their gap to the trainer's is no fault."""
    return ring_config(
        folder,
        model={"path": str(model), "dtype": "float32", "device": "cpu"},
        rollout={"group_size": 2, "max_tokens": 12, "max_concurrent_groups": 4, "completion_retries": 5},
        packer={"groups_per_step": 3, "sequence_len": 64},
        trainer={"max_steps": 30, "checkpoint": {"interval": 10}, "mismatch": {"stop": None}},
        inference={"engine": {"type": "sglang"}, "pool": {"urls": urls, "sync_interval": 0.5} | pool},
        eval={"num_prompts": 0},
        bus={"control": "ipc", "lease": 3.0},
        up={"torch_threads": {"trainer": 1}},
    )


def served(stub: StubServer) -> int:
    """Completions asked of a server."""
    return len(stub.asked("/generate"))


@pytest.mark.long
def test_a_server_that_comes_takes_over_from_one_that_goes(
    tmp_path: Path, model_folder: ModelFolder, stubs: ExitStack
) -> None:
    """The second one is there from step 3 on, the first one dies with requests under way; nothing is lost or twice."""
    first, port = StubServer(), free_port()
    stubs.callback(first.close)
    config = pool_config(tmp_path, model_folder(), [first.url, f"http://127.0.0.1:{port}"])
    with processes(config, tmp_path) as started:
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 3, "three steps with one server", PATIENCE)
        first.token_seconds = 0.5  # the run goes on, but does not end before the second one is there
        second = StubServer(port)
        stubs.callback(second.close)
        wait_until(lambda: served(second) >= 4, "work for the second server", PATIENCE)
        paths = second.paths()
        assert paths.index("/update_weights_from_disk") < paths.index("/generate")  # weights before work
        wait_until(lambda: first.num_running() > 0, "requests under way", PATIENCE)
        first.close()
        before = served(second)
        assert up.wait(PATIENCE) == 0, started.text("up")
    assert served(second) > before
    check_promise(config)
    labels = {body["cache_salt"].partition(":")[0] for stub in (first, second) for body in stub.asked("/generate")}
    assert len(labels) == 2  # each server has an engine with a boot id of its own


def test_a_server_whose_address_goes_is_left_in_good_order(
    tmp_path: Path, model_folder: ModelFolder, stubs: ExitStack
) -> None:
    """It answers what it has been asked, its actor leaves while the run goes on with the other one."""
    first, second = StubServer(token_seconds=0.3), StubServer(token_seconds=0.3)  # until both have work
    stubs.callback(first.close)
    stubs.callback(second.close)
    config, servers = pool_config(tmp_path, model_folder(), [first.url, second.url]), [first.url, second.url]
    with processes(config, tmp_path) as started:
        for kind in ("packer", "trainer", "reward", "rollout"):
            started.run(f"{kind}-0")
        command = ["run", "inference", "--config", str(started.config_path)]
        pool = ServerPool(config, "inference-pool-0", command, lambda: servers)
        thread = threading.Thread(target=pool.run)
        thread.start()
        wait_until(lambda: steps_recorded(config) >= 1 and served(first) and served(second), "work for both", PATIENCE)
        leaver = next(child for child in pool.children if child.name == name_of(first.url))
        second.token_seconds = 0.0
        wait_until(lambda: first.num_running() > 0, "requests under way", PATIENCE)
        servers.remove(first.url)
        wait_until(lambda: not leaver.running, "its actor's end", PATIENCE)
        assert leaver.process is not None
        assert leaver.process.returncode == 0
        assert "/abort_request" not in first.paths()
        assert started.processes["trainer-0"].wait(PATIENCE) == 0
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert started.processes["packer-0"].wait(PATIENCE) == 0
    check_promise(config)
