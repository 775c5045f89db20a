"""SGLang can't run without a GPU; its types can. All that the engine says and reads is held against its own package.

GRPO_SGLANG names a folder with that package (see requirements-sglang.txt); else one is made, once per session.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.engines.protocol import EngineStoppedError
from actors.engines.sglang.answers import completion_of
from actors.engines.sglang.client import NEVER_LOADED
from actors.engines.sglang.compat import SUPPORTED
from actors.engines.sglang.process import command
from actors.models.image_tokens import ImageTokens
from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.sglang_engine import SglangEngineConfig
from tests import models
from tests.actors.engines.engines import WAIT, ask, policy, sample, seeing
from tests.actors.engines.sglang.conftest import MakeSglang, make_sglang, stub  # noqa: F401 - fixtures
from tests.actors.engines.sglang.stub import StubServer
from tests.actors.engines.sglang.test_engine import ADAPTER, PROMPT
from tests.actors.engines.sglang.test_process import ARGUMENTS
from tests.actors.engines.test_contract import weights_of_version
from tests.actors.engines.vllm.test_process import wait_for
from tests.system.tools import missing

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
LABELS = {"b:1.1.1": policy(1), "b:1.2.2": policy(2)}


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SGLang's package."""
    if given := os.environ.get("GRPO_SGLANG"):
        return Path(given)
    folder = tmp_path_factory.mktemp("sglang")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, "-r", str(HERE / "requirements-sglang.txt")], capture_output=True, text=True)
    if done.returncode:
        missing(f"SGLang's package can't be had: {done.stderr.strip().splitlines()[-1]}")
    return folder


def test_the_command_line_is_one_that_sglangs_own_parser_takes(package: Path, tmp_path: Path) -> None:
    """With the meaning that the engine has in mind; the committed list of options is that of this version."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"admin-api-key": "a", "api-key": "b"}))
    lora = ModelConfig(path="org/model", dtype="bfloat16", lora=LoraConfig(rank=12))
    config = SglangEngineConfig(
        max_model_len=2048,
        tensor_parallel_size=2,
        mem_fraction_static=0.7,
        quantization="fp8",
        extra_args=["--log-level", "warning"],
    )
    lines = [command(lora, config, 8001, keys), command(ModelConfig(path="m"), SglangEngineConfig(), 8002, keys)]
    done = subprocess.run(
        [sys.executable, str(HERE / "sglang_arguments.py")],
        input=json.dumps([words[3:] for words in lines]),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(package)},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["names"] == ARGUMENTS.read_text().split()
    first, second = told["parsed"]
    expected = {
        "model_path": "org/model",
        "dtype": "bfloat16",
        "context_length": 2048,
        "tp_size": 2,
        "dp_size": 1,
        "mem_fraction_static": 0.7,
        "quantization": "fp8",
        "enable_lora": True,
        "max_lora_rank": 12,
        "lora_target_modules": ["all"],
        "max_loaded_loras": 3,
        "max_loras_per_batch": 3,
        "enable_deterministic_inference": True,
        "admin_api_key": "a",
        "api_key": "b",
        "host": "127.0.0.1",
        "port": 8001,
        "log_level": "warning",
    }
    assert {key: first[key] for key in expected} == expected
    assert not second["enable_lora"]
    assert second["mem_fraction_static"] is None


def judged(package: Path, calls: list[Any], answers: list[Any], prompts: Any = ()) -> dict[str, Any]:
    """What SGLang's types say of these, and the prompts that its code makes."""
    done = subprocess.run(
        [sys.executable, str(HERE / "sglang_types.py")],
        input=json.dumps({"calls": calls, "answers": answers, "prompts": list(prompts)}),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(package)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_sglangs_own_code_makes_our_prompt_of_what_it_is_sent(package: Path) -> None:
    """Of token ids with one placeholder for each image, by each of its two ways; images next to each other too."""
    rule = ImageTokens(models.IMAGE, patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    sizes = [(8, 8), (16, 40), (30, 12)]
    start, image, end = models.VISION_START, models.IMAGE, models.VISION_END
    sent = [1, start, image, end, 5, start, image, end, start, image, end, 6, 7]
    ours, _ = rule.expand(sent, sizes)
    prompt = {"ids": sent, "grids": [rule.grid(*size) for size in sizes], "image": image}
    told = judged(package, [], [], prompts=[prompt])
    assert told["prompts"] == [[ours, ours]]
    assert len(ours) > len(sent)


@pytest.mark.parametrize("lora", [False, True])
def test_all_that_is_said_fits_sglangs_types(
    package: Path,
    make_sglang: MakeSglang,  # noqa: F811
    stub: StubServer,  # noqa: F811
    lora: bool,
) -> None:
    """Every request of a life of the engine, with every answer of the stub: each key is known, each value is taken."""
    stub.adapters["policy-1.0.7"] = "/gone"
    engine = make_sglang(lora=lora)
    for version in (1, 2, 3):
        engine.load(policy(version), ADAPTER if lora else weights_of_version(version), WAIT)
    settings: Any = {"top_k": 5, "min_p": 0.1, "stop": ("=", "a="), "stop_token_ids": (7,), "logit_bias": {5: -1.0}}
    settings |= {"top_p": 0.9, "presence_penalty": 0.5}
    sample(engine, ask(PROMPT, n=2, num_top_logprobs=3, **settings), ask(PROMPT, max_tokens=None))
    sample(engine, ask(PROMPT, temperature=0.0), ask(PROMPT, seed=2**63 - 1, n=2))
    stub.holding = True
    future = engine.submit(ask(PROMPT))
    wait_for(lambda: stub.num_running() == 1)
    future.cancel()
    wait_for(lambda: "/abort_request" in stub.paths() and stub.num_running() == 0)
    engine.close()
    stub.holding = False
    sample(make_sglang(family="qwen3_vl"), seeing())
    told = judged(package, stub.calls, stub.answers)
    assert told["problems"] == []
    assert told["words"]
    assert NEVER_LOADED == "adapter that has never been loaded"
    assert told["version"] == SUPPORTED
    said = set(stub.paths())
    weights = {"/load_lora_adapter", "/unload_lora_adapter"} if lora else {"/pause_generation"}
    assert {"/generate", "/abort_request", "/update_weight_version", "/continue_generation", *weights} <= said


def test_a_key_that_sglang_does_not_know_would_be_found(package: Path) -> None:
    """So would a value of another type, and an endpoint that is none: the test above can fail."""
    params = {"max_new_tokens": 3}
    calls = [
        ["/generate", {"input_ids": [1], "sampling_params": params, "lora": "x"}],
        ["/generate", {"input_ids": [1], "sampling_params": params | {"max_tokens": 3}}],
        ["/pause_generation", {"mode": "keep"}],
        ["/update_weights_from_disk", {"model_path": "/x", "version": "1"}],
        ["/pause", {}],
    ]
    answers = [["/generate", {"output_ids": [], "meta_info": {"finish": {}}}], ["/server_info", {"max_length": 1}]]
    told = judged(package, calls, answers)
    assert [problem.partition(":")[0] for problem in told["problems"]] == [path for path, _ in calls + answers]


def test_answers_of_sglangs_own_code_are_read(package: Path) -> None:
    """Two versions in one completion, each way to end, alternatives, a logprob that is none."""
    told = judged(package, [], [])["answers"]
    request = ask(PROMPT, max_tokens=3, num_top_logprobs=2)
    read = {
        name: completion_of(answer, request, 3, frozenset({2}), LABELS)
        for name, answer in told.items()
        if name != "nan"
    }
    assert {name: completion.finish_reason for name, completion in read.items()} == {n: n for n in read}
    for completion in read.values():
        assert completion.token_ids == [5, 8, 11]
        assert completion.logprobs == [-0.5, -1.0, -0.25]
        assert completion.segments == [(0, 1, 1), (2, 1, 2)]
        assert completion.top_logprobs[0] == [(4, -0.1), (5, -0.5)]
    assert (read["stop"].stop_reason, read["length"].stop_reason) == (11, None)
    with pytest.raises(EngineStoppedError, match="not finite"):
        completion_of(told["nan"], request, 3, frozenset({2}), LABELS)
