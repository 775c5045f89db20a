"""Progress of a run on a terminal: one line that stays below all others, a line per so many seconds elsewhere."""

import contextlib
import shutil
import textwrap
import time
from collections.abc import Iterator
from typing import IO, Any

from schemas.config import RunConfig

REFRESH_SECONDS = 0.5
LINE_EVERY_SECONDS = 10.0
MAX_FAILURE_CHARACTERS = 100


class Screen:
    """Shows `RunRecord.progress()`."""

    def __init__(self, stream: IO[str], config: RunConfig) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._next, self._started = 0.0, time.monotonic()
        self._rows = 0
        """On the terminal, that the progress line fills besides the one where the cursor is."""
        self.say(f"run {config.name}: {config.output}")

    def say(self, text: str) -> None:
        """Write a line that is not progress."""
        self._write(f"{text}\n")
        self._next = 0.0 if self._live else self._next

    def show(self, progress: dict[str, Any]) -> None:
        """Draw, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (REFRESH_SECONDS if self._live else LINE_EVERY_SECONDS)
        self._write(describe(progress, now - self._started) + "\n" * (not self._live))

    def close(self, progress: dict[str, Any]) -> None:
        """Draw a last time."""
        self._write(describe(progress, time.monotonic() - self._started) + "\n")

    def _write(self, text: str) -> None:
        """Write in the place of the progress line."""
        if self._live:
            up = f"\x1b[{self._rows}A" if self._rows else ""
            self._rows = 0 if text.endswith("\n") else (len(text) - 1) // shutil.get_terminal_size().columns
            text = f"\r{up}\x1b[J{text}"
        with contextlib.suppress(OSError):  # a full disk or a reader that has left is no reason to end a run
            self._stream.write(text)
            self._stream.flush()


def describe(progress: dict[str, Any], elapsed_seconds: float) -> str:
    """One line of words and numbers."""
    clock = f"{int(elapsed_seconds) // 60:02d}:{int(elapsed_seconds) % 60:02d}"
    if not progress:
        return f"{clock}  waiting for the packer"
    parts = [clock, str(progress["phase"]), f"step {progress['step']}/{progress['max_steps']}"]
    shown = (
        ("reward", "{:.3f}"),
        ("loss", "{:.4f}"),
        ("lag", "{:.0f}"),
        ("mismatch_kl", "{:.1e}"),
        ("tokens_per_second", "{:.0f} tokens/s"),
        ("idle", "trainer idle {:.0%}"),
    )
    for key, form in shown:
        if progress.get(key) is not None:
            text = form.format(progress[key])
            parts.append(text if " " in text else f"{key} {text}")
    parts.append(f"groups sampling {progress['issued']} settled {progress['settled']} packed {progress['composed']}")
    if progress.get("eval_open"):
        parts.append(f"evaluating, {progress['eval_open']} prompts to go")
    if progress["phase"] == "starting":
        parts.append("peers " + " ".join(f"{role} {count}" for role, count in sorted(progress["peers"].items())))
    return "  ".join([*parts, *_trouble(progress)])


def _trouble(progress: dict[str, Any]) -> Iterator[str]:
    """What went wrong and was dealt with; nothing in a run where all is well."""
    if (missing := progress.get("missing")) and progress["phase"] in ("starting", "running"):
        yield f"waits for {', '.join(missing)}"
    if restarts := progress.get("restarts"):
        yield "restarted " + ", ".join(f"{name} ×{count}" for name, count in restarts.items())
    if failed := progress.get("failed_attempts"):
        yield f"failed attempts {failed}"
    if dropped := progress.get("dropped"):
        yield f"dropped {sum(dropped.values())} ({', '.join(f'{n} {reason}' for reason, n in dropped.items())})"
    if failure := progress.get("last_failure"):
        yield f"last failure: {textwrap.shorten(failure, MAX_FAILURE_CHARACTERS, placeholder='…')}"
