"""The layers of docs/architecture.md, held on the syntax tree: imports go only leftwards."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "bus", "actors")
LOOPS = ("rollout", "reward", "packer", "trainer", "inference")
TOP = ("runtime", "cli", "supervisor", "assembly", "__main__")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _imports(path: Path) -> list[str]:
    """Every module imported anywhere in a file, type checking blocks and function bodies included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_packages_import_only_leftwards(path: Path) -> None:
    """schemas knows nobody, bus knows schemas, actors knows both."""
    package = path.relative_to(ROOT).parts[0]
    to_the_right = PACKAGES[PACKAGES.index(package) + 1 :]
    assert [name for name in _imports(path) if name.split(".")[0] in to_the_right] == []


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[-2] == "actors" and p.stem in LOOPS], ids=_module)
def test_actors_never_import_each_other(path: Path) -> None:
    """What two actors share is a part; what they tell each other is a message."""
    others = [f"actors.{name}" for name in LOOPS if name != path.stem]
    assert [name for name in _imports(path) if name in others] == []


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[-2] != "actors" or p.stem not in TOP], ids=_module)
def test_nothing_imports_runtime_or_command_line(path: Path) -> None:
    """Signals, exit codes and parsing are nobody's dependency."""
    assert [name for name in _imports(path) if name in {f"actors.{top}" for top in TOP}] == []


@pytest.mark.parametrize("path", [p for p in FILES if "algorithms" in p.parts or "rewards" in p.parts], ids=_module)
def test_algorithms_and_rewards_are_free_of_bus_and_sockets(path: Path) -> None:
    """Pure functions: no bus, no sockets, no ledger."""
    forbidden = ("bus", "zmq", "aiohttp", "sqlite3", "actors.ledger", "actors.membership", "actors.telemetry")
    assert [name for name in _imports(path) if name.startswith(forbidden)] == []


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_nothing_pickles(path: Path) -> None:
    """We send no pickle and store none, and run no text; torch.load is let through with weights_only=True alone."""
    tree = ast.parse(path.read_text())
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
