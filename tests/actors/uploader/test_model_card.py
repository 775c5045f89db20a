"""The model card: facts of the run, for people and for the hub, and nothing of the machine."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.api.model_files import save_model
from actors.uploader.model_card import MARK, card_of, model_card, write_card
from schemas.config import RunConfig
from schemas.config.resolved import write_resolved
from tests.actors.uploader.runs import done, saved, uploaded
from tests.model_hub import model_hub
from tests.ring.harness import ring_config

METRICS = [
    {"step": 1, "reward_mean": 0.25, "reward/exact_match": 0.1, "completion_tokens_mean": 9.0, "entropy": None},
    {"step": 2, "reward_mean": 0.5, "reward/exact_match": 0.4, "completion_tokens_mean": 8.0, "entropy": None},
    {"step": 3, "reward_mean": 0.99, "reward/exact_match": 0.99, "completion_tokens_mean": 1.0, "entropy": None},
]
EVALUATIONS: list[dict[str, Any]] = [
    {"version": 0, "environments": {"gsm8k": {"mean_reward": 0.1, "exact_match": None}}},
    {"version": 2, "environments": {"gsm8k": {"mean_reward": 0.75, "exact_match": 0.5, "num_prompts": 9}}},
    {"version": 3, "environments": {"gsm8k": {"mean_reward": 1.0}}},
]


def run_of(folder: Path, **sections: Any) -> RunConfig:
    """A run on a data set and a model of the hub, with an adapter, and a judge that has an address and a key."""
    judge = {"path": "llm_judge", "kwargs": {"url": "http://judge.example:8000", "model": "m", "api_key_env": "KEY"}}
    tree: dict[str, Any] = {
        "model": {"path": "owner/base", "lora": {"rank": 4, "alpha": 8}},
        "environments": [{"type": "dataset", "name": "gsm8k", "path": "openai/gsm8k", "config": "main"}],
        "reward": {"functions": [{"path": "exact_match", "weight": 2.0}, judge]},
        "rollout": {"temperature": 0.7}, "eval": {"num_prompts": 0},
        "inference": {"engine": {"type": "embedded", "max_sequence_len": 64}},
    }  # fmt: skip
    return ring_config(folder, **tree | sections)


def header_of(card: str) -> Any:
    """The metadata at the top of a card."""
    start, header, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(header)


def test_a_card_has_the_facts_of_the_run(tmp_path: Path) -> None:
    """Figures of the first step and of the checkpoint's own; the newest evaluation of a version that is not later."""
    card = model_card(run_of(tmp_path), 2, METRICS, EVALUATIONS)
    assert header_of(card) == {
        "library_name": "peft", "pipeline_tag": "text-generation", "base_model": "owner/base",
        "tags": ["reinforcement-learning", "grpo", "grpo-actors"], "datasets": ["openai/gsm8k"],
    }  # fmt: skip
    assert "Adapter (LoRA) of `owner/base` by reinforcement learning, after step 2 of 8, with grpo-actors" in card
    rows = dict(line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ") and len(line) > 5)
    expected = {
        "loss": "dapo", "advantage": "zscore", "rewards (weight)": "exact_match (2), llm_judge (1)",
        "data": "openai/gsm8k", "completions per prompt": "2", "prompts per step": "3", "temperature": "0.7",
        "LoRA rank, alpha": "4, 8", "mean reward": "0.25 at step 1, 0.5 at step 2",
        "reward `exact_match`": "0.1 at step 1, 0.4 at step 2", "gsm8k, mean reward, version 2": "0.75",
        "gsm8k, exact match, version 2": "0.5",
    }  # fmt: skip
    assert {name: rows.get(name) for name in expected} == expected
    assert "0.99" not in card
    assert "entropy" not in rows


def test_a_card_tells_nothing_of_the_machine(tmp_path: Path) -> None:
    """Neither folders nor addresses, also where model and data are local."""
    local = {"model": {"path": str(tmp_path / "secret" / "mine")}, "environments": [
        {"type": "jsonl", "name": "rows", "path": str(tmp_path / "secret" / "rows.jsonl")}
    ]}  # fmt: skip
    for sections in ({}, local):
        card = model_card(run_of(tmp_path, **sections), 2, METRICS, EVALUATIONS)
        assert [word for word in (str(tmp_path), "secret", "judge.example", "KEY") if word in card] == []
    assert header_of(card)["library_name"] == "transformers"
    assert not {"base_model", "datasets"} & header_of(card).keys()
    assert "Model trained from `mine`" in card
    assert "| data | rows |" in card


def test_names_break_neither_tables_nor_metadata(tmp_path: Path) -> None:
    """A path of a data set is any text."""
    name = 'a"b: [x]\n---\n|y'
    source = {"type": "dataset", "name": "d", "path": name}
    card = model_card(run_of(tmp_path, environments=[source]), 1, [], [])
    assert header_of(card)["datasets"] == [name]
    assert '| data | a"b: [x] --- \\|y |' in card
    assert "## Figures" not in card


@pytest.mark.slow
def test_each_push_has_the_card_of_its_checkpoint(tmp_path: Path) -> None:
    """With the figures of the run's files; not if the key says so."""
    with model_hub(tmp_path / "hub") as hub:
        config = done(tmp_path, 2)
        (config.output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
        assert uploaded(config, hub)[0] == 0
        [commit] = hub.commits("org/model")
        assert commit.files["README.md"].decode() == card_of(config, 2)
        assert b"0.25 at step 1, 0.5 at step 2" in commit.files["README.md"]
        silent = done(tmp_path / "other", 2, hub_model_id="org/other", model_card=False)
        assert uploaded(silent, hub)[0] == 0
        assert "README.md" not in hub.commits("org/other")[0].files


@pytest.mark.slow
def test_a_model_is_pushed_without_a_card_that_the_hub_refuses(tmp_path: Path) -> None:
    """The log says so."""
    with model_hub(tmp_path / "hub") as hub:
        hub.refuses_cards = True
        config = done(tmp_path, 2)
        code, log = uploaded(config, hub)
        assert code == 0
        assert sorted(hub.commits("org/model")[0].files) == ["config.json", "model.safetensors"]
        assert "the hub refuses the model card; pushed without it" in log
        assert "base_model is refused" in log


@pytest.mark.parametrize("own", [False, True])
def test_save_model_writes_a_card_and_keeps_one_of_the_users_own(tmp_path: Path, own: bool) -> None:
    """A card of ours is replaced by the newer one."""
    config = run_of(tmp_path)
    saved(config.output, 1)
    write_resolved(config)
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "README.md").write_text("mine" if own else f"{MARK} old")
    assert save_model(config.output, folder) == 1
    assert (folder / "README.md").read_text() == ("mine" if own else card_of(config, 1))
    write_card(config, 2, folder)
    assert ("after step 2" in (folder / "README.md").read_text()) is not own
