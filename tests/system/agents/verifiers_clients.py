"""verifiers 0.4 as an agent: it plays a task with its own clients. Needs `verifiers` 0.4."""

import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2] / "actors/environments/adapters"), str(HERE.parent / "environments")]
# servers of tools are processes that import the module again
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
import verifiers.v1 as vf  # noqa: E402 - of the folders above
from renderers import DefaultRendererConfig  # noqa: E402
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig  # noqa: E402

AGENT = {"runtime": {"type": "subprocess"}, "harness": {"id": "verifiers_v1"}}


async def eval_client(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play with the client that passes requests on."""
    return await _played(data, api_key, EvalClientConfig(base_url=base_url, api_key_var=_variable(api_key)))


async def train_client(data: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play with the client that renders prompts itself, and asks for tokens."""
    config = TrainClientConfig(
        base_url=base_url,
        api_key_var=_variable(api_key),
        renderer=DefaultRendererConfig(tool_parser="qwen3"),
        renderer_model_name=data["tokenizer"],
    )
    return await _played(data, api_key, config)


async def _played(data: dict[str, Any], api_key: str, client: Any) -> float:
    """Play a sum; write the tokens that verifiers has in its trace, and return its reward."""
    config = {"taskset": {"id": "verifiers_v1_worlds"}, "agent": AGENT}
    environment = vf.load_environment(vf.resolve_env_config(config))
    async with environment.serving():
        [slot] = environment.slots(next(iter(environment.taskset)))
        episode = await environment.run_slot(slot, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in episode.errors))
    [trace] = episode.traces
    seen = [[branch.token_ids, branch.sampled_mask, branch.logprobs] for branch in trace.branches]
    Path(data["seen"], api_key[-8:]).write_text(json.dumps(seen))
    return float(trace.reward)


def _variable(api_key: str) -> str:
    """Return the name of a variable with the key: verifiers reads keys from the environment alone."""
    name = f"KEY_{api_key[-8:].replace('-', '_')}"
    os.environ[name] = api_key
    return name
