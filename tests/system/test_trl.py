"""TRL itself: a script of its own with another import line, and its own configuration object."""

import json
import subprocess
from contextlib import chdir
from pathlib import Path

import pytest

from benchmarks.trl_losses import CASES, GENERATIONS, HELD, TOLERANCE, Case, compared, make_model
from tests.system.tools import missing

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

PYTHON = Path(__file__).parents[2] / ".venv-trl/bin/python"
CONFIGURATIONS = """
import json, sys
from pathlib import Path
from actors import GRPOConfig
from actors.api.translation import Program, translated
from trl import GRPOConfig as Theirs

def tree(arguments):
    program = Program("model", ["mine:f", "mine:g"], arguments, Path("rows.jsonl"), 1000, Path("eval.jsonl"))
    return translated(program)[0]

for given in json.load(sys.stdin):
    given = dict(output_dir="out", bf16=False, use_cpu=True, report_to="none") | given
    ours, theirs = tree(GRPOConfig(**given)), tree(GRPOConfig.of(Theirs(**given)))
    assert ours == theirs, (given, ours, theirs)
    print(len(given), flush=True)
"""
GIVEN = [
    {},
    {"gradient_accumulation_steps": 4, "max_steps": 20, "run_name": "mine"},
    {"gradient_accumulation_steps": 4, "steps_per_generation": 8, "num_generations": 4, "num_train_epochs": 2},
    {"generation_batch_size": 64, "num_iterations": 2, "save_strategy": "no"},
    {"loss_type": "grpo", "beta": 0.04, "scale_rewards": False, "epsilon_high": 0.28, "reward_weights": [1.0, 0.5]},
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-7}, "warmup_steps": 0.1},
    {"eval_strategy": "steps", "eval_steps": 10, "save_steps": 0.5, "optim": "adamw_torch", "adam_beta2": 0.95},
    {"model_init_kwargs": {"dtype": "bfloat16"}, "generation_kwargs": {"top_k": 5}, "mask_truncated_completions": True},
    {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_truncate"},
]


def _python() -> Path:
    if not PYTHON.is_file():
        missing("make system-deps brings TRL")
    return PYTHON


@pytest.mark.parametrize(
    "case",
    [
        CASES[0],
        Case(2, 4, {"loss_type": "dapo", "beta": 0.04, "num_iterations": 2, "steps_per_generation": 2}),
        Case(4, 8, {"loss_type": "bnpo", "num_iterations": 2, "entropy_coef": 0.01}, has_adapter=False),
    ],
    ids=lambda case: case.name,
)
def test_a_script_of_trl_trains_as_in_trl(tmp_path: Path, case: Case) -> None:
    """On the same completions: rewards, losses, the gradients of the first update, learning rates."""
    trl_python = _python()
    make_model(tmp_path / "model")
    with chdir(tmp_path):
        found = compared(tmp_path, case, trl_python)
    assert {name: value for name, value in found.items() if name in HELD and value > TOLERANCE} == {}
    # AdamW divides rounding errors by the gradient where that is close to zero
    assert found["weights"] < 0.02
    assert len(json.loads((tmp_path / "generations.json").read_text())) == GENERATIONS


def test_a_configuration_object_of_trl_is_read_as_what_was_given() -> None:
    """Values that TRL has computed are not taken for given ones, and given ones are not lost."""
    done = subprocess.run(
        [_python(), "-c", CONFIGURATIONS],
        input=json.dumps(GIVEN),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == len(GIVEN)
