"""A run that is shown: all questions about it, each answered from its files and from the catalogue.

Every method reads the files at the moment of the call, so a run that grows is shown as it is. Methods may be called
from several threads.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from actors.ops.images import can_show, is_kept, kept_image, picture
from actors.ops.trace.window import index_of
from actors.packer.sample_images import images_of, sizes_of
from actors.process.durations import seconds_in_words
from actors.telemetry.reporter import OLDER_SAMPLES, SAMPLES
from actors.view import recorded
from actors.view.catalogue import Catalogue, connect, read_line
from actors.view.curves import POINTS, Curves
from actors.view.groups import Value, of_line, of_payload
from actors.view.keeper import CatalogueKeeper
from actors.view.listing import Listing, Query
from actors.view.overview import newest_view, overview, state_of
from actors.view.plain import conversation
from actors.view.timeline import NoTimelineError, timeline_of, trace_of
from actors.view.token_values import place_of, trainer_values
from actors.view.tokens import decoder, samples_of, token_rows
from schemas.config import RunConfig
from schemas.errors import ConfigError

FIRST_PIECES = 2
"""Pieces of work on the catalogue before the first page: the newest lines, and rows of the ledger."""
SIDE_BY_SIDE_CHARACTERS = 6000
"""Characters of a text on the page of a group; the page of a trajectory has all of them."""
PICTURE_SIDE = 1024
"""Most pixels of a side of a picture."""


class MissingError(Exception):
    """A page asks for something that the run does not have; the text says what is missing."""


class ViewedRun:
    """Reader of a run.

    Args:
        config: configuration of the run.
        cache: folder of the catalogues.

    Raises:
        ConfigError: the catalogue can't be made.
    """

    def __init__(self, config: RunConfig, cache: Path) -> None:
        self.config, self.name = config, config.name
        self._curves = Curves(config.output / "metrics.jsonl")
        self._spans = index_of(config.output)
        self._reading = threading.Lock()
        """Held while the curves are read or brought up to date."""
        self._making: tuple[float, float] | None = None
        """Monotonic time of the first look at a catalogue that is being made, and the share that it had."""
        self._catalogue = _begun(config, cache)
        self._keeper = CatalogueKeeper(config, cache)

    def close(self) -> None:
        """Stop keeping the catalogue."""
        self._keeper.close()

    # --- the run --------------------------------------------------------------------------------------------------

    def headline(self) -> Value:
        """Return name, folder, state and step, for the list of runs."""
        view, alive, age = newest_view(self.config)
        with self._curves_of_now() as curves:
            step = max(view.progress.get("step", 0), curves.last)
        last = view.progress.get("max_steps") or self.config.trainer.max_steps
        facts = {"name": self.name, "output": str(self.config.output), "state": state_of(view, alive), "alive": alive}
        return facts | {"age": age, "step": step, "max_steps": last}

    def overview(self) -> Value:
        """Return all values of the page of the run."""
        counts = recorded.counts_of(self.config)
        with self._curves_of_now() as curves:
            return overview(self.config, curves, counts)

    def curves(self, names: list[str], points: int = POINTS) -> Value:
        """Return columns of metrics.jsonl, thinned."""
        with self._curves_of_now() as curves:
            return curves.table(names, points)

    def step(self, number: int) -> Value:
        """Return the values of a step, its groups, and its packing.

        Raises:
            MissingError: the run has no such step.
        """
        with self._curves_of_now() as curves:
            line, last = curves.line(number), curves.last
        with recorded.opened(self.config) as ledger:
            packing = recorded.packing_of(ledger, number, self.config)
        if not line and not packing.get("ordinals"):
            raise MissingError(f"step {number}: the run has steps 1 to {last}" if last else "the run has no step yet")
        return {"step": number, "last": last, "values": line, "packing": packing}

    def timeline(self, number: int) -> Value:
        """Return the spans of all actors in a step, or words if there are none."""
        return timeline_of(self._spans, number)

    def trace(self, number: int) -> Value:
        """Return the file of a step for Perfetto.

        Raises:
            MissingError: there are no spans of the step.
        """
        try:
            return trace_of(self._spans, number)
        except NoTimelineError as error:
            raise MissingError(str(error)) from error

    @contextmanager
    def _curves_of_now(self) -> Iterator[Curves]:
        with self._reading:
            self._curves.update()
            yield self._curves

    # --- groups ---------------------------------------------------------------------------------------------------

    def groups(self, query: Query) -> Value:
        """Return a page of the list of groups."""
        with self._listing() as listing:
            return listing.page(query)

    def facts(self) -> Value:
        """Return the values that filters can name, and how much of the files the catalogue has."""
        with self._listing() as listing:
            found = listing.facts()
        return found | {"problem": self._keeper.problem, "left": self._time_left(found["indexed"])}

    def _time_left(self, indexed: float) -> str:
        """Return the time until the catalogue has all lines, by the pace since the first look; empty if not known."""
        if indexed >= 1.0:
            self._making = None
            return ""
        now = time.monotonic()
        began, before = self._making = self._making or (now, indexed)
        if indexed <= before:
            return ""
        return f"about {seconds_in_words((now - began) / (indexed - before) * (1.0 - indexed))} left"

    def catalogued(self) -> tuple[int, int]:
        """Return the bytes of lines in the catalogue, and the bytes of all lines that it knows of."""
        with closing(connect(self._catalogue)) as database:
            low, high = database.execute("SELECT COALESCE(SUM(low), 0), COALESCE(SUM(high), 0) FROM files").fetchone()
        return high - low, high

    @contextmanager
    def _listing(self) -> Iterator[Listing]:
        with closing(connect(self._catalogue)) as database, recorded.opened(self.config) as ledger:
            # one state of the catalogue for all queries: a table of texts may be dropped meanwhile
            database.execute("BEGIN")
            yield Listing(self.config, database, ledger)

    def group(self, ordinal: int) -> Value:
        """Return a group with its completions, long texts cut.

        Raises:
            MissingError: neither the ledger nor samples.jsonl has it.
        """
        group = self._group(ordinal)
        for one in group["completions"]:
            one["cut"] = len(one["text"]) > SIDE_BY_SIDE_CHARACTERS
            one["text"] = one["text"][:SIDE_BY_SIDE_CHARACTERS]
            for message in one.get("messages", ()):
                if isinstance(message.get("content"), str) and len(message["content"]) > SIDE_BY_SIDE_CHARACTERS:
                    message["content"], one["cut"] = message["content"][:SIDE_BY_SIDE_CHARACTERS], True
        return group | {"prompt": conversation(group["prompt"])}

    def life(self, ordinal: int) -> Value:
        """Return a group's life out of the ledger."""
        with recorded.opened(self.config) as ledger:
            return {"ordinal": ordinal} | recorded.life_of(ledger, ordinal, self.config)

    def trajectory(self, ordinal: int, completion: int) -> Value:
        """Return a completion with all its messages, and the number of samples whose tokens are there.

        Raises:
            MissingError: there is no such group, or it has fewer completions.
        """
        group = self._group(ordinal)
        if not 0 <= completion < len(group["completions"]):
            raise MissingError(f"completion {completion}: group {ordinal} has {len(group['completions'])}")
        one = group["completions"][completion]
        if "messages" not in one:
            role = "" if isinstance(group["prompt"], str) else "assistant"
            one["messages"] = [{"role": role, "content": one["text"]}]
        with recorded.opened(self.config) as ledger:
            payload, words = recorded.tokens_of(ledger, ordinal, self.config)
        samples = [] if payload is None else samples_of(payload, completion)
        names = ("ordinal", "step", "purpose", "environment", "columns", "versions", "images")
        shared = {name: group[name] for name in names}
        return shared | {
            "prompt": conversation(group["prompt"]),
            "completions": len(group["completions"]),
            "completion": one,
            "samples": samples,
            "tokens_words": words,
        }

    def tokens(self, ordinal: int, sample: int, start: int, count: int) -> Value:
        """Return tokens of a sample of a group, with the trainer's values where they are recorded.

        Raises:
            MissingError: the ledger has no tokens of the group, or the group no such sample.
        """
        with recorded.opened(self.config) as ledger:
            payload, words = recorded.tokens_of(ledger, ordinal, self.config)
            place = place_of(ledger, ordinal)
        if payload is None:
            raise MissingError(words)
        decode, reason = decoder(self.config)
        try:
            rows = token_rows(payload, sample, self.config, decode, start, count)
        except ConfigError as error:
            raise MissingError("; ".join(error.problems)) from error
        chosen = slice(rows["start"], rows["start"] + len(rows["id"]))
        values = trainer_values(self.config, payload, sample, place, chosen)
        return rows | values | {"tokenizer": reason, "words": words}

    def picture(self, ordinal: int, digest: str) -> bytes:
        """Return the picture of an image of a group, a PNG.

        Raises:
            MissingError: there is no such image, or no picture can be made of it.
        """
        data = kept_image(self.config.output, digest)
        if data is None:
            with recorded.opened(self.config) as ledger:
                payload = recorded.payload_of(ledger, ordinal)
            data = None if payload is None else images_of(payload).get(digest)
        if data is None or not can_show():
            raise MissingError(f"group {ordinal}: there is no image with this digest, or Pillow is not installed")
        try:
            return picture(data, PICTURE_SIDE)
        except ValueError as error:
            raise MissingError(f"image {digest} {error}") from error

    def _group(self, ordinal: int) -> Value:
        """Return a group from the ledger if it has the payload, else from samples.jsonl.

        `images` has height and width of the images of which there are pictures, by digest.
        """
        with recorded.opened(self.config) as ledger:
            payload, words = recorded.tokens_of(ledger, ordinal, self.config)
            row = None if ledger is None else ledger.group(ordinal)
        if payload is not None:
            version = None if row is None or row.policy is None else row.policy.version
            step = None if row is None else row.step if row.step is not None else version
            state = None if row is None else str(row.state)
            images = sizes_of(images_of(payload)) if can_show() else {}
            return of_payload(payload, step) | {"state": state, "words": words, "images": images}
        line = self._line(ordinal)
        if line is None:
            raise MissingError(f"group {ordinal}: samples.jsonl has no such group, and {words}")
        sizes = line.get("images", {}) if can_show() else {}
        images = {digest: size for digest, size in sizes.items() if is_kept(self.config.output, digest)}
        return of_line(line) | {"state": None if row is None else str(row.state), "words": words, "images": images}

    def _line(self, ordinal: int) -> dict[str, Any] | None:
        query = "SELECT start, length, digest FROM groups WHERE ordinal = ? AND source = 'line'"
        with closing(connect(self._catalogue)) as database:
            row: sqlite3.Row | None = database.execute(query, (ordinal,)).fetchone()
        if row is None:
            return None
        found = (read_line(self.config.output / name, *row) for name in (SAMPLES, OLDER_SAMPLES))
        return next((record for record in found if record is not None), None)


def _begun(config: RunConfig, cache: Path) -> Path:
    """Return the path of a run's catalogue, with its first pieces: its own process needs a second to start.

    Raises:
        ConfigError: the catalogue can't be made.
    """
    catalogue = Catalogue(config, cache)
    # a file that can't be read is told by the keeper, which meets it again
    with closing(catalogue), suppress(Exception):
        for _ in range(FIRST_PIECES):
            catalogue.update()
    return catalogue.path
