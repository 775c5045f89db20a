"""The plan of devices: a pure function of the configuration and the number of GPUs."""

import os
import re
from typing import Any

import pytest

from actors.ops import device_plan
from actors.ops.device_plan import Actor, actors_of, parse_actors, plan_devices, plan_here, planned_table
from actors.ops.up.child import plan as children
from actors.process.devices import Gpu
from schemas.config import RunConfig, check_tree
from schemas.errors import ConfigError

VLLM = {"type": "vllm", "tensor_parallel_size": 2}


def _config(engine: dict[str, Any] | None = None, ranks: int = 1, device: str = "auto", **up: Any) -> RunConfig:
    return check_tree(
        {
            "model": {"path": "m", "device": device},
            "environments": [{"type": "reverse_text"}],
            "reward": {"functions": [{"path": "exact_match"}]},
            "trainer": {"max_steps": 1, "num_ranks": ranks},
            "inference": {"engine": engine or {"type": "embedded"}},
            "up": up,
        }
    )


def _gpus(number: int) -> list[Gpu]:
    return [Gpu(str(index), "NVIDIA H200", 139 << 30) for index in range(number)]


def _planned(config: RunConfig, number: int, machine: str = "") -> dict[str, list[int]]:
    """GPUs by name of actor; actors without a GPU are left out."""
    plan = plan_devices(config, _gpus(number), parse_actors(machine) if machine else actors_of(config))
    return {str(actor): list(gpus) for actor, gpus in plan.of.items() if gpus}


@pytest.mark.parametrize(
    ("config", "number", "expected"),
    [
        (_config(), 0, {}),
        (_config(), 2, {"trainer-0": [0], "inference-0": [1]}),
        (_config(), 8, {"trainer-0": [0], "inference-0": [1]}),
        (_config(device="cpu"), 2, {}),
        (_config({"type": "fake"}), 2, {}),
        (_config(colocate=True), 1, {"trainer-0": [0], "inference-0": [0]}),
        (_config(colocate=True), 2, {"trainer-0": [0], "inference-0": [1]}),
        (
            _config(ranks=2, inference=2),
            4,
            {"trainer-0": [0], "trainer-1": [1], "inference-0": [2], "inference-1": [3]},
        ),
        (_config(VLLM, inference=2), 5, {"trainer-0": [0], "inference-0": [1, 2], "inference-1": [3, 4]}),
        (_config(VLLM | {"urls": ["http://a:1"]}), 1, {"trainer-0": [0]}),
        (
            _config(ranks=2, inference=3, colocate=True),
            4,
            {"trainer-0": [0], "trainer-1": [1], "inference-0": [2], "inference-1": [3], "inference-2": [0]},
        ),
        (
            _config(ranks=4, inference=4, colocate=True),
            4,
            {f"{kind}-{i}": [i] for kind in ("trainer", "inference") for i in range(4)},
        ),
        (
            _config({"type": "vllm", "tensor_parallel_size": 2, "data_parallel_size": 2}, ranks=4),
            8,
            {"trainer-0": [0], "trainer-1": [1], "trainer-2": [2], "trainer-3": [3], "inference-0": [4, 5, 6, 7]},
        ),
    ],
)
def test_each_process_gets_gpus_of_its_own_and_shares_only_with_permission(
    config: RunConfig, number: int, expected: dict[str, list[int]]
) -> None:
    """Trainer ranks come first, engines next; other processes get none."""
    assert _planned(config, number) == expected


@pytest.mark.parametrize(
    ("config", "number", "words"),
    [
        (_config(), 1, "this machine has 1 GPU, and the run needs 2: 1 for trainer.num_ranks 1 and 1 for 1 of up.inf"),
        (_config(VLLM, inference=2), 4, "4 GPUs, and the run needs 5: 1 for trainer.num_ranks 1 and 4 for 2 of up.inf"),
        (_config(ranks=2, colocate=True), 1, "the run needs 2: 2 for trainer.num_ranks 2 and 1 for 1 of up.inference"),
        (_config(VLLM, colocate=True), 1, "this machine has 1 GPU, and the run needs 2"),
    ],
)
def test_too_few_gpus_are_an_error_that_names_the_keys(config: RunConfig, number: int, words: str) -> None:
    """Sharing is never a silent way out."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        _planned(config, number)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({"trainer": [[0], [1]], "inference": [[2]]}, "up.devices.trainer: 2 lists of GPUs for 1 processes"),
        ({"trainer": [[0]], "inference": [[4]]}, "up.devices.inference: there is no GPU 4; this machine has 4"),
        ({"trainer": [[0]], "inference": [[0]]}, "up.devices.trainer: a GPU of trainer-0 has another process too"),
        ({"trainer": [[0]]}, "up.devices.inference: [] for inference-0, which needs 1 GPUs"),
        ({"trainer": [[0, 1]], "inference": [[2]]}, "up.devices.trainer: [0, 1] for trainer-0, which needs 1 GPUs"),
    ],
)
def test_devices_that_do_not_fit_the_processes_are_named(devices: dict[str, Any], words: str) -> None:
    """Each error names the key and the process."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        _planned(_config(devices=devices), 4)


def test_named_devices_are_taken_as_they_are() -> None:
    """Also for a reward actor with a model of its own."""
    devices = {"trainer": [[3]], "inference": [[1, 0]], "reward": [[2]]}
    assert _planned(_config(VLLM, devices=devices), 4) == {"trainer-0": [3], "inference-0": [1, 0], "reward-0": [2]}


def test_two_machines_of_eight_have_a_plan_each() -> None:
    """One machine has the trainer's ranks, the other the engines; the configuration is the same."""
    config = _config(VLLM, ranks=8, inference=4)
    assert _planned(config, 8, "packer:0,trainer:0-7") == {f"trainer-{i}": [i] for i in range(8)}
    assert _planned(config, 8, "inference:0-3,reward:0") == {f"inference-{i}": [2 * i, 2 * i + 1] for i in range(4)}


def test_a_process_sees_its_own_gpus_alone_and_others_see_none() -> None:
    """Entries of a CUDA_VISIBLE_DEVICES that was there are handed on as they are, and so is its order."""
    gpus = [Gpu("GPU-aa"), Gpu("7")]
    plan = plan_devices(_config(), gpus, actors_of(_config()))
    inherited = {"CUDA_VISIBLE_DEVICES": "GPU-aa,7", "PYTORCH_CUDA_ALLOC_CONF": "mine"}
    trainer, packer = Actor("trainer", 0), Actor("packer", 0)
    assert plan.environment(trainer, inherited) == {
        "CUDA_VISIBLE_DEVICES": "GPU-aa",
        "PYTORCH_CUDA_ALLOC_CONF": "mine",
        "GRPO_ACTORS_SHARED_GPU": "0",
    }
    assert plan.environment(Actor("inference", 0), {}) == {
        "CUDA_VISIBLE_DEVICES": "7",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "GRPO_ACTORS_SHARED_GPU": "0",
    }
    assert plan.environment(packer, {}) == {
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GRPO_ACTORS_SHARED_GPU": "0",
    }
    one = plan_devices(_config(colocate=True), gpus[:1], actors_of(_config()))
    assert one.environment(trainer, {})["GRPO_ACTORS_SHARED_GPU"] == "1"
    assert one.environment(packer, {})["GRPO_ACTORS_SHARED_GPU"] == "0"


def test_the_table_shows_who_has_which_gpu_who_shares_and_what_is_unused() -> None:
    """A line for each process with GPUs."""
    config = _config(VLLM, inference=2)
    table = plan_devices(config, _gpus(8), actors_of(config)).table()
    assert table == (
        "devices: 8 × NVIDIA H200\n"
        "  trainer-0      GPU 0\n"
        "  inference-0    GPU 1, 2\n"
        "  inference-1    GPU 3, 4\n"
        "  no GPU:        packer-0, reward-0, rollout-0\n"
        "  unused:        GPU 5, 6, 7"
    )
    shared = _config(colocate=True)
    assert "trainer-0      GPU 0 (shared)" in plan_devices(shared, _gpus(1), actors_of(shared)).table()
    assert "compute on the CPU" in plan_devices(shared, [], actors_of(shared)).table()


@pytest.mark.parametrize("words", ["", "trainer", "trainer:", "trainer:a", "trainer:0 inference:0"])
def test_a_list_of_actors_that_is_none_is_refused(words: str) -> None:
    """With an example of a good one."""
    with pytest.raises(ConfigError, match="must be KIND:NUMBER or KIND:FIRST-LAST"):
        parse_actors(words)


def test_an_actor_started_by_itself_takes_its_gpus_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of the machine's actors must have this one; the same list gives the same plan in each of them."""
    monkeypatch.setattr(device_plan, "visible_gpus", lambda: _gpus(8))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    config = _config(VLLM, inference=4)
    device_plan.take_devices(config, "inference:0-3", "inference-2")
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("4,5", "PCI_BUS_ID")
    with pytest.raises(ConfigError, match=r"--machine: inference:0-3 lacks trainer-0, this actor"):
        device_plan.take_devices(config, "inference:0-3", "trainer-0")


def test_up_shows_each_process_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The children of `actors up` see what the table shows."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = _config(inference=2)
    plan = plan_devices(config, _gpus(4), actors_of(config))
    seen = {child.name: child.environment["CUDA_VISIBLE_DEVICES"] for child in children(config, plan)}
    assert seen == {
        "packer-0": "",
        "trainer-0": "0",
        "inference-0": "1",
        "inference-1": "2",
        "reward-0": "",
        "rollout-0": "",
    }


def test_gpus_that_can_not_be_counted_are_left_to_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm and Jetson: `check` says so, and no variable is set."""
    monkeypatch.setattr(device_plan, "visible_gpus", lambda: None)
    config = _config()
    assert plan_here(config, actors_of(config)) is None
    assert "can't be counted" in planned_table(config, None, None)


def test_check_plans_a_machine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few GPUs are an error about the machine in question, and words about this one."""
    monkeypatch.setattr(device_plan, "visible_gpus", lambda: _gpus(1))
    config = _config()
    assert planned_table(config, None, None).startswith("devices: not on this machine: up.devices: this machine has 1")
    assert planned_table(config, 2, None).startswith("devices: 2 × GPU\n  trainer-0      GPU 0\n")
    assert "inference-0    GPU 0" in planned_table(config, 8, "inference:0")
    with pytest.raises(ConfigError, match="needs 2"):
        planned_table(config, 1, None)
    monkeypatch.setattr(device_plan, "visible_gpus", list)
    assert planned_table(config, None, None) == ""
