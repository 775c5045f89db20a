"""Subcommands: each takes the parsed arguments and returns the exit code. Each imports what it needs when it runs."""

import argparse
import json
import os
import re
import secrets
import socket
import string
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.config import RunConfig

EXIT_CONFIG = 2
"""Exit code of a configuration that can't be used."""


def init(arguments: argparse.Namespace) -> int:
    """Write the files of a new run."""
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


def up(arguments: argparse.Namespace) -> int:
    """Start all actors of a run on this machine, or of several runs one after the other."""
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


def node(arguments: argparse.Namespace) -> int:
    """Run one node's share of a run."""
    _have_one_thread()
    from actors.launch.node import hosts_of, share_of
    from actors.ops.up.supervisor import supervise_node

    if arguments.parent is not None:
        from actors.process.exits import die_with

        die_with(arguments.parent)
    config, share = share_of(arguments.config, arguments.overrides, arguments.rank, hosts_of(arguments.nodes))
    return supervise_node(config, share, arguments.fork)


def launch(arguments: argparse.Namespace) -> int:
    """Start a run on the nodes of a cluster."""
    from actors.launch.command import launch

    return launch(arguments.on, arguments.config.absolute(), arguments.overrides, dry_run=arguments.dry_run)


def run(arguments: argparse.Namespace) -> int:
    """Run a single actor. Ends the process with the actor's exit code."""
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


def check(arguments: argparse.Namespace) -> int:
    """Check a configuration, and print what is asked for."""
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
        from actors.ops.preflight import image_bytes
        from actors.ops.sizes import table as table_of_sizes

        print(table_of_sizes(config, image_bytes(config)))
    if arguments.memory:
        from actors.models.memory import estimate

        print(estimate(config).table())
    return 0


def replay(arguments: argparse.Namespace) -> int:
    """Train a recorded step, or play a recorded group, again; return 1 if it differs."""
    from actors.assembly import make_chats, make_expand, make_learner, make_rollout_datasets
    from actors.ops.replay import recorded_threads, replay
    from actors.ops.replay_trajectory import replay_group
    from actors.ops.resume import resolved_config
    from schemas.config import load_config

    config = load_config(resolved_config(_output_dir(arguments.output_dir)), [])
    if arguments.trajectory is not None:
        ordinal, completion = arguments.trajectory
        chats, expand = make_chats(config), make_expand(config)
        group = replay_group(config, ordinal, completion, make_rollout_datasets(config), chats, expand)
        print(group)
        return 0 if group.is_same else 1
    result = replay(config, arguments.step, make_learner(config, recorded_threads(config, arguments.step)))
    print(result)
    return 0 if all(result.same.values()) else 1


def watch(arguments: argparse.Namespace) -> int:
    """Show a run once, or until it ends."""
    from actors.ops.screens import watch

    config = watch.config_of(arguments.run, arguments.overrides)
    return watch.top(config) if arguments.command_name == "top" else watch.status(config)


def compare(arguments: argparse.Namespace) -> int:
    """Print and draw several runs side by side."""
    from actors.ops.compare.figures import figures_of
    from actors.ops.compare.words import compared
    from actors.ops.screens.watch import config_of

    runs = [figures_of(config_of(run, []).output) for run in arguments.runs]
    print(compared(runs))
    if arguments.picture is not None:
        from actors.ops.compare.picture import draw

        draw(runs, arguments.picture)
        print(f"\nwrote {arguments.picture}")
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Write one HTML file about a run."""
    from actors.ops.report.command import write_report
    from actors.ops.screens.watch import config_of

    config = config_of(arguments.output_dir, [])
    written = write_report(config, arguments.output, arguments.num, arguments.price, arguments.pictures)
    print(f"wrote {written.page}")
    if written.pictures:
        print(f"wrote {len(written.pictures)} pictures to {written.pictures[0].parent}")
    if written.note:
        print(written.note, file=sys.stderr)
    return 0


def view(arguments: argparse.Namespace) -> int:
    """Serve pages about runs until Ctrl-C."""
    from actors.view.command import serve

    return serve(arguments.runs, arguments.host, arguments.port, arguments.cache)


def samples(arguments: argparse.Namespace) -> int:
    """Print sampled completions."""
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


def translate(arguments: argparse.Namespace) -> int:
    """Print another system's configuration as a run.yaml, and the report of the translation on stderr."""
    from actors.imports.command import import_files, run_yaml, sort_words
    from actors.imports.job import Options

    files, words = sort_words([*arguments.files, *arguments.words])
    options = Options(arguments.world, arguments.rows, arguments.data, arguments.reward, arguments.from_version)
    job = import_files(arguments.system, files, words, options)
    print(run_yaml(job, files), end="")
    for line in job.report.lines():
        print(line, file=sys.stderr)
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the text of a command whose work returns a text."""
    match arguments.command_name:
        case "topology":
            from bus.topology import describe
            from schemas.config import load_config

            text = describe(load_config(arguments.config, arguments.overrides))
        case "simulate":
            from actors.simulate.command import run as simulate

            text = simulate(arguments)
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
        case "quantize":
            from actors.ops.quantize import quantize

            text = quantize(arguments.model, arguments.type, arguments.output)
        case "completion":
            from actors.ops.completion import script

            text = script(arguments.shell)
        case "schema":
            from schemas.config.json_schema import json_schema

            text = json.dumps(json_schema(), indent=2)
    print(text)
    return 0


def _output_dir(run: Path) -> Path:
    """Return the output_dir of a run, given the output_dir itself or the run's run.yaml."""
    if not run.is_file():
        return run
    from schemas.config import load_config

    return load_config(run).output


def _have_one_thread() -> None:
    """Import numpy without the threads that its library starts at its import, so that this process can fork actors."""
    if "OPENBLAS_NUM_THREADS" in os.environ:
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy  # noqa: F401

    # its children choose by themselves
    del os.environ["OPENBLAS_NUM_THREADS"]


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
