"""The wheel: what it brings with the code, and a run on a machine without the clone."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.models import build

ROOT = Path(__file__).parent.parent


def test_every_pattern_of_data_files_finds_files_and_all_pages_are_among_them() -> None:
    """Messages and the schema name pages; whoever has installed the wheel finds them under share/grpo-actors."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [pattern for patterns in tools["data-files"].values() for pattern in patterns]
    found = {pattern: sorted(ROOT.glob(pattern)) for pattern in patterns}
    assert [pattern for pattern, files in found.items() if not files] == []
    pages = {path for files in found.values() for path in files if path.suffix == ".md"}
    assert {path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts} <= pages
    assert all(file.is_file() for files in found.values() for file in files)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "outputs", "*.egg-info", "tests")
    shutil.copytree(ROOT, source, ignore=ignored)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("grpo_actors-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv/bin/python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # pip of this environment installs into the other; the clone's own editable installation stays out of the path
    target = ["--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    run(sys.executable, "-m", "pip", *target)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv/bin"


def run(*command: object, folder: Path | None = None) -> str:
    """Run a command without the clone in its path; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=folder, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_in_an_empty_folder_starts_and_finishes_a_run(installed: Path, tmp_path: Path) -> None:
    """`actors init`, `actors up`, done; no file of the clone is read."""
    where = run(installed / "python", "-c", "import actors; print(actors.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    build(tmp_path / "model")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    actors = installed / "actors"
    run(actors, "init", "--model", "model", "--data", "sums.jsonl", "--steps", 2, folder=tmp_path)
    small = ["packer.sequence_len=64", "rollout.max_tokens=8", "model.dtype=float32", "environments.0.chat=false"]
    told = run(actors, "up", "run.yaml", "packer.groups_per_step=2", *small, folder=tmp_path)
    assert "done: 2 steps" in told
    ledger = json.loads((tmp_path / "outputs/sums/summary.json").read_text())["ledger"]
    assert (ledger["trained"], ledger["trained_twice"]) == (4, 0)


@pytest.mark.slow
def test_a_wheel_brings_examples_dashboards_and_the_schema(installed: Path, tmp_path: Path) -> None:
    """As files of the environment, not of the clone."""
    run(installed / "actors", "init", "--example", "quickstart", folder=tmp_path)
    assert (tmp_path / "quickstart.py").is_file()
    shared = installed.parent / "share/grpo-actors"
    assert list(shared.glob("grafana/*.json"))
    assert list(shared.glob("prometheus/rules/*.yml"))
    assert json.loads(run(installed / "actors", "schema", folder=tmp_path))["title"] == "RunConfig"
