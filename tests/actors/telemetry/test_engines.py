"""What engines say counts once."""

import json

from actors.telemetry.engines import REMEMBERED, EngineTotals
from schemas.messages import InferenceHeartbeat, PolicyVersion


def heartbeat(tokens, version=0, **seconds):
    """An engine that has generated so many tokens since its start."""
    return InferenceHeartbeat(
        run="r", name="inference-0", boot_id="b", sequence=1, phase="running", url="http://x",
        engine_state="clean", policy=PolicyVersion(lineage=1, version=version), load=0, generated_tokens=tokens,
        holds_two_versions=False, update_seconds=seconds,
    )  # fmt: skip


def test_beat_that_comes_again_or_late_counts_nothing():
    """100, again, 150, the 100 of before, 160: 160 in all."""
    engines = EngineTotals({})
    assert [engines.heard("e/b", heartbeat(tokens), 1) for tokens in (100, 100, 150, 100, 160)] == [100, 0, 50, 0, 10]


def test_engines_that_are_gone_are_forgotten_and_live_ones_are_not():
    """2 000 boots beside one that lives on: a thousand are kept, and the one is never counted anew.

    The updates of those that are gone are forgotten too: what they say again later counts as new.
    """
    seen = {}
    engines = EngineTotals(seen)
    counted = 0
    for boot in range(2000):
        counted += engines.heard("live/b", heartbeat(10 * boot, 1, load=float(boot)), 2)
        counted += engines.heard(f"e/{boot}", heartbeat(7, 1, load=float(boot)), 2)
    assert counted == 10 * 1999 + 7 * 2000
    assert len(seen) == REMEMBERED + 2
    assert engines.heard("e/1999", heartbeat(7), 1) == 0
    for boot in range(900):
        engines.heard(f"e/{boot}", heartbeat(7, 1, load=float(boot)), 2)
    assert engines.recent_median("load") < 900


def test_more_live_engines_than_are_remembered_are_all_counted_once():
    """1 500 live ones send heartbeats twice."""
    engines = EngineTotals({})
    assert sum(engines.heard(f"e/{i}", heartbeat(5), 1500) for _ in range(2) for i in range(1500)) == 1500 * 5


def test_order_of_forgetting_survives_the_ledger():
    """What was heard last before a restart of the packer, when no peer is known to live yet, is forgotten last."""
    seen = {}
    engines = EngineTotals(seen)
    engines.heard("live/b", heartbeat(50), 1)
    for boot in range(REMEMBERED + 5):
        engines.heard(f"e/{boot}", heartbeat(1), 1)
        engines.heard("live/b", heartbeat(50), 1)
    again = EngineTotals(json.loads(json.dumps(seen)))
    assert again.heard("new/b", heartbeat(3), 0) == 3
    assert again.heard("live/b", heartbeat(60), 1) == 10


def test_update_is_noted_once_and_medians_are_of_recent_ones():
    """Two heartbeats of one update, then one of the next: 0.2 and 0.4 s."""
    engines = EngineTotals({})
    for version, pause in ((1, 0.2), (1, 0.2), (2, 0.4)):
        engines.heard("e/b", heartbeat(0, version, pause=pause), 1)
    assert engines.recent_median("pause") == (0.2 + 0.4) / 2
    assert engines.recent_median("load") is None
