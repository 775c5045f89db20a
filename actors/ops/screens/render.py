"""Rendering of a run as text: a screen of lines, or a single line. Pure functions: no terminal, no clock."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.ops.screens.diagnostics import dealt_with, diagnose, learning
from actors.ops.screens.limits import evaluation_words, limits
from actors.process.durations import seconds_in_words
from actors.process.tasks import words_of

MARGIN = 11
"""Width of the headings on the left, in characters."""
NARROWEST = 40
"""Smallest number of columns for wrapping; on narrower terminals lines are cut."""
UNBROKEN = "\u00a0"
"""Space at which no line is wrapped."""
BAR = 20
"""Width of a bar, in characters."""
MAX_ACTORS = 16
"""Largest number of actors with a line each; with more actors, the longest unheard are shown."""
STAGES = {
    "sampling": "groups, of the rollouts' slots",
    "scoring": "groups, of those scored at once",
    "scored": "groups ready, of those admitted",
    "packed": "groups in packed steps, of two",
    "batches": "batches on the way to the trainer",
}
WORK = {
    "packer": "keeps the ledger",
    "trainer": "at step {next_step}",
    "inference": "serves {version}, {engine}, {load} completions at once",
    "reward": "{load} groups to score",
    "rollout": "holds {holds} groups, {free_slots} slots free",
}
"""Current work of an actor, by kind, in the order of display."""
WHOLE = 2000
"""Longest text of a failure in a log line, in characters; no terminal cuts log lines."""
EVAL_WORDS = {"exact_match": "exact match", "mean_reward": "reward"}
# name of a progress value, and its format; a format without a space is shown after the name
FIGURES = (
    ("reward", "{:.3f}"),
    ("entropy", "{:.2f}"),
    ("grad_norm", "{:.2g}"),
    ("lag", "{:.0f}"),
    ("mismatch_kl", "{:.1e}"),
    ("tokens_per_second", "{:.0f} tokens/s"),
    ("idle", "trainer idle {:.0%}"),
)


@dataclass(frozen=True)
class View:
    """Everything shown of a run.

    Args:
        name: name of the run.
        output: path of the output_dir.
        progress: the packer's progress; empty if unknown.
        silent_seconds: age of the progress, in seconds.
    """

    name: str
    output: str
    progress: Mapping[str, Any]
    silent_seconds: float = 0.0
    elapsed_seconds: float | None = None
    """Seconds since the watcher's start; None: the run's own time is shown."""
    ended: str = ""
    """Way in which the run has ended, in words; empty while it goes on."""
    ended_well: bool = True
    """False if the run has ended without being done."""
    starting: str = ""
    """Work of a packer that starts and does not answer yet; empty: not known."""

    @property
    def is_over(self) -> bool:
        """True if the run has ended, so that no actor is expected to be there."""
        return bool(self.ended) or self.progress.get("phase") in ("done", "failed")

    @property
    def diagnostics(self) -> list[str]:
        """Texts on everything that needs attention."""
        return diagnose(self.progress, 0.0 if self.is_over else self.silent_seconds)

    @property
    def is_healthy(self) -> bool:
        """True if nothing needs attention."""
        return self.ended_well and not self.diagnostics


def render(view: View, columns: int = 100) -> list[str]:
    """Return a run as the lines of a screen, each at most `columns` characters long."""
    width, progress = max(columns, NARROWEST), view.progress
    seconds = progress.get("seconds", 0.0) if view.elapsed_seconds is None else view.elapsed_seconds
    left = "" if view.is_over else time_left(progress)
    where = [*(_where(progress) if progress else ()), _clock(seconds), *([left] if left else [])]
    lines = ["  ".join([view.name, *where, view.output])]
    lines += _section("ended", [view.ended] if view.ended else [], width)
    if not progress:
        return [printable(line)[:columns] for line in [*lines, *(() if view.ended else (waiting(view.starting),))]]
    lines += _section("trouble", view.diagnostics, width)
    lines += _section("note", progress.get("notes", ()), width)
    if not view.is_over:
        limit = limits(progress)
        lines += _section("limit", [f"{limit.stage}: {limit.because}"], width)
        lines += _section("change", [limit.change] if limit.change else [], width)
        lines += _section("scale", scaled(progress), width)
    served = progress.get("served")
    policy = f"version {progress['step']} trained, {'none' if served is None else served} served"
    if "durable" in progress:
        policy += f", {progress['durable']} in a checkpoint"
    lines += _section("policy", [policy], width)
    if figures := _figures(progress):
        # a name stays on the line of its value
        joined = "  ".join(figure.replace(" ", UNBROKEN) for figure in figures)
        lines += [line.replace(UNBROKEN, " ") for line in _section("step", [joined], width)]
    lines += _section("eval", evaluations(progress), width)
    lines += _section("recovered", dealt_with(progress), width)
    if not view.is_over:
        lines += ["", *_queue(progress), "", *_actors(progress, view.silent_seconds)]
    return [printable(line)[:columns] for line in lines]


def scaled(progress: Mapping[str, Any]) -> list[str]:
    """Return a line on the processes that `scale` wants, with the cost for an hour and the reason; none without."""
    scale = progress.get("scale", {})
    if not scale.get("wanted"):
        return []
    parts = [", ".join(f"{number} {role}" for role, number in scale["wanted"].items())]
    parts += [f"{scale['cost']:g} for an hour"] if scale["cost"] else []
    parts += [scale["because"]] if scale["because"] else []
    return ["; ".join(parts)]


def printable(text: str) -> str:
    """Return a text with control characters escaped: it may quote a prompt, and must not steer the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def waiting(starting: str) -> str:
    """Return the line on a packer that does not answer yet, with its work if that is known."""
    return f"waiting for the packer{f': {starting}' if starting else ''}"


def describe(progress: Mapping[str, Any], elapsed_seconds: float, starting: str = "") -> str:
    """Return a run as a single line, for logs; `starting` is the work of a packer that does not answer yet."""
    if not progress:
        return printable(f"{_clock(elapsed_seconds)}  {waiting(starting)}")
    parts = [_clock(elapsed_seconds), *_where(progress), *_figures(progress)]
    if left := time_left(progress):
        parts.append(left)
    parts += [f"{actor['name']}: {words_of(actor['task'])}" for actor in progress.get("actors", ()) if "task" in actor]
    parts += [f"eval {text}" for text in evaluations(progress)]
    # a packer that refuses all processes gives only the reason, and no counts
    if "issued" in progress:
        counts = (progress["issued"], progress["settled"], progress["composed"])
        parts.append("groups sampling {} settled {} packed {}".format(*counts))
    if progress.get("eval_open"):
        parts.append(f"evaluating: {evaluation_words(progress)}")
    if progress["phase"] == "starting":
        parts.append("peers " + " ".join(f"{role} {count}" for role, count in sorted(progress["peers"].items())))
    if (missing := progress.get("missing")) and progress["phase"] in ("starting", "running"):
        parts.append(f"waits for {', '.join(missing)}")
    return printable("  ".join([*parts, *dealt_with(progress, WHOLE), *progress.get("notes", ()), *learning(progress)]))


def time_left(progress: Mapping[str, Any]) -> str:
    """Return the estimated time to max_steps, at the pace of the newest steps; empty if there is no estimate."""
    seconds = progress.get("seconds_per_step")
    left = progress.get("max_steps", 0) - progress.get("step", 0)
    if progress.get("phase") != "running" or seconds is None or left <= 0:
        return ""
    return f"about {seconds_in_words(seconds * left)} left"


def evaluations(progress: Mapping[str, Any]) -> list[str]:
    """Return a line per environment, with the first and the newest evaluation, by version."""
    found: dict[str, list[str]] = {}
    for version, results in progress.get("evals", {}).items():
        for label, values in results.items():
            texts = [f"{EVAL_WORDS[name]} {value:.3f}" for name, value in values.items() if value is not None]
            found.setdefault(label, []).append(f"version {version}: {', '.join(texts) or 'nothing measured'}")
    return [f"{label}: {'; '.join(texts)}" for label, texts in found.items()]


def _where(progress: Mapping[str, Any]) -> list[str]:
    step, last = progress["step"], progress["max_steps"]
    # max_steps was lowered since: "step 40/10" would confuse
    beyond = f"step {step} (trainer.max_steps {last})"
    return [str(progress["phase"]), f"step {step}/{last}" if step <= last else beyond]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def _figures(progress: Mapping[str, Any]) -> list[str]:
    """Return the figures of the newest steps, as far as they are known."""
    texts = [(key, form.format(progress[key])) for key, form in FIGURES if progress.get(key) is not None]
    return [text if " " in text else f"{key} {text}" for key, text in texts]


def _section(heading: str, words: Sequence[str], width: int) -> list[str]:
    """Return texts wrapped to lines, each text on new lines, with the heading left of the first line."""
    lines = [line for text in words for line in textwrap.wrap(text, width - MARGIN)]
    return [f"{heading if i == 0 else '':{MARGIN}}{line}" for i, line in enumerate(lines)]


def _queue(progress: Mapping[str, Any]) -> Iterator[str]:
    for stage, (number, limit) in progress.get("queues", {}).items():
        # more than the capacity is possible: groups also wait at reward actors
        yield f"{stage:{MARGIN}}{number:>4} of {limit:<4} {_bar(number, limit)}  {STAGES[stage]}"


def _bar(number: float, limit: float) -> str:
    filled = round(BAR * min(1.0, number / limit)) if limit else 0
    return f"{'#' * filled:.<{BAR}}"


def _actors(progress: Mapping[str, Any], silent_seconds: float) -> list[str]:
    """Return a line for the packer, the source of all values, and for each actor known to it."""
    actors = [{"name": progress.get("packer", ""), "kind": "packer", "age": 0.0}] if progress.get("packer") else []
    actors += progress.get("actors", ())
    shown, folded = actors, ""
    if len(actors) > MAX_ACTORS:
        by_age = sorted(actors, key=lambda actor: -actor["age"])
        shown = by_age[:MAX_ACTORS]
        more = len(by_age) - MAX_ACTORS + progress.get("actors_left_out", 0)
        folded = f"and {more} more, all heard within {by_age[MAX_ACTORS]['age']:.1f} s"
    # by kind; the sort is stable, so actors of a kind keep their order
    shown = sorted(shown, key=lambda actor: list(WORK).index(actor["kind"]))
    longest = max((len(actor["name"]) for actor in shown), default=0)
    lines = []
    for actor in shown:
        age = actor["age"] + silent_seconds  # ages were true when the packer was heard last
        heard = f"heard {age:.1f} s ago" if age < 10 else f"heard {seconds_in_words(age)} ago"
        version, phase = actor.get("version"), actor.get("phase", "running")
        served = "nothing yet" if version is None else f"version {version}"
        words = WORK[actor["kind"]].format(**{**actor, "version": served})
        work = words if phase == "running" else f"{phase}; {words}"
        if (task := actor.get("task")) is not None:
            # what it does now comes first: the end of a long line is cut
            bar = f"{_bar(task['done'], task['total'])} " if task["total"] else ""
            work = f"{bar}{words_of(task)}; {work}"
        lines.append(f"{actor['name']:{longest}}  {heard:>14}  {work}")
    return [line.rstrip() for line in [*lines, *([folded] if folded else [])]]
