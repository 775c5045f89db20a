"""The trainer's layers compiled by torch: the same step, whatever the rows' lengths."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.learner.learner import TorchLearner
from schemas.errors import ConfigError
from tests import models
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.conftest import ModelFolder

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="not run: install g++")


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """In this process and afresh, so that no worker of torch's stays behind."""
    import torch._dynamo as dynamo
    import torch._inductor.config as inductor

    dynamo.reset()
    dynamo.utils.counters.clear()
    with inductor.patch(compile_threads=1):  # type: ignore[no-untyped-call]
        yield
    dynamo.reset()


def learner_of(model_folder: Callable[[], Path], compiled: bool, **keys: Any) -> TorchLearner:
    """A learner on the tied model."""
    checkpointing = keys.pop("gradient_checkpointing", False)
    config = run_config(model_folder(), **keys)
    changed = {"compile": compiled, "gradient_checkpointing": checkpointing}
    return TorchLearner(config.model_copy(update={"model": config.model.model_copy(update=changed)}))


@needs_a_compiler
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "keys",
    [{}, {"lora": {"rank": 4}, "gradient_checkpointing": True}, {"gradient_checkpointing": "selective"}],
    ids=["full", "lora", "selective"],
)
def test_compiled_layers_train_what_they_train_without(model_folder: ModelFolder, keys: dict[str, Any]) -> None:
    """Three steps on rows of other lengths each: loss, gradient norm and weights within 1e-5 of plain ones."""
    from torch._dynamo.utils import counters

    learners, measured = [], []
    for compiled in (False, True):
        learner = learner_of(model_folder, compiled, optimizer={"eps": 1e-4}, **keys)
        measured.append([learner.step(step_batch(random_samples(step)[: 3 + step], step=step)) for step in (1, 2, 3)])
        learners.append(learner)
    compiled_frames: Counter[str] = counters["frames"]
    assert compiled_frames["ok"] > 0, "nothing was compiled"
    for plain, found in zip(*measured, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert found[name] == pytest.approx(plain[name], rel=1e-4, abs=1e-6), name
    for expected, found in zip(*(learner.model.parameters() for learner in learners), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({}, 8),
        ({"lora": {"rank": 4}}, 11),
        # with the adapter switched off for the reference
        ({"lora": {"rank": 4}, "reference": {"beta": 0.1}}, 15),
        pytest.param({"lora": {"rank": 4}, "gradient_checkpointing": True}, 11, marks=pytest.mark.long),
        pytest.param({"gradient_checkpointing": "selective"}, 8, marks=pytest.mark.long),
    ],
)
def test_layers_share_graphs_that_hold_for_rows_of_any_length(
    keys: dict[str, Any], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers or five, rows of four lengths: as many graphs in the first step, and none later. They run as they are.

    A layer is four graphs around its attention, with and without gradients, and with an input that has none. With a
    graph for each layer torch would stop to compile at the eighth.
    """
    made: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **given: compile_(module, backend=counting, **given))
    monkeypatch.setenv("CXX", "sh")  # none is called
    found = []
    for layers in (2, 5):
        torch._dynamo.reset()
        made.clear()
        folder = tmp_path / str(layers)
        Qwen3ForCausalLM(Qwen3Config(**models.SMALL | {"num_hidden_layers": layers})).save_pretrained(folder)
        models.tokenizer().save_pretrained(folder)
        learner = learner_of(lambda folder=folder: folder, compiled=True, **keys)
        counts = []
        for step in range(1, 5):
            learner.step(step_batch(random_samples(step)[: 1 + step], step=step))
            counts.append(len(made))
        assert len(set(counts)) == 1, counts
        found.append(counts[0])
    assert found[0] == found[1]
    assert 4 <= found[0] <= most


def test_a_missing_compiler_is_said_before_anything_is_trained(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the key, and the variable that names another."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"model.compile: needs a C\+\+ compiler, and no-such-compiler is not inst"):
        learner_of(model_folder, compiled=True)
