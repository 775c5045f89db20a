"""A run in words and numbers: one screen of lines, or one line. Pure: no terminal, no clock."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.view.limits import limits
from actors.view.troubles import dealt_with, seconds_in_words, troubles

MARGIN = 11
"""Characters of the headings on the left."""
NARROWEST = 40
"""Columns: below, lines are cut."""
BAR = 20
MAX_ACTORS = 16
"""Shown one by one; those that have not been heard for longest come first when there are more."""
STAGES = {
    "sampling": "groups being sampled, of the rollouts' slots",
    "scoring": "groups with a reward actor, of those scored at once",
    "scored": "groups that wait for their step, of those admitted",
    "packed": "groups in packed steps, of two steps",
    "batches": "batches on their way to the trainer",
}
WORK = {
    "packer": "keeps the ledger",
    "trainer": "at step {next_step}",
    "inference": "serves {version}, {engine}, {load} completions under way",
    "reward": "{load} groups to score",
    "rollout": "holds {holds} groups, {free_slots} slots free",
}
"""What an actor is at, by kind, in the order in which kinds are shown."""
FIGURES = (
    ("reward", "{:.3f}"),
    ("loss", "{:.4f}"),
    ("lag", "{:.0f}"),
    ("mismatch_kl", "{:.1e}"),
    ("tokens_per_second", "{:.0f} tokens/s"),
    ("idle", "trainer idle {:.0%}"),
)


@dataclass(frozen=True)
class View:
    """What is shown of a run: the packer's progress, how old it is, and how the run has ended, if it has."""

    name: str
    output: str
    progress: Mapping[str, Any]
    silent_seconds: float = 0.0
    elapsed_seconds: float | None = None
    """On the watcher's clock; the packer's where empty."""
    ended: str = ""
    ended_well: bool = True

    @property
    def is_over(self) -> bool:
        """Whether nobody is expected to be there."""
        return bool(self.ended) or self.progress.get("phase") in ("done", "failed")

    @property
    def troubles(self) -> list[str]:
        """What somebody should look at."""
        return troubles(self.progress, 0.0 if self.is_over else self.silent_seconds)

    @property
    def is_healthy(self) -> bool:
        """Whether nobody need look."""
        return self.ended_well and not self.troubles


def render(view: View, columns: int = 100) -> list[str]:
    """The lines of a screen, none longer than `columns`."""
    width, progress = max(columns, NARROWEST), view.progress
    lines = [_head(view), *_section("ended", [view.ended] if view.ended else [], width)]
    if not progress:
        return [line[:columns] for line in [*lines, *(() if view.ended else ("waiting for the packer",))]]
    lines += _section("trouble", view.troubles, width)
    if not view.is_over:
        limit = limits(progress)
        lines += _section("limit", [f"{limit.stage}: {limit.because}"], width)
        lines += _section("change", [limit.change] if limit.change else [], width)
    lines += _section("policy", [_policy(progress)], width)
    if figures := _figures(progress):
        lines += _section("step", ["  ".join(figures)], width)
    lines += _section("dealt with", dealt_with(progress), width)
    if not view.is_over:
        lines += ["", *_queue(progress), "", *_actors(progress, view.silent_seconds)]
    return [line[:columns] for line in lines]


def describe(progress: Mapping[str, Any], elapsed_seconds: float) -> str:
    """One line of words and numbers."""
    if not progress:
        return f"{_clock(elapsed_seconds)}  waiting for the packer"
    parts = [_clock(elapsed_seconds), *_where(progress), *_figures(progress)]
    if "issued" in progress:  # the last words of a packer that refuses everybody have no figures
        counts = (progress["issued"], progress["settled"], progress["composed"])
        parts.append("groups sampling {} settled {} packed {}".format(*counts))
    if progress.get("eval_open"):
        parts.append(f"evaluating, {progress['eval_open']} prompts to go")
    if progress["phase"] == "starting":
        parts.append("peers " + " ".join(f"{role} {count}" for role, count in sorted(progress["peers"].items())))
    if (missing := progress.get("missing")) and progress["phase"] in ("starting", "running"):
        parts.append(f"waits for {', '.join(missing)}")
    return "  ".join([*parts, *dealt_with(progress)])


def _head(view: View) -> str:
    seconds = view.progress.get("seconds", 0.0) if view.elapsed_seconds is None else view.elapsed_seconds
    return "  ".join([view.name, *(_where(view.progress) if view.progress else ()), _clock(seconds), view.output])


def _where(progress: Mapping[str, Any]) -> list[str]:
    return [str(progress["phase"]), f"step {progress['step']}/{progress['max_steps']}"]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def _figures(progress: Mapping[str, Any]) -> list[str]:
    """Those of the newest step and of the newest few, as far as there are any."""
    texts = [(key, form.format(progress[key])) for key, form in FIGURES if progress.get(key) is not None]
    return [text if " " in text else f"{key} {text}" for key, text in texts]


def _policy(progress: Mapping[str, Any]) -> str:
    served = progress.get("served")
    parts = [f"version {progress['step']} trained", f"{'none' if served is None else served} served"]
    if "durable" in progress:
        parts.append(f"{progress['durable']} in a checkpoint")
    return ", ".join(parts)


def _section(heading: str, words: Sequence[str], width: int) -> list[str]:
    """Each text from its own line on, with the heading left of the first."""
    lines = [line for text in words for line in textwrap.wrap(text, width - MARGIN)]
    return [f"{heading if i == 0 else '':{MARGIN}}{line}" for i, line in enumerate(lines)]


def _queue(progress: Mapping[str, Any]) -> Iterator[str]:
    for stage, (number, limit) in progress.get("queues", {}).items():
        filled = round(BAR * min(1.0, number / limit)) if limit else 0
        yield f"{stage:{MARGIN}}{number:>4} of {limit:<4} {'#' * filled:.<{BAR}}  {STAGES[stage]}"


def _actors(progress: Mapping[str, Any], silent_seconds: float) -> list[str]:
    """The packer, whose word all this is, and everybody that it has heard."""
    actors = [{"name": progress.get("packer", ""), "kind": "packer", "age": 0.0}] if progress.get("packer") else []
    actors += progress.get("actors", ())
    shown, folded = actors, ""
    if len(actors) > MAX_ACTORS:
        by_age = sorted(actors, key=lambda actor: -actor["age"])
        shown = by_age[:MAX_ACTORS]
        folded = f"and {len(by_age) - MAX_ACTORS} more, all heard within {by_age[MAX_ACTORS]['age']:.1f} s"
    shown = sorted(shown, key=lambda actor: list(WORK).index(actor["kind"]))
    longest = max((len(actor["name"]) for actor in shown), default=0)
    lines = [f"{actor['name']:{longest}}  {_heard(actor, silent_seconds):>14}  {_work(actor)}" for actor in shown]
    return [line.rstrip() for line in [*lines, *([folded] if folded else [])]]


def _heard(actor: Mapping[str, Any], silent_seconds: float) -> str:
    age = actor["age"] + silent_seconds
    return f"heard {age:.1f} s ago" if age < 10 else f"heard {seconds_in_words(age)} ago"


def _work(actor: Mapping[str, Any]) -> str:
    """What an actor is at."""
    phase = actor.get("phase", "running")
    words = WORK[actor["kind"]].format(**{**actor, **_version(actor)})
    return words if phase == "running" else f"{phase}; {words}"


def _version(actor: Mapping[str, Any]) -> dict[str, str]:
    version = actor.get("version")
    return {"version": "nothing yet" if version is None else f"version {version}"}
