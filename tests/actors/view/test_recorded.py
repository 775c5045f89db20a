"""A group's life and a step's packing out of the ledger."""

from actors.ledger import LedgerReader
from actors.view import recorded
from actors.view.recorded import counts_of, life_of, packing_of
from tests.actors.view.conftest import Make


def test_a_life_has_an_event_for_each_state_that_was_reached(make: Make) -> None:
    """Issued, sampled, settled, composed, trained, durable; dropped ones end with the reason and the witness's step."""
    run = make()
    run.add_step(dropped=1)
    run.add_step()
    run.save(1)
    issued = run.add_issued(failures=2)
    ledger = LedgerReader.of(run.config.ledger_path)
    whole = life_of(ledger, 1, run.config)
    assert [event["what"] for event in whole["events"]] == [
        "issued", "sampled", "settled", "composed", "trained", "durable",
    ]  # fmt: skip
    assert whole["events"][3]["step"] == 1
    assert whole["events"][5]["words"] == "in the checkpoint step_1"
    assert whole["lag"] == 0
    assert whole["digest"] == ledger.steps()[0].digests[0]
    assert [event["what"] for event in life_of(ledger, 4, run.config)["events"]][-1] == "trained"
    dropped = life_of(ledger, 0, run.config)
    assert dropped["events"][-1] == {"what": "dropped", "words": "stale; the witness of step 1 has it"}
    under_way = life_of(ledger, issued, run.config)
    assert [event["what"] for event in under_way["events"]] == ["issued", "sampled", "held"]
    assert "3 attempts, 2 failed" in under_way["events"][1]["words"]
    ledger.close()


def test_replaced_groups_name_each_other(make: Make) -> None:
    """The dropped group and the group in its place."""
    run = make()
    run.add_step(dropped=1)
    run.store.database.execute("UPDATE groups SET origin = 0 WHERE ordinal = 2")
    ledger = LedgerReader.of(run.config.ledger_path)
    assert life_of(ledger, 0, run.config)["events"][-1] == {
        "what": "replaced by",
        "words": "another group",
        "ordinal": 2,
    }
    assert {event.get("ordinal") for event in life_of(ledger, 2, run.config)["events"]} == {None, 0}
    ledger.close()


def test_a_life_that_is_compacted_or_never_was_is_said_to_be_so(make: Make) -> None:
    """In words, without events."""
    run = make(3)
    run.compact(2)
    ledger = LedgerReader.of(run.config.ledger_path)
    assert "is compacted" in life_of(ledger, 0, run.config)["words"]
    assert "no group with this number" in life_of(ledger, 500, run.config)["words"]
    assert life_of(None, 0, run.config)["events"] == []
    ledger.close()


def test_the_packing_has_every_token_of_the_step_once(make: Make) -> None:
    """Rows within their length, completions by group, tokens and loss as the groups have them; on several ranks."""
    for ranks, name in ((1, "one"), (2, "two")):
        run = make(name=name, trainer={"max_steps": 40, "num_ranks": ranks}, packer={"groups_per_step": 6})
        messages = run.add_step()
        ledger = LedgerReader.of(run.config.ledger_path)
        found = packing_of(ledger, 1, run.config)
        assert len(found["ranks"]) == ranks
        samples = [one for rank in found["ranks"] for row in rank["rows"] for one in row["samples"]]
        expected = {
            (group.ordinal, g): (int(group.num_tokens_G[g]), int(group.lengths_G[g]))
            for group in messages
            for g in range(group.num_completions)
        }
        assert {(s["ordinal"], s["completion"]): (s["tokens"], s["loss_tokens"]) for s in samples} == expected
        assert len(samples) == len(expected)
        for rank in found["ranks"]:
            for row in rank["rows"]:
                assert row["used"] == sum(one["prompt"] + one["tokens"] for one in row["samples"])
                assert row["used"] + row["free"] == 512
            assert rank["tokens"] == sum(row["used"] for row in rank["rows"])
        for one in samples:
            prompt = next(len(group.prompt_ids) for group in messages if group.ordinal == one["ordinal"])
            assert one["prompt"] + one["shared"] == prompt
        ledger.close()


def test_a_step_that_is_gone_or_too_large_is_said_to_be_so(make: Make, monkeypatch) -> None:
    """Its groups and drops stay known while the ledger has the step."""
    run = make()
    run.add_step(dropped=2)
    run.add_step()
    ledger = LedgerReader.of(run.config.ledger_path)
    assert "no groups of this step" in packing_of(ledger, 9, run.config)["words"]
    monkeypatch.setattr(recorded, "PICTURE_BYTES", 10)
    large = packing_of(ledger, 1, run.config)
    assert "MiB" in large["words"]
    assert (large["ordinals"], large["dropped"]) == ([2, 3, 4], [[0, "stale"], [1, "stale"]])
    ledger.close()


def test_counts_are_those_of_the_ledger(make: Make) -> None:
    """Compacted groups included; none without a ledger."""
    run = make(3)
    run.compact(1)
    assert counts_of(run.config) == {("train", "durable", None): 3, ("train", "trained", None): 6}
    run.close()
    run.config.ledger_path.unlink()
    assert counts_of(run.config) == {}
