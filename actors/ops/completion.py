"""Completion of the command line in shells: options, files, and overrides `key=value` of run.yaml (argcomplete)."""

import argparse
from typing import Any, get_args

import argcomplete
from argcomplete.shell_integration import shellcode

from schemas.config.keys import paths
from schemas.config.run import RunConfig


def script(shell: str) -> str:
    """Return the script that a shell loads.

    Args:
        shell: bash, zsh or fish.
    """
    return str(shellcode(["actors"], shell=shell))


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's question and end the process, if a shell asks; else return at once."""
    argcomplete.autocomplete(parser)


def override_words(prefix: str, **_: Any) -> list[str]:
    """Return overrides that start as the word on the command line: keys with `=`, and behind `=` the allowed values.

    Items of lists are offered with the number 0.
    """
    words = []
    for path, key in paths([RunConfig]):
        name = path.replace("[]", ".0")
        if key.sections:
            continue
        values = [str(value) for value in _choices(key.field.annotation)]
        # all values of a key would hide the other keys
        words += [f"{name}={value}" for value in values] if prefix.startswith(f"{name}=") else [f"{name}="]
    return [word for word in dict.fromkeys(words) if word.startswith(prefix)]


def _choices(annotation: Any) -> list[Any]:
    """Return the values of a Literal, or of a flag."""
    if annotation is bool:
        return ["true", "false"]
    return [value for value in get_args(annotation) if isinstance(value, str)]
