"""The trainer's thread that broadcasts: whatever goes wrong in it is told to the packer, and the thread goes on."""

import threading

import pytest

from actors.telemetry.metrics import Metrics
from actors.trainer import weight_broadcaster
from actors.trainer.weight_broadcaster import MAX_FAULTS, WeightBroadcaster
from bus import threads
from bus.weights import UpdateAbandonedError
from schemas.messages import PolicyVersion, UpdateFailure, WeightMember, WeightUpdate
from tests.ring.harness import wait_until


class Publisher:
    """Raises what it is given for each update in turn, and sends where there is nothing to raise."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)
        self.sent: list[str] = []

    def send(self, update, check):
        """Take the next turn."""
        error = self._errors.pop(0)
        if error is not None:
            raise error
        self.sent.append(update.update)


def update(number: int) -> WeightUpdate:
    """An update of one engine."""
    members = [WeightMember(boot_id="A", num_ranks=1)]
    return WeightUpdate(
        update=f"1.{number}", process_group="1.1", policy=PolicyVersion(lineage=1, version=number), members=members
    )


@pytest.fixture
def told(monkeypatch):
    """What the packer is told; no pause between two faults."""
    monkeypatch.setattr(weight_broadcaster, "PAUSE_SECONDS", 0.0)
    return []


@pytest.mark.parametrize(
    "error",
    [RuntimeError("DistStoreError: wait timeout after 30000ms"), OSError("Name or service not known"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_nobody_expected_is_told_to_the_packer_and_the_next_update_is_sent(told, error):
    """As torch's store, the name service or a machine without memory raises it; the packer names another update."""
    publisher = Publisher(error, None)
    sender = WeightBroadcaster(publisher, Metrics("trainer"), told.append)
    sender.follow(update(1))
    wait_until(lambda: told, "the failure is told")
    assert told == [UpdateFailure(update="1.1", missed=[], detail=f"{type(error).__name__}: {error}")]
    sender.follow(update(2))
    wait_until(lambda: publisher.sent, "the next update is sent")
    assert publisher.sent == ["1.2"]
    sender.close()


@pytest.mark.slow
def test_errors_without_end_end_the_process_by_name(told, monkeypatch):
    """A store that is broken for good is not asked for ever: the thread is ours, and its process starts anew."""
    failures: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    sender = WeightBroadcaster(Publisher(*[RuntimeError("broken")] * MAX_FAULTS), Metrics("trainer"), told.append)
    for number in range(1, MAX_FAULTS + 1):
        sender.follow(update(number))
        wait_until(lambda n=number: failures or len(told) == n, f"update {number} has failed")
    wait_until(lambda: failures, "the thread ends")
    assert [str(failure.exc_value) for failure in failures] == ["broken"]
    assert threads.is_ours(failures[0].thread)


@pytest.mark.slow
def test_an_update_that_was_sent_forgives_the_errors_before_it(told):
    """Only errors in a row count."""
    faulty = [RuntimeError("hiccup")] * (MAX_FAULTS - 1)
    publisher = Publisher(*faulty, None, *faulty, None)
    sender = WeightBroadcaster(publisher, Metrics("trainer"), told.append)
    for number in range(1, 2 * MAX_FAULTS + 1):
        sender.follow(update(number))
        wait_until(lambda n=number: len(told) + len(publisher.sent) == n, f"update {number} is over")
    assert publisher.sent == [f"1.{MAX_FAULTS}", f"1.{2 * MAX_FAULTS}"]
    sender.close()


def test_an_abandoned_update_is_told_with_those_who_missed_it(told):
    """As before: the packer learns who was behind the others."""
    sender = WeightBroadcaster(Publisher(UpdateAbandonedError("too late", ["A"])), Metrics("trainer"), told.append)
    sender.follow(update(1))
    wait_until(lambda: told, "the failure is told")
    assert told == [UpdateFailure(update="1.1", missed=["A"], detail="too late")]
    sender.close()
