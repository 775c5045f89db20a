"""Runs beside SGLang's package: its own parser of the command line. `python sglang_arguments.py < lines > judged`.

Consumes a list of command lines, without program and module. Emits {"names": [option, …], "parsed": [values or the
parser's error, …]}. What needs a GPU is stood in for.
"""

import argparse
import contextlib
import io
import json
import sys
from unittest.mock import MagicMock

import torch  # noqa: F401 - before its `triton` is stood in for

for name in ("triton", "triton.language", "IPython", "IPython.display"):
    sys.modules[name] = MagicMock(name=name)

from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger  # noqa: E402

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)


def parsed(words: list[str]) -> dict[str, object] | str:
    """The values of a command line; the parser's words if it refuses."""
    refused = io.StringIO()
    try:
        with contextlib.redirect_stderr(refused):
            values = vars(parser.parse_args(ConfigArgumentMerger(parser).merge_config_with_args(words)))
    except SystemExit:
        return refused.getvalue()
    return {key: value for key, value in values.items() if isinstance(value, str | int | float | list | None)}


names = sorted(option for action in parser._actions for option in action.option_strings if option.startswith("--"))
print(json.dumps({"names": names, "parsed": [parsed(words) for words in json.load(sys.stdin)]}))
