"""User functions of rewards are found by path, and errors name the key of the path."""

import sys
from pathlib import Path
from typing import Any

import pytest

from actors.reward.functions import load_advantage, load_rewards, load_steps
from actors.reward.lookup import load_function
from schemas.config.advantages import CustomAdvantageConfig
from schemas.config.data import RewardFunctionConfig, StepRewardConfig
from schemas.errors import ConfigError


def test_functions_for_steps_and_advantages_are_loaded_with_their_key(tmp_path: Path) -> None:
    """Like reward functions, and their kwargs may not take the name of an argument."""
    (tmp_path / "steps_mine.py").write_text("def f(prompts, completions, completion_ids): return [[(1, 7.0)]]\n")
    path = f"{tmp_path}/steps_mine.py:f"
    assert load_steps(StepRewardConfig(path=path)).function([], [], []) == [[(1, 7.0)]]
    assert load_advantage(CustomAdvantageConfig(path=path)).name == "f"
    with pytest.raises(ConfigError, match=r"reward.steps.path: .* has no function 'g'"):
        load_steps(StepRewardConfig(path=path.replace(":f", ":g")))
    with pytest.raises(ConfigError, match=r"reward.advantage.path: .* has no function 'g'"):
        load_advantage(CustomAdvantageConfig(path=path.replace(":f", ":g")))
    with pytest.raises(ConfigError, match=r"reward.steps.kwargs.prompts: is what functions receive"):
        load_steps(StepRewardConfig(path=path, kwargs={"prompts": []}))


@pytest.fixture
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loading adds to sys.path goes with the test, and modules of an earlier one are forgotten."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine", "one_helper", "late_helper"):
        sys.modules.pop(name, None)


def test_functions_load_from_name_module_and_file(tmp_path: Path) -> None:
    """All three spellings of a path."""
    (tmp_path / "mine.py").write_text("def f(prompts, completions): return [7.0]\n")
    assert load_function("exact_match", "k").__name__ == "exact_match"
    assert load_function("actors.reward.builtin:exact_match", "k").__name__ == "exact_match"
    assert load_function(f"{tmp_path}/mine.py:f", "k")([], []) == [7.0]


@pytest.mark.usefixtures("search_path")
@pytest.mark.parametrize("path", ["{folder}/mine.py:f", "mine:f"])
def test_a_function_may_import_what_lies_beside_it(tmp_path: Path, monkeypatch: Any, path: str) -> None:
    """A helper, when it is loaded and when it is called; modules are found from the working directory."""
    (tmp_path / "one_helper.py").write_text("WORTH = 3.0\n")
    (tmp_path / "late_helper.py").write_text("MORE = 4.0\n")
    (tmp_path / "mine.py").write_text(
        "from one_helper import WORTH\n"
        "def f(prompts, completions):\n"
        "    from late_helper import MORE\n"
        "    return [WORTH + MORE]\n"
    )
    if path.startswith("mine"):
        monkeypatch.chdir(tmp_path)
    assert load_function(path.format(folder=tmp_path), "k")([], []) == [7.0]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("exact_mach", "key: no built-in reward 'exact_mach', did you mean 'exact_match'"),
        ("no.such.module:f", "key: can't import no.such.module"),
        ("actors.reward.builtin:nothing", "key: actors.reward.builtin has no function 'nothing'"),
        ("/nowhere/mine.py:f", "key: there is no file /nowhere/mine.py"),
    ],
)
def test_a_function_that_can_not_be_found_is_named_with_its_key(path: str, words: str) -> None:
    """The error says which key, and what is there instead."""
    with pytest.raises(ConfigError, match=words):
        load_function(path, "key")


@pytest.mark.usefixtures("search_path")
@pytest.mark.parametrize(
    ("code", "words"),
    [("import not_installed_anywhere", "ModuleNotFoundError: No module"), ("exit(3)", "SystemExit: 3")],
)
def test_a_file_that_fails_on_import_says_why(tmp_path: Path, code: str, words: str) -> None:
    """The cause is in the words."""
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(ConfigError, match=f"fails on import: {words}"):
        load_function(f"{tmp_path}/bad.py:f", "key")


def test_functions_of_the_same_name_are_told_apart() -> None:
    """So that their columns in metrics and samples do not overwrite each other."""
    configs = [
        RewardFunctionConfig(path="exact_match"),
        RewardFunctionConfig(path="actors.reward.builtin:exact_match"),
    ]
    assert [reward.name for reward in load_rewards(configs)] == ["exact_match_0", "exact_match_1"]


@pytest.mark.parametrize(
    ("path", "here"),
    [
        ("trl.rewards:get_cosine_scaled_reward", "use cosine_scaled"),
        ("trl.rewards:get_soft_overlong_punishment", "use soft_overlong_punishment"),
        ("trl.rewards:get_new_reward", "use a function of your own file"),
    ],
)
def test_a_function_of_trl_that_returns_a_function_is_refused_with_its_counterpart(path: str, here: str) -> None:
    """Where nothing can call it with its arguments; TRL need not be installed for the words."""
    with pytest.raises(ConfigError, match=f"key: {path} returns a function and is none itself; {here}"):
        load_function(path, "key")
    with pytest.raises(ConfigError, match=f"reward.functions.0.path: {path} returns a function"):
        load_rewards([RewardFunctionConfig(path=path, python="same")])
    with pytest.raises(ConfigError, match=f"reward.steps.path: {path} returns a function"):
        load_steps(StepRewardConfig(path=path))
