"""Pages of groups out of the catalogue: filters, search, and the place from which the next page goes on.

All filters of a completion hold for the same completion, and a searched text is in this completion or in the prompt.
An answer takes SECONDS at most. A page that is not full by then has a place to go on from, and says so.
"""

import heapq
import itertools
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actors.ledger import LedgerReader
from actors.telemetry.reporter import OLDER_SAMPLES, SAMPLES
from actors.view.catalogue import OF_PAYLOADS, read_line, stored_value
from actors.view.groups import of_line, texts_of
from actors.view.plain import around, storable
from schemas.config import RunConfig

PAGE_GROUPS = 25
"""Groups of a page, unless the reader asks for another number."""
MAX_GROUPS = 100
"""Largest number of groups of a page."""
SECONDS = 0.8
"""Longest time of an answer: a search that finds nothing reads lines for so long."""
TRIGRAMS = 16
"""Trigrams of a searched text that are looked up; further ones hardly exclude any group."""
SHOWN_REWARDS = 64
"""Completions of a group whose rewards are in a list."""
COMPACTED = "compacted"
"""State of a group whose row the ledger has no more."""


@dataclass(frozen=True)
class Query:
    """Filters of a list.

    Args:
        purpose: training or evaluation.
        environment, state, reason, stop: the value; empty: any.
        steps, rewards, characters: bounds, both inclusive; None: none.
        text: text that a completion or its prompt contains, in small or capital letters.
        before: ordinal from which the list goes on towards older groups; None: from the newest.
        limit: groups of a page.
    """

    purpose: Literal["train", "eval"] = "train"
    environment: str = ""
    state: str = ""
    reason: str = ""
    stop: str = ""
    steps: tuple[int | None, int | None] = (None, None)
    rewards: tuple[float | None, float | None] = (None, None)
    characters: tuple[int | None, int | None] = (None, None)
    text: str = ""
    before: int | None = None
    limit: int = PAGE_GROUPS

    @property
    def newest_first(self) -> str:
        """Order of the ordinals: those of evaluations are negative and fall."""
        return "DESC" if self.purpose == "train" else "ASC"

    @property
    def of_completions(self) -> tuple[list[str], list[Any]]:
        """Conditions on a completion, and their values."""
        found = [*_between("reward", self.rewards), *_between("characters", self.characters)]
        found += [("stop = ?", self.stop)] if self.stop else []
        return [condition for condition, _ in found], [value for _, value in found]

    @property
    def of_groups(self) -> tuple[list[str], list[Any]]:
        """Conditions on a group, and their values."""
        found: list[tuple[str, Any]] = [("ordinal >= ?" if self.purpose == "train" else "ordinal < ?", 0)]
        found += [("environment = ?", storable(self.environment))] if self.environment else []
        found += [("reason = ?", storable(self.reason))] if self.reason else []
        found += _between("step", self.steps)
        if self.state == COMPACTED:
            found.append(("state IS NULL AND 0 = ?", 0))
        elif self.state:
            found.append(("state = ?", self.state))
        return [condition for condition, _ in found], [value for _, value in found]


def _between(column: str, bounds: tuple[float | None, float | None]) -> list[tuple[str, Any]]:
    low, high = bounds
    found: list[tuple[str, Any]] = [] if low is None else [(f"{column} >= ?", low)]
    return found if high is None else [*found, (f"{column} <= ?", high)]


class Listing:
    """Reader of lists; for one thread.

    Args:
        config: configuration of the run.
        database: connection to the catalogue.
        ledger: the run's ledger; None if there is none.
    """

    def __init__(self, config: RunConfig, database: sqlite3.Connection, ledger: LedgerReader | None) -> None:
        self._config, self._database, self._ledger = config, database, ledger

    def page(self, query: Query, seconds: float = SECONDS) -> dict[str, Any]:
        """Return a page: `groups`, `next` to go on from (None: no group is left), and `complete`.

        `complete` is False if time was over before the page was full, so `next` may be followed by more.
        """
        deadline = time.monotonic() + seconds
        found: list[dict[str, Any]] = []
        after: int | None = None
        for ordinal, row in self._matches(query):
            after = ordinal
            if row is not None:
                found.append(row)
                if len(found) == query.limit:
                    return {"groups": found, "next": ordinal, "complete": True}
            if time.monotonic() > deadline:
                return {"groups": found, "next": after, "complete": False}
        return {"groups": found, "next": None, "complete": True}

    def facts(self) -> dict[str, Any]:
        """Return what a filter can name, and how much of the files is in the catalogue."""
        one = self._database.execute

        def names(column: str, table: str) -> list[str]:
            return [name for (name,) in one(f"SELECT {column} FROM {table} ORDER BY 1")]

        groups, newest = one("SELECT COUNT(*), MAX(step) FROM groups").fetchone()
        (trajectories,) = one("SELECT COUNT(*) FROM trajectories").fetchone()
        (left,) = one("SELECT COALESCE(SUM(low), 0) FROM files").fetchone()
        (high,) = one("SELECT COALESCE(SUM(high), 0) FROM files").fetchone()
        reasons = [
            reason for (reason,) in one("SELECT DISTINCT reason FROM groups WHERE reason IS NOT NULL ORDER BY 1")
        ]
        return {
            "environments": names("environment", "environments"),
            "stops": names("stop", "stops"),
            "reasons": reasons,
            "groups": groups,
            "trajectories": trajectories,
            "newest_step": newest,
            "indexed": 1.0 if not high else 1.0 - left / high,
        }

    # --- matches ---------------------------------------------------------------------------------------------------

    def _matches(self, query: Query) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield ordinals, newest first, each with its entry of the list, or None if the group does not match."""
        if not query.text:
            yield from ((row["ordinal"], self._entry(row, query)) for row in self._rows(query))
            return
        candidates = self._candidates(query)
        if candidates is None:  # too short for the index
            yield from ((row["ordinal"], self._if_it_says(row, query)) for row in self._rows(query))
            return
        conditions, values = self._conditions(query)
        where = " AND ".join(["ordinal = ?", *conditions])
        for ordinal in candidates:
            row = self._database.execute(f"SELECT * FROM groups WHERE {where}", (ordinal, *values)).fetchone()
            yield ordinal, None if row is None else self._if_it_says(row, query)

    def _rows(self, query: Query) -> Iterator[sqlite3.Row]:
        conditions, values = self._conditions(query)
        if query.before is not None:
            older = "ordinal < ?" if query.purpose == "train" else "ordinal > ?"
            conditions, values = [*conditions, older], [*values, query.before]
        where = " AND ".join(conditions)
        yield from self._database.execute(
            f"SELECT * FROM groups WHERE {where} ORDER BY ordinal {query.newest_first}",
            values,
        )

    def _conditions(self, query: Query) -> tuple[list[str], list[Any]]:
        conditions, values = query.of_groups
        inner, inner_values = query.of_completions
        if inner:
            any_of = f"EXISTS (SELECT 1 FROM trajectories t WHERE t.ordinal = groups.ordinal AND {' AND '.join(inner)})"
            conditions, values = [*conditions, any_of], [*values, *inner_values]
        return conditions, values

    def _candidates(self, query: Query) -> Iterator[int] | None:
        """Return the ordinals whose texts have all trigrams of the searched text; None if the text has no trigram."""
        wanted = _trigrams(query.text)
        if not wanted:
            return None
        numbers = [OF_PAYLOADS, *(number for (number,) in self._database.execute("SELECT id FROM files"))]
        past = "" if query.before is None else " AND rowid < ?" if query.purpose == "train" else " AND rowid > ?"
        purpose = "rowid >= 0" if query.purpose == "train" else "rowid < 0"
        values = [wanted, *([] if query.before is None else [query.before])]
        tables = [
            self._database.execute(
                f"SELECT rowid FROM texts_{number} WHERE texts_{number} MATCH ? AND {purpose}{past} "
                f"ORDER BY rowid {query.newest_first}",
                values,
            )
            for number in numbers
        ]
        found = heapq.merge(*(map(_first, rows) for rows in tables), reverse=query.purpose == "train")
        # a group may be in two tables: settled first, and a line later
        return (ordinal for ordinal, _ in itertools.groupby(found))

    # --- entries ---------------------------------------------------------------------------------------------------

    def _entry(self, row: sqlite3.Row, query: Query) -> dict[str, Any]:
        """Return a group as an entry of the list."""
        numbers = self._database.execute(
            "SELECT completion, reward, advantage, characters, stop FROM trajectories WHERE ordinal = ? ORDER BY 1",
            (row["ordinal"],),
        ).fetchall()
        rewards = [one["reward"] for one in numbers]
        known = [reward for reward in rewards if reward is not None]
        stops: dict[str, int] = {}
        for one in numbers:
            stops[one["stop"]] = stops.get(one["stop"], 0) + 1
        entry = {
            name: row[name] for name in ("ordinal", "environment", "step", "reason", "attempt", "failures", "head")
        }
        return entry | {
            "state": row["state"] or COMPACTED,
            "oldest": row["oldest"],
            "source": row["source"],
            "completions": len(numbers),
            "rewards": rewards[:SHOWN_REWARDS],
            "reward_mean": sum(known) / len(known) if known else None,
            "characters": [one["characters"] for one in numbers[:SHOWN_REWARDS]],
            "stops": stops,
        }

    def _if_it_says(self, row: sqlite3.Row, query: Query) -> dict[str, Any] | None:
        """Return the entry of a group in which a completion of the filters, or the prompt, has the searched text."""
        group = self._group(row)
        if group is None:
            return None
        needle = query.text.lower()
        prompt, *texts = texts_of(group)
        conditions, values = query.of_completions
        where = " AND ".join(["ordinal = ?", *conditions])
        chosen = self._database.execute(
            f"SELECT completion FROM trajectories WHERE {where} ORDER BY completion",
            (row["ordinal"], *values),
        ).fetchall()
        for place, text in [*((one["completion"], texts[one["completion"]]) for one in chosen), (None, prompt)]:
            at = text.lower().find(needle)
            # lower() may change the length of a text, so the place is exact only where it does not
            if at >= 0 and (place is not None or chosen):
                return self._entry(row, query) | {"found": {"completion": place} | around(text, at, len(query.text))}
        return None

    def _group(self, row: sqlite3.Row) -> Mapping[str, Any] | None:
        if row["source"] == "payload":
            return stored_value(self._ledger, row["ordinal"], row["step"])[0]
        place = (row["start"], row["length"], row["digest"])
        if row["source"] != "line":
            return None
        for name in (SAMPLES, OLDER_SAMPLES):
            record = read_line(self._config.output / name, *place)
            if record is not None:
                return of_line(record)
        return None


def _trigrams(text: str) -> str:
    """Return the query for the trigrams of a text; empty if the text is shorter than three characters."""
    small = storable(text).lower()
    found = list(dict.fromkeys(small[at : at + 3] for at in range(len(small) - 2)))
    # SQLite reads a query up to the first zero byte
    found = [one for one in found if "\0" not in one]
    # spread over the text, since neighbours exclude nearly the same groups
    spread: Sequence[str] = found[:: max(1, len(found) // TRIGRAMS)][:TRIGRAMS]
    return " AND ".join(f'"{one.replace(chr(34), chr(34) * 2)}"' for one in spread)


def _first(row: Sequence[Any]) -> int:
    return int(row[0])
