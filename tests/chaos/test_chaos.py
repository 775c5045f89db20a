"""A dozen faults in one real run; `make chaos` runs hundreds. And that the suite itself sees what it should."""

from collections import Counter
from pathlib import Path

import pytest

from actors.faults import POINTS
from tests.chaos import stage
from tests.chaos.faults import ROUND, UP, Fault, actors_at, draw
from tests.chaos.plans import fake
from tests.chaos.stage import NOBODY, Plan, Stage
from tests.chaos.table import verdict

FAST = Plan("fast", fake, others=(Fault("full disk", NOBODY),))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_meets_a_dozen_faults_keeps_its_promise(tmp_path: Path) -> None:
    """Every fault is taken, the run recovers from each, and its witnesses find nothing lost, twice or dropped."""
    result = Stage(FAST, tmp_path, print).run(seed=1, number=12, points=list(POINTS))
    assert result.problems == []
    assert [outcome.problem for outcome in result.outcomes] == [""] * 12
    assert all(outcome.seconds is not None for outcome in result.outcomes)
    assert result.testimony is not None
    assert result.testimony.dropped == {}
    assert verdict([result])


@pytest.mark.slow
def test_a_point_that_nobody_passes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault fails with its actor and point, the run goes on, and the verdict is bad."""
    monkeypatch.setattr(stage, "HIT_SECONDS", 0.5)
    monkeypatch.setattr(stage, "draw", lambda *arguments: [Fault("SIGKILL", "rollout-0", "rollout.never")])
    result = Stage(Plan("never", fake), tmp_path).run(seed=0, number=1, points=[])
    assert [o.problem for o in result.outcomes] == ["not within 0.5 s: rollout-0 passes the point rollout.never"]
    assert result.problems == []
    assert not verdict([result])


def test_every_state_is_drawn_once_before_any_comes_again() -> None:
    """Of 20 points with two ranks 24 victims, each killed once; `actors up` ends every round; a seed is an order."""
    points = [point for point in POINTS if point not in FAST.never_passed]
    victims = {(actor, point) for point in points for actor in actors_at(point, 2)}
    drawn = draw(1, 40, 2, points, [], 1)
    kills = Counter((f.actor, f.point) for f in drawn if f.kind == "SIGKILL" and f != UP)
    assert len(victims) == 24
    assert set(kills) == victims
    assert max(kills.values()) <= 2
    assert [i for i, fault in enumerate(drawn, start=1) if fault == UP] == [ROUND, 2 * ROUND, 3 * ROUND, len(drawn)]
    assert drawn == draw(1, 40, 2, points, [], 1) != draw(2, 40, 2, points, [], 1)
