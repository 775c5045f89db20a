"""The doors are light: parsing, checking and help import neither torch nor transformers nor zmq."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

HEAVY = {"torch", "transformers", "vllm", "peft", "safetensors", "aiohttp", "prometheus_client"}
COMMAND = "import sys; from actors.cli import main; main(sys.argv[1:])"


def _modules_after(code: str, *arguments: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running this code, which may exit."""
    script = f"import atexit, sys; atexit.register(lambda: print('#', *sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.rpartition("#")[2].split()}


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    """A good configuration."""
    path = tmp_path / "run.yaml"
    tree = {
        "model": {"path": "tiny"},
        "environments": [{"type": "arithmetic"}],
        "reward": {"functions": [{"path": "exact_match"}]},
        "trainer": {"max_steps": 2},
    }
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(path)


def test_help_imports_only_the_command_line() -> None:
    """`actors --help` needs no third-party package at all."""
    assert _modules_after(COMMAND, "--help") & (HEAVY | {"zmq", "numpy", "pydantic", "yaml"}) == set()


def test_check_imports_neither_bus_nor_numpy(run_yaml: str) -> None:
    """`actors check` needs pydantic and YAML."""
    loaded = _modules_after(COMMAND, "check", run_yaml)
    assert "pydantic" in loaded
    assert loaded & (HEAVY | {"zmq", "numpy"}) == set()


def test_topology_imports_no_actor(run_yaml: str) -> None:
    """`actors topology` needs the bus and nothing that trains or serves."""
    assert _modules_after(COMMAND, "topology", run_yaml) & HEAVY == set()


def test_schemas_bus_and_command_line_import_nothing_heavy() -> None:
    """Whatever speaks the protocol can do so without torch."""
    everything = "schemas.config, schemas.messages, bus.codec, bus.data, bus.control, bus.topology, actors.cli"
    assert _modules_after(f"import {everything}") & HEAVY == set()
