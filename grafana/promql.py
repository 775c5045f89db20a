"""The selectors of a PromQL expression: which metrics it reads, and with which matchers.

Not a parser of the language: a scanner that knows what else a name can be. A name selects series unless `(` follows it
(a function or an aggregation), it is a word of the language, or it stands in the parentheses after `by`, `without`,
`on`, `ignoring`, `group_left` or `group_right` (labels). Grafana's `$variables` outside of strings and ranges are
numbers. Whether the expression is right as a whole, Prometheus says.

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
"""(metric, what stands between its braces)."""


def selectors(expr: str) -> list[Selector]:
    """All of an expression, in their order, each as often as it stands there.

    Raises:
        ValueError: braces without a name before them, which would read metrics that nobody has named.
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
    """The names of metrics that an expression reads, each once."""
    return list(dict.fromkeys(name for name, _ in selectors(expr)))


def _without_label_lists(expr: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each token, without words that take labels and those labels.

    After an aggregation's `by (…)` the next `(` is the aggregation's own, so its name is no metric either.
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
