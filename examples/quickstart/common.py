"""Parts of all quickstarts: the folder of a run, the commands that fill it, the figures and the page about it."""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from actors.ops.report.command import write_report
from actors.ops.up.run_lock import hold_run_lock
from actors.process.ledger_file import SUFFIXES as LEDGER_SUFFIXES
from actors.process.output_dir import WRITTEN
from schemas.config import load_config
from schemas.errors import ConfigError

HERE = Path(__file__).parent
LEDGER = "ledger.sqlite"
PAGE, PICTURES = "report.html", "report-pictures"
LEFT_BEHIND = ("model", "digits", PAGE, PICTURES, "report.png", LEDGER, *(LEDGER + end for end in LEDGER_SUFFIXES))
"""Files that make_room removes, in addition to the files of every run; report.png is of earlier versions."""


def arguments_of(about: str | None, output: str) -> argparse.ArgumentParser:
    """Return the parser of the arguments that all quickstarts have; `output` is the default folder."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(output))
    parser.add_argument("--resume", action="store_true", help="continue the run in the output directory")
    parser.add_argument("overrides", nargs="*", help="dotted overrides of the configuration")
    return parser


def train(arguments: argparse.Namespace, output: Path, config: Path, *model_maker: object) -> None:
    """Make a model and train it, or continue the run in the output directory with its own configuration.

    Args:
        arguments: those of `arguments_of`.
        output: folder of the run.
        config: configuration of the run.
        model_maker: script that writes the model, with further arguments.
    """
    up = (sys.executable, "-m", "actors", "up")
    if arguments.resume:
        run(*up, output / "config.resolved.yaml", *arguments.overrides)
        return
    try:
        make_room(output)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    started, model = time.monotonic(), output / "model"
    script, *further = model_maker
    run(sys.executable, HERE / str(script), model, "--seed", arguments.seed, *further)
    print(f"model made after {time.monotonic() - started:.0f} s\n")
    places = (f"output_dir={output}", f"model.path={model}", f"seed={arguments.seed}")
    run(*up, config, *places, *arguments.overrides)


def make_room(output: Path) -> None:
    """Remove the files of an earlier quickstart from this directory; files with other names stay.

    Raises:
        ConfigError: the directory has files but no quickstart made it, or a run is using it.
    """
    mark = output / ".quickstart"
    if mark.exists():
        with hold_run_lock(output):
            for name in (*LEFT_BEHIND, *WRITTEN):
                _remove(output / name)
        print(f"beginning anew; the earlier quickstart in {output} has been removed (--resume would have continued it)")
    elif output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output}: is not empty, and not a quickstart's; remove it, or give another --output")
    output.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run(*command: object) -> None:
    """Run a command; a failure ends this program with the command's exit code."""
    process = subprocess.Popen([str(part) for part in command])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has sent SIGINT to the command too, which then stops softly
        code = process.wait()
    if code > 128:
        print("continue with --resume; without --resume the quickstart starts from the beginning", file=sys.stderr)
    if code:
        sys.exit(code)


def records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return rows of a name, a value before and a value after as lines."""
    return [f"{'':32}{'before':>9}{'after':>9}", *(f"{name:32}{a:>9}{b:>9}" for name, a, b in rows)]


def training_lines(summary: dict[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    """Return speed, rise of the reward, lag and the ledger's balance in words."""
    ledger = summary["ledger"]
    speed = (
        f"{summary['completions_per_second'] or 0:.0f} completions/s, "
        f"{summary['tokens_per_second'] or 0:.0f} tokens/s, "
        f"trainer idle {summary['trainer_idle_ratio'] or 0:.0%}"
    )
    equation = (
        f"issued {ledger['issued']} = trained {ledger['trained']} + dropped {sum(ledger['dropped'].values())} "
        f"+ in flight {ledger['in_flight']}; trained twice {ledger['trained_twice']}"
    )
    return [
        f"{summary['steps']} steps in {summary['train_seconds']:.0f} s of training: {speed}",
        f"sampled reward first held 0.9 over five steps after {first_held(lines, 0.9)}",
        f"lag mean {summary['lag_mean']:.2f}, max {summary['lag_max']:.0f}; mismatch KL {summary['mismatch_kl']:.1e}",
        f"ledger: {equation}",
    ]


def first_held(lines: list[dict[str, Any]], reward: float) -> str:
    """Return the first step, and its time, at which the mean reward of five steps in a row reached a value."""
    for i in range(4, len(lines)):
        if sum(line["reward_mean"] for line in lines[i - 4 : i + 1]) / 5 >= reward:
            return f"step {lines[i]['step']}, {lines[i]['time'] - lines[0]['time']:.0f} s after the first step"
    return "no step"


def write_page(output: Path) -> None:
    """Write the page and the pictures of `actors report`, and print where they are.

    Raises:
        ConfigError: the files can't be written.
    """
    written = write_report(load_config(output / "config.resolved.yaml"), output / PAGE, 4, None)
    pictures = f", with its curves as pictures in {output / PICTURES}" if written.pictures else ""
    print(f"\n{written.page} shows curves, scores, completions and costs{pictures}")
