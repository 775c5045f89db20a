"""A run from what it has left on disk, when its packer does not answer.

progress.json tells what the packer knew last, summary.json that the run is done, and up.log why `actors up` has ended.
"""

import json
import time
from typing import Any

from actors.remains import newest_checkpoint
from actors.telemetry.reporter import read_lines
from actors.view.render import View
from actors.view.troubles import seconds_in_words
from schemas.config import RunConfig
from schemas.errors import ConfigError


def view_on_disk(config: RunConfig) -> View:
    """What is known of it.

    Raises:
        ConfigError: nothing has ever run there.
    """
    summary, progress = _read(config, "summary.json"), _read(config, "progress.json")
    if not (summary or progress or (config.output / "logs" / "up.log").is_file()):
        raise ConfigError(
            f"output_dir: {config.output}: nothing has run there, and no packer answers at bus.control "
            f"{config.bus.control}"
        )
    name, output = config.name, str(config.output)
    if summary:
        words = f"done at step {summary['steps']}, after {seconds_in_words(summary['wall_seconds'])}"
        done = {"phase": "done", "step": summary["steps"], "max_steps": config.trainer.max_steps}
        return View(name, output, progress | done, ended=words)
    phase, words = _why(config, progress)
    known = progress and progress | {"phase": phase}
    going_on = f"the same command goes on from step {newest_checkpoint(config)}"
    return View(name, output, known, ended=f"{words}; {going_on}", ended_well=False)


def has_ended_on_disk(config: RunConfig) -> bool:
    """Whether the packer has written down that the run is done or has failed."""
    is_done = (config.output / "summary.json").is_file()  # the packer of one that goes on removes it
    return is_done or _read(config, "progress.json").get("phase") in ("done", "failed")


def _why(config: RunConfig, progress: dict[str, Any]) -> tuple[str, str]:
    """(phase, words) of a run that is not done and whose packer does not answer."""
    log = config.output / "logs" / "up.log"
    told = [line for line in read_lines(log) if line.get("event") in ENDINGS] if log.is_file() else []
    last = told[-1] if told else {"event": "started"}
    if last["event"] == "run failed":
        return "failed", f"failed: {last.get('reason', '')}"
    if last["event"] == "stopping":
        return "stopped", f"stopped by {last.get('signal', 'a signal')}"
    wrote = f"it wrote {seconds_in_words(time.time() - progress['time'])} ago" if progress else "it has written nothing"
    return "stopped", (
        f"the packer does not answer at bus.control {config.bus.control}; {wrote}, so it has been killed, is frozen, "
        "or can't be reached from here"
    )


ENDINGS = ("started", "run failed", "stopping")
"""Events of up.log; the last of them counts."""


def _read(config: RunConfig, name: str) -> dict[str, Any]:
    """A file that is replaced atomically; empty where there is none."""
    try:
        return dict(json.loads((config.output / name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
