"""Rules that span sections: what the trainer is given must fit what it is asked for."""

from pathlib import Path
from typing import Any

import pytest

from schemas.config import check_tree, load_config
from schemas.errors import ConfigError

TEACHER = {"path": "some/teacher"}
SFT = {"path": "a.jsonl", "batch_size": 3, "mu_peak": 0.5, "mu_valley": 0.1, "mu_warmup_steps": 0, "mu_decay_steps": 0}


def problems(
    reward: dict[str, Any] | None = None,
    packer: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **trainer: Any,
) -> list[str]:
    """Those of a run with 2 groups of 3 completions per step."""
    tree = {
        "model": {"path": "some/model"},
        "environments": [{"type": "reverse_text"} | (environment or {})],
        "rollout": {"group_size": 3},
        "packer": {"groups_per_step": 2} | (packer or {}),
        "reward": {"functions": [{"path": "characters_in_place"}]} | (reward or {}),
        "trainer": {"max_steps": 10} | trainer,
    }
    try:
        check_tree(tree)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        ({"num_minibatches": 6, "num_iterations": 9}, None),
        ({"num_minibatches": 7}, "trainer.num_minibatches: 7, but a step has 6 completions, packer.groups_per_"),
        ({"num_minibatches": 3, "sft": SFT}, None),
        ({"num_minibatches": 4, "sft": SFT}, "trainer.sft.batch_size: 3 examples can't be shared out to trainer.num_"),
        ({"loss": {"type": "surogate", "teacher_tau": 0.5}, "teacher": TEACHER}, None),
        ({"loss": {"type": "surogate", "teacher_tau": 0.5}}, "trainer.loss.teacher_tau: 0.5 needs a teacher; set"),
        ({"loss": {"type": "ref_kl"}}, "trainer.loss: ref_kl needs a teacher; set trainer.teacher.path"),
        ({"loss": {"type": "ref_kl"}, "teacher": TEACHER}, None),
        ({"teacher": TEACHER}, "trainer.teacher: trainer.loss dapo does not read it; set "),
        ({"loss": {"type": "grpo"}, "teacher": TEACHER}, "trainer.teacher: trainer.loss grpo does not read it"),
        ({"loss": {"type": "custom", "path": "mine.py:loss"}, "teacher": TEACHER}, None),
        ({"distillation": {"type": "joint"}, "teacher": TEACHER}, None),
        ({"distillation": {"type": "sdar"}}, "trainer.distillation: sdar needs a teacher; set trainer.teacher.path"),
    ],
)
def test_rules_of_the_trainer(trainer: dict[str, Any], problem: str | None) -> None:
    """A problem names both keys, and there is one of it."""
    found = problems(**trainer)
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


@pytest.mark.parametrize(("lease", "interval", "good"), [(3.0, 1.0, True), (2.0, 1.0, True), (1.9, 1.0, False)])
def test_a_lease_outlasts_a_lost_beat(tmp_path: Path, lease: float, interval: float, good: bool) -> None:
    """With a lease below two heartbeats every peer would die between two of them, or with the first lost one."""
    (tmp_path / "run.yaml").write_text(
        "model: {path: some/model}\nenvironments: [{type: reverse_text}]\ntrainer: {max_steps: 1}\n"
        "reward: {functions: [{path: characters_in_place}]}\n"
        f"bus: {{lease: {lease}, beat_interval: {interval}}}\n"
    )
    if good:
        assert load_config(tmp_path / "run.yaml").bus.lease == lease
        return
    with pytest.raises(ConfigError, match=r"bus.lease: 1.9 s .* bus.beat_interval 1 s"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("reward", "trainer", "problem"),
    [
        ({}, {"reference": {"beta": 0.1}}, None),
        ({"adv_norm": {}}, {}, "packer.filter_zero_advantages: reward.adv_norm leaves no advantage at 0"),
        ({}, {"loss": {"type": "ref_kl"}, "teacher": TEACHER}, "packer.filter_zero_advantages: trainer.loss ref_kl"),
        (
            {},
            {"loss": {"type": "dppo", "teacher_tau": 0.5}, "teacher": TEACHER},
            "packer.filter_zero_advantages: drops tokens that trainer.loss.teacher_tau 0.5 is for",
        ),
        (
            {},
            {"distillation": {"type": "joint"}, "teacher": TEACHER},
            "packer.filter_zero_advantages: drops tokens that trainer.distillation is for",
        ),
        (
            {},
            {"reference": {"beta": 0.1, "place": "reward"}},
            "packer.filter_zero_advantages: trainer.reference.place reward changes advantages after",
        ),
    ],
)
def test_zero_advantages_are_filtered_only_where_they_teach_nothing(
    reward: dict[str, Any], trainer: dict[str, Any], problem: str | None
) -> None:
    """A teacher, a KL in the reward or a norm gives such a token something to learn."""
    found = problems(reward, {"filter_zero_advantages": True}, **trainer)
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ({"advantage": {"type": "rloo"}}, None),
        ({"advantage": {"type": "norm"}}, None),
        (
            {"advantage": {"type": "gae"}},
            "trainer.reference.place: group_reward makes advantages of rewards alone; ",
        ),
        ({"advantage": {"type": "mean"}, "mask_no_eos_with_zero": True}, "reward.mask_no_eos_with_zero: not with trai"),
        ({"advantage": {"type": "mean"}, "adv_norm": {}}, None),
    ],
)
def test_a_kl_in_the_rewards_needs_advantages_that_the_trainer_can_make(
    reward: dict[str, Any], problem: str | None
) -> None:
    """It has rewards and groups of the step, but no finish reasons, steps or functions of the user."""
    found = problems(reward, reference={"beta": 0.1, "place": "group_reward"})
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


@pytest.mark.parametrize(
    ("packer", "key"),
    [
        ({"max_async_level": 1}, None),
        ({"max_async_level": 2}, "weights.keep"),
        ({"order": "arrival", "oversampling_factor": 1.5}, "packer.strict_async_level"),
    ],
)
def test_a_strict_level_needs_its_versions_and_groups_in_their_steps(packer: dict[str, Any], key: str | None) -> None:
    """Three versions are kept, which is enough for level 1."""
    found = problems({}, {"strict_async_level": True} | packer)
    assert [one.partition(":")[0] for one in found] == ([key] if key else [])


@pytest.mark.parametrize(
    ("teacher", "temperature", "found"),
    [
        ({"path": "big"}, 1.0, 0),
        (None, 1.0, 1),
        ({"path": "big"}, 0.7, 1),
    ],
)
def test_a_served_teacher_has_a_name_and_temperature_1(teacher: Any, temperature: float, found: int) -> None:
    """The server's logprobs are of temperature 1; the name tells the tokenizer."""
    tree = {"model": {"path": "m"}, "environments": [{"type": "reverse_text"}], "rollout": {"temperature": temperature}}
    tree |= {"reward": {"functions": [{"path": "characters_in_place"}]}}
    loss = {"type": "ref_kl"} if teacher else {"type": "dapo"}
    trainer = {"max_steps": 1, "loss": loss, "teacher": teacher, "teacher_server": {"url": "http://h:1"}}
    try:
        check_tree(tree | {"trainer": trainer})
        problems_found = []
    except ConfigError as error:
        problems_found = error.problems
    assert [one.partition(":")[0] for one in problems_found] == ["trainer.teacher_server"] * found


@pytest.mark.parametrize("dtype", ["float16", "fp16", "half"])
def test_float16_is_refused_with_what_to_write(dtype: str) -> None:
    """As in TRL's and ms-swift's fp16, which users bring along."""
    tree = {"model": {"path": "m", "dtype": dtype}, "environments": [{"type": "reverse_text"}]}
    tree |= {"reward": {"functions": [{"path": "characters_in_place"}]}, "trainer": {"max_steps": 1}}
    with pytest.raises(ConfigError, match=f"model.dtype: {dtype} is not supported: .* write bfloat16"):
        check_tree(tree)


def test_a_reference_that_moves_needs_weights_of_its_own() -> None:
    """Under LoRA the reference is the frozen base model."""
    tree = {"model": {"path": "m", "lora": {}}, "environments": [{"type": "reverse_text"}]}
    tree |= {"reward": {"functions": [{"path": "characters_in_place"}]}}
    tree |= {"trainer": {"max_steps": 1, "reference": {"beta": 0.1, "sync": {}}}}
    with pytest.raises(ConfigError) as refused:
        check_tree(tree)
    assert [one.partition(":")[0] for one in refused.value.problems] == ["trainer.reference.sync"]
    tree["model"] = {"path": "m"}
    assert check_tree(tree).trainer.reference


@pytest.mark.parametrize(
    ("environment", "packer", "trainer", "problem"),
    [
        ({"rl_weight": 0.5}, {}, {}, None),
        ({"rl_weight": 0.0, "ref_kl_weight": 1.0}, {}, {"teacher": TEACHER}, None),
        (
            {"ref_kl_weight": 1.0},
            {},
            {},
            "environments[].ref_kl_weight: that of reverse_text needs a teacher; set",
        ),
        ({"rl_weight": 0.0}, {}, {}, "environments[].rl_weight: with 0 for all of them, and no ref_kl_weight, nothing"),
        (
            {"rl_weight": 0.5},
            {},
            {"loss": {"type": "custom", "path": "mine.py:loss"}},
            "environments[].rl_weight: reverse_text has weights, which do nothing with trainer.loss custom",
        ),
        (
            {"ref_kl_weight": 0.5},
            {"filter_zero_advantages": True},
            {"teacher": TEACHER},
            "packer.filter_zero_advantages: drops tokens that environments[].ref_kl_weight is for",
        ),
    ],
)
def test_weights_of_an_environments_losses_fit_the_rest(
    environment: dict[str, Any], packer: dict[str, Any], trainer: dict[str, Any], problem: str | None
) -> None:
    """Distillation needs a teacher, and something must be trained."""
    found = problems(packer=packer, environment=environment, **trainer)
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


def test_mask_no_eos_with_zero_needs_a_reward_at_the_end() -> None:
    """Process supervision has rewards of steps."""
    reward = {"mask_no_eos_with_zero": True, "advantage": {"type": "process"}, "steps": {"path": "mine.py:steps"}}
    (problem,) = problems(reward)
    assert problem.startswith("reward: mask_no_eos_with_zero: advantage process has no reward at the end")


def test_paths_of_the_trainer_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    """A teacher's folder and a file of examples; a teacher's name on the hub stays."""
    (tmp_path / "teacher").mkdir()
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "run.yaml").write_text(
        "model: {path: some/model}\nenvironments: [{type: reverse_text}]\n"
        "reward: {functions: [{path: characters_in_place}]}\n"
        "trainer: {max_steps: 1, loss: {type: ref_kl}, teacher: {path: teacher}, sft: {path: a.jsonl, batch_size: 1, "
        "mu_peak: 1.0, mu_valley: 1.0, mu_warmup_steps: 0, mu_decay_steps: 0}}\n"
    )
    trainer = load_config(tmp_path / "run.yaml").trainer
    assert trainer.teacher is not None
    assert trainer.sft is not None
    assert (trainer.teacher.path, trainer.sft.path) == (str(tmp_path / "teacher"), str(tmp_path / "a.jsonl"))
    named = load_config(tmp_path / "run.yaml", ["trainer.teacher.path=some/teacher"]).trainer.teacher
    assert named is not None
    assert named.path == "some/teacher"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"scale": {"reward": {"min": 3, "max": 2}}}, "max: 2 is below min 3"),
        ({"scale": {"reward": {"max": 2, "max_cost": 1.0}}}, "max_cost: needs price"),
        (
            {"scale": {"reward": {"min": 2, "max": 4, "price": 1.0, "max_cost": 1.9}}},
            "pays for 1 processes at price 1, and min is 2",
        ),
        (
            {"inference": {"engine": {"type": "vllm", "urls": ["http://a:1"]}}, "scale": {"inference": {"max": 2}}},
            "scale.inference: inference.engine.urls has one actor for each server",
        ),
        ({"up": {"reward": 0}, "scale": {"reward": {"max": 2}}}, "scale.reward: with up.reward 0"),
    ],
)
def test_numbers_that_can_not_follow_the_load_are_refused(sections: dict[str, Any], problem: str) -> None:
    """By the key to change."""
    with pytest.raises(ConfigError) as caught:
        check_tree(_scaled(**sections))
    assert any(problem in one for one in caught.value.problems)


def test_a_price_limits_the_largest_number_and_up_stays_within_the_limits() -> None:
    """0.3 for an hour at 0.1 each pays for 3; `up.rollout` 1 is raised to the minimum of 2."""
    config = check_tree(
        _scaled(scale={"reward": {"max": 8, "price": 0.1, "max_cost": 0.3}, "rollout": {"min": 2, "max": 4}})
    )
    assert config.scale.roles["reward"].most == 3
    assert config.processes == {"inference": 1, "reward": 1, "rollout": 2}


def _scaled(**sections: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "model": {"path": "some/model"},
        "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": {"max_steps": 10},
    }
    return tree | sections
