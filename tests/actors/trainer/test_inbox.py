"""The trainer's reader of batches; the loop itself is tested in the whole ring (tests/ring)."""

import numpy as np
import pytest

from actors.trainer.inbox import BatchInbox
from bus.data import Inbox, Outbox
from bus.parts import messages_of
from bus.topology import Addresses
from schemas import limits
from schemas.messages import StepBatch, drop_fields
from tests.ring.harness import PATIENCE_SECONDS, ring_config, wait_until


def batch(step: int, incarnation: int = 1, rank: int = 0, run: str = "r", term: int = 1) -> StepBatch:
    """One sample of one prompt and one completion token."""
    int64 = lambda *values: np.array(values, np.int64)  # noqa: E731 - short rows
    return StepBatch(
        run=run, term=term, incarnation=incarnation, rank=rank, num_ranks=1, step=step,
        minibatch_offsets=int64(0, 1), loss_tokens=int64(1), num_completions=int64(1), **drop_fields([]), digests=["d"],
        ordinals=int64(step), micro_batch_offsets=int64(0, 1), sample_offsets=int64(0, 2),
        prompt_lengths=int64(1), sample_ordinals=int64(step), completions=int64(0), rewards=np.ones(1),
        sample_shared=int64(0), sample_shares=np.ones(1, np.float32),
        rl_weights=np.ones(1, np.float32), ref_kl_weights=np.zeros(1, np.float32), ref_kl_tokens=int64(0),
        token_ids=np.array([1, 2], np.int32), loss_mask=np.array([0, 1], np.uint8),
        logprobs=np.array([0, -1], np.float32), advantages=np.array([0, 1], np.float32),
        temperatures=np.ones(2, np.float32), versions=np.zeros(2, np.int32),
    )  # fmt: skip


@pytest.fixture
def edge(tmp_path):
    """A reader of incarnation 1, a sender, and what the reader has said of arrivals."""
    config = ring_config(tmp_path, "inproc")
    inbox = Inbox("steps", Addresses(config), config.bus, "trainer-0", "0123456789abcdef")
    said: list[list[int]] = []
    batches = BatchInbox(inbox, 0, said.append)
    batches.accept("r", 1)
    batches.follow("r", 1)
    batches.start()
    outbox = Outbox("steps", inbox.address, config.bus, "packer")
    yield batches, outbox, said
    outbox.close()
    batches.close()


def test_batches_of_another_incarnation_or_rank_are_not_taken(edge):
    """Of three batches for step 1 only that of incarnation 1 and rank 0 counts; arrivals are said at once."""
    batches, outbox, said = edge
    for message in (batch(1, incarnation=2), batch(1, rank=1), batch(1)):
        assert outbox.try_send(message)
    taken = batches.take(1, PATIENCE_SECONDS)
    assert (taken.incarnation, taken.rank) == (1, 0)
    wait_until(lambda: said == [[1]], "its arrival is said")  # by the reader, after it has handed the batch out


def test_batches_of_another_run_or_an_older_term_are_not_taken(edge):
    """Same step, rank and incarnation: only those of this run and of the directive's term or newer count (P1, P2)."""
    batches, outbox, said = edge
    batches.follow("r", 3)
    for term in (3, 4):
        outbox.try_send(batch(term, term=2))
        outbox.try_send(batch(term, run="another run", term=9))
        outbox.try_send(batch(term, term=term))
        # said first: to take a step drops those before it, and the reader says what is there then
        wait_until(lambda term=term: said and said[-1][-1] == term, "its arrival is said")
        taken = batches.take(term, PATIENCE_SECONDS)
        assert (taken.run, taken.term) == ("r", term)
    assert said == [[3], [3, 4]]
    assert batches.counts.dropped["foreign_run"] == 2
    assert batches.counts.dropped["old_term"] == 2


def test_batch_that_came_early_waits_for_its_step(edge):
    """Step 2 before step 1: both are there in order, and step 1 is forgotten when step 2 is taken."""
    batches, outbox, said = edge
    outbox.try_send(batch(2))
    outbox.try_send(batch(1))
    assert batches.take(1, PATIENCE_SECONDS).step == 1
    wait_until(lambda: said == [[2], [1, 2]], "both have arrived")
    assert batches.take(2, PATIENCE_SECONDS).step == 2
    assert batches.steps == [2]


def test_new_incarnation_starts_with_no_batches(edge):
    """What the dead incarnation had received is not trained by the next one."""
    batches, outbox, _ = edge
    outbox.try_send(batch(1))
    assert batches.take(1, PATIENCE_SECONDS)
    batches.accept("r", 2)
    assert batches.take(1, 0.05) is None


def test_batches_whose_prefixes_are_wrong_are_refused_and_the_next_one_is_taken(edge):
    """Each is counted and dropped at the socket; the reading thread lives on."""
    batches, outbox, _ = edge
    wrong = [{"sample_shared": np.array([n])} for n in (-1, 1, 2, 2**63 - 1, -(2**63))]
    wrong += [{"prompt_lengths": np.array([n])} for n in (-1, 0, 3)]
    wrong += [{"micro_batch_offsets": np.array([0, 2**63 - 1, -2, 1])}]
    for change in wrong:
        assert outbox.try_send(batch(1).model_copy(update=change))
    assert outbox.try_send(batch(2))
    assert batches.take(2, PATIENCE_SECONDS).step == 2
    assert batches.counts.dropped["bad_header"] == len(wrong)


@pytest.fixture
def in_parts(monkeypatch):
    """Each batch travels in parts of 200 bytes."""
    monkeypatch.setattr("bus.parts.WHOLE_BYTES", 0)
    monkeypatch.setattr(limits, "PART_BYTES", 200)


def test_a_batch_in_parts_arrives_once_it_is_whole(edge, in_parts):
    """Sent twice, the second time after the step has been taken: said once, and nothing stays."""
    batches, outbox, said = edge
    *first, last = messages_of(batch(1))
    for message in first:
        assert outbox.try_send(message)
    wait_until(lambda: batches.counts.num_messages == len(first), "all but the last have come")
    assert batches.take(1, 0.0) is None
    assert said == []
    assert outbox.try_send(last)
    assert batches.take(1, PATIENCE_SECONDS).equals(batch(1))
    wait_until(lambda: said == [[1]], "its arrival is said")
    outbox.try_send(batch(2))
    assert batches.take(2, PATIENCE_SECONDS).step == 2
    for message in (*messages_of(batch(1)), batch(3)):
        assert outbox.try_send(message)
    wait_until(lambda: said[-1] == [2, 3], "the parts sent again are dropped")
    assert batches._unfinished == {}


def test_parts_for_an_earlier_gang_or_of_an_older_packer_complete_nothing(edge, in_parts):
    """All but one part of the old batch, then the new one: the batch is the new one, and parts of the old one go."""
    batches, outbox, _ = edge
    for old, new in ((batch(1), batch(1, term=2)), (batch(5, term=2), batch(6, incarnation=2, term=2))):
        for message in messages_of(old)[:-1]:
            assert outbox.try_send(message)
        wait_until(lambda old=old: old.step in batches._unfinished, "parts of the old batch are here")
        batches.follow("r", new.term)
        if new.incarnation != old.incarnation:
            batches.accept("r", new.incarnation)
        for message in (*messages_of(new), messages_of(old)[-1]):
            assert outbox.try_send(message)
        found = batches.take(new.step, PATIENCE_SECONDS)
        assert (found.step, found.term, found.incarnation) == (new.step, new.term, new.incarnation)
        assert batches._unfinished == {}


def test_parts_that_are_no_batch_are_counted_and_dropped(edge, in_parts):
    """The batch that is sent then arrives."""
    batches, outbox, _ = edge
    for message in messages_of(batch(1)):
        outbox.try_send(message.model_copy(update={"data": message.data ^ 255}))
    wait_until(lambda: sum(batches.counts.dropped.values()) == 1, "the parts are refused")
    for message in messages_of(batch(1)):
        outbox.try_send(message)
    assert batches.take(1, PATIENCE_SECONDS).equals(batch(1))
