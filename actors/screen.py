"""Progress of a run on a terminal: one line that stays, a line per so many steps elsewhere."""

import time
from typing import IO, Any

from schemas.config import RunConfig

REFRESH_SECONDS = 0.5
LINE_EVERY_SECONDS = 10.0


class Screen:
    """Shows `RunRecord.progress()`."""

    def __init__(self, stream: IO[str], config: RunConfig) -> None:
        self._stream, self._live = stream, stream.isatty()
        self._next, self._started = 0.0, time.monotonic()
        self._stream.write(f"run {config.name}: {config.output}\n")
        self._stream.flush()

    def show(self, progress: dict[str, Any]) -> None:
        """Draw, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (REFRESH_SECONDS if self._live else LINE_EVERY_SECONDS)
        text = describe(progress, now - self._started)
        self._stream.write(f"\r\x1b[2K{text}" if self._live else f"{text}\n")
        self._stream.flush()

    def close(self, progress: dict[str, Any]) -> None:
        """Draw a last time."""
        text = describe(progress, time.monotonic() - self._started)
        self._stream.write(f"\r\x1b[2K{text}\n" if self._live else f"{text}\n")
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
    if progress.get("restarts"):
        parts.append("restarted " + ", ".join(f"{name} ×{count}" for name, count in progress["restarts"].items()))
    return "  ".join(parts)
