"""The script on docs/howto/trl.md is a run here, with another import line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors import load_run
from tests.howto.pages import page

THEIRS, OURS = "from trl import GRPOConfig, GRPOTrainer", "from actors import GRPOConfig, GRPOTrainer"


@pytest.mark.slow
def test_the_script_of_the_page_runs_with_another_import_line(tmp_path: Path) -> None:
    """On the quickstart's architecture with random weights; the adapter is saved."""
    pytest.importorskip("datasets")
    import torch

    from examples.quickstart.model import make_model, make_tokenizer

    torch.manual_seed(0)
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    script = page("trl").block("reverse_grpo.py")
    assert script.count(THEIRS) == 1
    (tmp_path / "reverse_grpo.py").write_text(script.replace(THEIRS, OURS))
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "reverse_grpo.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "outputs/reverse")
    assert run.metrics.column("step") == [1, 2, 3]
    assert {"reward/in_place", "reward/length"} <= next(iter(run.metrics)).keys()
    assert (run.checkpoints[3] / "adapter_model.safetensors").is_file()
