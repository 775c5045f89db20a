"""Whole scripts with GRPOTrainer: tools, environments, a model as an object, uploads, and two interrupts."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors import GRPOConfig, GRPOTrainer, load_run
from tests.actors.trajectories.families import FAMILIES, tokenizer_of
from tests.conftest import ModelFolder
from tests.model_hub import USER, model_hub
from tests.processes import running

pytestmark = pytest.mark.slow

FAMILY = "qwen2_5"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "3+4?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "7"},
]
START = '''
from actors import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": [{"role": "user", "content": "3+4?"}], "answer": "7"}] * 4


def right(completions, answer, **columns):
    pairs = zip(completions, answer)
    return [float(messages[-1]["content"] == text) for messages, text in pairs]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number.
        b: second number.
    """
    return a + b


class Calculator:
    def reset(self, **row):
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: first number.
            b: second number.
        """
        self.calls += 1
        return a + b

    def get_reward(self):
        return float(self.calls)


if __name__ == "__main__":
    arguments = dict(output_dir="out", per_device_train_batch_size=4, num_generations=2, max_completion_length=200)
    arguments |= dict(max_steps=2, bf16=False, use_cpu=True, learning_rate=1e-6, disable_tqdm=True)
'''


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number.
        b: second number.
    """
    return a + b


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that knows one conversation by heart: it calls the tool, and tells its result."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("calling"), tokenizer_of(FAMILY)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in FAMILIES[FAMILY].ends]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            eos_token_id=ends[0],
        )
    )

    def ids(messages: list[dict[str, Any]], *, opens: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tools=[add], tokenize=False, add_generation_prompt=opens)
        return list(tokenizer.encode(text, add_special_tokens=False))

    row = ids(CONVERSATION, opens=False)
    labels = [-100] * len(row)
    for turn in (1, 3):
        start, end = len(ids(CONVERSATION[:turn], opens=True)), len(ids(CONVERSATION[: turn + 1], opens=False))
        labels[start:end] = row[start:end]
    tokens, wanted = torch.tensor([row]), torch.tensor([labels])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(400):
        loss = model(input_ids=tokens, labels=wanted).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 2e-3:
            break
    assert loss < 2e-3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "rewards"),
    [
        # functions of the script are imported by a process for rewards too
        ('reward_funcs=right, tools=[add], args=GRPOConfig(run_keys={"up.reward": 1}, **arguments)', {"reward/right"}),
        (
            "reward_funcs=right, environment_factory=Calculator, args=GRPOConfig(**arguments)",
            {"reward/right", "reward/Calculator"},
        ),
    ],
    ids=["tools", "environment_factory"],
)
def test_the_tools_of_a_script_are_called(
    tmp_path: Path, calling_model: Path, arguments: str, rewards: set[str]
) -> None:
    """The model calls the function, sees its value, and answers; the reward reads the last message."""
    script = f"{START}    GRPOTrainer(model={str(calling_model)!r}, train_dataset=ROWS, {arguments}).train()\n"
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "out")
    assert run.metrics.column("step") == [1, 2]
    rows = list(run.trajectories)
    assert len(rows) == 4
    good = [row for row in rows if row["reward/right"] == 1.0]
    # a sampled token may go wrong
    assert len(good) >= 2
    for row in good:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert row["tool_calls"] == 1
    assert {name for name in rows[0] if name.startswith("reward/")} == rewards


@pytest.mark.long
def test_a_model_as_an_object_is_evaluated_trained_and_uploaded(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any training the start model is evaluated, afterwards the newest checkpoint."""
    import huggingface_hub.constants
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder()
    rows = [{"prompt": f"{word}=", "answer": word[::-1]} for word in ("abcd", "hello", "world", "train")]
    output = tmp_path / "tiny"
    arguments: dict[str, Any] = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
    arguments |= {"max_steps": 2, "bf16": False, "use_cpu": True, "learning_rate": 1e-2, "disable_tqdm": True}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=lambda completions, **columns: [float(len(text)) for text in completions],
        args=GRPOConfig(output_dir=output, push_to_hub=True, hub_token="secret", hub_private_repo=True, **arguments),
        train_dataset=rows,
        eval_dataset=rows[:2],
    )
    before = trainer.evaluate()
    assert before["eval_num_completions"] == 8
    assert trainer.state.log_history[-1]["step"] == 0
    with model_hub(tmp_path / "hub") as hub:
        hub.valid = {"secret", "other"}
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        assert trainer.train().global_step == 2
        # large files go to an address that is signed, without a token
        assert hub.tokens == {"Bearer secret", ""}
        (uploaded,) = hub.repositories.items()
        assert (uploaded[0], uploaded[1].visibility) == (f"{USER}/tiny", "private")
        (commit,) = hub.commits(uploaded[0])
        assert commit.title == "End of training"
        # what is on the hub already would be no commit
        hub.repositories.clear()
        trainer.push_to_hub("Once more", token="other")
        assert hub.titles(uploaded[0]) == ["Once more"]
        assert "Bearer other" in hub.tokens
    for name, content in commit.files.items():
        (tmp_path / "downloaded" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "downloaded" / name).write_bytes(content)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "downloaded").state_dict()
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert any((found[name] != start[name]).any() for name in start)
    assert AutoTokenizer.from_pretrained(tmp_path / "downloaded").eos_token == "<eos>"
    after = trainer.evaluate()
    assert trainer.state.log_history[-1]["step"] == 2
    assert after.keys() == before.keys()


HANGING = """
import sys
import threading
from pathlib import Path
from actors import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"{word}=", "answer": word} for word in ("abcd", "hello", "world", "train")]


class Steps:
    def on_step_end(self, args, state, control, **values):
        # from here on no group gets a reward, so the run can't be stopped in order
        if state.global_step == 2 and len(sys.argv) > 2:
            Path("hangs").touch()
            print("hangs", flush=True)


def length(completions, **columns):
    if Path("hangs").exists():
        threading.Event().wait()
    return [len(text) / 10 for text in completions]


arguments = dict(output_dir="out", per_device_train_batch_size=8, num_generations=4, max_completion_length=8)
arguments |= dict(max_steps=300, bf16=False, use_cpu=True, save_steps=1, disable_tqdm=True)
trainer = GRPOTrainer(
    model=sys.argv[1], reward_funcs=length, args=GRPOConfig(**arguments), train_dataset=ROWS, callbacks=[Steps]
)
try:
    trainer.train()
except KeyboardInterrupt:
    print("interrupted", trainer.state.global_step, flush=True)
"""


@pytest.mark.long
def test_a_second_interrupt_kills_the_run_and_the_program_ends(tmp_path: Path, model_folder: ModelFolder) -> None:
    """Even though a reward function never returns: neither the run nor the interpreter waits for it."""
    (tmp_path / "script.py").write_text(HANGING)
    # a shell starts what it puts into the background with the signal ignored
    command = ["env", "--default-signal=INT", sys.executable, "-u", "script.py", str(model_folder()), "hang"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            _read_until(process.stdout, b"hangs")
            process.send_signal(signal.SIGINT)
            _read_until(process.stderr, b"interrupt again")
            process.send_signal(signal.SIGINT)
            _read_until(process.stdout, b"interrupted 2")
            assert process.wait(60.0) == 0
        finally:
            process.kill()
    assert not _run_processes(tmp_path)
    (tmp_path / "hangs").unlink()
    # the run goes on from its checkpoint
    script = HANGING.replace("max_steps=300", "max_steps=4")
    (tmp_path / "script.py").write_text(script)
    subprocess.run(command[:-1], cwd=tmp_path, timeout=200, check=True, capture_output=True)
    assert load_run(tmp_path / "out").metrics.column("step") == [1, 2, 3, 4]


def _read_until(stream: Any, text: bytes, seconds: float = 200.0) -> bytes:
    """Read an unbuffered stream up to a text."""
    found, limit = b"", time.monotonic() + seconds
    while text not in found:
        ready, _, _ = select.select([stream], [], [], max(0.0, limit - time.monotonic()))
        part = os.read(stream.fileno(), 65536) if ready else b""
        assert part, f"{text!r} is not in {found!r}"
        found += part
    return found


def _run_processes(folder: Path) -> list[str]:
    """Return the command lines of processes that have a folder among their arguments; a killed one takes a moment."""
    limit = time.monotonic() + 30.0
    while found := [line for line in map(" ".join, (one.command for one in running())) if str(folder) in line]:
        if time.monotonic() > limit:
            break
        time.sleep(0.2)
    return found
