"""Spans of labels as segments, and labels that nobody here has set."""

import pytest

from actors.engines.external.labels import ServedWeights, UnknownWeightsError, segments_of
from schemas.messages import PolicyVersion

FOUR, FIVE = PolicyVersion(lineage=1, version=4), PolicyVersion(lineage=1, version=5)
VERSIONS = [ServedWeights("b", policy, update) for update, policy in enumerate((None, FOUR, FOUR, FIVE))]
LABELS = {version.label: version.policy for version in VERSIONS}


def test_a_label_names_boot_policy_and_update() -> None:
    """So one policy that is loaded twice is two versions, and that of another life a third."""
    assert list(LABELS) == ["b:base.0", "b:1.4.1", "b:1.4.2", "b:1.5.3"]
    assert (VERSIONS[1].name, VERSIONS[1].adapter) == ("1.4.1", "policy-1.4.1")


def test_spans_become_segments_by_policy() -> None:
    """One policy that was loaded twice is one segment; tokens before the first version have none."""
    ends = zip(("b:base.0", "b:1.4.1", "b:1.4.2", "b:1.5.3"), (0, 3, 5, 6), (3, 5, 6, 9), strict=True)
    spans = [{"version": version, "start": start, "end": end} for version, start, end in ends]
    assert segments_of(spans, LABELS) == [(3, 1, 4), (6, 1, 5)]
    assert segments_of([], LABELS) == []
    with pytest.raises(UnknownWeightsError, match=r"'c:1\.4\.1'"):
        segments_of([*spans, {"version": "c:1.4.1", "start": 9, "end": 10}], LABELS)
    with pytest.raises(UnknownWeightsError, match="does not say"):
        segments_of(None, LABELS)
