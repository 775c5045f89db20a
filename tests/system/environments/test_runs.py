"""Whole runs with environments of packages that nobody here wrote: real processes, GRPO steps, nothing lost.

The model is random, so nothing is learnt here; what counts is that each package's episodes become steps.
"""

import contextlib
import importlib.util
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.ledger import LedgerReader
from schemas.config import RunConfig
from schemas.errors import ConfigError
from tests.chat_model import build_chat_model
from tests.ring.harness import SHORT_LEASE, check_promise, processes, ring_config, wait_until
from tests.system.environments.playing import ROOT, python
from tests.system.environments.scripted import python_of
from tests.system.environments.servers import served
from tests.system.tools import missing

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS = 3
LIMITS = dict.fromkeys(("load", "reset", "step", "score", "silence"), 240.0)
"""Imports of some packages take up to a minute on a busy machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    folder = tmp_path_factory.mktemp("chat")
    build_chat_model(folder)
    return folder


def config_of(folder: Path, model: Path, engine: dict[str, Any], **environment: Any) -> RunConfig:
    """Three steps of two groups of two trajectories."""
    return ring_config(
        folder,
        model={"path": str(model), "dtype": "float32", "device": "cpu"},
        environments=[{"name": "real", "max_turns": 3, "max_message_tokens": 2000, "limits": LIMITS} | environment],
        rollout={"group_size": 2, "max_tokens": 24, "group_timeout": 500.0, "max_concurrent_groups": 2},
        reward={"functions": []},
        packer={"groups_per_step": 2, "sequence_len": 12_000},
        trainer={"max_steps": STEPS, "checkpoint": {"interval": 2}},
        inference={"engine": engine},
        eval={"num_prompts": 0},
    )


def ran(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """The samples of a run that has ended well."""
    with processes(config, folder) as started:
        assert started.up().wait(500.0) == 0, started.text("up")
    check_promise(config)
    return [json.loads(line) for line in (config.output / "samples.jsonl").read_text().splitlines()]


SINGLE_TURN = ("reasoning_gym", "marble-v1", "sophistry-bench-sprint")
EMBEDDED = {"type": "embedded", "max_sequence_len": 12_000, "max_sequences": 8}


@pytest.mark.parametrize(
    ("venv", "environment", "reward"),
    [
        ("environments", {"type": "reasoning_gym", "options": {"task": "chain_sum"}}, "reasoning_gym"),
        ("environments", {"type": "textarena", "options": {"game": "TowerOfHanoi-v0"}}, "textarena"),
        ("environments", {"type": "gymnasium", "options": {"id": "FrozenLake-v1"}}, "turns"),
        (
            "environments",
            {"type": "python", "path": f"{ROOT}/examples/environments/crashdiag_env.py:Env"},
            "resolved",
        ),
        ("verifiers-v0", {"type": "verifiers", "options": {"id": "sophistry-bench-sprint"}}, "sophistry-bench-sprint"),
        ("verifiers-v1", {"type": "verifiers_v1", "options": {"id": "marble-v1"}}, "marble-v1"),
    ],
    ids=["reasoning_gym", "textarena", "gymnasium", "crashdiag", "verifiers", "verifiers_v1"],
)
def test_a_package_of_others_is_trained(
    tmp_path: Path, model: Path, venv: str, environment: dict[str, Any], reward: str
) -> None:
    """Its rewards reach the samples under their names."""
    interpreter = python() if venv == "environments" else python_of(venv)
    config = config_of(tmp_path, model, EMBEDDED, python=interpreter, **environment)
    records = ran(config, tmp_path)
    assert len(records) >= STEPS
    for record in records:
        assert all(1 <= turns <= 3 for turns in record["turns"])
        assert {message["role"] for message in record["messages"][0]} >= {"user", "assistant"}
        assert not any(record["failures"])
    assert any(turns > 1 for record in records for turns in record["turns"]) or reward in SINGLE_TURN
    values = [value for record in records for value in record["rewards"].get(reward, [])]
    assert any(value is not None and math.isfinite(value) for value in values) or reward == "textarena"


def test_a_level_that_moves_survives_the_kill_of_the_packer(tmp_path: Path, model: Path) -> None:
    """Twice, in the middle of the run: no example of a level is lost or repeated, and the level goes on where it was.

    Each window of two groups raises the level here, whatever the random model answers.
    """
    moving = {"levels": 3, "raise_at": -1.0, "window": 2}
    config = config_of(
        tmp_path, model, EMBEDDED, python=python(), type="reasoning_gym", curriculum=moving,
        options={"task": "chain_sum", "size": 40, "seed": 3},
    )  # fmt: skip
    config = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"max_steps": 8}),
            "bus": config.bus.model_copy(update=SHORT_LEASE),
        }
    )
    names = ("packer-0", "trainer-0", "reward-0", "rollout-0", "inference-0")
    with processes(config, tmp_path) as run:
        for name in names:
            run.run(name)
        for groups in (3, 8):
            wait_until(partial(has_issued, config, groups), f"{groups} groups", 400.0)
            run.processes["packer-0"].kill()
            run.processes["packer-0"].wait(60.0)
            run.run("packer-0")
        for name in names:
            assert run.processes[name].wait(400.0) == 0, run.text(name)
    check_promise(config)
    [state] = stored(config, "levels").values()
    assert min(state["counts"]) > 0
    # each draw was counted with its ticket: every ordinal has the next example, without a gap or a repetition
    expected = [
        40 * level + int(place)
        for level, count in enumerate(state["counts"])
        for place in np.random.default_rng([config.seed, 0, 0, level]).permutation(40)[:count]
    ]
    assert len(expected) == stored(config, "num_issued")["train"]
    assert all(expected[ordinal] == index for ordinal, index in issued(config).items())
    # of durable groups the ledger keeps counts; a group of each step is in the file for people
    records = [json.loads(line) for line in (config.output / "samples.jsonl").read_text().splitlines()]
    trained = {record["ordinal"]: record["columns"] for record in records if record["purpose"] == "train"}
    assert len(trained) == 8
    for ordinal, columns in trained.items():
        assert (columns["index"], columns["level"]) == (expected[ordinal], expected[ordinal] // 40)


def issued(config: RunConfig) -> dict[int, int]:
    """Ordinals of train groups in the ledger, with the indexes of their examples."""
    with contextlib.closing(LedgerReader.of(config.ledger_path)) as ledger:
        return {one.ordinal: one.example.index for one in ledger.groups() if one.ordinal >= 0}


def has_issued(config: RunConfig, groups: int) -> bool:
    """Whether the ledger has more groups than these; it may not be written yet."""
    with contextlib.suppress(ConfigError):
        return len(issued(config)) > groups
    return False


def stored(config: RunConfig, key: str) -> dict[str, Any]:
    """A value of the ledger."""
    with contextlib.closing(LedgerReader.of(config.ledger_path)) as ledger:
        found: dict[str, Any] = ledger.values()[key]
        return found


def test_an_openenv_server_is_trained(tmp_path: Path, model: Path) -> None:
    """Over its WebSocket; the worker has the actors' own interpreter."""
    with served("openenv_server.py", "echo", "8") as url:
        options = {"url": url, "action": {"message": "{text}"}, "tasks": "echo"}
        records = ran(config_of(tmp_path, model, EMBEDDED, type="openenv", options=options), tmp_path)
    assert any(value is not None for record in records for value in record["rewards"]["openenv"])


TOOLS = '''
class Env:
    """TRL's form: a public method is a tool."""

    def reset(self, **row) -> str:
        self.sum = 0
        return "Add up 3 and 4."

    def add(self, number: int) -> int:
        """Add a number.

        Args:
            number: what to add.
        """
        self.sum += number
        return self.sum

    def get_reward(self) -> float:
        return 1.0 + self.sum
'''


def test_tools_are_trained_on_real_vllm(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt has the tools, the samples are vLLM's own tokens."""
    if importlib.util.find_spec("vllm") is None:
        missing("make system-deps brings vLLM")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    (tmp_path / "env.py").write_text(TOOLS)
    engine = {
        "type": "vllm",
        "max_model_len": 4096,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "startup_timeout": 300.0,
    }
    config = config_of(tmp_path, model, engine, type="python", path=f"{tmp_path}/env.py:Env")
    config = config.model_copy(update={"packer": config.packer.model_copy(update={"sequence_len": 4096})})
    records = ran(config, tmp_path)
    assert all(value >= 1.0 for record in records for value in record["rewards"]["Env"])
    assert all(messages[0]["content"] == "Add up 3 and 4." for record in records for messages in record["messages"])
