"""Faults of trackers' own packages, one process each: what is lost, sent twice or sent elsewhere."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.system.tools import missing

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def _left(folder: Path, fault: str) -> Any:
    """What the tracker has after a fault."""
    python = ROOT / ".venv-extras/bin/python"
    if not python.is_file():
        missing("make system-deps brings the trackers")
    environment = os.environ | {"TRACKIO_DIR": str(folder / "trackio"), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "tests.system.tracker_faults", fault, str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line[:1] in "[{"))


def test_mlflow_has_each_value_once_wherever_it_is_sent(tmp_path: Path) -> None:
    """A step without values, more values than fit a request; another experiment in mid-run gets the whole history."""
    left = _left(tmp_path, "mlflow")
    assert left["told"] == [-1, None, -1]
    assert left["metric_0"] == [[1, 2, 3], [1, 2, 3]]
    assert left["metric_1499"] == [[2], [2]]
    # next to the database, which outlives the output_dir of the run that came first
    assert left["artifacts"] == (tmp_path / "artifacts").as_uri()


def test_tensorboard_in_another_folder_gets_the_whole_history(tmp_path: Path) -> None:
    """`logging_dir` may change in mid-run."""
    assert _left(tmp_path, "tensorboard") == [-1, None]


def test_runs_of_one_name_have_folders_of_their_own_in_tensorboard(tmp_path: Path) -> None:
    """Else the files of one run would order to forget the steps of the other."""
    assert _left(tmp_path, "tensorboard_shared") == ["mine", "mine-bbbbbbbb", "mine"]


def test_trackio_gets_a_lost_batch_again_and_no_other_row_twice(tmp_path: Path) -> None:
    """It drops rows that it can't write, as on a full or locked disk, and goes on behind them."""
    left = _left(tmp_path, "trackio")
    assert left["errors"] == ["step 2 is not in Trackio's database after 3 s"]
    assert left["told"] == [-1, 1]
    assert left["steps"] == [1, 2, 3, 4, 5]


def test_wandb_offline_is_asked_for_its_newest_row_without_reading_all_rows(tmp_path: Path) -> None:
    """It is asked after each step: in a run of 10 000 steps a whole reading takes more than a second."""
    left = _left(tmp_path, "wandb")
    assert left["newest"] == 300
    first, later = left["seconds"]
    assert later < first / 3


def test_swanlab_goes_on_with_a_run_that_followed_a_rewind(tmp_path: Path) -> None:
    """Its files have another spelling of the run's id; the newest step may be there in part and is sent again."""
    left = _left(tmp_path, "swanlab")
    assert left["told"] == [-1, 2]
    assert left["steps"] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5]]
