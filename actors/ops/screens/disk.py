"""View of a run from its files, for a packer that does not answer.

progress.json has the packer's last progress, summary.json the end of a finished run, up.log the reason why `actors
up` has exited.
"""

import time
from typing import Any

from actors.ops.previous_run import done_at, newest_checkpoint, read_left
from actors.ops.screens.render import View
from actors.process.durations import seconds_in_words
from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig
from schemas.errors import ConfigError


def view_on_disk(config: RunConfig) -> View:
    """Return the view of a run from its files.

    Raises:
        ConfigError: no run has ever been in the output_dir.
    """
    summary, progress = read_left(config, "summary.json"), read_left(config, "progress.json")
    if not (summary or progress or (config.output / "logs" / "up.log").is_file()):
        raise ConfigError(
            f"output_dir: {config.output}: nothing has run there, and no packer answers at bus.control "
            f"{config.bus.control}"
        )
    name, output = config.name, str(config.output)
    if summary and _is_done(config):
        words = f"done at step {summary['steps']}, after {seconds_in_words(summary['wall_seconds'])}"
        # 0 with trainer.max_epochs, which are not counted for a screen
        last = config.trainer.max_steps or summary["steps"]
        done = {"phase": "done", "step": summary["steps"], "max_steps": last, "failure": ""}
        return View(name, output, progress | done, ended=words)
    phase, words = _why(config, progress)
    # progress.json may be older than the trainer's last save
    step = newest_checkpoint(config)
    known = progress and progress | {"phase": phase, "step": step, "durable": step}
    return View(name, output, known, ended=f"{words}; the same command continues from step {step}", ended_well=False)


def _is_done(config: RunConfig) -> bool:
    """Return whether the files show that the run is done. If the ledger is out of sight here, the summary is enough."""
    return not config.ledger_path.exists() or done_at(config, deep=False) is not None


def has_ended_on_disk(config: RunConfig) -> bool:
    """Return whether the packer has recorded on disk that the run is done or has failed."""
    # a run that goes on has its summary removed
    is_done = (config.output / "summary.json").is_file()
    return (is_done and _is_done(config)) or read_left(config, "progress.json").get("phase") in ("done", "failed")


def _why(config: RunConfig, progress: dict[str, Any]) -> tuple[str, str]:
    """Return phase and words for a run that is not done and whose packer does not answer."""
    log = config.output / "logs" / "up.log"
    told = [line for line in read_lines(log) if line.get("event") in ENDINGS] if log.is_file() else []
    last = told[-1] if told else {"event": "started"}
    if last["event"] == "run failed":
        return "failed", f"failed: {last.get('reason', '')}"
    if last["event"] == "stopping":
        return "stopped", f"stopped by {last.get('signal', 'a signal')}"
    if last["event"] == "rewound":
        return "stopped", f"actors rewind went back to step {last.get('step')}"
    wrote = f"it wrote {seconds_in_words(time.time() - progress['time'])} ago" if progress else "it has written nothing"
    return "stopped", (
        f"the packer does not answer at bus.control {config.bus.control}; {wrote}, so it has been killed, is frozen, "
        "or can't be reached from here"
    )


ENDINGS = ("started", "run failed", "stopping", "rewound")
"""Events of up.log that tell how a run stands; the last one counts."""
