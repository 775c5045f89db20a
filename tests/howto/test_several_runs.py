"""docs/howto/several-runs.md: its commands, names, keys and table are those of the code."""

import re
import shlex
from pathlib import Path

import pytest

from actors.cli import parse
from actors.ops.compare.figures import Evaluated, Figures
from actors.ops.compare.words import compared
from actors.ops.queue.plan import planned
from actors.ops.queue.sweep import parse_axis
from tests.actors.ops.queue.test_collisions import CASES, LASTING
from tests.howto.pages import page

PAGE = page("several-runs")
COMMANDS = [
    line.removesuffix("&").strip()
    for block in PAGE.blocks
    if block.language == "sh"
    for line in block.text.splitlines()
]
TEXTS = [block.text for block in PAGE.blocks if block.language == "text"]


def test_all_commands_parse() -> None:
    """Files, overrides and options in the order of the page."""
    assert len(COMMANDS) == 6
    parsed = [parse(shlex.split(command)[1:]) for command in COMMANDS]
    assert [str(path) for path in parsed[2].configs] == ["first.yaml", "second.yaml", "third.yaml"]
    assert parsed[2].overrides == ["trainer.max_steps=100"]
    assert len(parsed[3].sweep) == 2


def test_the_sweep_makes_the_runs_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order."""
    monkeypatch.chdir(tmp_path)
    PAGE.write_files(tmp_path)
    arguments = parse(shlex.split(COMMANDS[3])[1:])
    runs = planned(arguments.configs, arguments.overrides, list(map(parse_axis, arguments.sweep)))
    assert [run.config.output for run in runs] == [tmp_path / path for path in TEXTS[0].split()]
    assert all(run.config.name == f"reverse.{run.config.output.name}" for run in runs)
    assert parse_axis("rollout.stop=[a,b],[c]").values == ("[a,b]", "[c]")


def test_the_table_of_keys_has_all_that_is_refused() -> None:
    """No more, and no less."""
    rows = PAGE.table("Key", "Two runs", "Instead").rows
    keys = [re.findall(r"`([^`]+)`", row[0])[0] for row in rows]
    assert sorted(keys) == sorted(["output_dir", "rollout.sessions.port", *LASTING, *CASES])
    assert {key for key, row in zip(keys, rows, strict=True) if row[1].startswith("never")} == {"output_dir", *LASTING}


def test_the_comparison_is_printed_as_on_the_page() -> None:
    """Of two made-up runs; all columns are explained."""
    low, high = (
        Figures(
            f"reverse.{name}",
            Path(name),
            outcome,
            {"trainer": {"learning_rate": rate}},
            steps=steps,
            evaluations={"reverse_text": Evaluated("exact match", values)},
            reward=reward,
            steps_per_second=speed,
            tokens=tokens,
            wasted=wasted,
            idle=idle,
            limit="sampling",
        )
        for name, outcome, rate, steps, values, reward, speed, tokens, wasted, idle in (
            ("low", "done", 1e-5, 100, {80: 0.42, 100: 0.41}, 0.715, 1.88, 90210, 0.0, 0.17),
            ("high", "stopped: SIGTERM", 3e-5, 60, {60: 0.535}, 0.801, 1.79, 54002, None, 0.2),
        )
    )
    assert compared([low, high]) == TEXTS[1].rstrip()
    columns = {row[0] for row in PAGE.table("Column", "Meaning").rows}
    head = TEXTS[1].splitlines()[3]
    assert all(column in head for column in columns)
    assert columns == {"final, best", "reward", "steps/s", "tokens", "wasted", "trainer waits", "limit"}
