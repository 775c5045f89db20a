"""The packages of docs/internals/architecture.md, held on the syntax tree: imports go one way."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("tree")  # a worker parses the tree once
ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "bus", "actors")
ACTORS = ("rollout", "reward", "packer", "trainer", "inference")
TOP = ("runtime", "assembly", "__main__")
SCORING = ("scorer", "runner", "functions", "values", "errors", "builtin", "constant_rewards")
"""Modules of the reward actor that only compute."""
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> list[str]:
    """Every module imported anywhere in a file, type checking blocks and function bodies included."""
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@cache
def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _importing(paths: Iterable[Path], forbidden: Callable[[str], bool]) -> list[str]:
    """Return the imports that are forbidden, each in words."""
    assert paths
    return [f"{_module(path)} imports {name}" for path in paths for name in _imports(path) if forbidden(name)]


def _is_in(path: Path, package: str) -> bool:
    return f"{_module(path)}.".startswith(f"{package}.")


@cache
def _package(name: str) -> str:
    """Return the package of ours that a dotted name lies in; empty where there is none."""
    parts = name.split(".")
    while parts and not ROOT.joinpath(*parts, "__init__.py").is_file():
        parts.pop()
    return ".".join(parts)


def _rows() -> list[list[str]]:
    """Return the packages of each row of the table in docs/internals/architecture.md, uppermost row first."""
    table = (ROOT / "docs/internals/architecture.md").read_text().partition("## Packages")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [re.findall(r"`([\w.]+)`", cell) for cell in cells]
    return [[name if name.startswith(PACKAGES) else f"actors.{name}" for name in row] for row in names]


def test_the_root_of_actors_has_three_modules() -> None:
    """Everything else has a package, so the folder shows the architecture."""
    assert {path.stem for path in (ROOT / "actors").glob("*.py")} == {"__init__", *TOP}


def test_no_packages_import_each_other_in_a_circle() -> None:
    """A package can be understood with what lies below it; imports for types and inside functions count too."""
    graph: dict[str, set[str]] = {}
    for path in (path for path in FILES if path.stem != "__main__"):  # imported by nobody
        package = _package(_module(path))
        graph.setdefault(package, set()).update(map(_package, _imports(path)))
    below = {package: found - {package, ""} for package, found in graph.items()}
    assert len(below) > 25
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


def test_imports_go_downwards_in_the_table_of_packages() -> None:
    """From a package to one that stands in a lower row of the page; each package stands in one row."""
    row_of = {name: number for number, row in enumerate(_rows()) for name in row}
    upwards = []
    for path in FILES:
        rows = [(name, row) for name, row in row_of.items() if _is_in(path, name)]
        if path == ROOT / "actors/__init__.py" or path.stem == "__main__":
            continue
        assert len(rows) == 1, f"{_module(path)} stands in no row, or in several"
        own, own_row = rows[0]
        for imported in _imports(path):
            # its packages, the innermost first
            above = imported.split(".")
            to = next((name for n in range(len(above), 0, -1) if (name := ".".join(above[:n])) in row_of), own)
            if to != own and row_of[to] <= own_row and own_row > 0:
                upwards.append(f"{_module(path)} imports {imported}")
    assert upwards == []


def test_what_every_process_has_needs_no_other_package_of_actors() -> None:
    """Every actor imports it, so it must not bring along what only one of them needs."""
    paths = [path for path in FILES if _is_in(path, "actors.process")]
    assert _importing(paths, lambda name: name.startswith("actors") and not name.startswith("actors.process")) == []


def test_packages_import_only_leftwards() -> None:
    """schemas knows nobody, bus knows schemas, actors knows both."""
    for number, package in enumerate(PACKAGES):
        to_the_right = PACKAGES[number + 1 :]
        paths = [path for path in FILES if _is_in(path, package)]
        assert _importing(paths, lambda name: name.split(".")[0] in to_the_right) == []  # noqa: B023 - called here


@pytest.mark.parametrize("actor", ACTORS)
def test_actors_never_import_each_other(actor: str) -> None:
    """What two actors share is a part; what they tell each other is a message."""
    others = tuple(f"actors.{name}." for name in ACTORS if name != actor)
    paths = [path for path in FILES if _is_in(path, f"actors.{actor}")]
    assert len(paths) > 1
    assert _importing(paths, lambda name: f"{name}.".startswith(others)) == []


def test_nothing_imports_runtime_or_command_line() -> None:
    """Making and running a process, and parsing, are nobody's dependency."""
    top = {"actors.ops.up.supervisor", "actors.cli", *(f"actors.{name}" for name in TOP)}
    paths = [path for path in FILES if path.parts[-2] != "cli" and (path.parts[-2] != "actors" or path.stem not in TOP)]
    assert _importing(paths, lambda name: name in top) == []


def test_algorithms_and_rewards_are_free_of_bus_and_sockets() -> None:
    """Pure functions: no bus, no sockets, no ledger. What marks a thread as ours (`bus.threads`) is none of them."""
    forbidden = ("bus", "zmq", "aiohttp", "sqlite3", "actors.ledger", "actors.process.membership", "actors.telemetry")
    scoring = [path for path in FILES if _is_in(path, "actors.reward") and path.stem in SCORING]
    assert len(scoring) == len(SCORING)
    paths = [*scoring, *(path for path in FILES if _is_in(path, "actors.algorithms"))]
    assert _importing(paths, lambda name: name.startswith(forbidden) and not name.startswith("bus.threads")) == []


def test_algorithms_import_nothing_else_of_actors() -> None:
    """No ledger, no model, no code of the user's: what they need is an argument."""
    paths = [path for path in FILES if _is_in(path, "actors.algorithms")]
    assert _importing(paths, lambda name: name.startswith("actors") and not name.startswith("actors.algorithms")) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_pickles(package: str) -> None:
    """We send no pickle and store none, and run no text; torch.load is let through with weights_only=True alone."""
    for path in (path for path in FILES if _is_in(path, package)):
        _check_pickles_nothing(path)


def _check_pickles_nothing(path: Path) -> None:
    tree = _tree(path)
    assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"} & {
        n.split(".")[0] for n in _imports(path)
    }
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {"send_pyobj", "recv_pyobj"} & attributes
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func) for call in calls}
    assert not {"torch.save", "eval", "exec", "builtins.eval", "builtins.exec", "yaml.unsafe_load"} & names
    loads = [call for call in calls if ast.unparse(call.func) in ("torch.load", "load") and _is_torchs(call, tree)]
    assert all("weights_only=True" in [ast.unparse(k) for k in call.keywords] for call in loads)
    options = [ast.unparse(keyword) for call in calls for keyword in call.keywords]
    assert "allow_pickle=True" not in options


def _is_torchs(call: ast.Call, tree: ast.Module) -> bool:
    """`torch.load`, or a `load` that was imported from torch."""
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "torch"]
    return ast.unparse(call.func) == "torch.load" or any(alias.name == "load" for n in imported for alias in n.names)


def test_the_doors_are_light() -> None:
    """Importing schemas, bus and the command line loads neither torch nor an engine."""
    code = "import sys, schemas, schemas.messages, schemas.config, bus, actors.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "vllm", "peft"} & set(loaded)
