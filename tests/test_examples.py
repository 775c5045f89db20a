"""What README.md, docs/reference/rewards.md and the examples promise is executed here."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.ops.trace.window import index_of, steps_of
from actors.ops.up.run_lock import hold_run_lock
from schemas.config import load_config, warnings
from tests.docs.pages import page

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path for path in (ROOT / "examples").rglob("*.yaml"))


def _actors(*arguments: object, timeout: float = 280) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "actors", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_configuration_is_good(path: Path) -> None:
    """Offline, without the model and without warnings."""
    assert warnings(load_config(path)) == []


@pytest.mark.slow
def test_actors_check_accepts_gsm8k_offline_and_names_the_data_that_is_still_to_come(tmp_path: Path) -> None:
    """The model is a name on the hub and not asked for; the files that the reader puts beside the example are named."""
    folder = shutil.copytree(ROOT / "examples/gsm8k", tmp_path / "gsm8k")
    completed = _actors("check", folder / "run.yaml")
    assert completed.returncode == 0
    assert completed.stderr.splitlines() == [
        f"warning: environments[].{key}: {folder / name} is not here; `actors up` needs it"
        for key, name in (("path", "train.jsonl"), ("eval_path", "test.jsonl"))
    ]
    completed = _actors("up", folder / "run.yaml")
    assert completed.returncode == 2
    assert f"environments[].path: there is no file {folder / 'train.jsonl'}" in completed.stderr
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text(8 * (json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n"))
    completed = _actors("check", folder / "run.yaml")
    assert (completed.returncode, completed.stderr) == (0, "")


@pytest.mark.slow
def test_your_own_reward_in_ten_lines_works_as_written(tmp_path: Path) -> None:
    """The functions and the YAML of docs/reference/rewards.md, in a run of two steps with the fake engine."""
    guide = page("docs/reference/rewards.md")
    code, rewards = guide.code("python")[0], yaml.safe_load(guide.code("yaml")[0])
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_rewards.py").write_text(code)
    config = {
        "output_dir": str(tmp_path / "out"), "model": {"path": "none"}, "environments": [{"type": "reverse_text"}],
        "rollout": {"group_size": 4, "max_tokens": 12}, "packer": {"groups_per_step": 2}, "trainer": {"max_steps": 2},
        "inference": {"engine": {"type": "fake"}}, "eval": {"num_prompts": 2}, **rewards,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    completed = _actors("up", tmp_path / "run.yaml")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    line = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= line["reward/vowels"] <= 1
    assert 0 <= line["reward/short"] <= 1
    assert line["reward_mean"] == pytest.approx(line["reward/vowels"] + 0.5 * line["reward/short"], abs=1e-6)


@pytest.mark.slow
def test_the_run_of_the_readme_works_as_written(tmp_path: Path) -> None:
    """README.md: its data, its reward and its configuration, with another model and two steps of the fake engine."""
    readme, row = page("README.md"), json.dumps({"prompt": "Name a fruit.", "answer": "a"})
    assert row.replace('"a"', '"apple"') in readme.text
    for block in readme.blocks:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    (tmp_path / "questions.jsonl").write_text(8 * f"{row}\n")
    output = tmp_path / "out"
    completed = _actors(
        "up", tmp_path / "run.yaml", f"output_dir={output}", "model.path=none", "inference.engine.type=fake",
        "trainer.max_steps=2", "rollout.max_tokens=12",
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout + completed.stderr
    line = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < line["reward/contains_answer"] < 1


def test_the_file_map_of_the_architecture_names_what_is_there() -> None:
    """Every path that the map lists exists."""
    text = (ROOT / "docs/internals/architecture.md").read_text()
    mapped = [name for block in re.findall(r"```text\n(schemas/.*?)```", text, re.DOTALL) for name in _names(block)]
    assert len(mapped) > 20
    assert [name for name in mapped if not (ROOT / name).exists()] == []


def _names(block: str) -> list[str]:
    """Paths of the tree: a line without indentation is a folder, the lines below it are in it."""
    found, folder = [], ""
    for line in block.splitlines():
        parts = [part for part in line.split("   ")[0].split() if part.endswith(("/", ".py"))]
        if not line.startswith(" "):
            folder = parts[0] if parts else ""
            found += parts
        else:
            found += [folder + part for part in parts]
    return found


def _quickstart(monkeypatch: pytest.MonkeyPatch, *arguments: object, script: str = "quickstart") -> list[str]:
    """The commands that a quickstart gives with these arguments; nothing is trained, the report is left out."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/quickstart"))
    module = importlib.import_module(script)
    given: list[str] = []
    common = importlib.import_module("common")
    monkeypatch.setattr(common, "run", lambda *command: given.append(" ".join(map(str, command))))
    monkeypatch.setattr(module, "report", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
    module.main()
    return given


@pytest.mark.slow
def test_the_quickstart_begins_anew_unless_it_is_told_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With seed 1 after seed 0 nothing of the first is left, and it says so; `--resume` takes the run as it is."""
    output = tmp_path / "out"
    model, up = _quickstart(monkeypatch, "--output", output)
    assert "--seed 0" in model
    assert "seed=0" in up
    assert capsys.readouterr().out.startswith("model made")
    (output / "summary.json").write_text("{}")
    (output / "checkpoints" / "step_9").mkdir(parents=True)
    (output / "ledger.sqlite-wal").touch()
    (output / "notes.txt").write_text("mine")
    (output / "report.html").touch()
    (output / "report-pictures").mkdir()
    (up,) = _quickstart(monkeypatch, "--output", output, "--resume", "trainer.max_steps=9")
    assert up.endswith(f"up {output}/config.resolved.yaml trainer.max_steps=9")
    assert (output / "summary.json").exists()
    model, up = _quickstart(monkeypatch, "--output", output, "--seed", 1)
    assert "--seed 1" in model
    assert "seed=1" in up
    assert f"beginning anew; the earlier quickstart in {output} has been removed" in capsys.readouterr().out
    assert {path.name for path in output.iterdir() if not path.name.startswith(".")} == {"notes.txt"}
    assert (output / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_the_quickstart_removes_nothing_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 in a directory with other files, and in that of a quickstart that is running."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit, match="2"):
        _quickstart(monkeypatch, "--output", tmp_path)
    assert "is not empty, and not a quickstart's" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
    _quickstart(monkeypatch, "--output", tmp_path / "out")
    (tmp_path / "out" / "metrics.jsonl").touch()
    with hold_run_lock(tmp_path / "out"), pytest.raises(SystemExit, match="2"):
        _quickstart(monkeypatch, "--output", tmp_path / "out")
    assert "a run is going on here" in capsys.readouterr().err
    assert (tmp_path / "out" / "metrics.jsonl").exists()


def run_quickstart(command: list[Any]) -> subprocess.CompletedProcess[str]:
    """With one thread for the warm-up: tests share the cores, and threads that wait for each other spin."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=1200, env=environment
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("quickstart")
def test_the_quickstart_learns(tmp_path: Path) -> None:
    """Sixty of its steps: the sampled reward rises well above where it began, nothing is lost, the page is written."""
    command = [sys.executable, ROOT / "examples/quickstart/quickstart.py", "--output", tmp_path, "trainer.max_steps=60",
               "eval.num_prompts=40", "eval.every_steps=30"]  # fmt: skip
    completed = run_quickstart(command)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_first"] < 0.55
    assert summary["reward_last"] > summary["reward_first"] + 0.15
    assert summary["lag_max"] <= 1
    assert summary["ledger"] | {"copies_dropped": 0} == {
        "issued": 480, "trained": 480, "in_flight": 0, "dropped": {}, "copies_dropped": 0, "reissued": 0,
        "trained_twice": 0,
    }  # fmt: skip
    evals = [json.loads(line)["version"] for line in (tmp_path / "evals.jsonl").read_text().splitlines()]
    assert evals == [0, 30, 60]
    assert f"{tmp_path / 'report.html'} shows curves" in completed.stdout
    assert "<h2>Completions, best</h2>" in (tmp_path / "report.html").read_text()
    pictures = {path.name for path in (tmp_path / "report-pictures").iterdir()}
    assert {"reward_mean.png", "lag_max.png", "entropy.png", "eval-1-reverse_text.png"} <= pictures
    assert (tmp_path / "report-pictures" / "reward_mean.png").stat().st_size > 10_000
    assert "trained twice 0" in completed.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("quickstart")
def test_level_0_has_no_lag_and_trainer_and_engine_agree(tmp_path: Path) -> None:
    """max_async_level 0: every token is sampled by the weights that the step starts from, to 1e-4 nats in fp32."""
    command = [sys.executable, ROOT / "examples/quickstart/quickstart.py", "--output", tmp_path, "trainer.max_steps=10",
               "eval.num_prompts=0", "packer.max_async_level=0"]  # fmt: skip
    completed = run_quickstart(command)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["lag_max"] for line in lines] == [0.0] * 10, completed.stderr
    assert max(line["mismatch_max"] for line in lines) <= 1e-4


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("quickstart")
def test_the_quickstart_in_turns_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Twenty of its steps, as `make quickstart-colocate` runs them: trainer and engine are never at work at once."""
    command = [sys.executable, ROOT / "examples/quickstart/quickstart.py", "--output", tmp_path, "up.colocate=turns",
               "trainer.max_steps=20", "eval.num_prompts=4"]  # fmt: skip
    completed = run_quickstart(command)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    ledger = json.loads((tmp_path / "summary.json").read_text())["ledger"]
    assert (ledger["trained"], ledger["dropped"]) == (160, {})
    recorded, _ = steps_of(index_of(tmp_path), 1, 20)
    steps, rounds = (
        [span for span in recorded.spans if span.actor == actor and span.name in names]
        for actor, names in (("trainer-0", {"step"}), ("inference-0", {"prefill", "decode", "prefill again"}))
    )
    assert min(len(steps), len(rounds)) >= 20
    assert [(s, r) for s in steps for r in rounds if s.start < r.end and r.start < s.end] == []


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("quickstart")
def test_the_lora_quickstart_trains_adapters_that_load_with_peft(tmp_path: Path) -> None:
    """Five of its steps: engines take adapters, and the checkpoint is a PEFT adapter and no whole model."""
    config = ROOT / "examples/quickstart/lora.yaml"
    command = [sys.executable, ROOT / "examples/quickstart/quickstart.py", "--config", config, "--output", tmp_path,
               "trainer.max_steps=5", "eval.num_prompts=4"]  # fmt: skip
    completed = run_quickstart(command)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["ledger"]["trained"] == 40
    files = {path.name for path in (tmp_path / "checkpoints/step_5").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
