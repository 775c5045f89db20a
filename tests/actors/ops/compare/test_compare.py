"""Runs side by side: figures from files, differing keys, the table, sentences, and the picture."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.ops.compare.differences import differing
from actors.ops.compare.figures import Evaluated, Figures, evaluations_of, figures_of, limit_of
from actors.ops.compare.picture import MEAN_OF, POINTS, draw, running_mean
from actors.ops.compare.words import MOST_KEYS, compared, labels, results, table
from schemas.config.resolved import write_resolved
from schemas.config.resume import as_tree
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

EVALS = [
    {"version": 0, "environments": {"reverse_text": {"exact_match": 0.25, "mean_reward": 0.5}}},
    {"version": 4, "environments": {"reverse_text": {"exact_match": 0.75, "mean_reward": 0.9}}},
    {"version": 8, "environments": {"reverse_text": {"exact_match": 0.5, "mean_reward": 0.7}}},
]


def leave_run(folder: Path, steps: int = 8, *, summary: bool = True, evals: Any = EVALS, **sections: Any) -> Path:
    """Files that a run leaves behind: a step each 2 seconds, 100 tokens a step, rewards from 0.1 on."""
    config = ring_config(folder, **{"weights": {"directory": ""}} | sections)
    (config.output / "logs").mkdir(parents=True)
    write_resolved(config)
    lines = [
        {"step": n, "reward_mean": n / 10, "tokens": 100, "seconds_wait_batch": 0.5, "time": 1000.0 + 2 * n}
        for n in range(1, steps + 1)
    ]
    (config.output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (config.output / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    if summary:
        values = {
            "steps": steps,
            "wall_seconds": 30.0,
            "train_seconds": 20.0,
            "goodput": 0.8,
            "trainer_idle_ratio": 0.25,
        }
        (config.output / "summary.json").write_text(json.dumps(values))
    return config.output


@pytest.mark.parametrize("steps", [1, 8, 300])
def test_figures_are_those_of_the_files(tmp_path: Path, steps: int) -> None:
    """Each can be checked by hand."""
    found = figures_of(leave_run(tmp_path, steps))
    assert (found.name, found.steps, found.outcome) == ("ring", steps, "done")
    assert found.tokens == 100 * steps
    assert found.steps_per_second == steps / 20.0
    assert found.wasted == pytest.approx(0.2)
    assert found.idle == 0.25
    last = [n / 10 for n in range(max(1, steps - 4), steps + 1)]
    assert found.reward == pytest.approx(sum(last) / len(last))
    assert len(found.rewards) == steps
    assert found.evaluations["reverse_text"].final == 0.5
    assert found.evaluations["reverse_text"].best == (4, 0.75)


def test_a_run_under_way_has_the_figures_so_far(tmp_path: Path) -> None:
    """Without a summary the rate is that of the newest steps, and waste is not known yet. A cut line is left out."""
    output = leave_run(tmp_path, 8, summary=False)
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "reward')
    with (output / ".up.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = figures_of(output)
    assert (found.outcome, found.steps, found.wasted) == ("running", 8, None)
    assert found.steps_per_second == pytest.approx(0.5)
    (output / "logs" / "up.log").write_text(
        '{"event": "started"}\n{"event": "run failed", "reason": "the disk is full"}\n'
    )
    assert figures_of(output).outcome == "failed: the disk is full"
    (output / "logs" / "up.log").write_text('{"event": "stopping", "signal": "SIGTERM"}\n')
    assert figures_of(output).outcome == "stopped by SIGTERM"


def test_a_run_that_never_started_has_no_figures(tmp_path: Path) -> None:
    """The caller may know why."""
    assert figures_of(tmp_path / "none").outcome == "not started"
    found = figures_of(tmp_path / "none", "refused: trainer.max_steps: must be 1 or more")
    assert (found.outcome, found.steps, found.steps_per_second) == (
        "refused: trainer.max_steps: must be 1 or more", 0, None,
    )  # fmt: skip


def test_the_first_measure_that_was_taken_is_compared() -> None:
    """Exact match, else the mean reward; an evaluation without a number is left out."""
    results_of = {v: {"a": {"exact_match": None, "mean_reward": v / 10}, "b": {"exact_match": None}} for v in (0, 5)}
    lines = [{"version": v, "environments": environments} for v, environments in results_of.items()]
    assert evaluations_of(lines) == {"a": Evaluated("mean reward", {0: 0.0, 5: 0.5})}
    assert evaluations_of([]) == {}


def test_the_first_of_equally_good_versions_is_the_best() -> None:
    """Later ones cost more."""
    assert Evaluated("exact match", {4: 0.5, 0: 0.1, 8: 0.5}).best == (4, 0.5)


def test_the_limit_of_an_ended_run_is_that_of_its_last_steps() -> None:
    """At the end no actor is there, which limits nothing."""
    means = {"sampling": 14.8, "scoring": 0.4, "scored": 0.8, "packed": 0.0}
    queues = {"sampling": [0, 16], "scoring": [0, 8], "scored": [0, 16], "packed": [0, 16]}
    settings = {
        "rollout.max_concurrent_groups": 16, "packer.max_async_level": 1, "trainer.num_ranks": 1, "bus.control": "ipc",
        "packer.groups_per_step": 8, "packer.oversampling_factor": 1.0,
    }  # fmt: skip
    progress = {
        "phase": "done", "missing": ["rollout"], "eval_open": 3, "idle": 0.6, "means": means, "queues": queues,
        "settings": settings, "cpu_cores": 8, "computing": 2, "engine_load": 0, "engine_slots": None, "actors": [],
        "peers": {},
    }  # fmt: skip
    assert limit_of(progress) == "sampling"
    assert limit_of(progress | {"idle": 0.1}) == "training"
    assert limit_of({}) == "unknown"


def test_keys_that_differ_are_listed_with_each_value(tmp_path: Path) -> None:
    """Names and folders differ always; a section of another type counts as its type."""
    weights = {"weights": {"directory": ""}}
    first = as_tree(ring_config(tmp_path / "a", **weights))
    rate = as_tree(ring_config(tmp_path / "b", trainer={"learning_rate": 3e-5}, **weights))
    loss = as_tree(ring_config(tmp_path / "c", trainer={"loss": {"type": "cispo"}}, **weights))
    assert differing([first, first]) == {}
    assert differing([first, rate]) == {"trainer.learning_rate": [1e-6, 3e-5]}
    assert differing([first, rate, loss]) == {
        "trainer.learning_rate": [1e-6, 3e-5, 1e-6],
        "trainer.loss.type": ["dapo", "dapo", "cispo"],
    }
    functions = as_tree(ring_config(tmp_path / "d", reward={"functions": [{"path": "final_number"}]}, **weights))
    assert differing([first, functions]) == {"reward.functions.0.path": ["characters_in_place", "final_number"]}


def figures(name: str, value: float, **more: Any) -> Figures:
    """Made-up figures."""
    evaluations = {"math": Evaluated("exact match", {0: 0.1, 8: value})}
    return Figures(name, Path(f"/runs/{name}"), more.pop("outcome", "done"), evaluations=evaluations, **more)


def test_the_table_and_the_sentences_tell_what_is_best() -> None:
    """Unknown figures are dashes; a reason of a failure has a line of its own."""
    runs = [
        figures("a", 0.5, steps=8, steps_per_second=2.0, tokens=800, wasted=0.25, idle=0.6, limit="sampling"),
        figures("b", 0.7, steps=8, steps_per_second=1.0),
        Figures("c", Path("/runs/c"), "failed: the disk\x1b[31m is full"),
    ]
    assert results(runs) == [
        "run  outcome  steps  math final, best   reward  steps/s  tokens  wasted  trainer waits  limit",
        "a    done     8      0.500, 0.500 at 8  -       2        800     25.0%   60%            sampling",
        "b    done     8      0.700, 0.700 at 8  -       1        -       -       -              -",
        "c    failed   0      -                  -       -        -       -       -              -",
        "",
        "best of math: b, exact match 0.700 at version 8",
        "most steps per second: a, 2",
        "c: failed: the disk\\x1b[31m is full",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [1, 2, 64])
def test_rows_are_as_many_as_runs(number: int) -> None:
    """All lines of the table have their columns at the same places."""
    runs = [figures(f"run-{'x' * n}", n / 100, steps=n) for n in range(number)]
    lines = results(runs)[: number + 1]
    place = lines[0].index("steps ")
    assert all(line[place:].split()[0] == str(n) for n, line in enumerate(lines[1:]))


def test_runs_with_the_same_name_are_told_apart_by_their_folders() -> None:
    """Others by their names."""
    runs = [
        Figures("run", Path("/x/a"), "done"),
        Figures("run", Path("/x/b"), "done"),
        Figures("c", Path("/x/c"), "done"),
    ]
    assert labels(runs) == ["/x/a", "/x/b", "c"]


def test_values_of_any_kind_fit_into_a_cell() -> None:
    """Long values are cut, control characters are shown, and the number of keys is bounded."""
    configs: list[dict[str, Any]] = [{f"key_{n:02}": ["x" * 99, n, None, True, "\x07"][n % 5] for n in range(50)}, {}]
    configs[1] = dict.fromkeys(configs[0], 7)
    runs = [Figures(name, Path(name), "done", config) for name, config in zip("ab", configs, strict=True)]
    lines = compared(runs).splitlines()
    assert lines[MOST_KEYS + 1] == f"and {50 - MOST_KEYS} more keys"
    assert max(map(len, lines)) < 120
    assert not any("\x07" in line for line in lines)


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    """Without blanks at the end."""
    assert table([("a", "bb"), ("ccc", "")]) == ["a    bb", "ccc"]


@pytest.mark.parametrize("steps", [0, 1, POINTS, 10 * POINTS + 1])
def test_curves_have_few_points_and_end_at_the_last_step(steps: int) -> None:
    """A mean of ten steps; of fewer at the start."""
    shown, means = running_mean({step: float(step) for step in range(1, steps + 1)})
    assert len(shown) == len(means) <= POINTS
    assert (shown[-1] if shown else 0) == steps
    if steps > MEAN_OF:
        assert means[-1] == steps - (MEAN_OF - 1) / 2


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_command_compares_and_draws(tmp_path: Path, capsys: Any, ending: str) -> None:
    """Two runs of other rates, and one that is not there."""
    first = leave_run(tmp_path / "a", name="low")
    second = leave_run(tmp_path / "b", name="high", trainer={"learning_rate": 3e-5})
    picture = tmp_path / f"runs.{ending}"
    assert main(["compare", str(first), str(second), "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["differing", "key", "low", "high"]
    assert lines[1].split() == ["trainer.learning_rate", "1e-06", "3e-05"]
    assert lines[-1] == f"wrote {picture}"
    start = b"\x89PNG" if ending == "png" else b"<?xml"
    assert picture.read_bytes().startswith(start)
    if ending == "svg":
        assert "low" in picture.read_text()
    assert main(["compare", str(tmp_path / "none")]) == 2
    assert "none: is not there" in capsys.readouterr().err


def test_a_picture_that_can_not_be_written_is_told_in_words(tmp_path: Path) -> None:
    """An unknown ending, or a folder that is not there."""
    for path in (tmp_path / "runs.nothing", tmp_path / "none" / "runs.png"):
        with pytest.raises(ConfigError, match=r"^--picture "):
            draw([figures("a", 0.5)], path)
