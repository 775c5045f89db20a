"""The command `actors`. Parsing imports nothing heavy."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from actors.cli.commands import EXIT_CONFIG
from actors.cli.parser import make_parser


def main(argv: list[str] | None = None) -> int:
    """Run the given subcommand; return the exit code."""
    if os.getpid() == 1:  # in a container: this process must reap orphans, and a child does the work
        from actors.ops.init import run_as_init

        run_as_init()
    for stream in (sys.stdout, sys.stderr):
        # texts of a run may have characters that the terminal's encoding lacks, and a screen must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = parse(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    from actors.ops.screens.task_lines import tasks_on
    from schemas.errors import ConfigError

    # an actor tells its log
    told = contextlib.nullcontext() if arguments.command_name == "run" else tasks_on(sys.stderr)
    try:
        with told:
            code = command(arguments)
        # here and not at exit, so that a closed pipe is caught below
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        # stdout may hold text still, which the interpreter would flush at exit, and complain about the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # Ctrl-C at work that has no end of its own for it, as a first look at a data set
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return EXIT_CONFIG


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. Overrides may be anywhere; argparse alone rejects overrides after an option."""
    parser = make_parser()
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
