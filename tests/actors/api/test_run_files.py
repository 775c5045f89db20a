"""`actors.load_run`: metrics, samples and trajectories of real runs as tables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import actors
from schemas.errors import ConfigError
from tests.docs.pages import page
from tests.ring.harness import ALL, ring, ring_config
from tests.ring.test_environments import config_of


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of single answers."""
    config = ring_config(tmp_path_factory.mktemp("plain"))
    with ring(config) as run:
        run.start(*ALL).wait()
    return config.output


def test_each_step_and_each_completion_is_a_row(plain_run: Path) -> None:
    """Rewards of functions have columns of their own, and a row has the columns of its example."""
    run = actors.load_run(plain_run)
    lines = [json.loads(line) for line in (plain_run / "metrics.jsonl").read_text().splitlines()]
    assert list(run.metrics) == lines
    assert run.metrics.column("step") == [line["step"] for line in lines]
    groups = list(run.groups)
    assert len(run.samples) == sum(len(group["completions"]) for group in groups)
    last = list(run.samples)[-1]
    assert last["completion"] == groups[-1]["completions"][-1]
    assert last["reward"] == groups[-1]["reward"][-1]
    names = {f"reward/{name}": values[-1] for name, values in groups[-1]["rewards"].items()}
    assert names
    assert {name: last[name] for name in last if name.startswith("reward/")} == names
    assert {row["purpose"] for row in run.samples.where(purpose="train")} == {"train"}
    assert list(run.trajectories) == []
    assert run.config["rollout"]["group_size"] == len(run.groups.where(purpose="train").column("completions")[0])
    assert run.checkpoints[8] == plain_run / "checkpoints/step_8"
    assert list(run.checkpoints) == sorted(run.checkpoints)


def test_the_example_of_the_page_runs(plain_run: Path) -> None:
    """docs/reference/files.md, with the folder of a real run."""
    (block,) = [block for block in page("docs/reference/files.md").blocks if block.language == "python"]
    names: dict[str, Any] = {}
    exec(block.text.replace("outputs/mine", str(plain_run)), names)
    assert len(names["rewards"]) == 8
    assert {row["step"] for row in names["third"]} == {3}
    assert names["turns"] == []


@pytest.mark.slow
def test_trajectories_have_their_conversation_and_the_rewards_of_their_turns(tmp_path: Path) -> None:
    """The rewards of a trajectory's turns are its own, not those of the whole group."""
    config = config_of(tmp_path, "Letters")
    with ring(config) as run:
        run.start(*ALL).wait()
    rows = list(actors.load_run(config.output).trajectories.where(purpose="train"))
    assert rows
    for row in rows:
        assert sum(message["role"] == "assistant" for message in row["messages"]) == row["turns"] == 3
        assert [turn for turn, _ in row["turn_rewards"]] == [0, 1, 2]
        assert sum(value for _, value in row["turn_rewards"]) == pytest.approx(row["reward/turns"])


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    """A running run can be read at any moment, and a later iteration has the new rows."""
    (tmp_path / "config.resolved.yaml").write_text("name: run\n")
    run = actors.load_run(tmp_path)
    assert list(run.metrics) == []
    assert run.summary is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert run.metrics.column("step") == [1, 2]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('p": 3}\n')
    assert run.metrics.column("step") == [1, 2, 3]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """The error names the folder."""
    with pytest.raises(ConfigError, match="is not a run's output_dir"):
        actors.load_run(tmp_path)


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Neither torch nor transformers nor ZeroMQ."""
    code = "import actors, sys; print(sorted({'torch', 'transformers', 'zmq', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = actors.nothing
