"""CPU and memory of a rollout actor that serves sessions of agents, with a double of the engines.

    python -m benchmarks.sessions [--json PATH]

Services in another process take trajectories of an external agent. Each trajectory has 20 calls, each of which sends
the whole conversation; an answer has 50 tokens, and every tenth call is disturbed: the client hangs up, sends half of
a request, or asks twice at once. The first message has so many tokens that the prompts have at least 200, 2 000 or
8 000, in Qwen3's chat template over a tokenizer of words. The double answers at once and its CPU is counted; that of
the clients is not. `call_ms` is the CPU time of the process, all threads, user and system, ÷ the answers; it includes
HTTP, the record of the tokens, and the call's part of the group's message in bytes. The limit is 3 ms. `MiB` is the
resident memory at the start, in the middle and at the end of the measurement, which begins after a first generation of
sessions. A row is a process of its own.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import structlog
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from actors.datasets import Example
from actors.engines.http.client import SampledCompletion
from actors.engines.protocol import PromptImage
from actors.models.tokenizer import eos_ids
from actors.rollout.engine_choice import EngineChoice
from actors.rollout.environments import EnvironmentPlayer
from actors.rollout.model_chat import chat_of
from actors.rollout.trajectory_group import build_trajectory_group
from actors.telemetry.metrics import Metrics
from actors.trajectories.forms import AnswerForm
from benchmarks.machine import ROOT, finish
from bus import codec
from schemas.config.model import ModelConfig
from schemas.messages import EnginePeer, Ticket
from tests.actors.rollout.doubles import directive, engine, ticket
from tests.actors.trajectories.families import FAMILIES
from tests.ports import free_port
from tests.ring.harness import ring_config

GROUP_SIZE, CALLS, TOKENS = 4, 20, 50
SEQUENCE_LEN = 16384
DISTURBED = 0.1
ROWS = [(number, length, 15.0) for number in (20, 200) for length in (200, 2000, 8000)] + [(200, 2000, 90.0)]
"""Sessions at the same time, tokens of the first message, seconds; the last one is for the memory."""
LIMIT_MS = 3.0


class Client:
    """Double of the engines: 50 tokens, the last of which ends the turn."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.num_prompt_tokens = 0

    async def sample(
        self,
        engine: EnginePeer,
        ticket: Ticket,
        prompt_ids: list[int],
        stop: Sequence[str] = (),
        form: AnswerForm | None = None,
        images: Sequence[PromptImage] = (),
    ) -> list[SampledCompletion]:
        """Answer at once."""
        self.num_prompt_tokens += len(prompt_ids)
        return [SampledCompletion([*self._tokens], [-0.5] * TOKENS, [(0, 1, 3)], "stop", "")]

    async def close(self) -> None:
        """Close nothing."""


def write_model(folder: Path) -> ModelConfig:
    """Write a tokenizer of words with Qwen3's template; a word with the blank before it is a token."""
    family = FAMILIES["qwen3"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["a word user assistant Session Result is there. Next? "] * 9, trainer)
    raw.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    raw.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.marks])
    PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=family.template).save_pretrained(folder)
    ends = [raw.token_to_id(end) for end in family.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return ModelConfig(path=str(folder))


async def measured(folder: Path, num_sessions: int, length: int, seconds: float) -> dict[str, Any]:
    """Return the row of a number of sessions and a length of the first message."""
    model, port = write_model(folder), free_port()
    config = ring_config(
        folder,
        environments=[{"type": "agent", "name": "helper", "external": True, "max_turns": CALLS}],
        reward={"functions": []},
        packer={"sequence_len": SEQUENCE_LEN},
        rollout={
            "max_tokens": TOKENS + 1,
            "group_size": GROUP_SIZE,
            "group_timeout": 600.0,
            "sessions": {"port": port},
        },
    )
    chat, metrics, numbers = chat_of(model), Metrics("rollout"), itertools.count()
    client = Client([*chat.encode(" word" * (TOKENS - 1)), min(eos_ids(model))])
    engines = EngineChoice(config, metrics, lambda: client)
    player = EnvironmentPlayer(config, "rollout-0", {"helper": chat}, engines, metrics, SEQUENCE_LEN)

    async def play_for_ever() -> None:
        while True:
            index = next(numbers)
            sizes = {"num_completions": GROUP_SIZE, "max_tokens": TOKENS + 1}
            asked = ticket(index, environment="helper", index=index, **sizes)
            trajectories, columns = await player.play(asked, Example("", {"index": index, "split": "train"}))
            codec.encode(build_trajectory_group("run", "rollout-0", asked, columns, trajectories))

    def answered() -> float:
        labels = {"environment": "helper", "outcome": "answered"}
        return metrics.registry.get_sample_value("grpo_rollout_session_calls_total", labels) or 0.0

    async with engines, player:
        engines.note(time.monotonic(), directive(engines=[engine("inference-0")]))
        playing = [asyncio.create_task(play_for_ever()) for _ in range(num_sessions // GROUP_SIZE)]
        asked = {
            "url": f"http://127.0.0.1:{port}",
            "admin": "",
            "services": num_sessions,
            "calls": CALLS,
            "characters": 5 * length,
        }
        async with crowd(asked | {"mischief": DISTURBED, "seed": num_sessions}):
            while answered() < num_sessions * CALLS:
                await asyncio.sleep(0.1)
            calls, prompts, started, cpu = answered(), client.num_prompt_tokens, time.monotonic(), time.process_time()
            memory = [resident()]
            for _ in range(2):
                await asyncio.sleep(seconds / 2)
                memory.append(resident())
            wall, cpu = time.monotonic() - started, time.process_time() - cpu
            calls, prompts = answered() - calls, client.num_prompt_tokens - prompts
        for task in playing:
            task.cancel()
        ended = await asyncio.gather(*playing, return_exceptions=True)
        if failures := [one for one in ended if not isinstance(one, asyncio.CancelledError)]:
            raise RuntimeError(f"{len(failures)} groups could not be played: {failures[0]}")
    return {
        "sessions": num_sessions,
        "first_tokens": length,
        "prompt_tokens": round(prompts / calls),
        "calls_per_s": round(calls / wall, 1),
        "call_ms": round(1e3 * cpu / calls, 3),
        "seconds": seconds,
        "MiB": [round(one / 2**20) for one in memory],
    }


@contextlib.asynccontextmanager
async def crowd(asked: dict[str, Any]) -> AsyncIterator[None]:
    """Run the clients' process inside the block."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "tests.actors.rollout.sessions.crowd"]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=asyncio.subprocess.DEVNULL, cwd=ROOT)
    assert process.stdin is not None
    process.stdin.write(json.dumps(asked).encode() + b"\n")
    try:
        yield
        if process.returncode is not None:
            raise RuntimeError(f"the clients have ended with the code {process.returncode}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def row(num_sessions: int, length: int, seconds: float) -> dict[str, Any]:
    """Return the row of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sessions", "--row", *map(str, (num_sessions, length, seconds))]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=600).stdout
    return dict(json.loads(told.splitlines()[-1]))


def measure() -> dict[str, Any]:
    """Return all rows."""
    rows = [row(*case) for case in ROWS]
    return {"limit_ms": LIMIT_MS, "rows": rows, "within_limit": all(one["call_ms"] <= LIMIT_MS for one in rows)}


def table(results: dict[str, Any]) -> str:
    """Return a line for each row."""
    rows = results["rows"]
    header = "".join(f"{name:>16}" for name in rows[0])
    return "\n".join([header, *("".join(f"{value!s:>16}" for value in one.values()) for one in rows)])


def main() -> None:
    """Run one row, or the benchmark."""
    if sys.argv[1:2] != ["--row"]:
        finish(__doc__, measure, table)
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    number, length, seconds = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measured(Path(folder), int(number), int(length), float(seconds)))))


if __name__ == "__main__":
    main()
