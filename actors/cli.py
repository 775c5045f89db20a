"""The command `actors`. Parsing imports nothing heavy: each command imports what it needs when it is given."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.config import RunConfig

ACTORS = ("rollout", "reward", "packer", "trainer", "inference", "inference-pool")
EXIT_CONFIG = 2
FORK = "go on from the newest checkpoint though the configuration makes it another run; what came after is given up"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = _parse(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    from schemas.errors import ConfigError

    try:
        return command(arguments)
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return EXIT_CONFIG


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may stand anywhere; argparse alone takes those after an option for unknown."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="actors", description="Reinforcement learning of language models on a bus of actors."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str, config: bool = True
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        if config:
            sub.add_argument("config", type=Path, help="run.yaml")
            _add_overrides(sub)
        return sub

    up = add("up", _up, "Start all actors of a run on this machine and wait for its end.")
    up.add_argument("--fork", action="store_true", help=FORK)
    check = add("check", _check, "Check a configuration; needs no GPU, and a model for --memory alone.")
    check.add_argument("--resume", type=Path, metavar="DIR", help="a run's output_dir: may it go on with this?")
    check.add_argument("--memory", action="store_true", help="what it will need, by part, from the model's config.json")
    add("topology", _topology, "Print who binds, who connects, and the high-water mark of each edge.")
    run = add("run", _run, "Run one actor.", config=False)
    run.add_argument("actor", choices=ACTORS)
    run.add_argument("--config", type=Path, required=True, help="run.yaml, the same for all actors of a run")
    run.add_argument("--name", help="unique in the run; default: the actor's kind and -0")
    run.add_argument("--fork", action="store_true", help=FORK)
    run.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    run.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    _add_overrides(run)
    for name, command, text in (
        ("top", _top, "Watch a run from another terminal; Ctrl-C leaves it alone."),
        ("status", _status, "Print one screen about a run; exit code 0: healthy, 1: not healthy, 2: no such run."),
    ):
        seen = add(name, command, text, config=False)
        seen.add_argument("run", type=Path, metavar="RUN", help="a run's output_dir, or its run.yaml")
        _add_overrides(seen)
    samples = add("samples", _samples, "Show sampled completions with rewards.", config=False)
    samples.add_argument("output_dir", type=Path, help="a run's output_dir")
    samples.add_argument("--step", type=int, help="only this step (default: the last one)")
    samples.add_argument("--num", type=int, default=4, help="completions per group")
    rewind = add("rewind", _rewind, "Have a run that stands still go on from an older checkpoint.", config=False)
    rewind.add_argument("output_dir", type=Path, help="a run's output_dir")
    rewind.add_argument("--step", type=int, required=True, help="of the checkpoint")
    replay = add("replay", _replay, "Train a recorded step again and compare bit by bit.", config=False)
    replay.add_argument("output_dir", type=Path, help="a run's output_dir")
    replay.add_argument("--step", type=int, required=True, help="the step to compare")
    keys = add("keys", _keys, "Make, rotate or show the keys of the bus.", config=False)
    keys.add_argument("action", choices=("new", "rotate", "show"))
    keys.add_argument("folder", type=Path, metavar="DIR", help="the folder that bus.keys names")
    keys.add_argument("--finish", action="store_true", help="with rotate: the older keys are good no more")
    add("schema", _schema, "Print the JSON Schema of run.yaml, for editors.", config=False)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # else argparse calls them required
        metavar="key=value",
        help="dotted overrides, e.g. trainer.learning_rate=1e-5",
    )


def _up(arguments: argparse.Namespace) -> int:
    from actors.supervisor import supervise
    from schemas.config import load_config

    return supervise(load_config(arguments.config, arguments.overrides), arguments.fork)


def _run(arguments: argparse.Namespace) -> int:
    from schemas.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    from actors.runtime import leave, run_actor, run_pool

    name = arguments.name or _default_name(arguments.actor)
    if arguments.actor == "inference-pool":
        code = run_pool(config, arguments.config, name, arguments.overrides, arguments.parent)
    else:
        code = run_actor(arguments.actor, name, config, arguments.parent, arguments.started_at, arguments.fork)
    leave(code)
    return code


def _check(arguments: argparse.Namespace) -> int:
    from actors.preflight import preflight
    from schemas.config import load_config, warnings

    config = load_config(arguments.config, arguments.overrides)
    for warning in warnings(config):
        print(f"warning: {warning}", file=sys.stderr)
    for missing in preflight(config, starts=False):
        print(f"warning: {missing}", file=sys.stderr)
    if arguments.resume is not None:
        return _check_resume(config, arguments.resume)
    print(f"{arguments.config}: good")
    if arguments.memory:
        from actors.policy.memory import estimate

        print(estimate(config).table())
    return 0


def _check_resume(config: "RunConfig", output_dir: Path) -> int:
    from actors.resume import compare

    text, allowed = compare(config, output_dir)
    print(text)
    print("the run goes on with this" if allowed else "identity differs: this needs --fork, or another output_dir")
    return 0 if allowed else EXIT_CONFIG


def _default_name(actor: str) -> str:
    """The actor's kind and a number: 0, or the rank that torchrun tells each of its processes."""
    return f"{actor}-{os.environ.get('RANK', 0) if actor == 'trainer' else 0}"


def _rewind(arguments: argparse.Namespace) -> int:
    from actors.resume import rewind

    print(rewind(arguments.output_dir, arguments.step))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from actors.assembly import make_learner
    from actors.replay import recorded_threads, replay
    from actors.resume import resolved_config
    from schemas.config import load_config

    config = load_config(resolved_config(arguments.output_dir), [])
    result = replay(config, arguments.step, make_learner(config, recorded_threads(config, arguments.step)))
    print(result)
    return 0 if all(result.same.values()) else 1


def _topology(arguments: argparse.Namespace) -> int:
    from bus.topology import describe
    from schemas.config import load_config

    print(describe(load_config(arguments.config, arguments.overrides)))
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from actors.view.watch import config_of, top

    return top(config_of(arguments.run, arguments.overrides))


def _status(arguments: argparse.Namespace) -> int:
    from actors.view.watch import config_of, status

    return status(config_of(arguments.run, arguments.overrides))


def _samples(arguments: argparse.Namespace) -> int:
    from actors.telemetry.samples import show_samples
    from schemas.errors import ConfigError

    path = arguments.output_dir / "samples.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{path}: there is no such file; is {arguments.output_dir} a run's output_dir, and has it trained a step?"
        )
    print(show_samples(path, arguments.step, arguments.num))
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    from actors.keys import keys

    print(keys(arguments.action, arguments.folder, arguments.finish))
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    import json

    from schemas.config import RunConfig

    print(json.dumps(RunConfig.model_json_schema(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
