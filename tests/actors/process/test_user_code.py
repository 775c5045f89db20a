"""Where functions of the user's are found."""

import sys
from importlib.util import find_spec

import pytest

from actors.ops.preflight import preflight
from actors.process.user_code import MOVED, load_function
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

TAKEN = "this name is taken by a package of grpo-actors, which Python finds instead; rename yours"


@pytest.mark.parametrize("line", ["import schemas", "from schemas import Answer", "from schemas.answers import Answer"])
def test_a_module_that_is_named_like_one_of_our_packages_is_refused_in_words(tmp_path, line):
    """`check` and the reward actor name file, line, the module that was meant, and what to do."""
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "answers.py").write_text("class Answer: ...\n")
    file = tmp_path / "my_rewards.py"
    file.write_text(f"import json\n{line}\n\ndef score(prompts, completions, **columns):\n    return []\n")
    words = f"reward.functions.0.path: {file}, line 2: imports {tmp_path / 'schemas'}, and {TAKEN}"
    with pytest.raises(ConfigError) as error:
        load_function(f"{file}:score", "reward.functions.0.path")
    assert error.value.problems == [words]
    with pytest.raises(ConfigError) as error:
        preflight(ring_config(tmp_path, reward={"functions": [{"path": f"{file}:score"}]}))
    assert error.value.problems == [words]


def test_such_a_module_behind_another_one_of_the_users_is_named_when_the_import_fails(tmp_path):
    """The file imports what imports it: Python's words alone would send the user into our package."""
    (tmp_path / "bus.py").write_text("STOPS = 3\n")
    (tmp_path / "timetable_of_this_test.py").write_text("from bus import STOPS\n")
    file = tmp_path / "my_rewards.py"
    file.write_text("import timetable_of_this_test\n\ndef score(prompts, completions, **columns):\n    return []\n")
    with pytest.raises(ConfigError) as error:
        load_function(f"{file}:score", "reward.functions.0.path")
    (problem,) = error.value.problems
    assert problem.startswith(
        f"reward.functions.0.path: {file} fails on import: ImportError: cannot import name 'STOPS'"
    )
    assert problem.endswith(f"; 'bus' is {tmp_path / 'bus.py'}, and {TAKEN}")


def test_our_packages_may_be_imported_beside_modules_of_those_names(tmp_path):
    """A folder that has the name of ours is no reason to refuse what ours has."""
    (tmp_path / "actors").mkdir()
    file = tmp_path / "my_rewards.py"
    file.write_text("from actors.reward.builtin import exact_match as score\n")
    assert load_function(f"{file}:score", "reward.functions.0.path").__name__ == "exact_match"


def test_a_path_of_an_earlier_build_names_the_function_at_its_present_place():
    """A run keeps the path, which is part of its identity; `actors check` takes it too."""
    assert MOVED["actors.rewards.builtin"] == "actors.reward.builtin"
    found = load_function("actors.rewards.builtin:exact_match", "reward.functions.0.path")
    assert found is load_function("actors.reward.builtin:exact_match", "reward.functions.0.path")
    for place in MOVED.values():
        assert find_spec(place) is not None


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("from actors.rewards.builtin import exact_match", "actors.rewards.builtin is actors.reward.builtin now"),
        ("from actors.engines.openai import ChatClient", "actors.engines.openai is actors.reward.judge now"),
    ],
)
def test_an_import_of_a_module_that_has_moved_is_refused_with_its_present_name(tmp_path, line, hint):
    """The file is the user's to change, so the error says to what."""
    file = tmp_path / "my_rewards.py"
    file.write_text(f"{line}\n\ndef score(prompts, completions, **columns):\n    return []\n")
    with pytest.raises(ConfigError) as error:
        load_function(f"{file}:score", "reward.functions.0.path")
    (problem,) = error.value.problems
    assert problem.endswith(f"; {hint}")


def test_functions_of_one_file_share_one_module_and_the_file_is_run_once(tmp_path):
    """A judge model that a file loads is in memory once, by whatever path, and its functions share state."""
    (tmp_path / "sub").mkdir()
    file = tmp_path / "judge.py"
    file.write_text("calls = []\ndef add():\n    calls.append(1)\ndef count():\n    return len(calls)\n")
    add = load_function(f"{file}:add", "reward.functions.0.path")
    count = load_function(f"{tmp_path / 'sub' / '..' / 'judge.py'}:count", "reward.functions.1.path")
    add()
    assert count() == 1


def test_two_files_of_one_name_are_two_modules(tmp_path):
    """rewards.py here and rewards.py there each keep their own functions."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(f"def f():\n    return {name!r}\n")
    first, second = (load_function(f"{tmp_path / name / 'same.py'}:f", "key") for name in ("a", "b"))
    assert (first(), second()) == ("a", "b")
    assert sys.modules[first.__module__] is not sys.modules[second.__module__]
