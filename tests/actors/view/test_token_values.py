"""The trainer's values on a page of tokens: each against its formula, at its token, or words that name the key."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.algorithms.losses import LOSSES, compute_loss
from actors.algorithms.losses.inputs import LossInputs
from actors.telemetry.token_files import name_of
from actors.view.formulas import FORMULAS, RULES, formula_of
from actors.view.viewed_run import ViewedRun
from schemas.config import RunConfig
from schemas.config.objective import ObjectiveConfig
from tests.actors.view.conftest import Make
from tests.actors.view.runs import MadeRun, record_values, trainers_logprobs

LOSSES_PAGE = Path(__file__).parents[3] / "docs/reference/losses.md"
SUROGATE = {"loss": {"type": "surogate", "kl_tau": 0.1}, "max_steps": 40}


def recording(config: RunConfig, groups: int) -> RunConfig:
    """The configuration with another `telemetry.token_details`."""
    return config.model_copy(update={"telemetry": config.telemetry.model_copy(update={"token_details": groups})})


def shown(run: MadeRun, tmp_path: Path, groups: int) -> ViewedRun:
    """The run as the viewer has it."""
    return ViewedRun(recording(run.config, groups), tmp_path / "cache")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_values_of_each_token_are_those_of_its_loss(make: Make, tmp_path: Path, ranks: int, groups: int) -> None:
    """Of every completion of the recorded groups, on every rank; what is outside the loss has no values."""
    run = make(trainer={**SUROGATE, "num_ranks": ranks}, packer={"groups_per_step": 4, "sequence_len": 160})
    run.add_step()
    messages = run.add_step()
    record_values(run.config, messages, 2, groups)
    loss_tokens = sum(int(group.loss_mask.sum()) for group in messages)
    viewed = shown(run, tmp_path, groups)
    num_ruled = 0
    for group in messages[:groups]:
        for sample in range(group.num_completions):
            rows = viewed.tokens(group.ordinal, sample, 0, 1000)
            own = slice(*group.sample_offsets[sample : sample + 2])
            trainers = trainers_logprobs(group.token_ids[own], group.logprobs[own])
            assert (rows["trainer"]["words"], rows["trainer"]["loss_tokens"]) == ("", f"[{loss_tokens}]")
            assert rows["trainer"]["keys"]["kl_tau"] == 0.1
            for t, mask in enumerate(rows["mask"]):
                if not mask:
                    assert {rows[name][t] for name in ("trainer_logprob", "ratio", "entropy", "loss", "value")} == {
                        None
                    }
                    assert rows["rules"][t] == []
                    continue
                log_ratio = float(trainers[t]) - rows["logprob"][t]
                assert rows["trainer_logprob"][t] == pytest.approx(float(trainers[t]), abs=1e-6)
                assert rows["entropy"][t] == pytest.approx(-2 * float(trainers[t]), abs=1e-6)
                assert rows["ratio"][t] == pytest.approx(np.exp(log_ratio), rel=1e-5)
                assert rows["trainer_advantage"][t] == rows["advantage"][t]
                value = -np.exp(log_ratio) * (rows["advantage"][t] - 0.1 * log_ratio) * float(trainers[t])
                is_masked = bool(rows["rules"][t])
                assert rows["value"][t] == pytest.approx(0.0 if is_masked else value, abs=1e-5)
                assert rows["loss"][t] == pytest.approx(rows["value"][t] / loss_tokens, abs=1e-7)
                assert ("low" in rows["rules"][t]) is bool(np.exp(log_ratio) < 0.125)
                num_ruled += is_masked
    assert num_ruled
    viewed.close()


def test_pages_of_values_join_to_the_whole(make: Make, tmp_path: Path) -> None:
    """Pages of five tokens have the values of a page of all."""
    run = make()
    record_values(run.config, run.add_step(), 1, 1)
    viewed = shown(run, tmp_path, 1)
    whole = viewed.tokens(0, 3, 0, 1000)
    parts = [viewed.tokens(0, 3, start, 5) for start in range(0, whole["total"], 5)]
    for name in ("trainer_logprob", "ratio", "value", "loss", "entropy", "rules"):
        assert [one for part in parts for one in part[name]] == whole[name], name
        assert len(whole[name]) == whole["total"]
    assert viewed.tokens(0, 3, 10_000, 5)["loss"] == []
    viewed.close()


def test_without_a_record_the_words_name_the_key(make: Make, tmp_path: Path) -> None:
    """Where the key is 0 or too small, and where the step has no file; the columns of the engine are there."""
    run = make(1)
    for groups, ordinal, words in (
        (0, 0, "Set telemetry.token_details: 1"),
        (2, 0, "no record of step 1 in tokens/"),
    ):
        rows = shown(run, tmp_path, groups).tokens(ordinal, 0, 0, 10)
        assert words in rows["trainer"]["words"]
        assert "trainer_logprob" not in rows
        assert rows["logprob"]
    record_values(run.config, run.add_step(), 2, 1)
    assert shown(run, tmp_path, 1).tokens(3, 0, 0, 10)["trainer"]["words"] == ""
    # a record is shown whatever the key is now
    assert shown(run, tmp_path, 0).tokens(3, 0, 0, 10)["trainer"]["words"] == ""
    second = shown(run, tmp_path, 1).tokens(4, 0, 0, 10)["trainer"]["words"]
    assert "this group is number 2 of step 2. Set telemetry.token_details to 2 or more" in second


def test_groups_without_values_of_the_trainer_are_said_to_have_none(make: Make, tmp_path: Path) -> None:
    """An evaluation, a group without a step, and completions that packing has left out."""
    run = make(packer={"groups_per_step": 3, "sequence_len": 512, "filter_zero_advantages": True})
    run.add_evaluation(0)
    messages = run.add_step()
    flat = messages[0].model_copy(update={"advantages_G": np.zeros(4, np.float32)})
    record_values(run.config, [flat, *messages[1:]], 1, 3)
    run.store.database.execute("UPDATE groups SET step = NULL, state = 'settled' WHERE ordinal = 2")
    viewed = shown(run, tmp_path, 3)
    assert "packer.filter_zero_advantages" in viewed.tokens(0, 0, 0, 10)["trainer"]["words"]
    assert viewed.tokens(1, 0, 0, 10)["trainer"]["words"] == ""
    assert "No step has this group yet" in viewed.tokens(2, 0, 0, 10)["trainer"]["words"]
    viewed.close()


def test_a_record_of_other_tokens_or_a_damaged_one_is_not_taken_for_the_group_s(make: Make, tmp_path: Path) -> None:
    """As after a rewind, before the step is trained again."""
    run = make()
    messages = run.add_step()
    other = messages[0].model_copy(update={"token_ids": messages[0].token_ids[::-1].copy()})
    record_values(run.config, [other, *messages[1:]], 1, 3)
    viewed = shown(run, tmp_path, 3)
    assert "does not have these tokens" in viewed.tokens(0, 0, 0, 10)["trainer"]["words"]
    assert viewed.tokens(1, 0, 0, 10)["trainer"]["words"] == ""
    (run.config.output / "tokens" / name_of(1, 0)).write_bytes(b"no such format")
    assert "can't be read" in viewed.tokens(1, 0, 0, 10)["trainer"]["words"]
    viewed.close()


def test_each_formula_is_that_of_the_page_of_losses() -> None:
    """Letter by letter, for every loss but a custom one."""
    table = LOSSES_PAGE.read_text().split("## Policy losses")[1].split("The trust region of")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    assert {name: formula for name, formula in rows.items() if name not in ("type", "custom")} == FORMULAS
    assert formula_of("dapo") == "as grpo, where grpo is −min(ρA, clip(ρ)·A)"
    assert formula_of("custom") == ""


@pytest.mark.parametrize("config", sorted(LOSSES, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_each_rule_of_a_loss_has_words(config: Any) -> None:
    """And a formula."""
    logprobs_BT = -torch.ones(2, 3)
    further = {f"{name}_logprobs_BT": logprobs_BT for name in ("old", "teacher", "reference")}
    inputs = LossInputs.of_padded(
        logprobs_BT, logprobs_BT, [1.0, -1.0], torch.ones(2, 3), max_completion_length=3, entropy_BT=-logprobs_BT,
        versions_BT=torch.zeros(2, 3), version=1, **further,
    )  # fmt: skip
    objective = ObjectiveConfig(loss=config(), top_entropy_quantile=0.5)
    tokens = compute_loss(inputs, objective).tokens
    assert tokens is not None
    assert set(tokens.rules) <= RULES.keys()
    assert FORMULAS[config().type]
