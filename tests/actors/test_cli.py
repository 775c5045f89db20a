"""The command line: overrides, words for mistakes, exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors import runtime
from actors.assembly import replica_index
from actors.cli import commands, main
from actors.process import exits
from schemas.config import dump_config
from tests.ring.harness import ring_config


@pytest.fixture
def config_path(tmp_path):
    """A good run.yaml."""
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(ring_config(tmp_path)))
    return path


def test_check_says_good_and_exits_0(config_path, capsys):
    """A configuration without problems."""
    assert main(["check", str(config_path)]) == 0
    assert capsys.readouterr().out == f"{config_path}: good\n"


def test_mistakes_exit_2_with_one_line_each_on_stderr(config_path, capsys):
    """A value out of range and an unknown key: both are told at once."""
    assert main(["check", str(config_path), "trainer.max_steps=0", "bus.lese=3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert any(line.startswith("trainer.max_steps: ") for line in lines)
    assert any("did you mean 'lease'" in line for line in lines)


@pytest.mark.parametrize("order", ["before", "after"])
def test_overrides_may_stand_before_and_after_options(config_path, capsys, order):
    """`actors run reward KEY=VALUE --config …` and `… --config … KEY=VALUE` read the same override."""
    options, override = ["--config", str(config_path)], ["trainer.max_steps=0"]
    words = override + options if order == "before" else options + override
    assert main(["run", "reward", *words]) == 2
    assert "trainer.max_steps" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["check", "{}", "--lease=3"], ["check", "{}", "--x"], ["schema", "a=b"]])
def test_unknown_arguments_are_refused(config_path, capsys, words):
    """What is neither an option nor an override is named."""
    with pytest.raises(SystemExit) as ended:
        main([word.format(config_path) for word in words])
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_default_name_is_nobody_elses(config_path, monkeypatch):
    """Two rollouts on one host have two names; a rank's name is its rank, and no other ends in a number."""
    monkeypatch.setattr(commands.socket, "gethostname", lambda: "node-7.cluster.local")
    monkeypatch.setenv("RANK", "3")
    names, codes = [], []
    monkeypatch.setattr(runtime, "run_actor", lambda kind, name, *_: names.append(name) or 0)
    monkeypatch.setattr(exits, "leave", codes.append)
    for kind in ("rollout", "rollout", "trainer", "packer", "inference"):
        assert main(["run", kind, "--config", str(config_path)]) == 0
    first, second, trainer, packer, inference = names
    assert re.fullmatch(r"rollout-node-7-[a-z]{5}", first)
    assert first != second
    assert (trainer, packer) == ("trainer-3", "packer-0")
    assert replica_index(inference) == 0
    assert codes == [0] * 5


def test_missing_configuration_is_all_that_is_asked_for(capsys):
    """Overrides are not required."""
    with pytest.raises(SystemExit):
        main(["check"])
    assert "required: config\n" in capsys.readouterr().err


def test_check_says_what_is_not_there(config_path, capsys):
    """What the run relies on outside its configuration is looked at too."""
    assert main(["check", str(config_path), "eval.exact_match=exact_mach"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("eval.exact_match: no built-in reward 'exact_mach', did you mean 'exact_match'?")
    assert out == ""


def test_samples_of_a_directory_without_a_run_says_so(tmp_path, capsys):
    """Exit 2, naming the file that is not there."""
    assert main(["samples", str(tmp_path)]) == 2
    assert f"{tmp_path}/samples.jsonl: there is no such file" in capsys.readouterr().err


def test_schema_is_json_with_all_sections(capsys):
    """For editors."""
    assert main(["schema"]) == 0
    assert {"rollout", "reward", "packer", "trainer", "inference"} <= set(
        json.loads(capsys.readouterr().out)["properties"]
    )


def test_topology_names_every_edge_and_the_control_address(config_path, capsys):
    """Who binds, who connects, and the one address that is configured."""
    assert main(["topology", str(config_path), "bus.control=tcp://127.0.0.1:5599"]) == 0
    out = capsys.readouterr().out
    for edge in ("groups", "scored", "steps", "control", "completions", "weights"):
        assert f"\n{edge} " in out
    assert "tcp://127.0.0.1:5599" in out


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """`actors --version`."""
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("grpo-actors")


def test_an_override_with_dashes_is_answered_with_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    """`--trainer.learning_rate=1` is a usual slip."""
    with pytest.raises(SystemExit) as left:
        main(["check", "run.yaml", "--trainer.learning_rate=1e-5"])
    assert left.value.code == 2
    assert "write overrides without dashes: trainer.learning_rate=1e-5" in capsys.readouterr().err


def test_samples_take_a_run_by_its_configuration_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `top` and `status` do: run.yaml names the output_dir."""
    config = ring_config(tmp_path)
    config.output.mkdir(parents=True)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    record = {
        "step": 1, "ordinal": 0, "purpose": "train", "environment": "e", "versions": [0], "prompt": "p",
        "completions": ["a"], "reward": [1.0], "advantages": [0.0], "stop_conditions": ["stop"],
    }  # fmt: skip
    (config.output / "samples.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["samples", str(tmp_path / "run.yaml")]) == 0
    assert "step 1  train ordinal 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`actors schema | head -1`: no traceback."""
    command = f"{sys.executable} -P -m actors schema | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=180, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")
