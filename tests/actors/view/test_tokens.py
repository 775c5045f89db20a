"""Tokens: each column against the message by hand, texts that join to the completion, advantages of steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.algorithms.advantages import with_step_advantages
from actors.ledger import LedgerReader
from actors.view.recorded import tokens_of
from actors.view.tokens import decoder, pieces, samples_of, token_rows
from schemas.errors import ConfigError
from tests.actors.learner.steps import branched_group
from tests.actors.view.conftest import Make
from tests.actors.view.runs import MadeRun, message, shop, sums, tokenizer

TEXTS = ["", "plain words", "日本語 🎉🏳️‍🌈 ñ", "line\nline\ttab", "\u202eright to left", "x" * 300]


def decode(ids: Any) -> str:
    """Tokens to text."""
    return str(tokenizer().decode(list(ids), skip_special_tokens=False))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("before", ["", "some words before "])
def test_pieces_join_to_the_text(text: str, before: str) -> None:
    """Also where a character is spread over several tokens; each token has a piece."""
    ids, context = tokenizer().encode(text).ids, tokenizer().encode(before).ids
    found = pieces(ids, decode, context)
    assert len(found) == len(ids)
    assert "".join(found) == text
    assert pieces(ids, None) == [f"‹{token}›" for token in ids]


@pytest.mark.parametrize("make_group", [sums, shop])
@pytest.mark.parametrize("size", [1, 4, 32])
def test_each_column_is_the_message_s(make: Make, make_group: Any, size: int) -> None:
    """Of every completion, token by token."""
    group = message(5, make_group(5, 3, size), 3)
    config = make().config
    for completion in range(size):
        ((sample),) = samples_of(group, completion)
        rows = token_rows(group, sample["sample"], config, decode)
        first, end = group.sample_offsets[completion : completion + 2]
        assert rows["id"] == group.token_ids[first:end].tolist()
        assert rows["logprob"] == group.logprobs[first:end].tolist()
        assert rows["mask"] == rows["in_loss"] == group.loss_mask[first:end].tolist()
        assert rows["advantage"] == [float(group.advantages_G[completion])] * (end - first)
        for n, place in enumerate(range(first, end)):
            segment = group.segments[np.searchsorted(group.segments[:, 0], place, side="right") - 1].tolist()
            assert [rows[name][n] for name in ("lineage", "version", "origin", "turn")] == segment[1:]
        assert "".join(rows["text"]) == decode(rows["id"])
        assert rows["prompt"] == decode(group.prompt_ids)


def test_pages_of_tokens_join_to_the_whole(make: Make) -> None:
    """Pages of five tokens have the same columns and texts as one of all; the prompt is on the first."""
    group = message(1, sums(1, 3, 4), 3)
    config = make().config
    whole = token_rows(group, 3, config, decode)
    parts = [token_rows(group, 3, config, decode, start, 5) for start in range(0, whole["total"], 5)]
    for name in ("id", "text", "mask", "logprob", "advantage", "version", "origin", "turn", "temperature"):
        assert [value for part in parts for value in part[name]] == whole[name], name
    assert [part["prompt"] for part in parts] == [whole["prompt"]] + [""] * (len(parts) - 1)
    assert token_rows(group, 3, config, decode, 10_000)["id"] == []


def test_tokens_of_advantage_0_that_packing_takes_out_are_said_to_be_out(make: Make) -> None:
    """`packer.filter_zero_advantages`."""
    group = message(1, sums(1, 3, 2), 3)
    group = group.model_copy(update={"advantages_G": np.array([0.0, 1.0], np.float32)})
    config = make(packer={"filter_zero_advantages": True}).config
    assert set(token_rows(group, 0, config, None)["in_loss"]) == {0}
    assert set(token_rows(group, 0, config, None)["mask"]) == {1}
    assert set(token_rows(group, 1, config, None)["in_loss"]) == {1}


def test_branches_are_samples_of_their_completion(make: Make) -> None:
    """Each has its own tokens; together they are all of the group."""
    group = branched_group(3)
    config = make().config
    found = [sample for completion in range(group.num_completions) for sample in samples_of(group, completion)]
    assert [one["sample"] for one in found] == list(range(len(group.sample_prompts)))
    assert len(samples_of(group, 0)) > 1
    rows = [token_rows(group, one["sample"], config, None) for one in found]
    assert [token for part in rows for token in part["id"]] == group.token_ids.tolist()
    with pytest.raises(ConfigError, match="sample 99: the group has"):
        token_rows(group, 99, config, None)


def test_the_tokenizer_is_that_of_the_model_or_of_a_checkpoint_or_is_said_to_be_missing(make: Make) -> None:
    """In this order; nothing is downloaded."""
    config = make().config
    model = config.output / "model"
    found, reason = decoder(config)
    assert found is not None
    assert (found(tokenizer().encode("word").ids), reason) == ("word", "")
    saved = config.output / "checkpoints" / "step_5"
    saved.mkdir(parents=True)
    (model / "tokenizer.json").rename(saved / "tokenizer.json")
    found, reason = decoder(config)
    assert found is not None
    (saved / "tokenizer.json").write_text("no tokenizer")
    # another path, since a tokenizer that was read is kept
    (saved / "tokenizer.json").rename(model / "tokenizer.json")
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model) + "/."})})
    assert "can't be read" in decoder(other)[1] or decoder(other)[0] is not None
    (model / "tokenizer.json").unlink()
    found, reason = decoder(config)
    assert found is None
    assert "shown by their numbers" in reason


def test_advantages_over_a_step_are_computed_again(make: Make) -> None:
    """With an advantage over the step the payload has provisional ones; the tokens have those that the packer gave."""
    run: MadeRun = make(reward={"advantage": {"type": "batch_std"}})
    messages = run.add_step()
    ledger = LedgerReader.of(run.config.ledger_path)
    given = with_step_advantages(messages, run.config.reward)
    for message_, right in zip(messages, given, strict=True):
        group, words = tokens_of(ledger, message_.ordinal, run.config)
        assert group is not None
        assert words == ""
        assert group.advantages_G.tolist() == right.advantages_G.tolist()
    assert given[0].advantages_G.tolist() != messages[0].advantages_G.tolist()
    one = run.config.reward.model_copy(update={"functions": run.config.reward.functions[:1]})
    group, words = tokens_of(ledger, 0, run.config.model_copy(update={"reward": one}))
    assert "provisional" in words  # the configuration is of a later start, with other functions
    ledger.close()


def test_tokens_that_are_gone_are_said_to_be_gone(make: Make, tmp_path: Path) -> None:
    """Of a compacted group, and of a run without a ledger."""
    run = make(2)
    run.compact(1)
    run.store.database.execute("DELETE FROM payloads WHERE ordinal < 3")
    ledger = LedgerReader.of(run.config.ledger_path)
    group, words = tokens_of(ledger, 0, run.config)
    assert group is None
    assert "its step is compacted" in words
    assert "ledger.keep_steps" in words
    assert "not there" in tokens_of(None, 0, run.config)[1]
    ledger.close()
