"""A dozen faults in one real run; `make chaos` runs hundreds. And that the suite itself sees what it should."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.process import fault_points
from actors.process.fault_points import POINTS
from tests.chaos import stage
from tests.chaos.faults import MOST_PER_ROUND, ROUND, UP, Fault, actors_at, draw
from tests.chaos.plans import KILLED_IN_TURNS, PLANS, RAISED, RAISED_IN_POOL, RAISED_IN_SHARDS, STRANGERS, fake, shares
from tests.chaos.stage import NOBODY, Plan, Stage
from tests.chaos.table import verdict
from tests.chaos.threads import ELSEWHERE, THREADS, kind_of, pairs
from tests.marks import first_of

ROOT = Path(__file__).parent.parent.parent
CODE = [path for package in ("bus", "actors") for path in sorted((ROOT / package).rglob("*.py"))]
MAKERS = {"start": 0, "make": 0, "start_helper": 0, "Workers": 1, "DaemonWorkers": 1}
"""Of `bus.threads`, with the place of the thread's name among their arguments."""
FAST = Plan("fast", fake, others=(Fault("full disk", NOBODY),))


PLACES = ("control.server", "packer.record", "control.client", "reward.loop", "inference.http", "checkpoint.written")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_meets_a_dozen_faults_keeps_its_promise(tmp_path: Path) -> None:
    """Every fault is taken, the run recovers from each, and its witnesses find nothing lost, twice or dropped."""
    result = Stage(FAST, tmp_path, print).run(seed=1, number=12, points=list(POINTS))
    assert result.problems == []
    assert [outcome.problem for outcome in result.outcomes] == [""] * 12
    assert all(outcome.seconds is not None for outcome in result.outcomes)
    assert result.testimony is not None
    assert result.testimony.dropped == {}
    assert verdict([result])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "raised"),
    first_of(
        [
            ("threads", [fault for fault in RAISED if fault.point in PLACES]),
            ("pool", [fault for fault in RAISED_IN_POOL if fault.point in ("control.client", "inference.relay")]),
            ("sharded", RAISED_IN_SHARDS[:1]),
            ("neighbours", STRANGERS[1:2]),
        ]
    ),
    ids=["each actor", "a pool and the relay to its server", "a rank that shares the weights", "a foreign run"],
)
def test_a_run_whose_threads_raise_keeps_its_promise(tmp_path: Path, name: str, raised: list[Fault]) -> None:
    """Each process ends with these words, is started again and works; nothing is lost, twice or dropped.

    And so it is where another run has the ports of one meanwhile.
    """
    result = Stage(PLANS[name][1], tmp_path, print).run(0, len(raised), [], raised)
    assert result.problems == []
    assert [outcome.problem for outcome in result.outcomes] == [""] * len(raised)
    assert verdict([result])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_in_each_state_of_a_turn_keeps_the_promise(tmp_path: Path) -> None:
    """Either rank as it gives the device back, an engine as it rests, and another as it wakes: others get the turn."""
    result = Stage(PLANS["turns"][1], tmp_path, print).run(0, len(KILLED_IN_TURNS), [], KILLED_IN_TURNS)
    assert result.problems == []
    assert [outcome.problem for outcome in result.outcomes] == [""] * len(KILLED_IN_TURNS)
    assert verdict([result])


def _made(path: Path) -> Iterator[str]:
    """Names of the threads and pools that a file makes, as they stand there."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "bus.threads"]
    known = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
    known |= {f"threads.{maker}": maker for maker in MAKERS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (maker := known.get(ast.unparse(node.func))) in MAKERS:
            yield ast.unparse(node.args[MAKERS[maker]])


@pytest.mark.slow
def test_every_thread_in_the_code_has_an_exception_in_a_plan() -> None:
    """A new one is refused here until it has, in every actor that has the thread, or a test that is named."""
    made = {name for path in CODE if path != ROOT / "bus" / "threads.py" for name in _made(path)}
    assert made == {thread.made for thread in THREADS} | ELSEWHERE.keys()
    raised = [fault for _, plan in PLANS.values() for fault in plan.others if fault.kind == "exception"]
    assert set(pairs()) == {(kind_of(fault.actor), fault.point) for fault in raised}
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in ELSEWHERE.values() if f"def {name}(" not in tests] == []


def test_every_place_of_a_thread_is_in_the_code_and_told_where_it_is_defined() -> None:
    """What threads pass by, what `actors.process.fault_points` describes, and what the table of the threads has."""
    code = "\n".join(path.read_text() for path in CODE)
    passed = set(re.findall(r"""(?:mark|tick)\((?:self\._loop, )?"([a-z.]+)"\)""", code))
    assert passed == fault_points.THREADS.keys() | fault_points.WORK.keys()
    assert passed == {thread.place for thread in THREADS} - POINTS.keys()


def test_every_thread_is_in_the_page_on_reliability() -> None:
    """With what comes of an exception in it."""
    page = (ROOT / "docs/internals/reliability.md").read_text().partition("## Threads")[2]
    names = {thread.called or thread.made.strip("'") for thread in THREADS} | {made.strip("'") for made in ELSEWHERE}
    assert [name for name in sorted(names) if f"`{name}" not in page] == []


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_faults_meet_all_that_may_happen_to_each_run(seed: int) -> None:
    """Each of a run's own faults comes once at least, so `make chaos N=200` raises in every thread."""
    numbers = shares(PLANS.values(), 200)
    assert sum(numbers) == 200
    for number, (_, plan) in zip(numbers, PLANS.values(), strict=True):
        drawn = draw(seed, number, plan.ranks, list(POINTS), plan.others, plan.others_per_round)
        assert [fault for fault in plan.others if fault not in drawn] == [], plan.name


@pytest.mark.parametrize("seed", range(10))
def test_ends_of_processes_are_spread_over_the_actors(seed: int) -> None:
    """Those by exceptions too: eleven of them on five actors, so at most once more than twice."""
    _, plan = PLANS["threads"]
    drawn = draw(seed, ROUND, 1, list(POINTS), plan.others, plan.others_per_round)
    ended = Counter(fault.actor for fault in drawn if fault.kills)
    assert ended.total() > 2 * MOST_PER_ROUND
    assert max(ended.values()) <= MOST_PER_ROUND + 1
    assert list(ended.values()).count(MOST_PER_ROUND + 1) <= 1


@pytest.mark.long
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
