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


REWARDS = """
import json, sys
import numpy as np
from actors.ops.preflight import preflight
from actors.reward.functions import load_rewards
from schemas.config import check_tree
from schemas.messages import RolloutGroup, single_turn
from trl import rewards

for case in json.load(sys.stdin):
    function = {"path": "trl.rewards:" + case["name"], "kwargs": case["kwargs"]}
    config = check_tree({
        "model": {"path": "some/model"}, "environments": [{"type": "jsonl", "path": case["rows"], "chat": True}],
        "reward": {"functions": [function]}, "trainer": {"max_steps": 1}, "eval": {"num_prompts": 0},
    })
    preflight(config, starts=False)
    texts = case["texts"]
    lengths = [len(text) for text in texts]
    ends = np.cumsum([0, *lengths])
    tokens = np.array([ord(sign) for text in texts for sign in text], np.int32)
    group = RolloutGroup(
        run="r", sender="rollout-0", ordinal=0, attempt=1, purpose="train", environment="e", example_key="k",
        prompt=[{"role": "user", "content": "q"}], columns={"solution": case["solution"]}, completions=texts,
        stop_conditions=["stop"] * len(texts), token_ids=tokens, loss_mask=np.ones(len(tokens), np.uint8),
        logprobs=np.full(len(tokens), -1, np.float32),
        **single_turn(np.array([1], np.int32), ends, np.array([[number, 0, 0] for number in range(len(texts))])),
        segment_temperatures=np.ones(len(texts), np.float32),
    )
    [reward] = load_rewards(config.reward.functions)
    found = reward.check(reward.function(**reward.arguments(group)), group)
    made = getattr(rewards, case["name"])
    made = made(**case["kwargs"]) if case["name"].startswith("get_") else made
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    expected = made(
        prompts=[group.prompt] * len(texts), completions=chats, solution=[case["solution"]] * len(texts),
        completion_ids=[[ord(sign) for sign in text] for text in texts],
    )
    nan = [None if value != value else value for value in np.asarray(found, float).tolist()]
    assert nan == expected, (case["name"], nan, expected)
    print(case["name"], len(set(expected)), flush=True)
"""
THINKING = ["<think>a</think> $\\boxed{4}$", "<think>a $\\boxed{4}$", "$5$", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"]
COSINE = {
    "max_len": 40, "min_value_wrong": -1.0, "max_value_wrong": -0.5, "min_value_correct": 0.5, "max_value_correct": 1.0,
}  # fmt: skip
NAMED: dict[str, dict[str, float]] = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {},
    "think_format_reward": {},
    "get_cosine_scaled_reward": COSINE,
    "get_repetition_penalty_reward": {"ngram_size": 2},
    "get_soft_overlong_punishment": {"max_completion_len": 30, "soft_punish_cache": 20},
}


def test_all_rewards_of_trl_work_by_their_path(tmp_path: Path) -> None:
    """With the values of a call by TRL's trainer; each tells some of the completions apart."""
    trl_python = _python()
    names = subprocess.run(
        [trl_python, "-c", "import trl.rewards as r; print(*(n for n in dir(r) if 'reward' in n or 'get_' in n))"],
        capture_output=True, text=True, timeout=600, check=True,
    ).stdout.split()  # fmt: skip
    # dir() has the modules of the functions too
    assert {name for name in names if not name.endswith("_rewards")} == NAMED.keys()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "q", "solution": "$4$"}) + "\n")
    cases = [{"name": name, "kwargs": kwargs, "texts": THINKING, "solution": "$4$", "rows": str(rows)}
             for name, kwargs in NAMED.items()]  # fmt: skip
    # a solution that is no formula gives None
    cases.append({"name": "accuracy_reward", "kwargs": {}, "texts": THINKING, "solution": "", "rows": str(rows)})
    done = subprocess.run(
        [trl_python, "-c", REWARDS], input=json.dumps(cases), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in found] == [case["name"] for case in cases]
    assert all(int(values) > 1 for _, values in found[:-1])


WRONG_KWARGS = """
from actors.reward.functions import load_rewards
from schemas.config.data import RewardFunctionConfig
from schemas.errors import ConfigError

for kwargs in ({}, {"max_completion_len": 3, "soft_punish": 1}):
    try:
        load_rewards([RewardFunctionConfig(path="trl.rewards:get_soft_overlong_punishment", kwargs=kwargs)])
    except ConfigError as error:
        print(*error.problems)
"""


def test_arguments_that_trl_refuses_are_named_with_those_that_it_takes() -> None:
    """Before the first group."""
    done = subprocess.run(
        [_python(), "-c", WRONG_KWARGS], capture_output=True, text=True, timeout=600, check=True
    )  # fmt: skip
    lines = done.stdout.splitlines()
    at = "reward.functions.0.path: trl.rewards:get_soft_overlong_punishment refuses the kwargs"
    assert [line.startswith(f"{at} {words}: ") for line, words in
            zip(lines, ("(none)", "max_completion_len, soft_punish"), strict=True)] == [True, True]  # fmt: skip
    assert all(line.endswith("it takes max_completion_len, soft_punish_cache") for line in lines)
