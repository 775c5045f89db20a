"""The owned server: its command line, its keys, its life. A stub stands in for SGLang, started as SGLang is."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.engines.protocol import EngineStoppedError
from actors.engines.sglang.compat import SUPPORTED
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.process import command
from schemas.config import RunConfig, check_tree
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.sglang_engine import SET_BY_US, SglangEngineConfig
from schemas.errors import ConfigError
from tests.actors.engines.engines import WAIT, ask, policy, sample, until_stopped
from tests.actors.engines.sglang.test_engine import PROMPT
from tests.actors.engines.test_contract import weights_of_version
from tests.actors.engines.vllm.test_process import wait_for
from tests.conftest import ModelFolder
from tests.folders import scratch_at
from tests.processes import children, in_group
from tests.ring.harness import ring_config

ARGUMENTS = Path(__file__).parent / f"arguments-{SUPPORTED}.txt"
"""Options of SGLang's own parser; tests/system/test_sglang_types.py holds the list against the package."""
LORA = LoraConfig(rank=12)
LAUNCH = """
import argparse, signal, sys, threading
import yaml
from tests.actors.engines.sglang.stub import StubServer

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--config", "--host", "--model-path", "--dtype", "--context-length", "--fail"):
    parser.add_argument(name)
parser.add_argument("--port", type=int)
given, rest = parser.parse_known_args()
if given.fail:
    sys.exit("CUDA out of memory")
with open(given.config) as file:
    keys = yaml.safe_load(file)
server = StubServer(given.port, api_key=keys.get("api-key", ""), admin_api_key=keys["admin-api-key"])
print("ready", *rest, flush=True)
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: over.set())
over.wait()
print("bye", flush=True)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed SGLang of the supported version, whose server is the stub."""
    folder = tmp_path / "site"
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(LAUNCH)
    metadata = folder / f"sglang-{SUPPORTED}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {SUPPORTED}\n")
    root = Path(__file__).parents[4]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(root)]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


def start(model_folder: ModelFolder, folder: Path, **keys: Any) -> SglangEngine:
    """An engine with a server of its own."""
    model = ModelConfig(path=str(model_folder("qwen3")), dtype="float32")
    config = SglangEngineConfig(startup_timeout=60.0, **keys)
    log = folder / "logs" / "inference-0.sglang.log"
    return SglangEngine(model, config, "interrupt", scratch_at(folder / "run" / "scratch"), log_path=log)


def process_group() -> int:
    """Process group of the server that this process has started."""
    [guard] = [child for child in children(os.getpid()) if any("guard.py" in word for word in child.command)]
    return guard.pid


def test_the_command_line_has_options_that_sglang_knows() -> None:
    """Keys, adapters with room for requests without one, and the user's own arguments last."""
    config = SglangEngineConfig(max_model_len=2048, tensor_parallel_size=2, extra_args=["--log-level", "warning"])
    adapters = command(ModelConfig(path="org/model", lora=LORA, trust_remote_code=True), config, 8001, Path("/keys"))
    line = " ".join(adapters)
    assert adapters[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert "--config /keys --host 127.0.0.1 --port 8001 --model-path org/model --dtype bfloat16" in line
    assert "--context-length 2048 --tensor-parallel-size 2 --data-parallel-size 1" in line
    assert "--max-lora-rank 12 --lora-target-modules all --max-loaded-loras 3" in line.replace(
        "--max-loras-per-batch 3 ", ""
    )
    assert adapters[-2:] == ["--log-level", "warning"]
    plain = command(ModelConfig(path="m"), SglangEngineConfig(deterministic=False), 8001, Path("/keys"))
    assert not {"--enable-lora", "--enable-deterministic-inference", "--trust-remote-code"} & set(plain)
    known = set(ARGUMENTS.read_text().split())
    assert {word for word in [*adapters, *plain] if word.startswith("--")} <= known
    assert set(SET_BY_US) <= known


def test_a_server_is_started_and_stopped_with_its_engine(
    package: Path, model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are changed as with an existing server; nothing is left, neither processes nor keys."""
    monkeypatch.setenv("SGLANG_KEY", "hidden-word")
    engine = start(model_folder, tmp_path, api_key_env="SGLANG_KEY")
    group = process_group()
    try:
        lines = [" ".join(process.command) for process in in_group(group)]
        assert any("sglang.launch_server" in line for line in lines)
        assert not any("hidden-word" in line for line in lines), "every user can read a command line"
        assert not list(tmp_path.glob("grpo-actors-sglang-*")), "the keys are removed once they have been read"
        engine.load(policy(1), weights_of_version(1), WAIT)
        [[completion]] = sample(engine, ask(PROMPT))
        assert completion.segments == [(0, 1, 1)]
    finally:
        engine.close()
    wait_for(lambda: in_group(group) == [])
    log = tmp_path / "logs" / "inference-0.sglang.log"
    # written by the guard of the server, which outlives it for a moment
    wait_for(lambda: log.read_text().splitlines()[-2:] == ["bye", "the server ended with exit code 0"])
    assert log.read_text().startswith("ready --")
    assert log.stat().st_mode & 0o077 == 0


def test_a_server_that_dies_ends_its_engine(package: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    """The words have the end of its log; the actor is started again, and with it a server."""
    engine = start(model_folder, tmp_path)
    try:
        os.killpg(process_group(), signal.SIGKILL)
        assert "the SGLang server has ended; the last lines of" in until_stopped(engine)
        with pytest.raises(EngineStoppedError):
            engine.submit(ask(PROMPT))
    finally:
        engine.close()


def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(
    package: Path, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """At once, and not after the timeout; no key is left."""
    with pytest.raises(EngineStoppedError, match=r"(?s)the SGLang server has ended.*CUDA out of memory"):
        start(model_folder, tmp_path, extra_args=["--fail", "yes"])
    assert not list(tmp_path.glob("grpo-actors-sglang-*"))


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.22", f"has SGLang 0.5.22, this engine is for {SUPPORTED}"),
        ("", f"has no SGLang; install sglang=={SUPPORTED}"),
    ],
)
def test_an_interpreter_without_the_right_sglang_is_refused(
    package: Path, model_folder: ModelFolder, tmp_path: Path, version: str, words: str
) -> None:
    """Before anything is started."""
    metadata = package / f"sglang-{SUPPORTED}.dist-info" / "METADATA"
    if version:
        metadata.write_text(metadata.read_text().replace(SUPPORTED, version))
    else:
        metadata.unlink()
        metadata.parent.rmdir()
    with pytest.raises(ConfigError, match=words):
        start(model_folder, tmp_path)


def run_with(folder: Path, engine: dict[str, Any], **sections: Any) -> RunConfig:
    """A run whose engine has these keys."""
    tree = ring_config(folder).model_dump() | {"inference": {"engine": {"type": "sglang"} | engine}} | sections
    return check_tree(tree)


def test_without_urls_each_actor_starts_a_server_on_gpus_of_its_own(tmp_path: Path) -> None:
    """With urls none is started."""
    assert run_with(tmp_path, {"tensor_parallel_size": 2}).inference.engine.num_gpus == 2
    attached = run_with(tmp_path, {"urls": ["http://gpu-1:30000"]}).inference.engine
    assert (attached.attached, attached.num_gpus) == (True, 0)
    assert dict(SglangEngineConfig(python="/other/python").packages()) == {}
    assert "sglang" in dict(SglangEngineConfig().packages())


@pytest.mark.parametrize(
    ("engine", "sections", "words"),
    [
        ({"max_lora_rank": 4}, {"model": {"path": "m", "lora": {"rank": 8}}}, "max_lora_rank: 4 is below model.lora"),
        ({"data_parallel_size": 2}, {"model": {"path": "m", "lora": {}}}, "data_parallel_size: 2, but SGLang loads no"),
        ({}, {"up": {"colocate": True}}, "mem_fraction_static: up.colocate may put SGLang on the trainer's GPU"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    tmp_path: Path, engine: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    """For a server that the actor would start."""
    with pytest.raises(ConfigError, match=words):
        run_with(tmp_path, engine, **sections)


@pytest.mark.parametrize("argument", ["--port=9", "--admin-api-key", "--max-loaded-loras=9", "--mod"])
def test_arguments_of_the_engine_itself_are_refused(argument: str) -> None:
    """Abbreviations too."""
    with pytest.raises(ValidationError, match="is set by the engine itself; remove it"):
        SglangEngineConfig(extra_args=[argument])
