"""One import: reads keys of the input, writes keys of run.yaml, and reports each key of the input once.

A system's module calls the methods of `Import` in the order of its sections and then `finish`, which refuses the keys
that nobody asked for. So a key of the input cannot be forgotten.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.imports.keys import pattern
from actors.imports.report import Entry, Question, Report, Verdict
from actors.imports.run_file import RunFile


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    world: int | None = None
    """Trainer processes of the origin's run (accelerate: num_processes; torchrun: all ranks)."""
    rows: int | None = None
    """Rows of the training data, for run lengths in epochs."""
    data: Path | None = None
    """JSON Lines file with the training data."""
    reward: str | None = None
    """Reward function, `file.py:function` or `module:function`."""
    version: str | None = None
    """Version of the origin whose defaults hold; None: the newest known."""


@dataclass(frozen=True)
class Unreadable:
    """Value of a key that only running the input would give, such as a call in a script."""

    source: str
    """Text in the input."""


_SAME: Any = object()
_SECRET = re.compile(r"(api_?key|token|secret|password|webhook_url)$", re.IGNORECASE)
SECRET = "(not shown)"  # noqa: S105 - is none
"""Stands in reports in place of a secret: a report is copied into issues and logs."""


class Import:
    """State of one import: given keys, defaults of the origin, the run.yaml and the report."""

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        origin: str,
        options: Options,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare an import.

        Args:
            given: values of the input by dotted key.
            defaults: values of the origin for keys that the files leave out.
            origin: name and version, for the report.
            options: command line.
            names: names in the input of keys that `given` has under another name, as keys of older versions.
        """
        self.given, self.defaults, self.options = dict(given), dict(defaults), options
        self.run, self.report = RunFile(), Report(origin)
        self.names = dict(names or {})

    def value(self, key: str) -> Any:
        """Return the value of a key: as given, else the origin's default. An unreadable value counts as left out.

        Raises:
            KeyError: neither exists; the system's table of defaults lacks the key.
        """
        return self.given[key] if key in self.given and not self.unreadable([key]) else self.defaults[key]

    def is_set(self, key: str) -> bool:
        """Tell whether a key has a value other than None, be it one that can't be read."""
        return bool(self.unreadable([key])) or self.value(key) is not None

    def unreadable(self, keys: Sequence[str]) -> list[str]:
        """Return the keys, of those given, whose values can't be read."""
        return [key for key in keys if isinstance(self.given.get(key), Unreadable)]

    def rename(self, key: str, target: str, value: Any = _SAME, text: str = "") -> None:
        """Write a key's value under its name here. A key that is not given is written with the origin's default.

        Args:
            key: key of the input.
            target: key of run.yaml.
            value: the value here, if it is written in other words (`true` for `enabled`); default: unchanged.
            text: remark for the report.
        """
        if self.unreadable([key]):
            self._ask_for([key], [target])
        else:
            self.run.set(target, self.value(key) if value is _SAME else value, self._comment(key, target))
        if key in self.given:
            is_same = self.name(key).rpartition(".")[2] == target.rpartition(".")[2] and value is _SAME
            self._add(key, Verdict.TAKEN if is_same else Verdict.RENAMED, (target,), text)

    def convert(self, keys: str | Sequence[str], targets: Mapping[str, Any], formula: str) -> None:
        """Write values that follow from keys of the input.

        Args:
            keys: keys that the values follow from. Those that are given get an entry, unless they have one already.
            targets: values by key of run.yaml.
            formula: formula with its numbers, such as `groups_per_step = 8 · 4 · 4 ÷ 8 = 16`.
        """
        keys = [keys] if isinstance(keys, str) else keys
        if unreadable := self.unreadable(keys):
            self._ask_for(unreadable, list(targets))
        else:
            for target, value in targets.items():
                self.run.set(target, value, formula if len(targets) == 1 else self._comment(keys[0], target))
        for key in keys:
            if key in self.given and not self.is_reported(key):
                self._add(key, Verdict.CONVERTED, tuple(targets), formula)

    def refuse(self, key: str, reason: str, instead: str = "") -> None:
        """Report a given key as without counterpart.

        Args:
            key: key of the input; a key that is not given is no entry.
            reason: why there is no counterpart.
            instead: what the user can do.
        """
        if key in self.given:
            self._add(key, Verdict.REFUSED, (), f"{reason}; {instead}" if instead else reason)

    def refuse_unless(self, key: str, harmless: Any, reason: str, instead: str = "") -> None:
        """Refuse a given key, unless its value has no effect in the origin either.

        Args:
            key: key of the input.
            harmless: the value without effect, or a tuple of such values.
            reason: why there is no counterpart.
            instead: what the user can do.
        """
        accepted = harmless if isinstance(harmless, tuple) else (harmless,)
        if key in self.given and self.given[key] in accepted:
            self.irrelevant(key, "switched off")
        else:
            self.refuse(key, reason, instead)
            # the origin's own default may be without counterpart too
            if key not in self.given and key in self.defaults and self.defaults[key] not in accepted:
                self.note(f"{key} is {self.defaults[key]} by default: {reason}")

    def irrelevant(self, key: str, reason: str) -> None:
        """Report a given key as without influence here."""
        if key in self.given:
            self._add(key, Verdict.IRRELEVANT, (), reason)

    def settle(self, key: str, reason: str) -> None:
        """Report a given key as without influence here, unless the key has an entry."""
        if key in self.given and not self.is_reported(key):
            self._add(key, Verdict.IRRELEVANT, (), reason)

    def sweep(self, irrelevant: Mapping[str, str], refused: Mapping[str, str]) -> None:
        """Report the given keys that have no entry yet and that a table knows.

        Args:
            irrelevant: reasons by key; `*` stands for one part of a key, `**` for all further parts.
            refused: reasons by key, with `; what to do instead` where there is something to do.
        """
        for rows, report in ((irrelevant, self.irrelevant), (refused, self.refuse)):
            for name, reason in rows.items():
                expression = pattern(name)
                for key in self.given:
                    if expression.fullmatch(key) and not self.is_reported(key):
                        # nobody misses what is off; an empty map may be a section that is on
                        value = self.given[key]
                        is_off = value is None or value is False or value in ("", [])
                        if rows is refused and is_off:
                            self.irrelevant(key, "switched off")
                        else:
                            report(key, reason)

    @property
    def system(self) -> str:
        """Name of the origin without its version."""
        return self.report.origin.partition(" ")[0]

    def has(self, section: str) -> bool:
        """Tell whether a key, or any key of a section, is given."""
        return any(key == section or key.startswith(f"{section}.") for key in self.given)

    def section(self, section: str) -> Any:
        """Return the given values below a key as nested maps and lists; an empty map if there are none."""
        nested: dict[str, Any] = {}
        for key in self.keys_below(section):
            *parents, last = key.removeprefix(f"{section}.").split(".")
            node = nested
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = self.given[key]
        return _with_lists(nested)

    def keys_below(self, section: str) -> list[str]:
        """Return the given keys below a key."""
        return [key for key in self.given if key.startswith(f"{section}.")]

    def name(self, key: str) -> str:
        """Return the name of a key in the input."""
        return self.names.get(key, key)

    def is_reported(self, key: str) -> bool:
        """Tell whether a key has its entry in the report."""
        return self.report.has(self.name(key))

    def ask(self, target: str, text: str) -> None:
        """Leave a value open: the file names it, and `actors check` refuses the file.

        Args:
            target: key of run.yaml.
            text: what is missing and what gives it, such as `rows of the training data; --rows N`.
        """
        self.run.missing(target, text)
        others = [question for question in self.report.questions if question.target != target]
        self.report.questions = [*others, Question(target, text)]

    def answer(self, target: str, value: Any, comment: str) -> None:
        """Write a value that was asked for, and take the question back."""
        self.run.set(target, value, comment)
        self.report.questions = [question for question in self.report.questions if question.target != target]

    def note(self, text: str) -> None:
        """Add a remark that belongs to no key of the input."""
        if text not in self.report.notes:
            self.report.notes.append(text)

    def finish(self, known: Sequence[str] = ()) -> None:
        """Refuse each given key that has no entry yet.

        Args:
            known: keys of the origin, for the hint of a misspelt one.
        """
        for key in self.given:
            if not self.is_reported(key):
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
                hint = f"did you mean {close[0]}?" if close else "remove it, or check the origin's version"
                self.refuse(key, f"no key of {self.report.origin} that is known here", hint)

    def _ask_for(self, keys: Sequence[str], targets: Sequence[str]) -> None:
        words = " ".join(f"--{key} VALUE" for key in keys)
        for target in targets:
            self.ask(target, f"follows from {' and '.join(keys)}, which only a run of the input would tell; {words}")

    def _add(self, key: str, verdict: Verdict, targets: tuple[str, ...], text: str) -> None:
        value = self.given[key]
        if isinstance(value, Unreadable):
            value = value.source
            if verdict is not Verdict.IRRELEVANT:
                verdict, text = Verdict.REFUSED, f"computed by the input, which is not run; give --{key} VALUE"
        if value and isinstance(value, str) and _SECRET.search(self.name(key)):
            value = SECRET
        self.report.add(Entry(self.name(key), value, verdict, targets, text))

    def _comment(self, key: str, target: str) -> str:
        """Return the comment of a value: the key it comes from, or that it is the origin's default."""
        if key not in self.given:
            return f"default of {self.report.origin}"
        return "" if self.name(key) == target else self.name(key)


def _with_lists(node: Any) -> Any:
    """Return nested maps with a list in the place of each map whose keys count from 0."""
    if not isinstance(node, dict):
        return node
    if node and list(node) == [str(number) for number in range(len(node))]:
        return [_with_lists(item) for item in node.values()]
    return {name: _with_lists(item) for name, item in node.items()}
