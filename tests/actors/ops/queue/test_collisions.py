"""Collisions of runs: what two runs would both use is refused by the key before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from actors.ops.queue.collisions import claims_of_processes, collisions, lasting_claims
from actors.ops.queue.plan import QueuedRun
from bus.run_folder import folders_of
from bus.topology import Addresses
from tests.ring.harness import ring_config

VLLM = {"engine": {"type": "vllm", "urls": ["http://h:8000"]}}
CASES: dict[str, dict[str, Any]] = {
    "bus.control": {"bus": {"control": "tcp://127.0.0.1:7000"}},
    "inference.port": {"inference": {"port": 7000}},
    "telemetry.metrics_port": {"telemetry": {"metrics_port": 7000}},
    "inference.engine.urls": {"inference": VLLM},
    "inference.pool.urls": {"inference": {"engine": {"type": "vllm"}, "pool": {"urls": ["http://h:8000"]}}},
}
LASTING: dict[str, dict[str, Any]] = {
    "ledger.path": {"ledger": {"path": "/disk/ledger.sqlite"}},
    "push_to_hub.hub_model_id": {"push_to_hub": {"hub_model_id": "me/model"}},
}


def queue_of(folder: Path, *sections: dict[str, Any]) -> list[QueuedRun]:
    """Runs with folders of their own."""
    return [
        QueuedRun(Path(f"{name}.yaml"), (), ring_config(folder / name, **more))
        for name, more in zip("abc", sections, strict=False)
    ]


@pytest.mark.parametrize("number", [2, 3])
def test_runs_of_one_file_with_other_folders_share_nothing(tmp_path: Path, number: int) -> None:
    """With the defaults, also at the same time: sockets and shared memory are named after the folder."""
    runs = queue_of(tmp_path, *[{"weights": {"directory": ""}}] * number)
    assert collisions(runs, number) == []
    configs = [run.config for run in runs]
    assert len({Addresses(config).folder for config in configs}) == number
    assert len({Addresses(config).control for config in configs}) == number
    assert len({folder.path for config in configs for folder in folders_of(config)}) == number


def test_the_same_folder_is_refused_under_two_names(tmp_path: Path) -> None:
    """A link leads to the same run."""
    (run,) = queue_of(tmp_path, {})
    run.config.output.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run.config.output)
    other = QueuedRun(Path("b.yaml"), (), run.config.model_copy(update={"output_dir": str(tmp_path / "link")}))
    found = collisions([run, other], 1)
    assert found[0] == (
        f"output_dir: a.yaml and b.yaml both use {run.config.output}; give each run a folder of its own"
    )


@pytest.mark.parametrize("key", LASTING)
def test_what_outlives_a_run_is_refused_one_after_the_other_too(tmp_path: Path, key: str) -> None:
    """The next run would continue the first one's ledger, or overwrite its model."""
    for at_once in (1, 2):
        (words,) = collisions(queue_of(tmp_path, LASTING[key], LASTING[key]), at_once)
        assert words.startswith(f"{key}: a.yaml and b.yaml both use ")
    assert collisions(queue_of(tmp_path, LASTING[key], {}), 2) == []


def test_repositories_without_a_name_follow_from_the_folder(tmp_path: Path) -> None:
    """`x/out` and `y/out` are two folders and one repository; another branch is another place."""
    (words,) = collisions(queue_of(tmp_path, {"push_to_hub": {}}, {"push_to_hub": {}}), 1)
    assert "the repository out@main" in words
    assert collisions(queue_of(tmp_path, {"push_to_hub": {}}, {"push_to_hub": {"hub_revision": "b"}}), 1) == []


@pytest.mark.parametrize("key", CASES)
def test_what_processes_use_is_refused_at_the_same_time_alone(tmp_path: Path, key: str) -> None:
    """One after the other the second run takes the port or the server over."""
    runs = queue_of(tmp_path, CASES[key], CASES[key])
    found = collisions(runs, 2)
    assert found[0].startswith(f"{key}: a.yaml and b.yaml both use ")
    assert all("leave out --at-once" in words for words in found)
    assert collisions(runs, 1) == []
    assert collisions(queue_of(tmp_path, CASES[key], {}), 2) == []


def test_ranges_that_overlap_collide_where_they_do(tmp_path: Path) -> None:
    """Ports of /metrics: five processes each, so two of the ports are in both ranges."""
    first, second = {"telemetry": {"metrics_port": 7000}}, {"telemetry": {"metrics_port": 7003}}
    found = collisions(queue_of(tmp_path, first, second), 2)
    assert [words.split(" both use ")[1].split(";")[0] for words in found] == ["127.0.0.1:7003", "127.0.0.1:7004"]


def test_a_run_never_collides_with_itself(tmp_path: Path) -> None:
    """Two rollout actors with one fixed port of sessions are another check's."""
    for sections in [*CASES.values(), *LASTING.values(), {}]:
        (run,) = queue_of(tmp_path, sections)
        claims = [*lasting_claims(run.config), *claims_of_processes(run.config)]
        assert collisions([run], 2) == []
        assert len(claims) >= 2
