"""deploy/Containerfile. No image is built here, for want of an engine and of its base: what it copies is installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.tools import tool

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy/Containerfile"


@pytest.mark.system
def test_hadolint_has_nothing_to_say_against_the_containerfile() -> None:
    """Every rule but the two that a line there takes exception to."""
    hadolint = tool("hadolint", "pip install -r tests/system/requirements.txt")
    completed = subprocess.run([hadolint, CONTAINERFILE], capture_output=True, text=True, check=False, timeout=60)
    assert (completed.returncode, completed.stdout + completed.stderr) == (0, "")


@pytest.mark.system
def test_hadolint_would_notice_a_base_without_a_tag(tmp_path: Path) -> None:
    """The test above can fail."""
    hadolint = tool("hadolint", "pip install -r tests/system/requirements.txt")
    path = tmp_path / "Containerfile"
    path.write_text(re.sub(r"python:\$\{PYTHON\}", "python", CONTAINERFILE.read_text()))
    completed = subprocess.run([hadolint, path], capture_output=True, text=True, check=False, timeout=60)
    assert "DL3006" in completed.stdout


def _copied() -> list[str]:
    """What comes from the repository."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", CONTAINERFILE.read_text(), re.MULTILINE)
    return [name for line in lines for name in line.split()[:-1]]


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    """.containerignore lets in the names that COPY lines say; secrets and outputs beside them stay out."""
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(_copied())
    assert all((ROOT / name).exists() for name in _copied())


def test_the_image_runs_as_nobody_in_particular() -> None:
    """By number, which Kubernetes can check; the actor is process 1 and hears SIGTERM itself."""
    last = CONTAINERFILE.read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001:10001$", last, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["actors"\]$', last, re.MULTILINE)


@pytest.mark.system
@pytest.mark.slow
def test_what_is_copied_is_enough_to_install(tmp_path: Path) -> None:
    """Built from a folder with those files alone, with what pip brings for that, and found there by the command."""
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    subprocess.run(["cp", "-r", *_copied(), source], cwd=ROOT, check=True, timeout=60)
    flags = ["--no-deps", "--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", *flags, "--target", target, source]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=170)
    assert installed.returncode == 0, installed.stderr
    python = [sys.executable, "-c", "import actors.cli; print(actors.cli.__file__); actors.cli.main(['schema'])"]
    completed = subprocess.run(
        python, capture_output=True, text=True, check=True, cwd=tmp_path, env={"PYTHONPATH": str(target)}, timeout=60
    )
    assert completed.stdout.startswith(str(target))
    assert (target / "bin/actors").exists()
