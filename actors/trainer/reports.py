"""Reports of trained steps, kept until the packer has recorded them: in memory, in heartbeats, and in checkpoints."""

import json
from collections.abc import Sequence
from pathlib import Path

from schemas import limits
from schemas.messages import StepReport

REPORTS = "trainer/reports.json"
"""File in a checkpoint with reports that the packer has not recorded yet."""
REPORT_BYTES, VALUE_BYTES = 64, 14
"""Bytes of a report in a message, and of each value in the report, both without texts; rounded up."""


class Reports:
    """Reports that the packer has not recorded yet, oldest first."""

    def __init__(self, reports: Sequence[StepReport] = ()) -> None:
        self._reports = list(reports)

    @classmethod
    def read(cls, checkpoint: Path) -> "Reports":
        """Return the reports saved in a checkpoint: the process that starts from the checkpoint reports them."""
        reports = json.loads((checkpoint / REPORTS).read_text(encoding="utf-8"))
        return cls([StepReport(**report) for report in reports])

    @property
    def text(self) -> str:
        """Content of the file REPORTS."""
        return json.dumps([report.model_dump() for report in self._reports])

    def add(self, report: StepReport) -> None:
        """Add the report of the newest step."""
        self._reports.append(report)

    def drop_recorded(self, step: int) -> bool:
        """Drop the reports up to a step that the packer has on disk. Return True if there were any."""
        before = len(self._reports)
        self._reports = [report for report in self._reports if report.step > step]
        return len(self._reports) < before

    def oldest(self) -> list[StepReport]:
        """Return the reports for a heartbeat."""
        return oldest(self._reports)


def oldest(reports: Sequence[StepReport]) -> list[StepReport]:
    """Return the reports for a heartbeat: the oldest, at least one, within the limits of `schemas.limits`.

    Later reports stay here and in checkpoints until the packer has recorded the earlier ones, without a time limit.
    """
    told: list[StepReport] = []
    room = limits.HEARTBEAT_REPORT_BYTES
    for report in reports[: limits.HEARTBEAT_REPORTS]:
        room -= REPORT_BYTES + len(report.weights) + sum(len(key.encode()) + VALUE_BYTES for key in report.values)
        # at least one, however large: a report that is never told would hold up all later ones
        if told and room < 0:
            break
        told.append(report)
    return told
