"""Runs of the whole ring with evaluations of their own: sources of `eval`, and environments that are not trained."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from schemas.config.load import load_config
from schemas.errors import ConfigError
from tests.ring.harness import (
    check_promise,
    processes,
    ring,
    ring_config,
    rows,
    wait_until,
)
from tests.ring.test_environments import WORLDS

SCORES = """
def text(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]

def early(prompts, completions, **_):
    return [sum(letter < "m" for letter in text(one)) / max(1, len(text(one))) for one in completions]

def length(prompts, completions, **_):
    return [float(len(text(one))) for one in completions]
"""


def config_of(folder: Path, **sections: Any) -> RunConfig:
    """A run of six steps that trains on words, and evaluates words in two ways, a file, and a game."""
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"word{i}=", "answer": "x"}) + "\n" for i in range(5)))
    scores = folder / "scores.py"
    scores.write_text(SCORES)
    letters = {"type": "python", "name": "letters", "path": f"{WORLDS}:Letters", "train": False}
    values: dict[str, Any] = {
        "environments": [
            {"type": "reverse_text", "name": "words"},
            {"type": "jsonl", "name": "file", "path": str(held_out), "train": False},
            letters,
        ],
        "reward": {"functions": [{"path": f"{scores}:early"}, {"path": f"{scores}:length"}]},
        "packer": {"sequence_len": 512},
        "trainer": {"max_steps": 6, "checkpoint": {"interval": 2}},
        "eval": {
            "num_prompts": 2,
            "every_steps": 3,
            "sources": [
                {"environment": "words", "name": "words-hot", "temperature": 1.0, "completions_per_prompt": 4}
                | {"every_steps": 0, "at_start": False, "num_prompts": 3, "max_tokens": 6},
                {"environment": "letters", "every_steps": 0, "completions_per_prompt": 2},
                {"environment": "file", "num_prompts": 99},
            ],
        },
    }
    return ring_config(folder, **values | sections)


def check_results(config: RunConfig) -> None:
    """Each evaluation at its versions, with its numbers of prompts and completions; only words are trained."""
    lines = read_lines(config.output / "evals.jsonl")
    assert {line["version"]: sorted(line["environments"]) for line in lines} == {
        0: ["file", "letters", "words"],
        3: ["file", "words"],
        6: ["file", "letters", "words", "words-hot"],
    }
    last = next(line for line in lines if line["version"] == 6)["environments"]
    sizes = {label: (found["num_prompts"], found["num_completions"]) for label, found in last.items()}
    assert sizes == {"words": (2, 2), "words-hot": (3, 12), "file": (5, 5), "letters": (2, 4)}
    assert {"pass@2", "pass@4"} <= last["words-hot"].keys()
    assert last["letters"]["reward/turns_taken"] == 3.0
    assert last["words-hot"]["reward/length"] <= 6.0
    records = read_lines(config.output / "samples.jsonl")
    assert {one["environment"] for one in records if one["purpose"] == "train"} == {"words"}
    assert {one["environment"] for one in records if one["purpose"] == "eval"} == set(last)


@pytest.mark.slow
def test_each_evaluation_has_its_own_data_sampling_and_versions(tmp_path: Path) -> None:
    """Words, words at temperature 1, a file and a game of several turns; only words are trained."""
    config = config_of(tmp_path)
    with ring(config) as run:
        run.start().wait()
        shown = run["packer-0"].metrics.registry.get_sample_value
        for label in ("words", "words-hot", "file"):
            assert shown("grpo_packer_eval_mean_reward", {"environment": label}) is not None
    check_promise(config)
    check_results(config)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["packer-0", "rollout-0", "reward-0", "inference-0"])
def test_an_actor_killed_in_an_evaluation_changes_no_result(tmp_path: Path, victim: str) -> None:
    """Killed with -9 while groups of the first evaluation are under way, and started again: the same evaluations."""
    gate = tmp_path / "gate"
    gate.touch()
    game = {"type": "python", "name": "letters", "path": f"{WORLDS}:Gated", "train": False}
    config = config_of(tmp_path, bus={"lease": 3.0})
    environments = [one.model_dump() for one in config.environments[:2]] + [game | {"options": {"gate": str(gate)}}]
    config = config_of(tmp_path, environments=environments, bus={"lease": 3.0})
    with processes(config, tmp_path) as run:
        names = [f"{kind}-0" for kind in ("packer", "trainer", "inference", "reward", "rollout")]
        for name in names:
            run.run(name)
        wait_until(Path(f"{gate}.entered").exists, "a game of the first evaluation")
        wait_until(lambda: any(state == "settled" for _, state, *_ in rows(config, "ordinal < 0")), "a settled prompt")
        run.processes[victim].send_signal(signal.SIGKILL)
        run.processes[victim].wait(30)
        run.run(victim)
        gate.unlink()
        for name in names:
            assert run.processes[name].wait(150) == 0, run.text(name)[-2000:]
    check_promise(config)
    check_results(config)


@pytest.mark.slow
def test_a_run_goes_on_with_other_evaluations(tmp_path: Path) -> None:
    """An environment that is evaluated only may come and go without a fork; a trained one may not."""
    config = config_of(tmp_path)
    with ring(config) as run:
        run.start().wait()
    further = config_of(
        tmp_path,
        environments=[config.environments[0].model_dump()],
        trainer={"max_steps": 8},
        eval={"num_prompts": 2, "sources": []},
        bus=config.bus.model_dump(),
    )
    with ring(further) as run:
        run.start().wait()
    assert read_lines(config.output / "evals.jsonl")[-1]["environments"].keys() == {"words"}
    other = further.model_copy(update={"environments": [further.environments[0].model_copy(update={"max_letters": 9})]})
    with ring(other) as run, pytest.raises(ConfigError, match="this makes another run"):
        run.start("packer-0")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"eval": {"sources": [{"environment": "x"}]}}, "eval.sources.0.environment: there is no 'x' in environments"),
        (
            {"eval": {"sources": [{"environment": "words", "name": "file"}]}},
            "eval.sources.0.name: 'file' is the name of an environment or of another source",
        ),
        (
            {"eval": {"sources": [{"environment": "words"}, {"environment": "words"}]}},
            "eval.sources.1.name: words has another source without a name",
        ),
        ({"eval": {"max_tokens": 512}}, "eval.max_tokens: 512 leaves no room for a prompt in packer.sequence_len 512"),
        (
            {"eval": {"sources": [{"environment": "words", "max_tokens": 600}]}},
            "eval.sources.0.max_tokens: 600 leaves no room for a prompt",
        ),
        (
            {"environments": [{"type": "reverse_text", "train": False}], "eval": {}},
            "environments[].train: is false for all; there is nothing to train on",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    """With the key."""
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, **sections)
    assert any(problem.startswith(words) for problem in caught.value.problems), caught.value.problems


def test_the_resolved_configuration_loads_again(tmp_path: Path) -> None:
    """Empty keys of a source stay empty."""
    from schemas.config.resolved import dump_config

    config = config_of(tmp_path)
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(config))
    again = load_config(path)
    assert again.eval.sources == config.eval.sources
    hot = again.evaluations["words-hot"].keys
    assert (hot.temperature, hot.num_prompts, hot.at_end, hot.at_start) == (1.0, 3, True, False)
    assert (again.evaluations["letters"].keys.temperature, again.evaluations["letters"].keys.num_prompts) == (0.0, 2)
