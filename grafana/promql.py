"""Scanner for the selectors of a PromQL expression: the metrics that the expression reads, with their matchers.

A name selects series with three exceptions: `(` follows the name (a function or an aggregation), the name is a word of
the language, or the name is in the parentheses after `by`, `without`, `on`, `ignoring`, `group_left` or `group_right`
(labels). Grafana's `$variables` outside of strings and ranges count as numbers. The scanner does not parse the
language: only Prometheus tells whether an expression is valid.

    sum by (run) (rate(a_total{x="1"}[5m])) / on(run) b   →   [("a_total", 'x="1"'), ("b", "")]
"""

import re
from collections.abc import Iterator

WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "start", "end", "atan2"})
LABEL_LISTS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<matchers>\{(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'}])*\})
    |(?P<range>\[[^\]]*\])
    |(?P<number>\d[\w.]*|\$\w+)
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<other>\S)""",
    re.VERBOSE,
)
Selector = tuple[str, str]
"""Pair (metric, text between its braces)."""


def selectors(expr: str) -> list[Selector]:
    """Return all selectors of an expression, in order, repeated ones included.

    Raises:
        ValueError: braces without a name in front, which could read any metric.
    """
    tokens = list(_without_label_lists(expr))
    found = []
    for (kind, text), (next_kind, next_text) in zip(tokens, [*tokens[1:], ("", "")], strict=True):
        if kind == "name" and text.lower() not in WORDS and next_text != "(":
            found.append((text, next_text[1:-1].strip() if next_kind == "matchers" else ""))
    if sum(kind == "matchers" for kind, _ in tokens) > sum(bool(matchers) for _, matchers in found):
        raise ValueError(f"matchers without the name of a metric, or empty ones: {expr}")
    return found


def metrics(expr: str) -> list[str]:
    """Return the names of the metrics that an expression reads, each once."""
    return list(dict.fromkeys(name for name, _ in selectors(expr)))


def _without_label_lists(expr: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of each token, without label lists and the words in front of the lists.

    The name of an aggregation with `by (…)` behind it is left out too: no `(` follows that name directly.
    """
    tokens = [(match.lastgroup or "", match.group()) for match in TOKEN.finditer(expr)]
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind == "name" and text in LABEL_LISTS:
            at += 1
            if following == "(":
                at = next(i for i in range(at, len(tokens)) if tokens[i][1] == ")") + 1
        elif kind == "name" and following in ("by", "without"):
            at += 1  # sum by (…) (…)
        else:
            yield kind, text
            at += 1
