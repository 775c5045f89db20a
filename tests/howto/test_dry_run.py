"""Whole runs without a model: the dry run of the page on debugging, and the processes of that on several machines."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.howto.origins import with_recorders
from tests.howto.pages import page, printed_by
from tests.ports import free_port

ONE_PROCESS_EACH = ["trainer.num_ranks=1", "trainer.sharding=none", "up.inference=1", "packer.groups_per_step=2"]
"""Smaller than on the page, for machines with few cores."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("trl", marks=pytest.mark.slow),
        *[pytest.param(name, marks=pytest.mark.long) for name in ("areal", "prime-rl", "surogate", "ms-swift")],
    ],
)
def test_data_and_rewards_of_a_page_go_through_a_whole_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a model: rows are sampled, scored by the page's functions, packed and trained; figures have the names."""
    found = page(name)
    monkeypatch.chdir(tmp_path)
    with_recorders(monkeypatch)
    found.write_files(tmp_path)
    printed_by(found.block("export.py"), {})
    (line,) = re.findall(r"^actors (up run\.yaml output_dir=.+)$", page("debugging").text, re.MULTILINE)
    words = [word.strip('"') for word in re.findall(r'"[^"]+"|\S+', line)]
    completed = subprocess.run(
        [sys.executable, "-m", "actors", *words, *ONE_PROCESS_EACH],
        capture_output=True, text=True, check=False, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    lines = [json.loads(text) for text in (tmp_path / "outputs/dry/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in lines] == [1, 2, 3]
    functions = re.findall(r"rewards\.py:(\w+)", found.block("run.yaml"))
    assert all(lines[-1][f"reward/{function}"] is not None for function in functions)


@pytest.mark.long
def test_processes_that_are_started_one_by_one_make_a_run(tmp_path: Path) -> None:
    """The commands of both machines, here on one: they find each other, train to the end, and end by themselves."""
    machines = [block.text for block in page("several-machines").blocks if "--config run.yaml bus.host=" in block.text]
    assert len(machines) == 2
    # machine B first, since the page promises that any order will do; one `wait` for all
    commands = re.sub(r"10\.0\.0\.[56]", "127.0.0.1", "\n".join(reversed(machines)).replace("wait\n", "", 1))
    tree = {
        "output_dir": "out", "model": {"path": "none"}, "environments": [{"type": "reverse_text"}],
        "rollout": {"group_size": 4, "max_tokens": 12}, "packer": {"groups_per_step": 2}, "trainer": {"max_steps": 3},
        "reward": {"functions": [{"path": "characters_in_place"}]}, "inference": {"engine": {"type": "fake"}},
        "eval": {"num_prompts": 0}, "bus": {"control": f"tcp://127.0.0.1:{free_port()}"},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    script = commands.replace("actors ", f"{sys.executable} -m actors ")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    completed = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert json.loads((tmp_path / "out/summary.json").read_text())["steps"] == 3
