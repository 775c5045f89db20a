"""GRPOTrainer: arguments, and whole runs whose rewards and callbacks are closures of the test."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from actors import GRPOConfig, GRPOTrainer
from actors.api import reward_here
from actors.api.process import RunProcess
from schemas.errors import ConfigError, RunFailedError
from tests.conftest import ModelFolder

ROWS = [{"prompt": f"{word}=", "answer": word[::-1]} for word in ("abcd", "hello", "world", "train", "actor", "model")]


def _trainer(model: Path, output: Path, rewards: Any, callbacks: Any = (), **keywords: Any) -> GRPOTrainer:
    given = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 4}
    given |= {"bf16": False, "use_cpu": True, "save_steps": 2, "learning_rate": 1e-3, "disable_tqdm": True}
    return GRPOTrainer(
        model=str(model),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=output, **(given | keywords)),
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        callbacks=list(callbacks),
    )


def _length(completions: list[str], **columns: Any) -> list[float]:
    return [len(completion) / 10 for completion in completions]


class _Told:
    """Callback that keeps the names of its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda args, state, control, **values: self.events.append((name, state.global_step))


@pytest.mark.slow
def test_the_import_and_the_arguments_load_no_torch() -> None:
    """A notebook gets its prompt back at once."""
    code = "import sys; from actors import GRPOTrainer, GRPOConfig; GRPOConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_keyword_is_a_type_error_with_the_nearest_name() -> None:
    """As in TRL, where the constructor refuses it."""
    with pytest.raises(TypeError, match=r"'lerning_rate'; did you mean 'learning_rate'\?"):
        GRPOConfig(lerning_rate=1e-5)
    assert GRPOConfig().num_generations == 8


def test_a_keyword_without_counterpart_is_refused_by_name(tmp_path: Path, model_folder: ModelFolder) -> None:
    """A run that differs silently from the script would be worse."""
    with pytest.raises(ConfigError, match="fp16=True: float16 has no counterpart"):
        _trainer(model_folder(), tmp_path, _length, fp16=True)


@pytest.mark.slow
def test_closures_are_rewards_and_callbacks_of_a_whole_run(tmp_path: Path, model_folder: ModelFolder) -> None:
    """In a thread of this process, also while an event loop runs; the saved model loads with transformers."""
    threads, told = set(), _Told()

    def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        threads.add(threading.current_thread())
        return [float(a == b) for a, b in zip(completions, answer, strict=True)]

    trainer = _trainer(model_folder(), tmp_path / "out", [right, lambda **group: _length(**group)], [told])

    async def cell() -> Any:
        return trainer.train()

    output = asyncio.run(cell())
    assert output.global_step == 4
    assert threads
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    assert {"rewards/right/mean", "rewards/lambda/mean"} <= steps[0].keys()
    names = [name for name, _ in told.events]
    assert names[:2] == ["on_init_end", "on_train_begin"]
    assert names[-1] == "on_train_end"
    in_order = [event for event in told.events if event[0] in ("on_step_begin", "on_step_end", "on_log")]
    assert in_order == [(name, n) for n in (1, 2, 3, 4) for name in ("on_step_begin", "on_step_end", "on_log")]
    assert names.count("on_save") == 2
    result = trainer.evaluate()
    assert result["eval_num_completions"] == 8
    assert trainer.evaluate() == result
    trainer.save_model(tmp_path / "saved")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token == "<eos>"


@pytest.mark.slow
def test_an_exception_of_a_reward_ends_the_run_with_its_name(tmp_path: Path, model_folder: ModelFolder) -> None:
    """The cause is the exception itself."""

    def broken(**group: Any) -> list[float]:
        raise LookupError("no such answer")

    with pytest.raises(RunFailedError, match="broken raised LookupError: no such answer") as failure:
        _trainer(model_folder(), tmp_path / "out", broken).train()
    assert isinstance(failure.value.__cause__, LookupError)


@pytest.mark.slow
def test_a_reward_actor_that_fails_ends_the_run_with_its_error(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No restart mends an error of its making: the run stops instead of waiting for rewards."""

    def fail(*_: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(reward_here, "make_reward_actor", fail)
    with pytest.raises(RunFailedError, match="the reward actor in this process failed: no space left"):
        _trainer(model_folder(), tmp_path / "out", _length).train()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "read"), [("stdout", "_read"), ("stderr", "_read_errors")])
def test_output_that_can_not_be_read_ends_the_run_with_its_error(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, name: str, read: str
) -> None:
    """Unread, a full pipe would hold up the run for good."""

    def fail(*_: Any) -> None:
        raise OSError("bad descriptor")

    monkeypatch.setattr(RunProcess, read, fail)
    with pytest.raises(RunFailedError, match=f"reading {name} of actors up failed: OSError: bad descriptor"):
        _trainer(model_folder(), tmp_path / "out", _length, max_steps=300).train()


@pytest.mark.long
def test_an_interrupt_drains_and_train_continues(tmp_path: Path, model_folder: ModelFolder) -> None:
    """As Ctrl-C in a terminal or a notebook, which raises KeyboardInterrupt in the main thread."""

    class Interrupt:
        def on_step_end(self, args: Any, state: Any, control: Any, **values: Any) -> None:
            if state.global_step == 2:
                signal.raise_signal(signal.SIGINT)

    trainer = _trainer(model_folder(), tmp_path / "out", _length, [Interrupt()], max_steps=300)
    # a shell starts what it puts into the background with the signal ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert list((tmp_path / "out" / "checkpoints").glob("step_*"))
    stopped_at = trainer.state.global_step
    assert 2 <= stopped_at < 300
    again = _trainer(model_folder(), tmp_path / "out", _length, max_steps=stopped_at + 3)
    assert again.train().global_step == stopped_at + 3
