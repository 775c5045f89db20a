"""The counters of `tests.house`, on sources whose counts one can check by hand."""

from pathlib import Path

import pytest

from tests import house
from tests.house import Docstring, Figure, Place, Source
from tests.house_words import RIDDLES


def _sources(**texts: str) -> list[Source]:
    """Sources by path, in which `__` stands for a slash: `actors__ledger__store`."""
    return [Source.parse(path.replace("__", "/") + ".py", text) for path, text in texts.items()]


def _source(text: str, path: str = "actors/some.py") -> Source:
    return Source.parse(path, text)


def _docstrings(text: str) -> list[tuple[str, str]]:
    return [(found.kind, found.text) for found in house.docstrings(_source(text))]


def _function_docstring(text: str) -> Docstring:
    return Docstring("actors/some.py", 1, "function", text)


def test_imports_count_wherever_they_stand() -> None:
    """At the top, under TYPE_CHECKING and in a function; modules of others are none of ours."""
    sources = _sources(
        bus__codec="",
        bus__data="",
        bus__topology="",
        actors__packer=(
            "import numpy\n"
            "import bus.codec\n"
            "if TYPE_CHECKING:\n"
            "    from bus.data import Inbox\n"
            "def f():\n"
            "    from bus import topology\n"
        ),
    )
    found = house.imports(sources)
    assert [(one.imported.module, one.line) for one in found] == [
        ("bus.codec", 2),
        ("bus.data", 4),
        ("bus.topology", 6),
    ]


def test_a_module_imported_twice_counts_once() -> None:
    """Two names of one module are one import; a module does not import itself."""
    sources = _sources(
        bus__data="from bus.data import x", bus__codec="from bus.data import Inbox, Outbox\nimport bus.data"
    )
    assert len(house.imports(sources)) == 1


def test_relative_imports_are_resolved() -> None:
    """One dot is the module's own package, in a module and in a package's `__init__` alike."""
    sources = [
        _source("", "bus/codec.py"),
        _source("from .codec import encode", "bus/__init__.py"),
        _source("from ..codec import encode", "bus/weights/sender.py"),
    ]
    found = house.imports(sources)
    assert {(one.importer.module, one.imported.module) for one in found} == {
        ("bus", "bus.codec"),
        ("bus.weights.sender", "bus.codec"),
    }


def test_two_packages_that_import_each_other_are_a_two_way_edge() -> None:
    """Deeper folders belong to the package two levels down; the thinner direction is listed."""
    sources = _sources(
        actors__packer="from actors.ledger.store import Store\nfrom actors.ledger.machine import Machine",
        actors__ledger__store="",
        actors__ledger__machine="from actors.packer import limits",
        actors__engines__vllm__engine="from actors.ledger.store import Store",
    )
    edges = house.two_way_edges(house.imports(sources))
    assert list(edges) == [("actors", "actors.ledger")]
    assert [one.importer.path for one in edges["actors", "actors.ledger"]] == ["actors/ledger/machine.py"]


def test_modules_inside_one_package_make_no_edge() -> None:
    """A cycle within one package is not an edge between packages; folders below the second level are no packages."""
    sources = _sources(
        bus__data="import bus.codec",
        bus__codec="import bus.data",
        actors__engines__vllm__engine="import actors.engines.http.client",
        actors__engines__http__client="import actors.engines.vllm.engine",
    )
    assert house.two_way_edges(house.imports(sources)) == {}


@pytest.mark.parametrize(("number", "listed"), [(10, 0), (11, 1)])
def test_more_than_ten_imports_make_a_module_wide(number: int, listed: int) -> None:
    """Ten are allowed."""
    parts = {f"bus__m{i}": "" for i in range(number)}
    importer = "\n".join(f"import bus.m{i}" for i in range(number))
    wide = house.wide_importers(house.imports(_sources(**parts, actors__packer=importer)))
    assert [place.weight for place in wide] == [number] * listed


def test_docstrings_of_fields_properties_and_constants_are_one_kind() -> None:
    """A string after an assignment is a field's; another string in a body is nobody's."""
    text = '''"""Of the module."""
LIMIT = 3
"""Of a constant."""
class Config:
    """Of the class."""
    size: int = 1
    """Of a field."""
    @property
    def total(self):
        """Of a property."""
    def run(self):
        """Of a method."""
        self.done = False
        """Of an attribute."""
        print()
        """Nothing's."""
'''
    assert sorted(_docstrings(text)) == [
        ("class", "Of the class."),
        ("field", "Of a constant."),
        ("field", "Of a field."),
        ("field", "Of a property."),
        ("field", "Of an attribute."),
        ("function", "Of a method."),
        ("module", "Of the module."),
    ]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Send it.", "send"),
        ("`path` of it", "path"),
        ("(T,) of float", ""),
        ("", ""),
        ("\n  Micro-batch.", "micro-batch"),
    ],
)
def test_the_first_word_is_the_one_that_opens_the_text(text: str, word: str) -> None:
    """A formula is no word."""
    assert _function_docstring(text).first_word == word


def test_forbidden_openings_are_found_by_their_first_word_alone() -> None:
    """Both lists; a word of the list further on is allowed."""
    found = [
        _function_docstring(text) for text in ("Of a group.", "What it says.", "The same for all.", "Wait for it.")
    ]
    assert [place.text for place in house.forbidden_openings(found)] == [
        "Of a group.",
        "What it says.",
        "The same for all.",
    ]
    assert [place.text for place in house.forbidden_openings(found, RIDDLES)] == ["Of a group."]


def test_a_docstring_opens_with_a_verb_in_the_imperative() -> None:
    """A noun, a verb in the third person and a formula do not count."""
    texts = ("Return the sum.", "Returns the sum.", "The sum.", "x + y", "Wait until then.")
    found = house.openings_without_verb([_function_docstring(text) for text in texts])
    assert [place.text for place in found] == ["Returns the sum.", "The sum.", "x + y"]


def test_pronoun_like_words_are_counted_with_their_number() -> None:
    """`this` and `which` are none; case does not matter."""
    texts = ("What it says of those.", "This which is here.", "THAT.")
    found = house.pronouns([_function_docstring(text) for text in texts])
    assert [(place.text, place.weight) for place in found] == [("What it says of those.", 3), ("THAT.", 1)]


def test_comments_are_counted_alone_and_behind_code() -> None:
    """A mark for a tool is no comment to the reader, a reason behind the mark is; a `#` in a string is none."""
    source = _source(
        "# alone\n"  # 1
        "x = 1  # behind code\n"  # 2
        "# --- ruler ------\n"  # 3
        "y = 2  # type: ignore[assignment]\n"  # 4
        "z = 3  # noqa: S101, B008\n"  # 5
        "u = 4  # noqa: SIM118 - it is no mapping\n"  # 6
        "v = 5  # type: ignore[assignment]  # the stub is wrong\n"  # 7
        "w = '# in a string'\n"
    )
    assert house.comment_lines(source) == [1, 3]
    assert house.explained_lines(source) == [1, 2, 6, 7]


def test_a_private_helper_named_once_is_listed() -> None:
    """Its definition does not count as naming it; public functions, magic ones and helpers of two uses are none."""
    text = """
class A:
    def __init__(self): self._once(); self._twice()
    def _once(self): self._twice()
    def _twice(self): pass
    def public(self): pass
def _never(): pass
A().public()
"""
    assert [place.text for place in house.helpers_named_once(_source(text))] == ["_once"]


def test_lines_of_a_function_include_the_docstring_but_no_decorator() -> None:
    """A nested function counts for itself and inside the outer one."""
    text = '@cached\ndef outer():\n    """Say."""\n    def inner():\n        return 1\n    return inner\n'
    lines = {place.text: place.weight for place in house.function_lines(_source(text))}
    assert lines == {"outer": 5, "inner": 2}


def test_tests_of_an_engines_type_are_found_in_all_their_forms() -> None:
    """isinstance, match, `.type` against the name of an engine, and `.type` of something called engine."""
    engines = _sources(
        schemas__config="class FakeEngineConfig:\n    type: Literal['fake'] = 'fake'\n    mode: str = 'x'\n"
    )
    types = house.engine_types(engines)
    assert types == {"fake"}
    source = _source(
        """
isinstance(engine, FakeEngineConfig | VllmEngineConfig)
isinstance(engine, (config.FakeEngineConfig, int))
isinstance(loss, EngineRatioLossConfig)
match engine:
    case FakeEngineConfig(): pass
settings.type == "fake"
settings.type in ("fake", "real")
"vllm" != config.engine.type
loss.type == "custom"
device.type == kind
"""
    )
    assert [place.line for place in house.engine_isinstance_tests(source)] == [2, 3, 6]
    assert [place.line for place in house.engine_type_comparisons(source, types)] == [7, 8, 9]


def test_private_attributes_of_others_are_reaches() -> None:
    """Own ones, magic names and plain names are none; a private attribute of an own attribute is one."""
    text = "self._x\ncls._x\nmodel._x\nself.y._x = 1\na._b._c\nx.__dict__\n_x\n"
    assert [place.text for place in house.private_reaches(_source(text))] == [
        "model._x",
        "self.y._x",
        "a._b._c",
        "a._b",
    ]


@pytest.mark.parametrize(
    ("low", "high", "limit", "verdict"),
    [
        (None, None, "-", ""),
        (4, 5, "4-5 %", "met"),
        (None, 4.0, "≤ 4 %", "met"),
        (None, 3.9, "≤ 3.9 %", "too high"),
        (5, 6, "5-6 %", "too low"),
    ],
)
def test_a_value_is_compared_with_its_limits(low: float | None, high: float | None, limit: str, verdict: str) -> None:
    """Limits are inclusive."""
    figure = Figure("key", "title", 4.0, "%", [], low, high)
    assert (figure.limit, figure.verdict) == (limit, verdict)


def test_the_worst_files_come_first() -> None:
    """Weights of one file are summed; equal files are sorted by name."""
    places = [Place("a.py", 1, "", 2), Place("c.py", 1, "", 1), Place("b.py", 1, "", 1), Place("a.py", 2, "", 3)]
    assert Figure("key", "title", 0, "", places).worst(2) == [("a.py", 5), ("b.py", 1)]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of three modules and one test, in which nearly every limit is broken."""
    texts = {
        "bus/codec.py": '"""Of frames."""\nimport actors.packer\n',
        "actors/packer.py": 'import bus.codec\ndef run():\n  """Until it is done."""\n  _help()\ndef _help(): pass\n',
        "actors/assembly.py": "isinstance(engine, FakeEngineConfig)\n",
        "tests/test_packer.py": "packer._inbox\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_table_has_every_figure_of_a_repository(repository: Path) -> None:
    """Counted by hand: 6 words of docstrings, 1 pronoun; functions of 3 lines and of 1; 8 lines, none a comment."""
    sources = house.read_sources(repository, house.PACKAGES)
    figures = house.measure(sources, house.read_sources(repository, ["tests"]))
    assert {figure.key: figure.value for figure in figures} == {
        "edges": 1,
        "wide": 0,
        "function-riddles": 100,
        "function-openings": 100,
        "verbs": 100,
        "field-riddles": 0,
        "field-openings": 0,
        "pronouns": pytest.approx(100 / 6),
        "comments": 0,
        "explained": 0,
        "helpers": 50,
        "median": 2,
        "p90": 3,
        "isinstance": 1,
        "engines": 0,
        "reaches": 1,
    }


def test_the_command_prints_table_files_and_places(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table with limits, the worst files on demand, or the places of one figure."""
    assert house.main(["--root", str(repository), "--worst", "1"]) == 0
    printed = capsys.readouterr().out
    edges = next(line for line in printed.splitlines() if line.startswith("edges "))
    assert edges.split() == ["edges", *["two-way", "edges", "between", "packages"], "1", "≤", "0", "too", "high"]
    assert "reaches: reaches of tests into private attributes\n       1  tests/test_packer.py\n" in printed
    assert house.main(["--root", str(repository), "--places", "helpers"]) == 0
    assert capsys.readouterr().out == "actors/packer.py:5: _help  [1]\n"


def test_an_unknown_figure_is_refused_with_the_known_ones(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the argument and the figures there are."""
    with pytest.raises(SystemExit):
        house.main(["--root", str(repository), "--places", "colour"])
    assert "--places colour: no such figure; take one of edges, wide, " in capsys.readouterr().err


def test_a_folder_without_our_packages_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of zeros would look like a perfect repository."""
    with pytest.raises(SystemExit):
        house.main(["--root", str(tmp_path)])
    assert f"--root {tmp_path}: no Python files below schemas, bus, actors" in capsys.readouterr().err
