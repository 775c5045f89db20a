"""Groups whose payloads are in files next to the ledger, in runs of real processes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.ledger.payload_files import MIN_BYTES, folder_of
from schemas.config import RunConfig
from tests.ring.harness import check_promise, children, processes, ring_config, steps_recorded, wait_until


def large_groups(folder: Path, **sections: Any) -> RunConfig:
    """A run whose groups have 64 completions of 2 048 tokens: 1.7 MB."""
    return ring_config(
        folder,
        rollout={"group_size": 64, "max_tokens": 2048, "ignore_eos": True},
        packer={"sequence_len": 4096, "memory_bytes": 1},
        eval={"num_prompts": 0},
        **sections,
    )


@pytest.mark.slow
def test_a_killed_packer_finds_the_payloads_that_are_in_files(tmp_path: Path) -> None:
    """Killed three times; the steps are made of what the files have, and the files go when the groups are durable."""
    config = large_groups(tmp_path, trainer={"max_steps": 9})
    with processes(config, tmp_path) as started:
        up = started.up()
        for step in (2, 4, 6):
            wait_until(lambda step=step: steps_recorded(config) >= step, f"step {step}")
            os.kill(children(up.pid)["packer-0"], signal.SIGKILL)
        assert up.wait() == 0
    check_promise(config)
    files = list(folder_of(config.ledger_path).iterdir())
    assert files, "no payload was in a file"
    written = sum(file.stat().st_size for file in files)
    assert written >= MIN_BYTES
    assert not any(file.name == "1" for file in files), "the first file has only groups of steps that are durable"
