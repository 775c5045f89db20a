"""How the owned server is started, and that it never outlives its owner."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.engines.external import guard
from actors.engines.vllm.compat import check_version, installed
from actors.engines.vllm.process import OwnServer, command, environment, lora_rank
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError
from tests.processes import in_group

LORA = LoraConfig(rank=12, alpha=8.0)
SERVER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); {}"


def engine(**keys: Any) -> VllmEngineConfig:
    """A configuration."""
    return VllmEngineConfig(type="vllm", **keys)


def model(lora: LoraConfig | None = None) -> ModelConfig:
    """A model."""
    return ModelConfig(path="org/model", dtype="bfloat16", lora=lora)


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Until it is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_a_server_that_takes_turns_on_a_gpu_can_give_memory_back() -> None:
    """On CPUs vLLM has no such mode, and refuses the option."""
    for on_cpu in (False, True):
        words = command(model(), engine(), on_cpu=on_cpu, port=8001, takes_turns=True)
        assert ("--enable-sleep-mode" in words) == (not on_cpu)
    assert "--enable-sleep-mode" not in command(model(), engine(), on_cpu=False, port=8001)


def test_the_command_line_says_what_is_configured() -> None:
    """Keys, what the contract needs, and the user's own arguments last."""
    words = command(
        model(), engine(max_model_len=2048, tensor_parallel_size=2, extra_args=["--seed", "3"]), on_cpu=False, port=8001
    )
    line = " ".join(words)
    assert words[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert "--model org/model --dtype bfloat16 --max-model-len 2048 --tensor-parallel-size 2" in line
    assert "--logprobs-mode processed_logprobs --max-logprobs 21" in line
    assert {"--enable-scale-out", "--enable-prefix-caching"} <= set(words)
    assert words[-2:] == ["--seed", "3"]
    assert "--worker-extension-cls grpo_actors_worker.Extension" in line
    assert command(model(), engine(), on_cpu=True, port=8001)[-1] == "--no-enable-chunked-prefill"
    assert not {
        "--no-enable-chunked-prefill",
        "--enable-lora",
        "--quantization",
        "--enforce-eager",
        "--trust-remote-code",
    } & set(words)


def test_an_exact_head_is_asked_for_where_it_is_one() -> None:
    """A server computes it for a model of 16 bits; float32 is exact as it is."""
    exact = ModelConfig(path="org/model", head_dtype="float32")
    words = command(exact, engine(), on_cpu=False, port=8001)
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"head_dtype": "float32"}
    in_float32 = exact.model_copy(update={"dtype": "float32"})
    for one in (model(), in_float32):
        assert "--hf-overrides" not in command(one, engine(), on_cpu=False, port=8001)


def test_adapters_follow_from_the_model() -> None:
    """Rank 12 needs kernels of rank 16; one version more than are served stays in memory."""
    line = " ".join(command(model(LORA), engine(max_loras=3), on_cpu=False, port=8001))
    assert "--max-lora-rank 16 --max-loras 3 --max-cpu-loras 4" in line
    assert "--enable-lora" in line
    assert environment(model(LORA), engine(), "k")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(model(), engine(), "k")


def test_a_server_whose_base_is_the_trainers_gets_a_loader_for_it() -> None:
    """By name and manifest; its module is imported in such servers alone, since it imports vLLM's loaders."""
    manifest = Path("/run/shared_base.json")
    line = command(model(LORA), engine(), on_cpu=False, port=8001, base=manifest)
    assert line[line.index("--load-format") + 1] == "grpo_base"
    assert json.loads(line[line.index("--model-loader-extra-config") + 1]) == {"manifest": str(manifest)}
    assert environment(model(LORA), engine(), "k", shares_base=True)["GRPO_ACTORS_SHARES_BASE"] == "1"
    assert "--load-format" not in command(model(LORA), engine(), on_cpu=False, port=8001)
    assert "GRPO_ACTORS_SHARES_BASE" not in environment(model(LORA), engine(), "k")


@pytest.mark.parametrize(("rank", "taken"), [(1, 1), (2, 8), (8, 8), (300, 320), (512, 512)])
def test_ranks_are_rounded_up(rank: int, taken: int) -> None:
    """To those that vLLM has."""
    assert lora_rank(rank) == taken


def test_a_rank_beyond_all_kernels_is_refused() -> None:
    """With both numbers."""
    with pytest.raises(ConfigError, match=r"model.lora.rank: 513, but .* up to rank 512"):
        lora_rank(513)


def test_the_environment_passes_through_and_holds_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES is the user's; the key is in the environment and not on the command line."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"inference.engine.api_key_env: the environment variable MY_KEY is not set"):
        environment(model(), engine(api_key_env="MY_KEY"), "k")
    monkeypatch.setenv("MY_KEY", "secret")
    given = environment(model(), engine(api_key_env="MY_KEY"), "k")
    assert (given["CUDA_VISIBLE_DEVICES"], given["VLLM_API_KEY"]) == ("3", "secret")
    assert "secret" not in command(model(), engine(api_key_env="MY_KEY"), on_cpu=False, port=8001)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"extra_args": ["--port=9"]}, "--port=9 is set by the engine itself"),
        ({"extra_args": ["--logprobs_mode=raw_logprobs"]}, "--logprobs_mode=raw_logprobs is set by the engine itself"),
        ({"extra_args": ["--hos", "0.0.0.0"]}, "--hos is set by the engine itself"),
        ({"extra_args": ["--no-enable-lora"]}, "--no-enable-lora is set by the engine itself"),
        ({"urls": ["http://host:8000/v1"]}, "without a path"),
        ({"max_loras": 1}, "greater than or equal to 2"),
    ],
)
def test_what_would_break_the_contract_is_refused(keys: dict[str, Any], problem: str) -> None:
    """By name."""
    with pytest.raises(ValidationError, match=problem):
        engine(**keys)


def test_another_vllm_is_refused_with_both_versions() -> None:
    """Patch levels may differ."""
    check_version("0.32.4", "here")
    for other in ("0.31.9", "0.33.0", "0.3.2"):
        with pytest.raises(ConfigError, match=rf"here has vLLM {other}, this engine is for vLLM 0.32.\*"):
            check_version(other, "here")


def test_an_interpreter_without_vllm_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Also one that is not there."""
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 0\n")
    bare.chmod(0o755)
    with pytest.raises(ConfigError, match=r"has no vLLM; install vllm==0.32.\*"):
        installed(str(bare))
    with pytest.raises(ConfigError, match=r"inference.engine.python: /nowhere can't be run"):
        installed("/nowhere")


def guarded(server: str) -> list[str]:
    """The command of a guard with a server that starts a worker and then does this."""
    return [sys.executable, "-I", guard.__file__, sys.executable, "-c", SERVER.format(server)]


def test_all_processes_of_the_server_die_with_its_owner() -> None:
    """kill -9 of an owner leaves no server and no worker of it."""
    code = f"""
import subprocess, time
guard = subprocess.Popen({guarded("time.sleep(600)")!r}, stdin=subprocess.PIPE, start_new_session=True)
print(guard.pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    group = int(owner.stdout.readline())
    wait_for(lambda: len(in_group(group)) == 3)  # guard, server, worker
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_for(lambda: in_group(group) == [])


def test_a_server_that_ends_takes_its_workers_with_it() -> None:
    """And the guard says how it ended."""
    command = guarded("time.sleep(0.3); sys.exit(3)")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert process.wait(60) == -signal.SIGKILL
    assert process.stderr is not None
    assert process.stderr.read() == b"the server ended with exit code 3\n"
    wait_for(lambda: in_group(process.pid) == [])


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_request_to_end_reaches_a_server_that_is_just_being_started(tmp_path: Path, moment: str) -> None:
    """SIGTERM arrives while its guard starts it: at the earliest moment and at the latest one."""
    code = f"""
import os, signal, subprocess
from actors.engines.external import guard
class Popen(subprocess.Popen):
    def __init__(self, *given, **named):
        if {moment!r} == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(*given, **named)
        if {moment!r} == "after":
            os.kill(os.getpid(), signal.SIGTERM)
guard.subprocess.Popen = Popen
guard.main(["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"])
"""
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=log, start_new_session=True
        )
    assert process.wait(60) == -signal.SIGKILL
    # the signal may come before the shell has set its trap
    told = (tmp_path / "log").read_text()
    assert told in ("the server ended with exit code 0\n", "the server ended by SIGTERM\n")
    wait_for(lambda: in_group(process.pid) == [])


def test_closing_ends_a_server_in_good_order(tmp_path: Path) -> None:
    """SIGTERM reaches it; what it writes then is in the log. Without its guard it is killed all the same."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\ntrap 'echo bye; exit 0' TERM\necho started\nsleep 600 & wait\n")
    fake.chmod(0o755)
    server = OwnServer(model(), engine(python=str(fake)), False, tmp_path / "logs" / "inference-0.vllm.log")
    wait_for(lambda: "started" in server.last_lines())
    assert server.ended() == ""
    server.close(patience=60.0)
    assert server.last_lines().splitlines() == ["started", "bye", "the server ended with exit code 0"]
    assert "the last lines of" in server.ended()
    wait_for(lambda: in_group(server.process_group) == [])  # a killed process takes a moment to end
    orphan = OwnServer(model(), engine(python=str(fake)), False, tmp_path / "logs" / "inference-0.vllm.log")
    wait_for(lambda: "started" in orphan.last_lines())
    assert "bye" not in orphan.last_lines()  # of this life alone
    os.kill(orphan.process_group, signal.SIGKILL)
    wait_for(orphan.ended)
    orphan.close()
    wait_for(lambda: in_group(orphan.process_group) == [])
