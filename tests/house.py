"""Measure the project's own shape: `python -m tests.house` prints each figure beside its limit.

The script counts on the syntax trees and tokens of `schemas`, `bus` and `actors`; of tests, only the reaches into
private attributes. Imports count at the top, under TYPE_CHECKING and in functions. A property's docstring counts as a
field's, and so does a constant's. `--worst 10` adds the files that contribute most to each figure, `--places KEY`
prints every place of one figure.
"""

import argparse
import ast
import functools
import io
import itertools
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from tests.house_words import OPENINGS, PRONOUNS, RIDDLES, VERBS

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "bus", "actors")
ASSEMBLY = "actors/assembly.py"
"""The one module that may ask of which type an engine is."""
WIDE_IMPORTS = 10
LONG_LINES, SHORT_LINES = 30, 5
COMMENT_SHARE = 3.0
"""Percent of lines below which a file is listed as short of comments."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal["module", "class", "function", "field"]


@dataclass(frozen=True)
class Source:
    """One Python file.

    Args:
        path: relative to the repository's root, as in `actors/ledger/machine.py`.
    """

    path: str
    text: str
    nodes: Sequence[ast.AST] = field(repr=False)
    """All nodes of the syntax tree, listed once: every counter goes through them."""

    @classmethod
    def parse(cls, path: str, text: str) -> "Source":
        """Parse the text of a file. The path serves as its name alone; nothing is read."""
        return cls(path, text, list(ast.walk(ast.parse(text))))

    @property
    def module(self) -> str:
        """Dotted name of the module; a package's for its `__init__.py`."""
        return ".".join(PurePosixPath(self.path).with_suffix("").parts).removesuffix(".__init__")

    @property
    def package(self) -> str:
        """First two folders of the path: `actors.ledger`; `actors` for `actors/runtime.py`."""
        return ".".join(PurePosixPath(self.path).parent.parts[:2])

    @property
    def num_lines(self) -> int:
        """Number of lines, empty ones included."""
        return len(self.text.splitlines())

    @functools.cached_property
    def comments(self) -> list[tokenize.TokenInfo]:
        """All comments, alone on a line or behind code."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token for token in tokens if token.type == tokenize.COMMENT]

    @property
    def functions(self) -> list[Function]:
        """All functions of the file: methods, properties and nested functions included."""
        return [node for node in self.nodes if isinstance(node, Function)]


@dataclass(frozen=True)
class Place:
    """A line that contributes to a figure, with how much it contributes."""

    path: str
    line: int
    text: str
    weight: float = 1.0


@dataclass(frozen=True)
class Figure:
    """A measured value, its limits, and the places that make it up.

    Args:
        unit: "%" or empty.
        low, high: limits, both inclusive; None where there is none.
    """

    key: str
    title: str
    value: float
    unit: str
    places: Sequence[Place]
    low: float | None = None
    high: float | None = None

    @property
    def limit(self) -> str:
        """Limits as text: "3-5 %", "≤ 15 %"; a dash without any."""
        unit = f" {self.unit}".rstrip()
        if self.low is not None:
            return f"{self.low:g}-{self.high:g}{unit}"
        return "-" if self.high is None else f"≤ {self.high:g}{unit}"

    @property
    def verdict(self) -> str:
        """Result of the comparison with the limits; empty without any."""
        if self.low is not None and self.value < self.low:
            return "too low"
        if self.high is None:
            return ""
        return "too high" if self.value > self.high else "met"

    def worst(self, number: int) -> list[tuple[str, float]]:
        """Return the files that contribute most, each with the sum of its places' weights."""
        by_file: dict[str, float] = {}
        for place in self.places:
            by_file[place.path] = by_file.get(place.path, 0) + place.weight
        return sorted(by_file.items(), key=lambda item: (-item[1], item[0]))[:number]


# --- imports ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One module of ours that another one imports."""

    importer: Source
    imported: Source
    line: int


def imports(sources: Sequence[Source]) -> list[Import]:
    """Return each import between two of the sources, once per pair of modules."""
    by_module = {source.module: source for source in sources}
    found: dict[tuple[str, str], Import] = {}
    for source in sources:
        for line, name in _imported_names(source):
            # `from a.b import c` names the module a.b.c if there is one, else something inside a.b
            target = by_module.get(name) or by_module.get(name.rpartition(".")[0])
            if target is not None and target is not source:
                found.setdefault((source.module, target.module), Import(source, target, line))
    return list(found.values())


def _imported_names(source: Source) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything that a file imports."""
    is_package = source.path.endswith("__init__.py")
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # one dot is the package itself, which a package's own `__init__` already is
                parts = source.module.split(".")
                above = parts[: len(parts) - node.level + is_package]
                base = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def two_way_edges(found: Iterable[Import]) -> dict[tuple[str, str], list[Import]]:
    """Return the pairs of packages that import each other, each with the imports of its thinner direction."""
    edges: dict[tuple[str, str], list[Import]] = {}
    for one in found:
        edges.setdefault((one.importer.package, one.imported.package), []).append(one)
    return {(a, b): min(edges[a, b], edges[b, a], key=len) for a, b in sorted(edges) if a < b and (b, a) in edges}


def wide_importers(found: Iterable[Import]) -> list[Place]:
    """Return the modules that import more than ten others of ours, weighted by that number."""
    by_importer: dict[str, list[Import]] = {}
    for one in found:
        by_importer.setdefault(one.importer.path, []).append(one)
    return [
        Place(path, 1, f"imports {len(all_of_it)} modules", len(all_of_it))
        for path, all_of_it in by_importer.items()
        if len(all_of_it) > WIDE_IMPORTS
    ]


# --- docstrings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Docstring:
    """A docstring; a property's counts as a field's, and so does a constant's."""

    path: str
    line: int
    kind: Kind
    text: str

    @property
    def words(self) -> list[str]:
        """All words in lower case; numbers and formulas are none."""
        return [word.lower() for word in re.findall(r"[A-Za-z][A-Za-z'’-]*", self.text)]

    @property
    def first_word(self) -> str:
        """First word in lower case; empty if the text opens with anything else, such as a formula."""
        match = re.match(r"[\s`*\"“]*([A-Za-z][\w'’-]*)", self.text)
        return match[1].lower() if match else ""

    @property
    def place(self) -> Place:
        """Place of the docstring, with its first line."""
        return Place(self.path, self.line, self.text.strip().split("\n")[0])


def docstrings(source: Source) -> list[Docstring]:
    """Return all docstrings of a file, those of fields and constants included."""
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node)
            if text:
                found.append(Docstring(source.path, node.body[0].lineno, _kind(node), text))
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a lambda's is an expression
            found += [Docstring(source.path, line, "field", text) for line, text in _field_docstrings(body)]
    return found


def _kind(node: ast.Module | ast.ClassDef | Function) -> Kind:
    if isinstance(node, Function):
        is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        return "field" if is_property else "function"
    return "class" if isinstance(node, ast.ClassDef) else "module"


def _field_docstrings(body: Sequence[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that follows an assignment."""
    for before, statement in itertools.pairwise(body):
        if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(statement, ast.Expr):
            value = statement.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def forbidden_openings(found: Iterable[Docstring], words: frozenset[str] = OPENINGS) -> list[Place]:
    """Return the docstrings that open with one of the words, or with "the same"."""
    return [
        docstring.place
        for docstring in found
        if docstring.first_word in words or (words is OPENINGS and docstring.words[:2] == ["the", "same"])
    ]


def openings_without_verb(found: Iterable[Docstring]) -> list[Place]:
    """Return the docstrings whose first word is not in the list of verbs."""
    return [docstring.place for docstring in found if docstring.first_word not in VERBS]


def pronouns(found: Iterable[Docstring]) -> list[Place]:
    """Return the docstrings with pronoun-like words, weighted by their number."""
    places = []
    for docstring in found:
        number = sum(word in PRONOUNS for word in docstring.words)
        if number:
            places.append(Place(docstring.path, docstring.line, docstring.place.text, number))
    return places


# --- comments --------------------------------------------------------------------------------------------------------

MARKS = re.compile(
    r"#\s*(type:\s*ignore(\[[^\]]*\])?|noqa(:\s*[A-Z]+[0-9]+(,\s*[A-Z]+[0-9]+)*)?|(pragma|fmt|ruff|mypy):.*)"
)
"""Comments to a tool. Words behind such a mark are a comment to the reader."""
RULER = re.compile(r"#\s*[-=]{3,}.*")
"""Line that parts sections: `# --- sending ------`."""


def comment_lines(source: Source) -> list[int]:
    """Return the lines that hold nothing but a comment, whatever it says."""
    return [token.start[0] for token in source.comments if token.line.lstrip().startswith("#")]


def explained_lines(source: Source) -> list[int]:
    """Return the lines with a comment to the reader, alone or behind code; marks for tools and rulers are none."""
    found = []
    for token in source.comments:
        said = MARKS.sub("", token.string)
        if re.search(r"\w", said) and not RULER.match(said):
            found.append(token.start[0])
    return found


def _short_of_comments(sources: Sequence[Source], lines: Sequence[Sequence[int]]) -> list[Place]:
    """Return the files below the lower limit, weighted by the number of comments that they lack."""
    places = []
    for source, commented in zip(sources, lines, strict=True):
        lacking = source.num_lines * COMMENT_SHARE / 100 - len(commented)
        if lacking > 0:
            places.append(Place(source.path, 1, f"{len(commented)} in {source.num_lines} lines", round(lacking, 1)))
    return places


# --- functions -------------------------------------------------------------------------------------------------------


def helpers_named_once(source: Source) -> list[Place]:
    """Return the private functions whose name occurs once in their file besides the definition."""
    named = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in source.nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return [
        Place(source.path, function.lineno, function.name)
        for function in source.functions
        if _is_private(function.name) and named[function.name] == 1
    ]


def function_lines(source: Source) -> list[Place]:
    """Return all functions, weighted by their lines: docstring included, decorators not."""
    return [
        Place(source.path, function.lineno, function.name, (function.end_lineno or 0) - function.lineno + 1)
        for function in source.functions
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# --- engines and private attributes ----------------------------------------------------------------------------------

ENGINE_CONFIG = re.compile(r"\b[A-Z]\w*EngineConfig\b")


def engine_types(sources: Iterable[Source]) -> frozenset[str]:
    """Return the values of `type` by which a configuration names its engine, read from the classes `…EngineConfig`."""
    classes = (
        node
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and ENGINE_CONFIG.fullmatch(node.name)
    )
    return frozenset(
        text
        for node in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "type"
        for text in _strings(statement.annotation)
    )


def engine_isinstance_tests(source: Source) -> list[Place]:
    """Return each `isinstance(…, SomeEngineConfig)` and each `case SomeEngineConfig()`."""
    places = []
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asked = ast.unparse(node.args[-1])  # one class, or several: `A | B`, `(A, B)`
        elif isinstance(node, ast.MatchClass):
            asked = ast.unparse(node.cls)
        else:
            continue
        if ENGINE_CONFIG.search(asked):
            places.append(Place(source.path, node.lineno, ast.unparse(node)))
    return places


def engine_type_comparisons(source: Source, types: frozenset[str]) -> list[Place]:
    """Return each comparison of a `type` with the name of an engine, and of an engine's `type` with anything."""
    places = []
    for node in source.nodes:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asked = [side.value for side in sides if isinstance(side, ast.Attribute) and side.attr == "type"]
            of_engine = any(ast.unparse(owner).split(".")[-1] == "engine" for owner in asked)
            if asked and (of_engine or types & {text for side in sides for text in _strings(side)}):
                places.append(Place(source.path, node.lineno, ast.unparse(node)))
    return places


def _strings(node: ast.AST) -> list[str]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def private_reaches(source: Source) -> list[Place]:
    """Return each private attribute that is read or set on anything but `self` and `cls`."""
    return [
        Place(source.path, node.lineno, ast.unparse(node))
        for node in source.nodes
        if isinstance(node, ast.Attribute)
        and _is_private(node.attr)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


# --- the table -------------------------------------------------------------------------------------------------------


def measure(sources: Sequence[Source], tests: Sequence[Source]) -> list[Figure]:
    """Return all figures, in the order of the table."""
    return [
        *_figures_of_imports(sources),
        *_figures_of_docstrings([one for source in sources for one in docstrings(source)]),
        *_figures_of_comments(sources),
        *_figures_of_functions(sources),
        *_figures_of_reaches(sources, tests),
    ]


def _figures_of_imports(sources: Sequence[Source]) -> list[Figure]:
    found = imports(sources)
    edges, wide = two_way_edges(found), wide_importers(found)
    back = [
        Place(one.importer.path, one.line, f"imports {one.imported.module} ({a} ⇄ {b})")
        for (a, b), thinner in edges.items()
        for one in thinner
    ]
    return [
        Figure("edges", "two-way edges between packages", len(edges), "", back, high=0),
        Figure("wide", "modules that import more than 10 of ours", _percent(wide, sources), "%", wide, high=5),
    ]


def _figures_of_docstrings(found: Sequence[Docstring]) -> list[Figure]:
    figures = []
    for kind in ("function", "field"):
        of_kind = [one for one in found if one.kind == kind]
        for suffix, title, words in (
            ("-riddles", "that open with of, those, until, … (short list)", RIDDLES),
            ("-openings", "that open with a forbidden word (full list)", OPENINGS),
        ):
            opened = forbidden_openings(of_kind, words)
            share = _percent(opened, of_kind)
            figures.append(Figure(kind + suffix, f"{kind} docstrings {title}", share, "%", opened, high=1))
        if kind == "function":
            nouns = openings_without_verb(of_kind)
            share = _percent(nouns, of_kind)
            figures.append(Figure("verbs", "function docstrings that do not open with a verb", share, "%", nouns))
    counted, num_words = pronouns(found), sum(len(one.words) for one in found)
    per_100 = 100 * sum(place.weight for place in counted) / max(1, num_words)
    return [*figures, Figure("pronouns", "pronoun-like words per 100 docstring words", per_100, "", counted, high=3)]


def _figures_of_comments(sources: Sequence[Source]) -> list[Figure]:
    num_lines = sum(source.num_lines for source in sources)
    figures = []
    for key, title, count in (
        ("comments", "lines that are a comment alone, rulers included", comment_lines),
        ("explained", "lines with a comment to the reader, alone or behind code", explained_lines),
    ):
        lines = [count(source) for source in sources]
        share = 100 * sum(map(len, lines)) / max(1, num_lines)
        figures.append(Figure(key, title, share, "%", _short_of_comments(sources, lines), low=3, high=5))
    return figures


def _figures_of_functions(sources: Sequence[Source]) -> list[Figure]:
    once = [place for source in sources for place in helpers_named_once(source)]
    lengths = [place for source in sources for place in function_lines(source)]
    by_length = sorted(place.weight for place in lengths)
    short = [Place(p.path, p.line, p.text) for p in lengths if p.weight <= SHORT_LINES]
    long = [Place(p.path, p.line, p.text, p.weight) for p in lengths if p.weight > LONG_LINES]
    return [
        Figure("helpers", "private helpers named once, of all functions", _percent(once, lengths), "%", once, high=15),
        Figure("median", "lines of a function, median", statistics.median(by_length), "", short),
        Figure("p90", "lines of a function, 90th percentile", by_length[int(0.9 * len(by_length))], "", long),
    ]


def _figures_of_reaches(sources: Sequence[Source], tests: Sequence[Source]) -> list[Figure]:
    types = engine_types(sources)
    by_class = [place for source in sources for place in engine_isinstance_tests(source)]
    all_tests = by_class + [place for source in sources for place in engine_type_comparisons(source, types)]
    outside = [place for place in all_tests if place.path != ASSEMBLY]
    reaches = [place for source in tests for place in private_reaches(source)]
    return [
        Figure("isinstance", "tests of an engine's type by isinstance, in all", len(by_class), "", by_class),
        Figure("engines", "tests of an engine's type outside assembly", len(outside), "", outside, high=0),
        Figure("reaches", "reaches of tests into private attributes", len(reaches), "", reaches, high=60),
    ]


def _percent(part: Sequence[object], whole: Sequence[object]) -> float:
    return 100 * len(part) / max(1, len(whole))


def table(figures: Sequence[Figure]) -> list[str]:
    """Return the figures as lines of text: key, title, value, limit, verdict."""
    keys, titles = max(len(figure.key) for figure in figures), max(len(figure.title) for figure in figures)
    lines = [f"{'key':{keys}}  {'figure':{titles}}  {'value':>8}  {'limit':>8}"]
    for figure in figures:
        number = f"{figure.value:g}" if float(figure.value).is_integer() else f"{figure.value:.1f}"
        value = f"{number} {figure.unit}".rstrip()
        line = f"{figure.key:{keys}}  {figure.title:{titles}}  {value:>8}  {figure.limit:>8}  {figure.verdict}"
        lines.append(line.rstrip())
    return lines


def read_sources(root: Path, folders: Iterable[str]) -> list[Source]:
    """Read and parse all Python files below some folders of the repository, in the order of their paths."""
    return [
        Source.parse(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; limits fail nothing here."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to measure; by default this one")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N files that contribute most")
    parser.add_argument("--places", default="", metavar="KEY", help="list every place of one figure instead")
    options = parser.parse_args(arguments)
    sources = read_sources(options.root, PACKAGES)
    if not sources:
        parser.error(f"--root {options.root}: no Python files below {', '.join(PACKAGES)}; name the repository's root")
    figures = measure(sources, read_sources(options.root, ["tests"]))
    if options.places:
        chosen = [figure for figure in figures if figure.key == options.places]
        if not chosen:
            parser.error(f"--places {options.places}: no such figure; take one of {', '.join(f.key for f in figures)}")
        print("\n".join(f"{p.path}:{p.line}: {p.text}  [{p.weight:g}]" for p in chosen[0].places))
        return 0
    print("\n".join(table(figures)))
    for figure in figures if options.worst else []:
        print(f"\n{figure.key}: {figure.title}")
        print("\n".join(f"  {weight:6g}  {path}" for path, weight in figure.worst(options.worst)) or "  none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
