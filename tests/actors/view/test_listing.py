"""Lists: each filter against all groups by hand, search, and pages that neither lose nor repeat a group."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.ledger import LedgerReader
from actors.view import listing
from actors.view.catalogue import Catalogue, connect
from actors.view.groups import characters_of, of_payload, texts_of
from actors.view.listing import Listing, Query
from schemas.messages import ScoredGroup
from tests.actors.view.conftest import Make
from tests.actors.view.runs import MadeGroup, MadeRun, sums


@contextmanager
def listed(run: MadeRun, folder: Path) -> Iterator[Listing]:
    """The list of a run whose catalogue is up to date."""
    made = Catalogue(run.config, folder)
    made.update_all()
    ledger = LedgerReader.of(run.config.ledger_path)
    with closing(connect(made.path)) as database:
        yield Listing(run.config, database, ledger)
    ledger.close()
    made.close()


def ordinals(found: Listing, **filters: Any) -> list[int]:
    """Ordinals of all pages of a list, in pages of three."""
    got: list[int] = []
    before = None
    for _ in range(100):
        page = found.page(Query(limit=3, before=before, **filters), seconds=30.0)
        got += [group["ordinal"] for group in page["groups"]]
        before = page["next"]
        if before is None:
            return got
    raise AssertionError("the pages have no end")


Test = Callable[[dict[str, Any], dict[str, Any]], bool]
FILTERS: list[tuple[dict[str, Any], Test]] = [
    ({"environment": "shop"}, lambda group, one: group["environment"] == "shop"),
    ({"stop": "length"}, lambda group, one: one["stop"] == "length"),
    ({"rewards": (1.0, None)}, lambda group, one: one["reward"] >= 1.0),
    ({"rewards": (None, 0.5)}, lambda group, one: one["reward"] <= 0.5),
    ({"characters": (80, 120)}, lambda group, one: 80 <= characters_of(one) <= 120),
    ({"steps": (3, 4)}, lambda group, one: 3 <= group["step"] <= 4),
    ({"state": "durable"}, lambda group, one: group["step"] <= 4),
    ({"rewards": (1.0, None), "stop": "length"}, lambda group, one: one["reward"] >= 1 and one["stop"] == "length"),
    ({"environment": "sums", "rewards": (None, 0.1), "steps": (2, None)},
     lambda group, one: group["environment"] == "sums" and one["reward"] <= 0.1 and group["step"] >= 2),
    ({"environment": "no such"}, lambda group, one: False),
]  # fmt: skip


def values(run: MadeRun, steps: int) -> dict[int, dict[str, Any]]:
    """All groups of a run as plain values, made of its messages."""
    messages: list[ScoredGroup] = [one for number in range(steps) for one in run.add_step(sampled=number % 3)]
    run.save(4)
    return {one.ordinal: of_payload(one, 1 + index // 3) for index, one in enumerate(messages)}


@pytest.mark.parametrize(("filters", "test"), FILTERS, ids=[str(filters) for filters, _ in FILTERS])
def test_a_filter_finds_the_groups_with_a_completion_that_passes_all_of_it(
    make: Make, tmp_path: Path, filters: dict[str, Any], test: Test
) -> None:
    """The same completion passes, newest group first, each group once."""
    run = make()
    groups = values(run, 6)
    expected = [ordinal for ordinal, group in groups.items() if any(test(group, one) for one in group["completions"])]
    with listed(run, tmp_path / "cache") as found:
        assert ordinals(found, **filters) == sorted(expected, reverse=True)


@pytest.mark.parametrize(
    "text", ["step by step", "STEP BY", "has 1", "0", "\n1. There", "zzz", "Add", 'a": 1', "%", "'"]
)
def test_a_search_finds_what_reading_all_texts_finds(make: Make, tmp_path: Path, text: str) -> None:
    """In completions, tool calls and prompts, of lines and of payloads; of one and two characters too."""
    run = make()
    groups = values(run, 5)
    expected = [o for o, group in groups.items() if any(text.lower() in one.lower() for one in texts_of(group))]
    with listed(run, tmp_path / "cache") as found:
        assert ordinals(found, text=text) == sorted(expected, reverse=True)


HOSTILE = [
    "\"quoted\" AND 'OR' NEAR(",
    "日本語のテキスト",
    "naïve ÀÉ 🎉🎉",
    "tab\tand\nline",
    "a\u0000b",
    "\ud800half",
    "<script>alert(1)</script>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_can_be_searched(make: Make, tmp_path: Path, text: str) -> None:
    """Quotes and operators of the search language, other scripts, control characters, half a surrogate pair."""
    run = make(1)
    texts = [f"before {text} after", "b", "c", "d"]
    # a message of the bus holds no half of a pair; a line does, in `test_server`
    groups = [] if "\ud800" in text else [MadeGroup("a prompt", texts, [1.0, 0.0, 0.0, 0.0])]
    run.add_step(groups=groups)
    with listed(run, tmp_path / "cache") as found:
        expected = [3] if groups else []
        assert ordinals(found, text=text) == expected
        if expected:
            (entry,) = found.page(Query(text=text))["groups"]
            assert entry["found"] | {"before": "", "after": ""} == {
                "completion": 0,
                "before": "",
                "match": text,
                "after": "",
            }


def test_search_and_filters_hold_for_the_same_completion(make: Make, tmp_path: Path) -> None:
    """A text in the completion of reward 0 is not found among rewards of 1."""
    run = make()
    run.add_step(groups=[MadeGroup("p", ["needle one", "other", "other", "other"], [0.0, 1.0, 0.0, 0.0])])
    run.add_step(groups=[MadeGroup("p", ["other", "needle two", "other", "other"], [0.0, 1.0, 0.0, 0.0])])
    with listed(run, tmp_path / "cache") as found:
        assert ordinals(found, text="needle") == [3, 0]
        assert ordinals(found, text="needle", rewards=(1.0, None)) == [3]
        assert ordinals(found, text="needle", steps=(None, 1)) == [0]


def test_evaluations_are_a_list_of_their_own(make: Make, tmp_path: Path) -> None:
    """Newest first: their ordinals fall."""
    run = make(1)
    for version in (0, 5):
        run.add_evaluation(version)
    with listed(run, tmp_path / "cache") as found:
        assert ordinals(found, purpose="eval") == [-4, -3, -2, -1]
        assert ordinals(found, purpose="eval", steps=(5, 5)) == [-4, -3]
        assert ordinals(found, purpose="train") == [2, 1, 0]
        assert ordinals(found, purpose="eval", text="have now") == [-4, -3, -2, -1]


def test_states_of_groups_without_completions_are_listed(make: Make, tmp_path: Path) -> None:
    """Issued and dropped groups, with reason and failures; and compacted ones that have a line."""
    run = make()
    run.add_step(dropped=2)
    issued = run.add_issued(failures=1)
    run.add_step()
    run.compact(1)
    with listed(run, tmp_path / "cache") as found:
        assert ordinals(found, state="issued") == [issued]
        assert ordinals(found, state="compacted") == [2]
        (entry,) = found.page(Query(state="issued"))["groups"]
        assert (entry["failures"], entry["completions"], entry["rewards"]) == (1, 0, [])
        run.add_step(dropped=1)
    with listed(run, tmp_path / "cache") as found:
        assert found.facts()["reasons"] == ["stale"]
        assert len(ordinals(found, reason="stale")) == 1


def test_a_search_without_end_stops_and_goes_on_from_there(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is not full after its time says so; its place leads to the rest, without a gap or a repetition."""
    run = make(4)
    clock = itertools.count(step=1.0)
    monkeypatch.setattr(listing.time, "monotonic", lambda: next(clock))
    got: list[int] = []
    with listed(run, tmp_path / "cache") as found:
        before, pages = None, 0
        while True:
            page = found.page(Query(text="no", before=before), seconds=2.0)
            got += [group["ordinal"] for group in page["groups"]]
            pages += 1
            if page["next"] is None:
                break
            assert not page["complete"]
            before = page["next"]
    assert got == [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0][: len(got)]
    assert got
    assert pages > 3


def test_facts_count_and_name_all_that_is_there(make: Make, tmp_path: Path) -> None:
    """Values for filters; of an empty run too."""
    empty = make(name="empty")
    with listed(empty, tmp_path / "cache") as found:
        facts = found.facts()
        assert (facts["groups"], facts["trajectories"], facts["environments"], facts["indexed"]) == (0, 0, [], 1.0)
        assert found.page(Query()) == {"groups": [], "next": None, "complete": True}
    run = make(4)
    run.add_step(groups=[sums(0, 1, 4)])
    with listed(run, tmp_path / "cache") as found:
        facts = found.facts()
        assert (facts["groups"], facts["trajectories"], facts["newest_step"]) == (15, 60, 5)
        assert facts["environments"] == ["shop", "sums"]
        assert set(facts["stops"]) == {"done", "length", "stop"}
