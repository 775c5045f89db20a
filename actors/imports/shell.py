"""Commands in a shell script, read as text. Nothing of the script is run.

Assignments, exports, quotes, comments, continued lines and variables are followed. What a command substitution or an
unset variable would give is unreadable, and stands in a word as `UNKNOWN`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from schemas.errors import ConfigError

UNKNOWN = "\x00"
"""Sign in a word for text that only running the script would give."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\}|([@*#?$!-]))")
_BEFORE = {"do", "then", "else", "elif", "if", "while", "{", "(", "!", "time", "nohup", "exec", "env", "sudo"}
_REDIRECTIONS = {"<": "\x01", ">": "\x02"}
_REDIRECTION = re.compile(r"(?:\d*|&)(?:\x02\x02?|\x01)(&\d|&-)?(.*)", re.DOTALL)
_END = "\n"


@dataclass(frozen=True)
class Command:
    """A command with the variables that it gets."""

    words: list[str]
    """Words, without the assignments in front of the command."""
    environment: dict[str, str] = field(default_factory=dict)
    """Exported variables and those in front of the command."""


def commands(text: str, path: Path) -> Iterator[Command]:
    """Yield the commands of a script in their order.

    Raises:
        ConfigError: quotes do not end.
    """
    variables: dict[str, str] = {}
    exported: set[str] = set()
    for statement in _statements(text):
        try:
            words = _without_files(shlex.split(_expanded(statement, variables)))
        except ValueError as error:
            raise ConfigError(f"{path}: {statement.strip()[:60]!r}: {error}") from None
        while words and words[0] in _BEFORE:
            words = words[1:]
        if words and words[0] in ("export", "declare", "local", "readonly"):
            assigned = [word for word in words[1:] if not word.startswith("-")]
            variables |= dict(word.split("=", 1) for word in assigned if "=" in word)
            if words[0] == "export" or "-x" in words:
                exported |= {word.partition("=")[0] for word in assigned}
            continue
        own: dict[str, str] = {}
        while words and _ASSIGNMENT.match(words[0]):
            name, _, value = words[0].partition("=")
            own[name] = value
            words = words[1:]
        # assignments in front of a command are the command's alone
        if words:
            yield Command(words, {name: variables[name] for name in exported if name in variables} | own)
        else:
            variables |= own


def _without_files(words: list[str]) -> list[str]:
    """Return words without redirections (`2>&1`, `> train.log`). A quoted `<` or `>` is none."""
    kept: list[str] = []
    is_target = False
    for word in words:
        found = _REDIRECTION.fullmatch(word)
        if is_target:
            is_target = False
        elif found is not None:
            is_target = not (found[1] or found[2])
        else:
            # inside of a word, as in a process substitution
            kept.append(word.replace("\x01", "<").replace("\x02", ">"))
    return kept


def _statements(text: str) -> Iterator[str]:
    """Yield statements, with continued lines joined and comments left out."""
    text = _without_documents(text)
    found: list[str] = []
    quote, index = "", 0
    while index < len(text):
        sign, after = text[index], text[index + 1 : index + 2]
        if sign == "\\" and quote != "'":
            # a continued line, or a sign that loses its meaning
            found += [" "] if after == _END and not quote else [sign, after] if after != _END else []
            index += 2
            continue
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "#" and (not found or found[-1].isspace()):
            end = text.find(_END, index)
            index = len(text) if end < 0 else end
            continue
        elif sign in "\n;|" or (sign == "&" and not (found and found[-1] == ">") and after != ">"):
            yield "".join(found)
            found = []
            index += 1
            continue
        found.append(sign)
        index += 1
    yield "".join(found)


def _without_documents(text: str) -> str:
    """Return a script without the lines of its here documents."""
    kept: list[str] = []
    end = ""
    for line in text.splitlines():
        if end:
            end = "" if line.strip() == end else end
            continue
        kept.append(line)
        if (found := re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line)) and "<<<" not in line:
            end = found[1]
    return _END.join(kept)


def _expanded(statement: str, variables: dict[str, str]) -> str:
    """Return a statement with its variables replaced, quoted as they stand."""
    found: list[str] = []
    quote, index = "", 0
    while index < len(statement):
        sign = statement[index]
        if sign == "\\" and quote != "'":
            pair = statement[index : index + 2]
            # in double quotes shlex keeps the backslash in front of these two
            found.append(pair[1:] if quote and pair[1:] in ("$", "`") else pair)
            index += 2
            continue
        if sign in "'\"" and quote in ("", sign):
            quote = "" if quote else sign
        if quote != "'" and (sign == "`" or statement.startswith("$(", index)):
            index = _end_of_substitution(statement, index)
            found.append(UNKNOWN)
            continue
        if quote != "'" and (match := _VARIABLE.match(statement, index)):
            name, default = match[1] or match[2] or "", match[3]
            value = variables.get(name, default if default is not None else UNKNOWN)
            found.append(re.sub(r'(["\\])', r"\\\1", value) if quote else value)
            index = match.end()
            continue
        # an unquoted sign is one of a redirection; shlex takes the quotes away, which tell it from a text
        found.append(sign if quote else _REDIRECTIONS.get(sign, sign))
        index += 1
    return "".join(found)


def _end_of_substitution(statement: str, index: int) -> int:
    """Return the place behind a command substitution."""
    if statement[index] == "`":
        end = statement.find("`", index + 1)
        return len(statement) if end < 0 else end + 1
    depth = 0
    for place in range(index + 1, len(statement)):
        depth += {"(": 1, ")": -1}.get(statement[place], 0)
        if not depth:
            return place + 1
    return len(statement)
