"""The page on timelines names the spans that the code records, and no others."""

import ast
from pathlib import Path

from tests.howto.pages import CODE, page

ROOT = Path(__file__).parents[2]
MAKERS = {"span", "record", "part", "JoinedRounds"}


def recorded() -> set[str]:
    """Names of all spans in the code; of `f"environment {kind}"` the first word."""
    names = set()
    for path in (ROOT / "actors").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in MAKERS and path.name != "spans.py":
                match node.args[0]:
                    case ast.Constant(value=str(name)):
                        names.add(name)
                    case ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]):
                        names.add(start.strip())
    return names


def test_every_span_is_on_the_page_and_every_span_on_the_page_is_recorded() -> None:
    """The table of spans, by actor."""
    table = page("timeline").table("Actor", "Spans")
    told = {name.removesuffix(" reset").removesuffix(" step") if name.startswith("environment ") else name
            for row in table.rows for name in CODE.findall(row[1])}  # fmt: skip
    assert told == recorded()
