"""Data sets on the hub, with the real libraries and a stand-in for the hub's server.

The libraries read their environment when they are imported, so each case is a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub import Hub, hub
from tests.ports import free_port

SCRIPT = """
import json, sys
from pathlib import Path
from actors.datasets import make_dataset
from actors.datasets.identity import data_changes
from actors.datasets.prepared import Prepared
from schemas.config.data import DatasetConfig
from schemas.errors import ConfigError
prepared, found = Prepared(Path(sys.argv[1])), []
for case in json.load(sys.stdin):
    split, pins, before = case.pop("as", "train"), case.pop("pins", {}), case.pop("before", None)
    prepared.note("commits.json", pins)
    try:
        table = make_dataset(DatasetConfig(**case), split, 0, prepared=prepared)
        rows = [[one.prompt, one.columns] for one in map(table.example, range(table.num_examples))]
        refused = data_changes({"x": before}, {"x": table})[0] if before else []
        found.append({"rows": rows, "identity": table.identity(), "refused": refused})
    except ConfigError as error:
        found.append(str(error))
print(json.dumps(found))
"""
README = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test.jsonl}
- config_name: socratic
  data_files: other.jsonl
---
"""


def rows(first: int, last: int) -> bytes:
    """JSON Lines with sums."""
    return b"".join(b'{"question": "%d+1", "answer": "%d"}\n' % (n, n + 1) for n in range(first, last))


def files(last: int = 8) -> dict[str, bytes]:
    """A data set with two configurations."""
    parts = {"main/train-0.jsonl": rows(0, 5), "main/train-1.jsonl": rows(5, last), "main/test.jsonl": rows(90, 92)}
    return {"README.md": README, **parts, "other.jsonl": rows(50, 51)}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    """A hub with one data set."""
    with hub(tmp_path / "hub") as server:
        server.publish("org/sums", files())
        yield server


def load(folder: Path, *cases: dict[str, Any], url: str, home: str = "home", **variables: str) -> list[Any]:
    """Load data sets in a new process; a failure is its words."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / home), "HF_HUB_DISABLE_TELEMETRY": "1"} | variables
    # of the machine; the stand-in is on loopback
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "prepared")],
        input=json.dumps([{"columns": {"prompt": "question"}, "path": "org/sums", **case} for case in cases]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def prompts(found: Any) -> list[str]:
    """The prompts of a data set that was loaded."""
    return [prompt for prompt, _ in found["rows"]]


@pytest.mark.slow
def test_configurations_splits_and_revisions_are_loaded(tmp_path: Path, served: Hub) -> None:
    """With slices and renamed columns, as from files; the commit stands in the identity."""
    new = served.publish("org/sums", files(6), branch="dev")
    main, part, test, other, dev = load(
        tmp_path,
        {"config": "main"},
        {"config": "main", "split": "train[50%:]+test", "limit": 5},
        {"config": "main", "eval_split": "test", "as": "eval"},
        {"config": "socratic"},
        {"config": "main", "revision": "dev"},
        url=served.url,
    )
    assert main["rows"] == [[f"{n}+1", {"answer": str(n + 1)}] for n in range(8)]
    assert main["identity"]["commits"] == {"org/sums@main": served.commit_of("org/sums", "main")}
    assert prompts(part) == ["4+1", "5+1", "6+1", "7+1", "90+1"]
    assert prompts(test) == ["90+1", "91+1"]
    assert prompts(other) == ["50+1"]
    assert prompts(dev) == [f"{n}+1" for n in range(6)]
    assert dev["identity"]["commits"] == {"org/sums@dev": new}


@pytest.mark.slow
def test_a_run_keeps_the_commit_of_its_start(tmp_path: Path, served: Hub) -> None:
    """Rows added on the hub later are no rows of the run, and a resume asks nothing of the network."""
    (first,) = load(tmp_path, {"config": "main"}, url=served.url)
    served.publish("org/sums", files(30))
    asked = len(served.requests)
    (again,) = load(tmp_path, {"config": "main", "before": first["identity"]}, url=served.url)
    assert again == first
    assert len(served.requests) == asked
    # nor without a network at all
    dead = f"http://127.0.0.1:{free_port()}"
    assert load(tmp_path, {"config": "main"}, url=dead) == [first]
    # somebody removes all that the run has made: the ledger has the commit, and the hub the files
    for file in (tmp_path / "prepared").iterdir():
        file.unlink()
    pins = first["identity"]["commits"]
    assert load(tmp_path, {"config": "main", "pins": pins}, url=served.url, home="new") == [first]
    # without the pin it would be another commit, and the ledger refuses it
    for file in (tmp_path / "prepared").iterdir():
        file.unlink()
    (other,) = load(tmp_path, {"config": "main", "before": first["identity"]}, url=served.url)
    assert len(other["rows"]) == 30
    (refused,) = other["refused"]
    assert f"org/sums@main is not the data of this run: commit {pins['org/sums@main']} so far" in refused


@pytest.mark.slow
def test_a_cache_that_was_cleared_is_filled_again(tmp_path: Path, served: Hub) -> None:
    """The files of the commit are downloaded a second time."""
    (first,) = load(tmp_path, {"config": "main"}, url=served.url)
    assert load(tmp_path, {"config": "main"}, url=served.url, home="other") == [first]
    for file in (tmp_path / "home").rglob("*.arrow"):
        file.unlink()
    (tmp_path / "home").rename(tmp_path / "gone")
    assert load(tmp_path, {"config": "main"}, url=served.url, home="third") == [first]


@pytest.mark.slow
def test_failures_of_the_hub_are_told_in_words(tmp_path: Path, served: Hub) -> None:
    """With the key, the name, and the thing to do."""
    served.publish("org/gated", files())
    served.gated.add("org/gated")
    found = load(
        tmp_path,
        {"path": "org/none"},
        {"path": "org/gated", "config": "main"},
        {"revision": "v9"},
        {"revision": "0" * 40, "config": "main"},
        {},
        {"config": "other"},
        {"config": "main", "split": "validation"},
        {"config": "main", "columns": {"prompt": "problem"}},
        {"config": "main", "split": "train[20:]"},
        {"config": "main", "eval_path": "org/none", "as": "eval"},
        url=served.url,
    )
    expected = [
        "environments[].path: org/none: is not on the hub, or is private",
        "org/gated: is gated: ask for access on its page, and set the environment variable HF_TOKEN",
        "environments[].path: org/sums: has no such revision (environments[].revision)",
        "environments[].path: org/sums: has no such revision (environments[].revision)",
        "org/sums: can't be loaded (environments[].config, split): ValueError: Config name is missing",
        "BuilderConfig 'other' not found. Available: ['main', 'socratic']",
        "Unknown split \"validation\". Should be one of ['train', 'test']",
        "row 1: no column 'problem' (columns.prompt); its columns are question, answer",
        "environments[].path: org/sums has no rows",
        "environments[].eval_path: org/none: is not on the hub, or is private",
    ]
    for words, wanted in zip(found, expected, strict=True):
        assert wanted in words


@pytest.mark.slow
def test_a_token_is_read_from_the_environment(tmp_path: Path, served: Hub) -> None:
    """And sent with each request for a gated data set."""
    served.publish("org/gated", files())
    served.gated.add("org/gated")
    (found,) = load(tmp_path, {"path": "org/gated", "config": "main"}, url=served.url, HF_TOKEN="hf_secret")
    assert len(found["rows"]) == 8
    assert served.tokens == {"Bearer hf_secret"}


@pytest.mark.slow
def test_a_hub_that_is_away_is_told_in_words(tmp_path: Path, served: Hub) -> None:
    """Nobody listens, somebody listens and says nothing, or the network is switched off: no wait is without end."""
    dead = f"http://127.0.0.1:{free_port()}"
    assert load(tmp_path, {}, url=dead) == [f"environments[].path: org/sums: the hub ({dead}) can't be reached"]
    served.silent = True
    limits = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    (words,) = load(tmp_path, {}, url=served.url, **limits)
    assert words == f"environments[].path: org/sums: the hub ({served.url}) does not answer in time"
    served.silent = False
    (words,) = load(tmp_path, {}, url=served.url, HF_HUB_OFFLINE="1")
    assert words == "environments[].path: org/sums: is not in the cache, and HF_HUB_OFFLINE is set"


@pytest.mark.slow
def test_columns_of_images_on_the_hub_are_refused(tmp_path: Path, served: Hub) -> None:
    """By the features that the data set declares."""
    readme = (
        b"---\ndataset_info:\n  features:\n  - {name: question, dtype: string}\n  - {name: shot, dtype: image}\n---\n"
    )
    served.publish("org/shots", {"README.md": readme, "train.jsonl": b'{"question": "a", "shot": null}\n'})
    keys = {"columns": {"prompt": "question", "shot": None}}
    refused, found = load(tmp_path, {"path": "org/shots"}, {"path": "org/shots", **keys}, url=served.url)
    assert "has images, audio or files in column shot" in refused
    assert found["rows"] == [["a", {}]]
