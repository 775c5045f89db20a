"""Whole runs on data sets in files and on the hub: the same batches as from JSON Lines, also after kills."""

import gzip
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.ledger import LedgerReader
from schemas.config import RunConfig, dump_config
from tests.hub import hub
from tests.ring.harness import (
    PATIENCE_SECONDS,
    SHORT_LEASE,
    check_promise,
    children,
    processes,
    ring,
    ring_config,
    steps_recorded,
    wait_until,
)

pytestmark = pytest.mark.slow

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
KEYS = {"name": "sums", "type": "dataset", "columns": {"prompt": "question"}}
SLOW = {"inference": {"engine": {"type": "fake", "token_seconds": 0.003}}}


def run_of(folder: Path, *environments: dict[str, Any], steps: int = 9, **sections: Any) -> RunConfig:
    """A run of 27 groups, almost three epochs, whose result is a function of its data."""
    return ring_config(
        folder,
        environments=list(environments),
        packer={"groups_per_step": 3, "sequence_len": 64, "max_async_level": 0},
        trainer={"max_steps": steps, "checkpoint": {"interval": 3}},
        eval={"num_prompts": 0},
        bus=SHORT_LEASE,
        ledger={"keep_steps": 100},
        **sections,
    )


def weights_of(config: RunConfig) -> str:
    """The digest of all batches of a run."""
    step = config.trainer.max_steps
    return str(json.loads((config.output / "checkpoints" / f"step_{step}" / "trainer" / "fake.json").read_text()))


def drawn(config: RunConfig) -> list[tuple[str, int]]:
    """Environment and index of each train group, by ordinal."""
    ledger = LedgerReader.of(config.ledger_path)
    try:
        groups = sorted(ledger.groups(), key=lambda group: group.ordinal)
        return [(one.example.environment, one.example.index) for one in groups if one.ordinal >= 0]
    finally:
        ledger.close()


def lines(rows: list[dict[str, str]]) -> bytes:
    """JSON Lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def written(folder: Path, kind: str) -> dict[str, Any]:
    """Write the rows in a format, and return the keys of an environment that reads them."""
    folder.mkdir()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=4)
        return {"path": str(folder / "rows.parquet")}
    if kind == "jsonl.gz":
        (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines(ROWS)))
        return {"path": str(folder / "rows.jsonl.gz")}
    if kind == "save_to_disk":
        import datasets

        datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved", num_shards=2)
        return {"path": str(folder / "saved")}
    assert kind == "filtered"
    # rows of another kind between those that count, and a column of another name
    mixed = [
        row for n, each in enumerate(ROWS) for row in (each | {"keep": "yes"}, {"question": f"no {n}", "keep": "no"})
    ]
    (folder / "rows.jsonl").write_bytes(lines(mixed))
    (folder / "mine.py").write_text('def kept(row):\n    return row["keep"] == "yes"\n')
    columns = {"prompt": "question"}
    return {"path": str(folder / "rows.jsonl"), "filter": f"{folder / 'mine.py'}:kept", "columns": columns}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[tuple[str, int]]]:
    """The weights and draws of an undisturbed run on the same rows in a `jsonl` environment."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "rows.jsonl").write_bytes(lines(ROWS))
    source = {"type": "jsonl", "name": "sums", "path": str(folder / "rows.jsonl"), "prompt_column": "question"}
    config = run_of(folder, source)
    with ring(config) as run:
        run.start().wait()
    found = weights_of(config), drawn(config)
    assert Counter(index for _, index in found[1][:20]) == Counter(dict.fromkeys(range(10), 2))
    return found


@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "save_to_disk", "filtered"])
def test_a_run_has_the_batches_of_the_jsonl_file(
    tmp_path: Path, kind: str, reference: tuple[str, list[tuple[str, int]]]
) -> None:
    """Packer and rollout crash in the middle of an epoch; epochs, order and bits are the same, nothing is lost."""
    config = run_of(tmp_path, KEYS | written(tmp_path / "data", kind), **SLOW)
    with ring(config) as run:
        run.start()
        for step, name in ((1, "packer-0"), (2, "rollout-0"), (5, "packer-0")):
            run.crash(name, step)
            run.start(name)
        run.wait(PATIENCE_SECONDS)
    assert check_promise(config).dropped == {}
    assert drawn(config) == reference[1]
    # another column of the filtered rows reaches the reward functions, and no batch
    assert weights_of(config) == reference[0]


def test_rows_come_in_their_order_without_a_shuffle(tmp_path: Path) -> None:
    """Epoch after epoch."""
    config = run_of(tmp_path, KEYS | written(tmp_path / "data", "parquet") | {"shuffle": False, "limit": 7}, steps=5)
    with ring(config) as run:
        run.start().wait()
    assert drawn(config) == [("sums", number % 7) for number in range(15)]


def test_a_mixture_has_its_shares_and_survives_kills(tmp_path: Path) -> None:
    """Three data sets in the proportion of their weights, the same draws with and without crashes."""
    shares = {"a": 1.0, "b": 3.0, "c": 6.0}
    sources = [
        KEYS | written(tmp_path / name, kind) | {"name": name, "weight": shares[name]}
        for name, kind in zip(shares, ("parquet", "jsonl.gz", "save_to_disk"), strict=True)
    ]
    found = []
    for name, crashes in (("quiet", ()), ("crashed", (3, 7, 20))):
        config = run_of(tmp_path / name, *sources, steps=40, **(SLOW if crashes else {}))
        with ring(config) as run:
            run.start()
            for step in crashes:
                run.crash("packer-0", step)
                run.start("packer-0")
            run.wait(PATIENCE_SECONDS)
        assert check_promise(config).dropped == {}
        found.append((drawn(config), weights_of(config)))
    assert found[0] == found[1]
    counts = Counter(name for name, _ in found[0][0])
    # 120 draws: three standard deviations of the smallest share are 10
    assert all(abs(counts[name] - 12 * share) < 10 for name, share in shares.items())
    # within each data set every row once per epoch
    for name in shares:
        indices = [index for label, index in found[0][0] if label == name]
        epochs = [indices[start : start + 10] for start in range(0, len(indices) - 9, 10)]
        assert all(sorted(epoch) == list(range(10)) for epoch in epochs)


def test_a_run_on_the_hub_survives_the_kill_of_its_packer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: tuple[str, list[tuple[str, int]]]
) -> None:
    """`actors up` with real processes; the hub moves on and goes away in between, and the run keeps its commit."""
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "rows.parquet")
    config = run_of(tmp_path, KEYS | {"path": "org/sums"}, **SLOW)
    with hub(tmp_path / "hub") as server, processes(config, tmp_path) as started:
        commit = server.publish("org/sums", {"data/train-0.parquet": (tmp_path / "rows.parquet").read_bytes()})
        for name, value in (("HF_ENDPOINT", server.url), ("HF_HOME", str(tmp_path / "home"))):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        up = started.up()
        wait_until(lambda: steps_recorded(config) >= 2, "step 2")
        pq.write_table(table.slice(0, 3), tmp_path / "rows.parquet")
        server.publish("org/sums", {"data/train-0.parquet": (tmp_path / "rows.parquet").read_bytes()})
        asked = len(server.requests)
        for name in ("packer-0", "rollout-0"):
            os.kill(children(up.pid)[name], signal.SIGKILL)
        assert up.wait(PATIENCE_SECONDS) == 0, started.text("up")
        assert len(server.requests) == asked
    assert check_promise(config).dropped == {}
    assert (weights_of(config), drawn(config)) == reference
    ledger = LedgerReader.of(config.ledger_path)
    assert ledger.value("data")["sums"]["commits"] == {"org/sums@main": commit}
    ledger.close()


def test_a_resume_on_other_rows_is_refused_by_name(tmp_path: Path) -> None:
    """By `actors up` before anything starts; a fork takes the new rows."""
    source = written(tmp_path / "data", "parquet")
    config = run_of(tmp_path, KEYS | source, steps=3)
    with ring(config) as run:
        run.start().wait()
    (config.output / "config.resolved.yaml").write_text(dump_config(config), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS[::-1]), source["path"], row_group_size=4)
    longer = config.model_copy(update={"trainer": config.trainer.model_copy(update={"max_steps": 6})})
    with processes(longer, tmp_path) as started:
        assert started.up().wait(PATIENCE_SECONDS) == 2
        words = started.text("up")
        assert f"environments[].path: {source['path']} is not the data of this run: so far " in words
        assert "this makes another run (--fork, or another output_dir)" in words
        assert started.up("--fork").wait(PATIENCE_SECONDS) == 0, started.text("up")
    check_promise(longer)
