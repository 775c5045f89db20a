"""Environments with turns are looked at before anything starts: interpreter, file, folder and chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.environments import pool
from actors.ops.preflight import preflight
from schemas.config import RunConfig, check_tree, warnings
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

WORLD = """
from pathlib import Path
Path(__file__).with_name("was_run").touch()
class Game:
    def reset(self): ...
TOOLS = [Game.reset]
"""


def run_config(folder: Path, *, sections: dict[str, Any] | None = None, **environment: Any) -> RunConfig:
    """A run that is good but for this environment."""
    (folder / "world.py").write_text(WORLD)
    one = {"type": "python", "name": "game", "path": f"{folder}/world.py:Game", "max_turns": 2} | environment
    return check_tree(ring_config(folder).model_dump() | {"environments": [one]} | (sections or {}))


def problems(config: RunConfig) -> list[str]:
    """What a start is refused for."""
    try:
        preflight(config)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("name", ["Game", "TOOLS"])
def test_a_sound_environment_passes_and_nothing_of_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither its file nor a worker, whether the run starts here or is only checked."""

    def refused(*_: object) -> None:
        raise AssertionError("a worker is started")

    monkeypatch.setattr(pool.WorkerPool, "__init__", refused)
    config = run_config(tmp_path, path=f"{tmp_path}/world.py:{name}")
    assert preflight(config) == preflight(config, starts=False) == []
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("{}/none.py:Game", "{}/none.py can't be read: No such file or directory"),
        ("{}/world.py:Gmae", "{}/world.py has no 'Gmae', did you mean 'Game'?"),
        ("{}/broken.py:Game", "{}/broken.py is not Python: '(' was never closed (broken.py, line 1)"),
    ],
)
def test_a_file_without_the_environment_is_named(tmp_path: Path, path: str, problem: str) -> None:
    """With the environment's label, also where the run does not start."""
    (tmp_path / "broken.py").write_text("f = (")
    config = run_config(tmp_path, path=path.format(tmp_path))
    expected = [f"environments[].path: {problem.format(tmp_path)} (game)"]
    assert problems(config) == expected
    with pytest.raises(ConfigError) as caught:
        preflight(config, starts=False)
    assert caught.value.problems == expected


def test_a_program_that_is_not_here_is_named_and_an_agent_has_one_kind(tmp_path: Path) -> None:
    """No worker is started for it. Options of the adapter are read too."""
    agent = {"type": "agent", "path": "", "command": ["/no/such"], "options": {"reward": "exit"}}
    (problem,) = problems(run_config(tmp_path, **agent))
    assert problem.startswith("environments[].command: reward is 'exit', but must be one of none, file, exit_code")
    assert "there is no program /no/such" in problem
    with pytest.raises(ConfigError, match="give exactly one of these, not path and command"):
        run_config(tmp_path, type="agent", command=["true"])


def test_the_folder_of_a_program_is_looked_up_where_the_workers_are(tmp_path: Path) -> None:
    """In `environments[].directory`, not in the folder of the command line."""
    (tmp_path / "code").mkdir()
    options = {"folder": "code"}
    agent: dict[str, Any] = {"type": "agent", "path": "", "command": ["true"], "options": options}
    assert problems(run_config(tmp_path, directory=str(tmp_path), **agent)) == []
    (problem,) = problems(run_config(tmp_path, directory=str(tmp_path / "code"), **agent))
    assert problem == f"environments[].command: folder: there is no folder {tmp_path}/code/code (game)"


def test_services_on_other_machines_need_a_key(tmp_path: Path) -> None:
    """Anybody could take the trajectories otherwise."""
    rollout = {"rollout": {"sessions": {"host": "10.0.0.1"}}}
    with pytest.raises(ConfigError, match=r"rollout\.sessions\.admin_key_env: is empty, and 10"):
        run_config(tmp_path, sections=rollout, type="agent", path="", external=True)


def test_what_only_a_worker_can_judge_is_left_to_it(tmp_path: Path) -> None:
    """A module of a package, and a file for another interpreter, which may be of another Python."""
    assert problems(run_config(tmp_path, path="no_such.package:Game")) == []
    (tmp_path / "newer.py").write_text("type Game[T] = (")
    program = tmp_path / "python"
    program.touch(mode=0o755)
    assert problems(run_config(tmp_path, path=f"{tmp_path}/newer.py:Game", python=str(program))) == []


def test_an_interpreter_that_can_not_be_started_is_named(tmp_path: Path) -> None:
    """Missing, a folder, not executable, or not in PATH; a check on another machine only tells of it."""
    (tmp_path / "python").touch(mode=0o644)
    advice = "name the interpreter itself, such as FOLDER/bin/python"
    for python, problem in (
        (f"{tmp_path}/none/bin/python", f"there is no file {tmp_path}/none/bin/python; {advice}"),
        (str(tmp_path), f"there is no file {tmp_path}; {advice}"),
        (f"{tmp_path}/python", f"{tmp_path}/python is not executable"),
        ("python-of-nobody", "there is no program python-of-nobody in PATH"),
    ):
        config = run_config(tmp_path, python=python)
        words = f"environments[].python: {problem}; the workers of game are started with it"
        assert problems(config) == [words]
        assert preflight(config, starts=False) == [f"{words}; `actors up` needs it on this machine"]
    assert problems(run_config(tmp_path, python="sh")) == []


def test_a_working_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Each worker would end at once."""
    assert problems(run_config(tmp_path, directory=f"{tmp_path}/none")) == [
        f"environments[].directory: there is no folder {tmp_path}/none for the workers of game"
    ]
    assert problems(run_config(tmp_path, directory=str(tmp_path))) == []


def test_columns_of_rows_are_left_to_the_environment_which_may_add_some(tmp_path: Path) -> None:
    """A function that needs a column, and one that takes only some; the rows themselves are still looked at."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a", "level": 1}) + "\n")
    (tmp_path / "own.py").write_text("def score(prompts, completions, answer): ...")
    functions = [{"path": "characters_in_place"}, {"path": f"{tmp_path}/own.py:score"}]
    sections = {"reward": {"functions": functions}, "packer": {"sequence_len": 64, "groups_per_step": 1}}
    assert problems(run_config(tmp_path, sections=sections, rows=str(rows))) == []
    rows.write_text(json.dumps({"prompt": 3}) + "\n")
    (problem,) = problems(run_config(tmp_path, sections=sections, rows=str(rows)))
    assert problem.startswith(f"environments[].rows: {rows}, line 1: the prompt must be text, or a list of messages")


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path, model_folder: Any) -> None:
    """Environment and model exchange messages; a name on the hub is not looked up."""
    model = Path(model_folder("llama"))
    sections: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "inference": {"engine": {"type": "embedded"}},
        "packer": {"sequence_len": 64, "groups_per_step": 3},
    }
    (problem,) = problems(run_config(tmp_path, sections=sections))
    assert problem.startswith(f"model.path: {model} has no chat template, by which environment game exchanges messages")
    assert problems(run_config(tmp_path, sections=sections | {"model": {"path": "org/model"}})) == []
    with_one = tmp_path / "model"
    with_one.mkdir()
    for file in model.iterdir():
        (with_one / file.name).symlink_to(file)
    (with_one / "chat_template.jinja").write_text("{{ messages }}")
    assert (
        problems(run_config(tmp_path, sections=sections | {"model": sections["model"] | {"path": str(with_one)}})) == []
    )


def test_turns_that_do_not_fit_into_a_sample_are_warned_of(tmp_path: Path) -> None:
    """Unless the trajectory has a limit of its own; a task of reasoning_gym has one turn."""
    words = (
        "environments[].max_turns: 6 turns of game with rollout.max_tokens 12 each may be 72 tokens, and "
        "packer.sequence_len holds 64 with the environment's messages; longer trajectories end as context_full. Set "
        "environments[].max_total_tokens, or raise packer.sequence_len"
    )
    assert warnings(run_config(tmp_path, max_turns=6)) == [words]
    assert warnings(run_config(tmp_path, max_turns=5)) == []
    assert warnings(run_config(tmp_path, max_turns=6, max_total_tokens=40)) == []
    gym = {"type": "reasoning_gym", "name": "game", "options": {"task": "gcd"}, "max_turns": 6}
    tree = json.loads(json.dumps(ring_config(tmp_path).model_dump())) | {"environments": [gym]}
    assert warnings(check_tree(tree)) == []
