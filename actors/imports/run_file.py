"""The run.yaml that an import writes: values with comments, in the order of the configuration's sections."""

from typing import Any

from schemas.config.load import MISSING, dump, parse
from schemas.config.run import RunConfig


class RunFile:
    """Values by dotted key, each with a comment. List items are numbered: `reward.functions.0.path`."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, str]] = {}

    def set(self, target: str, value: Any, comment: str = "") -> None:
        """Set a value; a later call with the same target replaces the earlier one."""
        self._values[target] = (value, comment)

    def missing(self, target: str, text: str) -> None:
        """Mark a value as missing, so that `actors check` refuses the file and names the key and the text."""
        self._values[target] = (f"{MISSING}{text}", "")

    def get(self, target: str) -> Any:
        """Return a value that was set, or None."""
        return self._values[target][0] if target in self._values else None

    def remove(self, target: str) -> None:
        """Remove a value and everything below the key."""
        for key in [key for key in self._values if key == target or key.startswith(f"{target}.")]:
            del self._values[key]

    @property
    def tree(self) -> dict[str, Any]:
        """Values as nested maps and lists, as YAML reads the text."""
        tree: dict[str, Any] = parse(self.text()) or {}
        return tree

    def text(self) -> str:
        """Return the file as YAML, one key a line."""
        order = list(RunConfig.model_fields)
        nested: dict[str, Any] = {}
        for target in sorted(self._values, key=lambda key: order.index(key.split(".")[0])):
            *parents, last = target.split(".")
            node = nested
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = self._values[target]
        lines: list[str] = []
        for name, node in nested.items():
            # an empty line between sections, none between plain values at the top
            if lines and isinstance(node, dict):
                lines.append("")
            lines += _lines({name: node}, "")
        return "\n".join(lines) + "\n"


def _lines(nested: dict[str, Any], indent: str) -> list[str]:
    """Return lines of a map. A map whose keys are numbers is a list."""
    lines: list[str] = []
    for name, node in nested.items():
        is_item = name.isdigit()
        if isinstance(node, dict):
            inner = _lines(node, indent + "  ")
            # the first key of an item stands behind its dash
            lines += [f"{indent}- {inner[0].lstrip()}", *inner[1:]] if is_item else [f"{indent}{name}:", *inner]
        else:
            value, comment = node
            line = f"{indent}{'-' if is_item else name + ':'} {dump(value)}"
            lines.append(f"{line}  # {comment}" if comment else line)
    return lines
