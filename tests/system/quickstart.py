"""The quickstart in few steps, for tests that run it on machines, real or made up."""

import importlib.util
from pathlib import Path
from typing import Any

import yaml

from tests.processes import running

ROOT = Path(__file__).parents[2]
MAX_STEPS = 24


def quickstart(folder: Path, **sections: Any) -> Path:
    """The quickstart in few steps, with its model as it is before the warm-up; `sections` replace its own."""
    import torch

    spec = importlib.util.spec_from_file_location("quickstart_model", ROOT / "examples/quickstart/model.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    # the same weights each time
    torch.manual_seed(0)
    maker.make_model().save_pretrained(folder / "model")
    maker.make_tokenizer().save_pretrained(folder / "model")
    tree: dict[str, Any] = yaml.safe_load((ROOT / "examples/quickstart/run.yaml").read_text())
    tree |= {"output_dir": str(folder / "out"), **sections}
    tree["model"]["path"] = str(folder / "model")
    tree["trainer"] |= {"max_steps": MAX_STEPS, "checkpoint": {"interval": 10}}
    tree["eval"] = {"num_prompts": 20}
    tree["telemetry"] = {"sample_groups_per_step": 8}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def pid_of_node(rank: int, path: Path) -> int:
    """Pid of `actors node` for a run.yaml; 0 if there is none."""
    start = ["node", "--rank", str(rank), "--nodes"]
    for process in running():
        words = list(process.command)
        if "actors" in words and words[words.index("actors") + 1 :][:4] == start and str(path) in words:
            return process.pid
    return 0
