"""Reports of trained steps on their way to the packer's record."""

import numpy as np
import pytest

from actors.trainer.reports import Reports, oldest
from bus import codec
from schemas import limits
from schemas.messages import StepReport, TrainerHeartbeat


@pytest.mark.slow
def test_a_beat_carries_the_oldest_reports_and_all_are_told_in_turns():
    """20 000 unwritten reports of 45 values, as a checkpoint may hold: each heartbeat is one that the packer takes."""
    values = {f"some_value_name_{number}": 0.123456 for number in range(45)}
    waiting = [StepReport(step=step, values=values, weights="ab" * 32) for step in range(1, 20_001)]
    heard = []
    while waiting:
        told = oldest(waiting)
        heartbeat = TrainerHeartbeat(
            run="r", name="trainer-0", boot_id="t", sequence=1, phase="running", rank=0, num_ranks=1, address="",
            incarnation=1, next_step=20_001, checkpoints=[], published=[], reports=told, received=np.zeros(0, np.int64),
        )  # fmt: skip
        frames = [bytes(frame) for frame in codec.encode(heartbeat)]
        assert len(frames[0]) <= limits.CONTROL_HEADER_BYTES * 0.6
        if len(heard) % 4000 == 0:
            assert codec.decode(frames, limits.CONTROL_HEADER_BYTES).equals(heartbeat)
        heard += [report.step for report in told]
        waiting = waiting[len(told) :]
    assert heard == list(range(1, 20_001))


def test_a_report_that_fills_a_beat_is_told_alone():
    """Otherwise those behind it would wait for ever."""
    large = StepReport(step=1, values={"x" * 2000 + str(number): 0.0 for number in range(300)})
    small = StepReport(step=2, values={"loss": 0.0})
    assert oldest([large, small]) == [large]
    assert oldest([small] * 1000) == [small] * limits.HEARTBEAT_REPORTS
    assert oldest([]) == []


def test_reports_come_back_from_a_checkpoint_and_go_once_they_are_recorded(tmp_path):
    """Step 1 is recorded: only the report of step 2 is told and saved from then on."""
    reports = Reports([StepReport(step=step, values={"loss": float(step)}, weights="ab") for step in (1, 2)])
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "reports.json").write_text(reports.text)
    again = Reports.read(tmp_path)
    assert again.oldest() == reports.oldest()
    assert again.drop_recorded(1)
    assert [report.step for report in again.oldest()] == [2]
    assert not again.drop_recorded(1)
