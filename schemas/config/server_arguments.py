"""Further arguments of a server's command line, and those that an engine sets itself."""

from collections.abc import Sequence


def refuse_own(arguments: list[str], own: Sequence[str]) -> list[str]:
    """Return the arguments, if none of them is an engine's own.

    Args:
        arguments: words of the command line.
        own: options that the engine sets, since its promises rest on them.

    Raises:
        ValueError: names the first such argument.
    """
    for argument in arguments:
        # argparse also accepts unique abbreviations (`--hos`); vLLM's parser underscores, and `--no-` before a switch
        name = argument.partition("=")[0].replace("_", "-")
        name = "--" + name.removeprefix("--no-") if name.startswith("--no-") else name
        # longer than `--`, which is the beginning of every option
        if len(name) > 2 and name.startswith("--") and any(option.startswith(name) for option in own):
            raise ValueError(f"{argument} is set by the engine itself; remove it")
    return arguments
