"""The command `actors import`: files of another system to the text of a run.yaml and a report."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from actors.imports.job import Import, Options
from actors.imports.report import Verdict, describe

SYSTEMS = {
    "surogate": "actors.imports.surogate",
    "prime-rl": "actors.imports.prime_rl",
    "areal": "actors.imports.areal",
    "trl": "actors.imports.trl",
    "ms-swift": "actors.imports.ms_swift",
}
"""Module of each system. A module has `read(files, arguments, options) -> Import`, with the report finished."""


def sort_words(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the files and the other words of an origin's command line.

    Words from one that starts with `--` to the next are that word's values, and `key=value` is a word of the command
    line, if no file has that name. All others are files; `@` in front of a file, as prime-rl has it, is left out.
    """
    files: list[Path] = []
    arguments: list[str] = []
    for word in words:
        is_value = bool(arguments) and any(earlier.startswith("--") for earlier in arguments)
        if word.startswith("--") or is_value or ("=" in word and not Path(word).exists()):
            arguments.append(word)
        elif word != "@":
            files.append(Path(word.removeprefix("@")))
    return files, arguments


def import_files(system: str, files: list[Path], arguments: list[str], options: Options) -> Import:
    """Return the finished import of a system's files.

    Args:
        system: a key of `SYSTEMS`.
        files: configuration files, scripts or recipes, in the order in which the origin reads them.
        arguments: further words of the origin's command line, such as `actor.lr=1e-5` (AReaL) or `--lr 1e-5`.
        options: values that no file says.

    Raises:
        ConfigError: a file can't be read or parsed, or the origin itself refuses the values.
    """
    job: Import = importlib.import_module(SYSTEMS[system]).read(files, arguments, options)
    return job


def run_yaml(job: Import, files: list[Path]) -> str:
    """Return the text of run.yaml with the report as comments at its top."""
    report = job.report
    head = [f"Imported from {', '.join(file.name for file in files)} with the defaults of {report.origin}."]
    for verdict, title in (
        (Verdict.CONVERTED, "Converted:"),
        (Verdict.REFUSED, "Without counterpart; the run differs here:"),
        (Verdict.IRRELEVANT, "Without influence here:"),
    ):
        if entries := report.of(verdict):
            head += ["", title, *(f"  {describe(entry)}" for entry in entries)]
    if report.notes:
        head += ["", "Notes:", *(f"  {note}" for note in report.notes)]
    if report.questions:
        head += ["", "Missing:", *(f"  {question.target}: {question.text}" for question in report.questions)]
    lines = [line for text in head for line in text.splitlines() or [""]]
    return "\n".join(f"# {line}".rstrip() for line in lines) + "\n\n" + job.run.text()
