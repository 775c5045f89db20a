"""Runs of the whole ring whose trajectories are those of agents: programs that talk to the model over HTTP."""

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from tests.docs.pages import page
from tests.ports import free_port
from tests.ring.agents import chat
from tests.ring.harness import ALL, ring, ring_config

AGENTS = Path(__file__).with_name("agents.py")


def config_of(folder: Path, agent: str = "", sessions: dict[str, Any] | None = None, **environment: Any) -> RunConfig:
    """A run of eight steps with an agent of agents.py, in groups of four."""
    one: dict[str, Any] = {"type": "agent", "name": "helper"} | environment
    if agent:
        one["path"] = f"{AGENTS}:{agent}"
    return ring_config(
        folder,
        environments=[one],
        rollout={"group_size": 4, "group_timeout": 300.0, "sessions": sessions or {}},
        reward={"functions": []},
        packer={"sequence_len": 512},
    )


def trained(config: RunConfig) -> list[dict[str, Any]]:
    """The steps of a run in which nothing was lost."""
    lines = read_lines(config.output / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    summary = json.loads((config.output / "summary.json").read_text())
    assert summary["ledger"]["trained_twice"] == 0
    assert all(line["failed_fraction"] == 0.0 for line in lines)
    return lines


@pytest.mark.slow
def test_calls_that_continue_each_other_are_one_sample(tmp_path: Path) -> None:
    """The reward is what the agent returns; parameters that would bias the ratio are named in the record."""
    config = config_of(tmp_path, "two_calls")
    with ring(config) as run:
        run.start(*ALL).wait()
    lines = trained(config)
    assert all(line["turns_mean"] == 2.0 and line["samples_per_completion"] == 1.0 for line in lines)
    assert all(0.5 <= line["reward/two_calls"] <= 1.0 for line in lines)
    for record in read_lines(config.output / "samples.jsonl"):
        assert all(info["pinned"] == "temperature" for info in record["info"])
        for messages in record["messages"]:
            assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.slow
def test_the_agent_of_the_page_is_trained(tmp_path: Path) -> None:
    """The block of docs/reference/agents.md, with OpenAI's client, which nothing tells that it is trained."""
    (block,) = [block for block in page("docs/reference/agents.md").blocks if block.title == "my_agent.py"]
    (tmp_path / "my_agent.py").write_text(block.text)
    (tmp_path / "tasks.jsonl").write_text('{"question": "Say a.", "answer": "a"}\n' * 40)
    rows = {"rows": str(tmp_path / "tasks.jsonl"), "prompt_column": "question", "path": f"{tmp_path}/my_agent.py:run"}
    config = config_of(tmp_path, **rows)
    with ring(config) as run:
        run.start(*ALL).wait()
    lines = trained(config)
    assert all(line["turns_mean"] == 1.0 for line in lines)
    assert sum(line["reward/run"] for line in lines) > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("samples", ["tree", "calls"])
def test_rewards_by_call_are_those_of_turns(tmp_path: Path, samples: str) -> None:
    """Calls without a common history are samples of their own in either way."""
    config = config_of(tmp_path, "PerCall", samples=samples)
    with ring(config) as run:
        run.start(*ALL).wait()
    lines = trained(config)
    assert all(line["turns_mean"] == 3.0 and line["samples_per_completion"] == 3.0 for line in lines)
    assert all(line["reward/turns"] == 3.0 for line in lines)


@pytest.mark.long
@pytest.mark.slow
def test_each_call_may_be_a_sample_by_itself(tmp_path: Path) -> None:
    """AReaL's style `individual`: a call that continues another has it as its prompt."""
    config = config_of(tmp_path, "two_calls", samples="calls")
    with ring(config) as run:
        run.start(*ALL).wait()
    assert all(line["samples_per_completion"] == 2.0 for line in trained(config))


@pytest.mark.slow
def test_an_agent_that_dies_is_played_again_and_nothing_is_lost(tmp_path: Path) -> None:
    """Its session ends with it."""
    config = config_of(tmp_path, "DiesOnce", options={"folder": str(tmp_path)})
    with ring(config) as run:
        run.start(*ALL).wait()
    assert (tmp_path / "died").exists()
    assert all(line["reward/DiesOnce"] == 1.0 for line in trained(config))


@pytest.mark.slow
def test_services_take_the_trajectories_of_an_external_agent(tmp_path: Path) -> None:
    """Two services, with the address of the rollout actor alone; both end when the run has ended."""
    port = free_port()
    config = config_of(tmp_path, external=True, sessions={"port": port})
    services = [threading.Thread(target=_serve, args=(f"http://127.0.0.1:{port}",), daemon=True) for _ in range(2)]
    stop.clear()
    with ring(config) as run:
        run.start(*ALL)
        for service in services:
            service.start()
        run.wait()
    stop.set()
    for service in services:
        service.join(30)
    assert all(line["reward/helper"] == 0.25 for line in trained(config))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the program of the page asks with curl")
def test_the_program_of_the_page_is_trained(tmp_path: Path) -> None:
    """A shell script with curl, more of them at once than a worker may have processes of its own."""
    (block,) = [block for block in page("docs/reference/agents.md").blocks if block.language == "json"]
    options = json.loads(block.text)
    command = options.pop("command")
    options["files"]["agent.sh"] = options["files"]["agent.sh"].replace("grep -q 42", "grep -q content")
    (tmp_path / "tasks.jsonl").write_text('{"question": "Say a."}\n' * 40)
    rows = {"rows": str(tmp_path / "tasks.jsonl"), "prompt_column": "question", "limits": {"processes": 8}}
    config = config_of(tmp_path, command=command, options=options, **rows)
    with ring(config) as run:
        run.start(*ALL).wait()
    assert all(line["reward/agent"] == 1.0 and line["turns_mean"] == 1.0 for line in trained(config))


stop = threading.Event()


def _serve(url: str) -> None:
    for taken in _taken(url):
        prompt = [{"role": "user", "content": f"Example {taken['data']['index']}."}]
        chat(taken["base_url"], taken["api_key"], prompt)
        end = taken["base_url"].removesuffix("/v1") + "/rl/end_session"
        urllib.request.urlopen(urllib.request.Request(end, b'{"reward": 0.25}'), timeout=30).close()


def _taken(url: str) -> Iterator[dict[str, Any]]:
    """Trajectories, until the test stops."""
    while not stop.is_set():
        try:
            request = urllib.request.Request(f"{url}/rl/start_session", b'{"wait": 1}')
            with urllib.request.urlopen(request, timeout=30) as answer:
                yield json.load(answer)
        except OSError:
            # not started yet, gone, or no trajectory waits (HTTPError 429)
            stop.wait(0.2)
