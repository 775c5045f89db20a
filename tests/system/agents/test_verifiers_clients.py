"""Clients of verifiers with their own loops and tools, against sessions: all have the tokens of the engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.engines.http.client import SampledCompletion
from actors.rollout.episode import Trajectory
from tests.actors.trajectories.families import tokenizer_of
from tests.system.agents.scripted import QWEN, Engines, config_of, player
from tests.system.environments.scripted import call, python_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
HERE = Path(__file__).parent


def _sum(prompt: str) -> str:
    """Add by the tool, which verifiers 0.4 gives the name of its server; then answer."""
    if "<tool_response>" in prompt:
        return "1"
    return call("sums_add" if "sums_add" in prompt else "add", a=0, b=1)


class Remembered(Engines):
    """Engines that add one to the number in the question by a tool, and remember all tokens."""

    def __init__(self) -> None:
        super().__init__(_sum)
        self.calls: list[tuple[list[int], list[int]]] = []

    async def ask(self, one: Any, prompt_ids: list[int], *more: Any, **options: Any) -> list[SampledCompletion]:
        """As the other engines."""
        [completion] = await super().ask(one, prompt_ids, *more, **options)
        self.calls.append((list(prompt_ids), list(completion.token_ids)))
        return [completion]


async def played(folder: Path, environment: str, path: str) -> tuple[list[Trajectory], Remembered, list[Any]]:
    """Two trajectories of an agent of verifiers, the engines' calls, and the tokens that verifiers has seen."""
    seen, tokenizer, rows = folder / "seen", folder / "tokenizer", folder / "rows.jsonl"
    seen.mkdir()
    tokenizer_of("qwen2_5").save_pretrained(tokenizer)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    # a renderer cuts an answer by this
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}))
    row = {"question": "What is 0 + 1?", "seen": str(seen), "tokenizer": str(tokenizer), "answer": "1"}
    rows.write_text(json.dumps(row) + "\n")
    keys = {"path": f"{HERE / path}", "python": python_of(environment), "rows": rows, "eval_rows": rows}
    config = config_of(
        folder / "out",
        "run.yaml",
        *(f"environments.0.{key}={value}" for key, value in keys.items()),
        "eval.num_prompts=1",
    )
    engines = Remembered()
    async with player(config, engines) as play:
        trajectories = await play(0)
    return trajectories, engines, [json.loads(file.read_text()) for file in seen.iterdir()]


def check(trajectories: list[Trajectory], engines: Remembered, reward: float) -> list[tuple[list[int], list[int]]]:
    """Each trajectory is one sample of the tokens of two calls of the engine, all of them; return both."""
    samples = []
    asked = {tuple(prompt + answer) for prompt, answer in engines.calls}
    for one in trajectories:
        assert (one.failure, list(one.rewards.values())) == ("", [reward])
        assert (one.tree.num_turns, one.tree.num_branches) == (2, 0)
        [sample] = one.tree.samples()
        assert sum(sample.loss_mask) == one.tree.num_sampled
        for turn in range(2):
            assert tuple(one.tree.ids(turn)) in asked
        samples.append((sample.prompt_ids + sample.token_ids, [0] * len(sample.prompt_ids) + sample.loss_mask))
    assert len(engines.calls) == 2 * len(trajectories)
    return samples


async def test_the_token_client_of_verifiers_3_has_the_tokens_of_the_record(tmp_path: Path) -> None:
    """Its second call has the prompt as tokens, which it has put together from the answer and /tokenize."""
    trajectories, engines, seen = await played(tmp_path, "verifiers-v03", "verifiers_tokens.py:run")
    samples = check(trajectories, engines, 1.0)
    for (ids, mask), steps in zip(samples, seen, strict=True):
        (prompt, first, logprobs), (longer, second, _) = steps
        assert longer[: len(prompt) + len(first)] == prompt + first
        assert longer + second == ids
        assert sum(mask) == len(first) + len(second)
        assert logprobs == [-1.0] * len(first)


async def test_the_training_client_of_verifiers_4_has_the_tokens_of_the_record(tmp_path: Path) -> None:
    """It renders and continues prompts itself; its trace is our sample, token by token."""
    trajectories, engines, seen = await played(tmp_path, "verifiers-v1", "verifiers_clients.py:train_client")
    for (ids, mask), branches in zip(check(trajectories, engines, 0.5), seen, strict=True):
        [(theirs, sampled, logprobs)] = branches
        assert (theirs, [int(one) for one in sampled]) == (ids, mask)
        assert logprobs == [-float(one) for one in mask]


async def test_the_evaluation_client_of_verifiers_4_is_recorded(tmp_path: Path) -> None:
    """It passes messages on, with the id of its own trace beside the session's key."""
    trajectories, engines, _ = await played(tmp_path, "verifiers-v1", "verifiers_clients.py:eval_client")
    for ids, mask in check(trajectories, engines, 0.5):
        assert QWEN.decode([token for token, sampled in zip(ids, mask, strict=True) if sampled]).endswith("1<|im_end|>")
