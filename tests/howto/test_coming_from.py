"""The pages that walk from another system to a run: both configurations are read, and the tables are held to them."""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import BaseModel

from actors.cli import main
from actors.datasets.jsonl import Jsonl
from actors.ops.preflight import preflight
from actors.reward.functions import load_rewards
from schemas.config import RunConfig, check_tree, load_config, warnings
from schemas.messages import single_turn
from tests.actors.reward.test_loop import group as sampled_group
from tests.howto.origins import NUM_ROWS, trees_of, with_recorders
from tests.howto.pages import CODE, Page, Table, check_key, page, printed_by, value_at

WALKS = ("trl", "prime-rl", "surogate", "areal", "ms-swift")
GSM8K_ROWS = 7473
"""Rows of the train split on the hub."""


@dataclass(frozen=True)
class Walk:
    """A page followed to its end: the configurations at both ends."""

    page: Page
    trees: dict[str, Any]
    """Configurations of the other system, by the first cell of the head of their table."""
    config: RunConfig
    written: RunConfig
    """The same with paths as the page has them."""

    @property
    def tables_of_keys(self) -> list[tuple[Table, Any]]:
        """Tables of their keys and ours, each with their configuration."""
        return [(table, self.trees[table.head[0]]) for table in self.page.tables if table.head[1:] == ["Here", "How"]]

    @property
    def table_of_defaults(self) -> Table:
        """Table of defaults that differ."""
        (table,) = [table for table in self.page.tables if table.head[0] == "Key here"]
        return table


@pytest.fixture(params=WALKS)
def walk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """What a reader of one of the pages has at its end."""
    found = page(request.param)
    monkeypatch.chdir(tmp_path)
    with_recorders(monkeypatch)
    found.write_files(tmp_path)
    printed_by(found.block("export.py"), {})
    written = check_tree(yaml.safe_load(found.block("run.yaml")))
    return Walk(found, trees_of(found.name, monkeypatch), load_config(tmp_path / "run.yaml"), written)


def test_the_run_passes_the_checks_without_a_warning(walk: Walk) -> None:
    """All but packages that are not installed here."""
    assert warnings(walk.config) == []
    assert [note for note in preflight(walk.config, starts=False) if "is not installed here" not in note] == []


def test_every_block_of_python_runs(walk: Walk) -> None:
    """The script of the other system too, with recorders in the place of its packages."""
    for block in walk.page.blocks:
        if block.language == "python":
            printed_by(block.text, {})


def same(theirs: Any, ours: Any) -> bool:
    """Return whether two values mean the same: `1e-5` is 0.00001, and a list of one item is the item."""
    if isinstance(ours, list) and len(ours) == 1 and not isinstance(theirs, list):
        ours = ours[0]
    if isinstance(ours, BaseModel):
        ours = ours.model_dump()
    if isinstance(theirs, dict):
        return all(same(value, ours[name]) for name, value in theirs.items())
    if isinstance(theirs, list):
        return len(theirs) == len(ours) and all(map(same, theirs, ours))
    try:
        return math.isclose(float(theirs), float(ours))
    except (TypeError, ValueError):
        return bool(theirs == ours)


def test_keys_that_are_exact_have_the_same_value_at_both_ends(walk: Walk) -> None:
    """The row says which key here, the two files say the values."""
    compared = 0
    for table, tree in walk.tables_of_keys:
        for theirs, here, how in table.rows:
            if how.startswith("exact"):
                (name,), (key, *_) = CODE.findall(theirs), CODE.findall(here)
                assert same(value_at(tree, name), value_at(walk.written, key)), (name, key)
                compared += 1
    assert compared >= 5


def leaves(tree: Any, path: str = "") -> set[str]:
    """The dotted paths of all values of a tree; items of a list of maps have the path of the list."""
    if isinstance(tree, dict) and tree:
        return {leaf for name, value in tree.items() for leaf in leaves(value, f"{path}.{name}" if path else name)}
    if isinstance(tree, list) and tree and all(isinstance(item, dict) for item in tree):
        return {leaf for item in tree for leaf in leaves(item, path)}
    return {path}


def test_every_key_of_the_other_configuration_has_a_row(walk: Walk) -> None:
    """A row of a section stands for the keys in it."""
    for table, tree in walk.tables_of_keys:
        named = [name.replace("[]", "") for theirs, _, _ in table.rows for name in CODE.findall(theirs)]
        missing = {leaf for leaf in leaves(tree) if not any(f"{leaf}.".startswith(f"{name}.") for name in named)}
        assert missing <= {"rlhf_type", "model"}  # the latter stands in each of Surogate's files


def test_every_row_names_a_key_that_exists_or_says_why_there_is_none(walk: Walk) -> None:
    """`none` comes with a reason."""
    for table, _ in walk.tables_of_keys:
        for theirs, here, how in table.rows:
            if here == "none":
                assert how.startswith("no counterpart"), theirs
                assert " because " in how, theirs
            else:
                assert how.startswith(("exact", "converted", "no counterpart")), theirs
                for key in CODE.findall(here):
                    check_key(key)


BARE: dict[str, Any] = {
    "model": {"path": "m"}, "environments": [{"type": "jsonl", "path": "rows.jsonl"}],
    "reward": {"functions": [{"path": "exact_match"}]}, "trainer": {"max_steps": 1},
}  # fmt: skip


def with_value(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a tree with one more value."""
    name, _, rest = key.partition(".")
    return tree | {name: with_value(dict(tree.get(name) or {}), rest, value) if rest else value}


def test_the_table_of_defaults_tells_the_defaults(walk: Walk) -> None:
    """The middle column is what a file without the key has; the last column is another value, which the file takes."""
    file = yaml.safe_load(walk.page.block("run.yaml"))
    for cell, here, there in walk.table_of_defaults.rows:
        (key,) = CODE.findall(cell)
        tree = with_value(BARE, "inference.engine.type", "vllm") if "engine." in key and "type" not in key else BARE
        default = yaml.safe_load(CODE.findall(here)[0])
        assert same(default, value_at(check_tree(tree), key)), key
        for value in map(yaml.safe_load, CODE.findall(there)[:1]):
            loaded = value_at(check_tree(with_value(file, key, value)), key)
            assert same(value, loaded), key
            assert not same(default, loaded), key


@pytest.mark.parametrize("walk", ["trl", "prime-rl"], indirect=True)
def test_the_file_sets_the_other_systems_defaults(walk: Walk) -> None:
    """As the line over the table says."""
    for key, _, there in walk.table_of_defaults.rows:
        value = yaml.safe_load(CODE.findall(there)[0])
        assert same(value, value_at(walk.config, CODE.findall(key)[0])), key


def test_the_command_of_the_page_writes_a_run_that_loads(walk: Walk, capsys: pytest.CaptureFixture[str]) -> None:
    """Of AReaL's with the one value that the page says is asked for."""
    commands = [line for block in walk.page.blocks if block.language == "sh" for line in block.text.splitlines()
                if line.startswith("actors import ")]  # fmt: skip
    assert commands
    for command in commands:
        words, redirection, target = command.partition(" > ")
        assert (redirection, target) == (" > ", "run.yaml")
        capsys.readouterr()
        assert main(shlex.split(words)[1:]) == 0
        tree = yaml.safe_load(capsys.readouterr().out)
        if walk.page.name == "areal":
            assert tree["environments"][0]["eval_path"].startswith("MISSING")
            tree["environments"][0]["eval_path"] = "test.jsonl"
        imported = check_tree(tree)
        assert imported.model.path == walk.written.model.path
        assert imported.rollout.group_size == walk.written.rollout.group_size
        assert imported.trainer.max_steps == walk.written.trainer.max_steps


# --- conversions: their values, by the formula of the row, are ours --------------------------------------------------


def trl(tree: dict[str, Any]) -> dict[str, Any]:
    """One process; 64 completions of a generation in two updates."""
    generation = tree["per_device_train_batch_size"] * tree["steps_per_generation"]
    updates = tree["steps_per_generation"] // tree["gradient_accumulation_steps"]
    assert generation % tree["num_generations"] == 0
    return {
        "packer.groups_per_step": generation // tree["num_generations"],
        "trainer.num_minibatches": updates,
        "trainer.max_steps": tree["max_steps"] / updates,
        "trainer.checkpoint.interval": tree["save_steps"] / updates,
        "inference.engine.type": "vllm" if tree["use_vllm"] else "embedded",
        "environments[].prompt_column": "question",
        "environments[].system_prompt": tree["train_dataset"][0]["prompt"][0]["content"],
        "eval.num_prompts": 0,
    }


def prime(tree: dict[str, Any]) -> dict[str, Any]:
    """128 rollouts in groups of 16."""
    assert tree["ckpt"] == {}
    orchestrator = tree["orchestrator"]
    return {
        "packer.groups_per_step": orchestrator["batch_size"] // orchestrator["group_size"],
        "trainer.checkpoint.interval_share": 1.0,
        "packer.max_async_level": 1,
        "packer.max_off_policy_steps": 8,
    }


def surogate(train: dict[str, Any], orch: dict[str, Any]) -> dict[str, Any]:
    """As prime-rl's."""
    assert train["max_steps"] == orch["max_steps"]
    assert train["sequence_len"] == orch["sequence_len"]
    return {
        "packer.groups_per_step": orch["batch_size"] // orch["rollouts_per_example"],
        "model.dtype": {"bf16": "bfloat16"}[train["recipe"]],
        "trainer.loss.type": "surogate",
    }


def areal(tree: dict[str, Any]) -> dict[str, Any]:
    """Epochs of whole batches."""
    steps_per_epoch = GSM8K_ROWS // tree["train_dataset"]["batch_size"]
    steps, optimizer = tree["total_train_epochs"] * steps_per_epoch, tree["actor"]["optimizer"]
    assert tree["rollout"]["backend"].startswith("vllm:d4")
    assert tree["actor"]["backend"].startswith("fsdp:d4")
    return {
        "name": f"{tree['experiment_name']}-{tree['trial_name']}",
        "trainer.max_steps": steps,
        "trainer.warmup_steps": int(optimizer["warmup_steps_proportion"] * steps),
        "trainer.checkpoint.interval": tree["saver"]["freq_epochs"] * steps_per_epoch,
        "eval.every_steps": tree["evaluator"]["freq_epochs"] * steps_per_epoch,
        "eval.completions_per_prompt": tree["gconfig"]["n_samples"],
        "eval.temperature": tree["gconfig"]["temperature"],
        "up.inference": 4,
        "trainer.num_ranks": 4,
        "trainer.sharding": "fsdp",
        "trainer.loss.type": "decoupled" if tree["actor"]["use_decoupled_loss"] else "dapo",
        "trainer.reference": None if tree["actor"]["kl_ctl"] == 0 else "present",
        "reward.advantage": {"type": "zscore", "std": "unbiased", "eps": 1e-5},
    }


def swift(tree: dict[str, Any]) -> dict[str, Any]:
    """64 completions of a generation, in one update."""
    processes, accumulation = int(tree["NPROC_PER_NODE"]), int(tree["gradient_accumulation_steps"])
    generation = int(tree["per_device_train_batch_size"]) * processes * accumulation
    steps = int(tree["num_train_epochs"]) * (GSM8K_ROWS * int(tree["num_generations"]) // generation)
    return {
        "packer.groups_per_step": generation // int(tree["num_generations"]),
        "trainer.num_minibatches": 1,
        "trainer.max_steps": steps,
        "reward.advantage.type": {"none": "mean"}[tree["scale_rewards"]],
        "trainer.sharding": {"zero2": "fsdp"}[tree["deepspeed"]],
        "model.lora": {"full": None}[tree["tuner_type"]],
    }


CONVERSIONS: dict[str, Any] = {
    "trl": lambda trees: trl(trees["TRL"]),
    "prime-rl": lambda trees: prime(trees["prime-rl"]),
    "surogate": lambda trees: surogate(trees["train.yaml"], trees["orch.yaml"]),
    "areal": lambda trees: areal(trees["AReaL"]),
    "ms-swift": lambda trees: swift(trees["ms-swift"]),
}


def test_keys_that_are_converted_have_the_converted_value(walk: Walk) -> None:
    """Batches, steps, epochs, warm-up, intervals."""
    for key, value in CONVERSIONS[walk.page.name](walk.trees).items():
        assert same(value, value_at(walk.config, key)), key


# --- rewards ---------------------------------------------------------------------------------------------------------

TOY: dict[str, dict[str, list[float]]] = {
    "trl": {"so #### 6": [1, 1], "#### 7": [0, 1], "six": [0, 0]},
    "prime-rl": {"<reversed_text>3 cba</reversed_text>": [1], "3 cba": [0], "<reversed_text></reversed_text>": [0]},
    "surogate": {"<reversed_text>3 cba</reversed_text>": [1], "3 cba": [0], "<reversed_text></reversed_text>": [0]},
    "areal": {r"\boxed{5} or \boxed{6}": [1], r"\boxed{7}": [0], "6": [0]},
    "ms-swift": {r"\boxed{6}": [1, 1], r"\boxed{7}": [0, 1], "6": [0, 0]},
}
"""Values of a page's reward functions, by completion, for row 3: 3 + 3, or `abc 3`."""


def test_the_rewards_score_a_group_of_the_data(walk: Walk) -> None:
    """As the reward actor calls them: on the row's columns, with chat completions."""
    (environment,) = walk.config.environments
    rows, said = Jsonl(environment, "train"), TOY[walk.page.name]
    assert rows.num_examples == NUM_ROWS
    example, offsets = rows.example(3), np.arange(len(said) + 1)
    group = sampled_group().model_copy(
        update={
            "prompt": example.prompt, "columns": example.columns, "completions": list(said),
            "token_ids": offsets[:-1].astype(np.int32),
            **single_turn(np.array([1], np.int32), offsets, np.array([[0, 1, 0]])),
        }
    )  # fmt: skip
    functions = load_rewards(walk.config.reward.functions)
    values = [one.check(one.function(**one.arguments(group)), group) for one in functions]
    assert [list(scores) for scores in zip(*values, strict=True)] == list(said.values())
    assert isinstance(example.prompt, list)  # so completions are lists of messages, as the pages say
