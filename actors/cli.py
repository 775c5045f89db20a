"""The command `actors`. Parsing imports nothing heavy: each subcommand imports what it needs when it runs."""

import argparse
import io
import json
import os
import re
import secrets
import signal
import socket
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from actors.simulate.options import add_options

if TYPE_CHECKING:
    from schemas.config import RunConfig

IMPORTED = ("areal", "ms-swift", "prime-rl", "surogate", "trl")
"""Systems whose files `actors import` translates."""
ACTORS = (
    *(
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
    ),
)
CLUSTERS = ("slurm", "kubernetes", "ray", "skypilot", "dstack")
"""Kinds of clusters of `actors launch`."""
EXIT_CONFIG = 2
MACHINE = "actors on one machine, e.g. trainer:0,inference:0-3 (default: all of the run)"
FORK = "continue from the newest checkpoint even if identity keys of run.yaml differ; later steps are sampled again"


def main(argv: list[str] | None = None) -> int:
    """Run the given subcommand; return the exit code."""
    if os.getpid() == 1:  # in a container: this process must reap orphans, and a child does the work
        from actors.ops.init import run_as_init

        run_as_init()
    for stream in (sys.stdout, sys.stderr):
        # texts of a run may have characters that the terminal's encoding lacks, and a screen must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = _parse(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    from schemas.errors import ConfigError

    try:
        code = command(arguments)
        # here and not at exit, so that a closed pipe is caught below
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        # stdout may hold text still, which the interpreter would flush at exit, and complain about the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return EXIT_CONFIG


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Overrides may be anywhere; argparse alone rejects overrides after an option."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from actors.ops.completion import complete

        complete(parser)
    arguments, rest = parser.parse_known_args(argv)
    if "words" in arguments:
        # `import` passes on the words of the origin's command line, such as `--learning_rate 1e-5`
        arguments.words = rest
        return arguments
    if "configs" in arguments:  # files and overrides of `up` in any order, around options too
        words = [*arguments.configs, *(word for word in rest if not word.startswith("-"))]
        rest = [word for word in rest if word.startswith("-")]
        arguments.overrides = [word for word in words if "=" in word]
        arguments.configs = [Path(word) for word in words if "=" not in word]
        if not arguments.configs:
            parser.error("the following arguments are required: run.yaml")
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    # --trainer.max_steps=5 is the habit of other tools, and deserves a hint
    meant = [word.removeprefix("--") for word in unknown if word.startswith("--") and "." in word and "=" in word]
    if meant and "overrides" in arguments:
        parser.error(f"write overrides without dashes: {' '.join(meant)}")
    if unknown or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="actors", description="Reinforcement learning of language models on a bus of actors."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str, config: bool = True
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command, command_name=name)
        if config:
            sub.add_argument("config", type=Path, help="run.yaml")
            _add_overrides(sub)
        return sub

    new = add("init", _init, "Write a commented run.yaml, from options or from questions.", config=False)
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
        _up,
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
    launched = add("launch", _launch, "Start a run on the nodes of a cluster.")
    launched.add_argument("--on", choices=CLUSTERS, required=True, help="kind of cluster")
    launched.add_argument("--dry-run", action="store_true", help="print what the cluster would be asked for")
    node = add("node", _node, "Run one node's share of a run over several nodes, until the run ends.")
    node.add_argument("--rank", type=int, required=True, metavar="R", help="number of this node, from 0")
    node.add_argument("--nodes", required=True, metavar="A,B,C", help="names or addresses of all nodes, by rank")
    node.add_argument("--fork", action="store_true", help=FORK)
    # given by the wrapper of `actors launch --on ray` alone
    node.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    check = add("check", _check, "Check a configuration, without GPU or model; only --memory reads the model's config.")
    check.add_argument(
        "--resume", type=Path, metavar="DIR", help="output_dir of a run: show what differs, and whether it may continue"
    )
    check.add_argument(
        "--gpus", type=int, metavar="N", help="plan the devices of a machine with N GPUs (default: of this machine)"
    )
    check.add_argument("--machine", metavar="ACTORS", help=MACHINE)
    check.add_argument("--memory", action="store_true", help="estimate the memory needed, by part")
    check.add_argument("--sizes", action="store_true", help="estimate the bytes of groups, batches and the ledger")
    simulated = add("simulate", _print, "Simulate a run in virtual time: rate, waiting, lag, limit and cost.")
    add_options(simulated)
    add("topology", _print, "Print each edge of the bus: which end binds, which connects, and the high-water mark.")
    run = add("run", _run, "Run a single actor.", config=False)
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
    for name, text in (
        ("top", "Watch a run from another terminal; Ctrl-C stops watching, not the run."),
        ("status", "Print a screen about a run; exit code 0: healthy, 1: not healthy, 2: no such run."),
    ):
        seen = add(name, _watch, text, config=False)
        seen.add_argument("run", type=Path, metavar="RUN", help="a run's output_dir, or its run.yaml")
        _add_overrides(seen)
    comparison = add("compare", _compare, "Compare runs: differing keys, and results side by side.", config=False)
    comparison.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir, or its run.yaml")
    comparison.add_argument("--picture", type=Path, metavar="FILE", help="draw the runs too, e.g. into runs.png")
    report = add(
        "report", _report, "Write a page about a run (curves, completions, costs, keys), and pictures.", config=False
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
    viewed = add("view", _view, "Show runs in a browser: overview, groups, trajectories, tokens, steps.", config=False)
    viewed.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir, or its run.yaml")
    viewed.add_argument("--host", default="127.0.0.1", help="address to serve at; beyond loopback with a token")
    viewed.add_argument("--port", type=int, default=8420, help="port to serve at; 0: any free one (default: 8420)")
    viewed.add_argument("--cache", type=Path, metavar="DIR", help="folder for catalogues (default: ~/.cache)")
    samples = add("samples", _samples, "Show sampled completions or conversations with rewards.", config=False)
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
    traced = add("trace", _print, "Write the timeline of some steps, and say who waited for what.", config=False)
    traced.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    traced.add_argument("--step", type=_steps, required=True, metavar="A..B", help="the steps, or a single one")
    traced.add_argument("--out", type=Path, metavar="FILE", help="trace file (default: trace-A-B.json)")
    rewind = add("rewind", _print, "Make a stopped run continue from an older checkpoint.", config=False)
    rewind.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    rewind.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    rewind.add_argument(
        "--same-groups",
        action="store_true",
        help="train the later steps again on the same groups (default: sample new groups)",
    )
    restore = add("restore", _print, "Replace a damaged ledger by its newest backup.", config=False)
    restore.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    replay = add("replay", _replay, "Train a recorded step, or play a recorded group, again and compare.", config=False)
    replay.add_argument("output_dir", type=Path, help="a run's output_dir, or its run.yaml")
    replayed = replay.add_mutually_exclusive_group(required=True)
    replayed.add_argument("--step", type=int, help="the step to compare, bit by bit")
    replayed.add_argument(
        "--trajectory",
        type=_trajectory,
        metavar="ORDINAL[:COMPLETION]",
        help="the group to play again with its environment or agent, without a model",
    )
    keys = add("keys", _print, "Create, rotate or show the keys of the bus.", config=False)
    keys.add_argument("action", choices=("new", "rotate", "show"))
    keys.add_argument("folder", type=Path, metavar="DIR", help="the folder of bus.keys")
    keys.add_argument("--finish", action="store_true", help="with rotate: revoke the old keys")
    imported = add("import", _import, "Translate another system's configuration to a run.yaml.", config=False)
    imported.add_argument("system", choices=IMPORTED)
    imported.add_argument("files", nargs="+", metavar="FILE", help="configuration files or scripts of that system")
    imported.add_argument("--world", type=int, metavar="N", help="trainer processes of the origin's run, on all nodes")
    imported.add_argument("--rows", type=int, metavar="N", help="rows of the training data, for lengths in epochs")
    imported.add_argument("--data", type=Path, metavar="FILE", help="training data as JSON Lines")
    imported.add_argument("--reward", metavar="FILE.py:F", help="reward function, for rewards that no file names")
    imported.add_argument("--from-version", metavar="V", help="version whose defaults hold (default: newest known)")
    imported.set_defaults(words=[])
    completion = add("completion", _print, "Print the script that completes `actors` in a shell.", config=False)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    add("schema", _print, "Print the JSON Schema of run.yaml, for editors.", config=False)
    return parser


class _Version(argparse.Action):
    """Option that prints the installed version. The package's metadata is read only when the option is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"grpo-actors {version('grpo-actors')}")
        except PackageNotFoundError:
            print("grpo-actors, not installed")
        parser.exit()


def _output_dir(run: Path) -> Path:
    """Return the output_dir of a run, given the output_dir itself or the run's run.yaml."""
    if not run.is_file():
        return run
    from schemas.config import load_config

    return load_config(run).output


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


def _init(arguments: argparse.Namespace) -> int:
    from actors.ops.new_run import Choices, ask, copy_example, with_defaults, write_run
    from schemas.errors import ConfigError

    folder: Path = arguments.folder
    if arguments.example is not None:
        written = copy_example(arguments.example, folder)
    else:
        choices = Choices(**{name: getattr(arguments, name) for name in Choices.__dataclass_fields__})
        try:
            choices = with_defaults(ask(choices) if sys.stdin.isatty() else choices)
        except EOFError:
            raise ConfigError(
                "the questions ended without an answer; use the options of `actors init --help`"
            ) from None
        written = write_run(folder, choices)
    print("\n".join(f"wrote {path}" for path in written))
    if arguments.example is None:
        print(f"next: actors check {folder / 'run.yaml'} && actors up {folder / 'run.yaml'}")
    return 0


def _have_one_thread() -> None:
    """Import numpy without the threads that its library starts at its import, so that this process can fork actors."""
    if "OPENBLAS_NUM_THREADS" in os.environ:
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy  # noqa: F401

    # its children choose by themselves
    del os.environ["OPENBLAS_NUM_THREADS"]


def _up(arguments: argparse.Namespace) -> int:
    if arguments.sweep or len(arguments.configs) > 1:
        from actors.ops.queue.plan import planned
        from actors.ops.queue.runner import run_queue
        from actors.ops.queue.sweep import parse_axis

        runs = planned(arguments.configs, arguments.overrides, list(map(parse_axis, arguments.sweep)))
        return run_queue(runs, arguments.at_once, fork=arguments.fork)
    _have_one_thread()
    from actors.ops.up.supervisor import supervise
    from schemas.config import load_config

    if arguments.parent is not None:
        from actors.process.exits import die_with

        die_with(arguments.parent)
    return supervise(load_config(arguments.configs[0], arguments.overrides), arguments.fork)


def _node(arguments: argparse.Namespace) -> int:
    _have_one_thread()
    from actors.launch.node import hosts_of, share_of
    from actors.ops.up.supervisor import supervise_node

    if arguments.parent is not None:
        from actors.process.exits import die_with

        die_with(arguments.parent)
    config, share = share_of(arguments.config, arguments.overrides, arguments.rank, hosts_of(arguments.nodes))
    return supervise_node(config, share, arguments.fork)


def _launch(arguments: argparse.Namespace) -> int:
    from actors.launch.command import launch

    return launch(arguments.on, arguments.config.absolute(), arguments.overrides, dry_run=arguments.dry_run)


def _run(arguments: argparse.Namespace) -> int:
    from schemas.config import load_config
    from schemas.errors import ConfigError

    if (arguments.actor == "environment") != (arguments.listen is not None):
        raise ConfigError("--listen: needed for `actors run environment`, and for no other actor")
    config = load_config(arguments.config, arguments.overrides)
    name = arguments.name or _default_name(arguments.actor)
    if arguments.machine is not None:
        from actors.ops.device_plan import take_devices

        take_devices(config, arguments.machine, name)  # before torch is imported, which looks at the GPUs once
    # imported after the check of the configuration: errors in it shall appear at once
    from actors.process.exits import NODE_DRAIN, leave
    from actors.runtime import run_actor, run_environment_host, run_server_pool

    alone = NODE_DRAIN if arguments.of_node else None
    if arguments.actor == "inference-pool":
        code = run_server_pool(config, arguments.config, name, arguments.overrides, arguments.parent, alone)
    elif arguments.actor == "environment":
        code = run_environment_host(config, name, arguments.listen)
    else:
        code = run_actor(arguments.actor, name, config, arguments.parent, arguments.started_at, arguments.fork, alone)
    # ends the process here, since the interpreter would wait for threads of user code or of an engine
    leave(code)
    return code


def _check(arguments: argparse.Namespace) -> int:
    from actors.ops.computation import computation
    from actors.ops.device_plan import planned_table
    from actors.ops.ports import busy_ports
    from actors.ops.preflight import preflight
    from schemas.config import load_config, warnings

    config = load_config(arguments.config, arguments.overrides)
    # on stderr, so that stdout has the verdict alone
    for warning in warnings(config):
        print(f"warning: {warning}", file=sys.stderr)
    for note in [*preflight(config, starts=False), *busy_ports(config)]:
        print(f"warning: {note}", file=sys.stderr)
    length = _length_note(config)
    if arguments.resume is not None:
        from actors.ops.resume import compare  # here, since it loads numpy

        text, allowed = compare(config, arguments.resume)
        print(text)
        refused = "these changes make it a different run: use --fork or another output_dir"
        print("the run can continue with this configuration" if allowed else refused)
        return 0 if allowed else EXIT_CONFIG
    print(f"{arguments.config}: good")
    if length:
        print(length)
    is_spread = config.launch.nodes > 1 and arguments.gpus is None and arguments.machine is None
    if table := _places(arguments) if is_spread else planned_table(config, arguments.gpus, arguments.machine):
        print(table)
    for choice in computation(config, arguments.gpus):
        print(choice)
    if arguments.sizes:
        from actors.ops.sizes import table as table_of_sizes

        print(table_of_sizes(config))
    if arguments.memory:
        from actors.models.memory import estimate

        print(estimate(config).table())
    return 0


def _places(arguments: argparse.Namespace) -> str:
    """Return the places of the processes on the nodes of a cluster, as a text."""
    from actors.launch import placement
    from actors.launch.kubernetes import job_of

    job = job_of(arguments.config.absolute(), arguments.overrides)
    return placement.table(job.config, job.nodes)


def _length_note(config: "RunConfig") -> str:
    """Return the number of steps of a run given in epochs, as a text; empty without epochs, or without the files."""
    # an import of numpy and data sets, for runs in epochs alone
    if config.trainer.max_epochs is None or not all(
        Path(path).exists() for one in config.environments for _, path in one.files.values()
    ):
        return ""
    from actors.ops.run_length import run_length_note

    return run_length_note(config)


def _default_name(actor: str) -> str:
    """Return a name that no other process has: kind, host and five random letters.

    A run has one packer, packer-0. A trainer's name ends in its rank, which torchrun passes in RANK. No other name may
    end in a digit, which would be taken for the actor's replica index (`actors.assembly.replica_index`).
    """
    if actor in ("packer", "trainer"):
        return f"{actor}-{os.environ.get('RANK', 0) if actor == 'trainer' else 0}"
    host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname().partition(".")[0]) or "host"
    return f"{actor}-{host}-{''.join(secrets.choice(string.ascii_lowercase) for _ in range(5))}"


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


def _replay(arguments: argparse.Namespace) -> int:
    from actors.assembly import make_chats, make_learner, make_rollout_datasets
    from actors.ops.replay import recorded_threads, replay
    from actors.ops.replay_trajectory import replay_group
    from actors.ops.resume import resolved_config
    from schemas.config import load_config

    config = load_config(resolved_config(_output_dir(arguments.output_dir)), [])
    if arguments.trajectory is not None:
        ordinal, completion = arguments.trajectory
        group = replay_group(config, ordinal, completion, make_rollout_datasets(config), make_chats(config))
        print(group)
        return 0 if group.is_same else 1
    result = replay(config, arguments.step, make_learner(config, recorded_threads(config, arguments.step)))
    print(result)
    return 0 if all(result.same.values()) else 1


def _watch(arguments: argparse.Namespace) -> int:
    from actors.ops.view import watch

    config = watch.config_of(arguments.run, arguments.overrides)
    return watch.top(config) if arguments.command_name == "top" else watch.status(config)


def _compare(arguments: argparse.Namespace) -> int:
    from actors.ops.compare.figures import figures_of
    from actors.ops.compare.words import compared
    from actors.ops.view.watch import config_of

    runs = [figures_of(config_of(run, []).output) for run in arguments.runs]
    print(compared(runs))
    if arguments.picture is not None:
        from actors.ops.compare.picture import draw

        draw(runs, arguments.picture)
        print(f"\nwrote {arguments.picture}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from actors.ops.report.command import write_report
    from actors.ops.view.watch import config_of

    config = config_of(arguments.output_dir, [])
    written = write_report(config, arguments.output, arguments.num, arguments.price, arguments.pictures)
    print(f"wrote {written.page}")
    if written.pictures:
        print(f"wrote {len(written.pictures)} pictures to {written.pictures[0].parent}")
    if written.note:
        print(written.note, file=sys.stderr)
    return 0


def _view(arguments: argparse.Namespace) -> int:
    from actors.view.command import serve

    return serve(arguments.runs, arguments.host, arguments.port, arguments.cache)


def _samples(arguments: argparse.Namespace) -> int:
    from actors.telemetry.samples import show_samples
    from schemas.errors import ConfigError

    output = _output_dir(arguments.output_dir)
    if arguments.follow:
        from actors.ops.samples.follow import follow_samples

        return follow_samples(output, arguments.num, arguments.width)
    path = output / "samples.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{path}: there is no such file; is {arguments.output_dir} a run's output_dir, and has it trained a step?"
        )
    print(show_samples(path, arguments.step, arguments.num, arguments.width))
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from actors.imports.command import import_files, run_yaml, sort_words
    from actors.imports.job import Options

    files, words = sort_words([*arguments.files, *arguments.words])
    options = Options(arguments.world, arguments.rows, arguments.data, arguments.reward, arguments.from_version)
    job = import_files(arguments.system, files, words, options)
    print(run_yaml(job, files), end="")
    for line in job.report.lines():
        print(line, file=sys.stderr)
    return 0


def _print(arguments: argparse.Namespace) -> int:
    """Print the text of a command whose work returns a text."""
    match arguments.command_name:
        case "topology":
            from bus.topology import describe
            from schemas.config import load_config

            text = describe(load_config(arguments.config, arguments.overrides))
        case "simulate":
            from actors.simulate.command import run

            text = run(arguments)
        case "rewind":
            from actors.ops.resume import rewind

            text = rewind(_output_dir(arguments.output_dir), arguments.step, same_groups=arguments.same_groups)
        case "trace":
            from actors.ops.trace.command import trace

            first, last = arguments.step
            text = trace(_output_dir(arguments.output_dir), first, last, arguments.out)
        case "restore":
            from actors.ops.resume import restore

            text = restore(_output_dir(arguments.output_dir))
        case "keys":
            from actors.ops.keys import keys

            text = keys(arguments.action, arguments.folder, arguments.finish)
        case "completion":
            from actors.ops.completion import script

            text = script(arguments.shell)
        case "schema":
            from schemas.config.json_schema import json_schema

            text = json.dumps(json_schema(), indent=2)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
