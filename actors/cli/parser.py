"""Options of each subcommand, and the functions of `commands` that run them."""

import argparse
from collections.abc import Callable
from pathlib import Path

from actors.cli import commands
from actors.simulate.options import add_options

IMPORTED = ("areal", "ms-swift", "prime-rl", "surogate", "trl")
"""Systems whose files `actors import` translates."""
ACTORS = (
    "rollout",
    "reward",
    "packer",
    "trainer",
    "inference",
    "inference-pool",
    "environment",
    "callbacks",
    "uploader",
    "tracker",
)
"""Kinds of actors of `actors run`."""
CLUSTERS = ("slurm", "kubernetes", "ray", "skypilot", "dstack")
"""Kinds of clusters of `actors launch`."""
MACHINE = "actors on one machine, e.g. trainer:0,inference:0-3 (default: all of the run)"
FORK = "continue from the newest checkpoint even if identity keys of run.yaml differ; later steps are sampled again"

Add = Callable[..., argparse.ArgumentParser]
"""Function (name, command, text, config=True) that adds a subcommand; `config`: whether it takes run.yaml first."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each subcommand sets `command` to its function."""
    parser = argparse.ArgumentParser(
        prog="actors", description="Reinforcement learning of language models on a bus of actors."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str, config: bool = True
    ) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command, command_name=name)
        if config:
            sub.add_argument("config", type=Path, help="run.yaml")
            _add_overrides(sub)
        return sub

    for section in (_add_starts, _add_forecasts, _add_run, _add_views, _add_repairs, _add_tools):
        section(add)
    return parser


def _add_starts(add: Add) -> None:
    """Add what writes and starts whole runs."""
    new = add("init", commands.init, "Write a commented run.yaml, from options or from questions.", config=False)
    new.add_argument("folder", nargs="?", type=Path, default=Path(), help="folder of the files (default: this one)")
    new.add_argument("--model", metavar="PATH", help="model folder, or name on the Hugging Face hub")
    new.add_argument("--data", metavar="FILE", help="training data as JSON Lines")
    new.add_argument("--prompt-column", metavar="NAME", help="column of the prompt (default: by its usual names)")
    new.add_argument("--reward", metavar="PATH", help="built-in name or FILE.py:FUNCTION, written if it does not exist")
    new.add_argument("--engine", choices=("vllm", "embedded"), help="engine that samples")
    new.add_argument("--steps", type=_at_least_1, metavar="N", help="training steps")
    new.add_argument("--lora", action=argparse.BooleanOptionalAction, help="train adapters instead of all weights")
    new.add_argument("--example", metavar="NAME", help="copy an example of the package instead, such as quickstart")
    up = add(
        "up",
        commands.up,
        "Start all actors of a run on this machine, and wait until the run ends; or of several.",
        config=False,
    )
    configs = up.add_argument(
        "configs", nargs="+", metavar="run.yaml", help="run.yaml, or several for a queue; and overrides key=value"
    )
    configs.completer = _file_and_override_words  # type: ignore[attr-defined]  # read by argcomplete
    up.set_defaults(overrides=[])
    up.add_argument("--at-once", type=_at_least_1, default=1, metavar="N", help="runs at the same time (default: 1)")
    up.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B,…",
        help="a run for each value of a key; give it again for each combination with another key",
    )
    up.add_argument("--fork", action="store_true", help=FORK)
    # given by GRPOTrainer alone
    up.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    launched = add("launch", commands.launch, "Start a run on the nodes of a cluster.")
    launched.add_argument("--on", choices=CLUSTERS, required=True, help="kind of cluster")
    launched.add_argument("--dry-run", action="store_true", help="print what the cluster would be asked for")
    node = add("node", commands.node, "Run one node's share of a run over several nodes, until the run ends.")
    node.add_argument("--rank", type=int, required=True, metavar="R", help="number of this node, from 0")
    node.add_argument("--nodes", required=True, metavar="A,B,C", help="names or addresses of all nodes, by rank")
    node.add_argument("--fork", action="store_true", help=FORK)
    # given by the wrapper of `actors launch --on ray` alone
    node.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def _add_forecasts(add: Add) -> None:
    """Add what tells of a configuration without a run."""
    check = add(
        "check", commands.check, "Check a configuration, without GPU or model; only --memory reads the model's config."
    )
    check.add_argument(
        "--resume", type=Path, metavar="DIR", help="output_dir of a run: show what differs, and whether it may continue"
    )
    check.add_argument(
        "--gpus", type=int, metavar="N", help="plan the devices of a machine with N GPUs (default: of this machine)"
    )
    check.add_argument("--machine", metavar="ACTORS", help=MACHINE)
    check.add_argument("--memory", action="store_true", help="estimate the memory needed, by part")
    check.add_argument("--sizes", action="store_true", help="estimate the bytes of groups, batches and the ledger")
    simulated = add("simulate", commands.show, "Simulate a run in virtual time: rate, waiting, lag, limit and cost.")
    add_options(simulated)
    add(
        "topology",
        commands.show,
        "Print each edge of the bus: which end binds, which connects, and the high-water mark.",
    )


def _add_run(add: Add) -> None:
    """Add `run`, a single actor."""
    run = add("run", commands.run, "Run a single actor.", config=False)
    run.add_argument("actor", choices=ACTORS)
    run.add_argument("--config", type=Path, required=True, help="run.yaml, the same for all actors of a run")
    run.add_argument("--name", help="unique in the run; default: KIND-HOST-LETTERS, trainer-RANK or packer-0")
    run.add_argument("--machine", metavar="ACTORS", help=f"{MACHINE}; this actor then takes its GPUs of the plan")
    run.add_argument("--fork", action="store_true", help=FORK)
    run.add_argument(
        "--listen",
        metavar="tcp://HOST:PORT",
        help="address of an environment host, for `run environment` alone; environments[].hosts has it too",
    )
    # --parent and --started-at are given by `actors up` alone
    run.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    run.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    # given by `actors node` alone: only the node's supervisor drains the actor, by a signal of its own
    run.add_argument("--of-node", action="store_true", help=argparse.SUPPRESS)
    _add_overrides(run)


def _add_views(add: Add) -> None:
    """Add what shows runs."""
    for name, text in (
        ("top", "Watch a run from another terminal; Ctrl-C stops watching, not the run."),
        ("status", "Print a screen about a run; exit code 0: healthy, 1: not healthy, 2: no such run."),
    ):
        seen = add(name, commands.watch, text, config=False)
        seen.add_argument("run", type=Path, metavar="RUN", help="a run's output_dir, or its run.yaml")
        _add_overrides(seen)
    comparison = add(
        "compare", commands.compare, "Compare runs: differing keys, and results side by side.", config=False
    )
    comparison.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir, or its run.yaml")
    comparison.add_argument("--picture", type=Path, metavar="FILE", help="draw the runs too, e.g. into runs.png")
    report = add(
        "report",
        commands.report,
        "Write a page about a run (curves, completions, costs, keys), and pictures.",
        config=False,
    )
    report.add_argument("output_dir", type=Path, metavar="RUN", help="a run's output_dir, or its run.yaml")
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write (default: report.html in output_dir)"
    )
    report.add_argument(
        "--num",
        type=_at_least_1,
        default=4,
        metavar="N",
        help="best, worst and random completions (default: 4 of each)",
    )
    report.add_argument(
        "--pictures", type=Path, metavar="DIR", help="folder for the curves as PNG (default: next to the file)"
    )
    report.add_argument("--price", type=float, metavar="PRICE", help="price of an hour of the run, for its costs")
    viewed = add(
        "view", commands.view, "Show runs in a browser: overview, groups, trajectories, tokens, steps.", config=False
    )
    viewed.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir, or its run.yaml")
    viewed.add_argument("--host", default="127.0.0.1", help="address to serve at; beyond loopback with a token")
    viewed.add_argument("--port", type=int, default=8420, help="port to serve at; 0: any free one (default: 8420)")
    viewed.add_argument("--cache", type=Path, metavar="DIR", help="folder for catalogues (default: ~/.cache)")
    samples = add("samples", commands.samples, "Show sampled completions or conversations with rewards.", config=False)
    samples.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    chosen = samples.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, help="only this step (default: the last one)")
    chosen.add_argument(
        "--follow", action="store_true", help="show new ones as they come, until the run has ended, or Ctrl-C"
    )
    samples.add_argument("--num", type=int, default=4, help="completions shown per group (default: 4)")
    samples.add_argument(
        "--width", type=int, default=400, help="characters shown of each message of a conversation (default: 400)"
    )
    traced = add("trace", commands.show, "Write the timeline of some steps, and say who waited for what.", config=False)
    traced.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    traced.add_argument("--step", type=_steps, required=True, metavar="A..B", help="the steps, or a single one")
    traced.add_argument("--out", type=Path, metavar="FILE", help="trace file (default: trace-A-B.json)")


def _add_repairs(add: Add) -> None:
    """Add what goes back in a run, or does a part of it again."""
    rewind = add("rewind", commands.show, "Make a stopped run continue from an older checkpoint.", config=False)
    rewind.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    rewind.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    rewind.add_argument(
        "--same-groups",
        action="store_true",
        help="train the later steps again on the same groups (default: sample new groups)",
    )
    restore = add("restore", commands.show, "Replace a damaged ledger by its newest backup.", config=False)
    restore.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    replay = add(
        "replay", commands.replay, "Train a recorded step, or play a recorded group, again and compare.", config=False
    )
    replay.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    replayed = replay.add_mutually_exclusive_group(required=True)
    replayed.add_argument("--step", type=int, help="the step to compare, bit by bit")
    replayed.add_argument(
        "--trajectory",
        type=_trajectory,
        metavar="ORDINAL[:COMPLETION]",
        help="the group to play again with its environment or agent, without a model",
    )


def _add_tools(add: Add) -> None:
    """Add what stands beside runs: keys, translations, shells and editors."""
    keys = add("keys", commands.show, "Create, rotate or show the keys of the bus.", config=False)
    keys.add_argument("action", choices=("new", "rotate", "show"))
    keys.add_argument("folder", type=Path, metavar="DIR", help="the folder of bus.keys")
    keys.add_argument("--finish", action="store_true", help="with rotate: revoke the old keys")
    imported = add(
        "import", commands.translate, "Translate another system's configuration to a run.yaml.", config=False
    )
    imported.add_argument("system", choices=IMPORTED)
    imported.add_argument("files", nargs="+", metavar="FILE", help="configuration files or scripts of that system")
    imported.add_argument("--world", type=int, metavar="N", help="trainer processes of the origin's run, on all nodes")
    imported.add_argument("--rows", type=int, metavar="N", help="rows of the training data, for lengths in epochs")
    imported.add_argument("--data", type=Path, metavar="FILE", help="training data as JSON Lines")
    imported.add_argument("--reward", metavar="FILE.py:F", help="reward function, for rewards that no file names")
    imported.add_argument("--from-version", metavar="V", help="version whose defaults hold (default: newest known)")
    imported.set_defaults(words=[])
    quantized = add(
        "quantize", commands.show, "Write a model with weights of 8 or 4 bits, as a base for adapters.", config=False
    )
    quantized.add_argument("model", type=Path, metavar="MODEL", help="folder of the model in 16 or 32 bits")
    quantized.add_argument("--type", choices=("fp8", "nvfp4"), required=True, help="format of the weights")
    quantized.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    completion = add("completion", commands.show, "Print the script that completes `actors` in a shell.", config=False)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    add("schema", commands.show, "Print the JSON Schema of run.yaml, for editors.", config=False)


class _Version(argparse.Action):
    """Option that prints the installed version. The package's metadata is read only when the option is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"grpo-actors {version('grpo-actors')}")
        except PackageNotFoundError:
            print("grpo-actors, not installed")
        parser.exit()


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    overrides = parser.add_argument(
        "overrides",
        nargs="*",
        # without a default argparse requires at least one
        default=[],
        metavar="key=value",
        help="dotted overrides, e.g. trainer.learning_rate=1e-5",
    )
    overrides.completer = _override_words  # type: ignore[attr-defined]  # read by argcomplete


def _override_words(prefix: str, **others: object) -> list[str]:
    from actors.ops.completion import override_words

    return override_words(prefix, **others)


def _file_and_override_words(prefix: str, **others: object) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return [*_override_words(prefix, **others), *FilesCompleter()(prefix)]


def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _trajectory(text: str) -> tuple[int, int | None]:
    """Return ordinal and completion of `41` or `41:3`."""
    ordinal, colon, completion = text.partition(":")
    try:
        return int(ordinal), int(completion) if colon else None
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give the ordinal of a group, as `actors samples` shows it, or ORDINAL:COMPLETION"
        ) from None


def _steps(text: str) -> tuple[int, int]:
    """Return the first and last step of `41..50` or `41`."""
    first, dots, last = text.partition("..")
    if not first.isdecimal() or not (last if dots else first).isdecimal() or int(first) > int(last or first):
        raise argparse.ArgumentTypeError(f"{text!r}: give the steps as A..B, for example 41..50, or as a single number")
    return int(first), int(last or first)
