"""`actors simulate`, as a user calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from actors.cli import main
from tests.actors.simulate.plans import CONFIG
from tests.actors.simulate.test_calibration import folder_of


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run.yaml with the engine for dry runs."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def output(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What the command prints."""
    assert main(["simulate", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_words_come_first_then_the_table(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a note that the times are defaults."""
    text = output(capsys, config, "--steps", 20)
    assert text.index("the trainer waits") < text.index("The limit is") < text.index("\nsteps per second ")
    assert "note: all times are defaults" in text


def test_figures_as_json_are_those_of_the_options(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, figures and overrides reach the simulation."""
    words = (config, "--steps", 12, "--json", "--brief", "--set", "step_seconds=2", "packer.groups_per_step=2")
    found = json.loads(output(capsys, *words))
    assert (found["steps"], found["times"]["step_seconds"]) == (12, 2.0)
    assert found["compute_seconds"] == pytest.approx(2.0)
    assert found["issued"] <= 2 * 15


def test_a_run_gives_its_times(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--like; --set goes before what the run says."""
    run = folder_of(tmp_path / "run", steps=20)
    words = (config, "--steps", 10, "--json", "--brief", "--like", run, "--set", "publish_seconds=0.5")
    times = json.loads(output(capsys, *words))["times"]
    assert (times["publish_seconds"], times["restart_seconds"]) == (0.5, 9.0)


def test_a_sweep_prints_a_table_and_draws_it(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over a key of run.yaml, which is loaded with each value."""
    picture = tmp_path / "sweep.svg"
    words = ("--steps", 10, "--sweep", "packer.max_async_level=0,1,2", "--picture", picture)
    lines = output(capsys, config, *words).splitlines()
    assert lines[0].split()[:2] == ["packer.max_async_level", "steps/s"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_a_split_of_gpus_with_its_cost(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each split, and the cheapest in words."""
    words = ("--steps", 10, "--brief", "--gpus", 4, "--price", "trainer=2", "--price", "inference=1")
    text = output(capsys, config, *words)
    assert "The cheapest split of 4 GPUs is " in text
    assert "A step costs " in text
    assert "cost/step" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "x=1"], "--set x=1"),
        (["--kill", "engine@3"], "--kill engine@3"),
        (["--picture", "a.svg"], "--sweep"),
        (["--sweep", "a.b=1", "--sweep", "c.d=1", "--sweep", "engines=1"], "one or two keys"),
        (["--sweep", "packer.nothing=1,2"], "packer.nothing"),
        (["--like", "nowhere"], "--like nowhere"),
        (["--mtbf", "inference=1"], "--mtbf inference=1"),
    ],
)
def test_a_mistake_is_told_with_its_option(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Exit code 2, as for a mistake in run.yaml."""
    assert main(["simulate", str(config), "--steps", "4", "--brief", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_no_torch_is_loaded() -> None:
    """A simulation needs neither torch nor an engine."""
    code = "import sys, actors.simulate.command; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "vllm"} & set(loaded)
