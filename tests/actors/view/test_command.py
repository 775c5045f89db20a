"""`actors view` as a program, on the files of a run that real actors have made."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.ledger import LedgerReader
from tests.actors.view.conftest import Make
from tests.ring.harness import ring, ring_config, wait_until

PATIENCE_SECONDS = 150.0


def ask(address: str, path: str) -> dict[str, object]:
    """The answer to a question."""
    with urllib.request.urlopen(f"{address}api/{path}", timeout=PATIENCE_SECONDS) as answer:
        found: dict[str, object] = json.load(answer)
    return found


def test_the_program_serves_runs_until_it_is_stopped(make: Make, tmp_path: Path) -> None:
    """It prints its address; a run named twice is shown once; SIGINT ends it with exit code 0."""
    run = make(2)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "actors", "view", str(run.config.output), f"{run.config.output}/.", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        assert [one["step"] for one in ask(address, "runs")["runs"]] == [2]  # type: ignore[attr-defined]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert list((tmp_path / "cache/grpo-actors/view").glob("*.sqlite"))


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In words, with exit code 2."""
    assert main(["view", str(tmp_path / "none"), "--cache", str(tmp_path)]) == 2
    assert "is not there; give a run's output_dir" in capsys.readouterr().err


def test_neither_torch_nor_transformers_is_loaded() -> None:
    """The pages are there at once, on a machine that has no torch as well."""
    code = "import sys, actors.view.command, actors.view.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "tokenizers"} & set(loaded)


@pytest.mark.slow
def test_the_files_of_real_actors_are_shown(tmp_path: Path) -> None:
    """A whole run of threads: every group of the ledger is listed, and each trained one has its tokens and its step."""
    from actors.view.listing import Query
    from actors.view.viewed_run import ViewedRun

    config = ring_config(tmp_path, trainer={"max_steps": 4, "checkpoint": {"interval": 2}})
    with ring(config) as made:
        made.start().wait()
    ledger = LedgerReader.of(config.ledger_path)
    rows = {row.ordinal: row for row in ledger.groups()}
    ledger.close()
    viewed = ViewedRun(config, tmp_path / "cache")
    try:
        trained = {ordinal for ordinal, row in rows.items() if row.step is not None}

        def known() -> list[dict[str, Any]]:
            page = viewed.groups(Query(limit=100))["groups"]
            return page if {one["ordinal"] for one in page if one["completions"]} >= trained else []

        listed = wait_until(known, "the groups of all steps")
        # groups of compacted steps are listed too, if samples.jsonl has them
        assert {group["ordinal"] for group in listed} >= {ordinal for ordinal in rows if ordinal >= 0}
        assert viewed.overview()["state"] == "done"
        assert viewed.curves(["reward_mean"])["steps"] == [1, 2, 3, 4]
        for ordinal in trained:
            (group,) = [one for one in listed if one["ordinal"] == ordinal]
            whole = viewed.group(ordinal)
            assert [one["reward"] for one in whole["completions"]] == group["rewards"]
            one = viewed.trajectory(ordinal, 0)
            assert one["completion"]["text"] == whole["completions"][0]["text"]
            tokens = viewed.tokens(ordinal, one["samples"][0]["sample"], 0, 1000)
            assert len(tokens["id"]) == one["samples"][0]["tokens"] > 0
            assert "shown by their numbers" in tokens["tokenizer"]  # the fake engine has no tokenizer
            packed = [row for rank in viewed.step(group["step"])["packing"]["ranks"] for row in rank["rows"]]
            assert ordinal in {sample["ordinal"] for row in packed for sample in row["samples"]}
        evaluations = viewed.groups(Query(purpose="eval"))["groups"]
        assert evaluations
    finally:
        viewed.close()
