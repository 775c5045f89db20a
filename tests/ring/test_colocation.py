"""Trainer and engine on one GPU: the engine starts when the trainer holds the memory of a step."""

import time

import pytest

from actors import assembly
from actors.engines import fake as fake_engine
from actors.learner.fake import FakeLearner
from tests.ring.harness import PATIENCE_SECONDS, ring, ring_config


@pytest.mark.slow
def test_an_engine_on_the_trainers_gpu_starts_after_the_trainers_warm_up(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the trainer takes; a run that goes on starts in the same order."""
    order: list[str] = []

    def warm_up(learner: FakeLearner) -> None:
        time.sleep(0.5)
        order.append("trainer")

    def make(*arguments):
        order.append("engine")
        return fake_engine.make(*arguments)

    monkeypatch.setenv("GRPO_ACTORS_SHARED_GPU", "1")
    monkeypatch.setattr(FakeLearner, "warm_up", warm_up)
    monkeypatch.setitem(assembly.ENGINES, "fake", make)
    config = ring_config(tmp_path, trainer={"max_steps": 4})
    with ring(config) as run:
        run.start().wait()
    longer = ring_config(tmp_path, trainer={"max_steps": 6})
    with ring(longer) as run:
        run.start().wait()
    # rollout actors make an engine of their own for its tokenizer, so engines are counted from the trainer on
    assert order.index("trainer") < len(order) - 1
    assert order[-1] == "engine"


@pytest.mark.slow
def test_an_engine_with_a_gpu_of_its_own_waits_for_nobody(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is not warmed up either."""
    monkeypatch.setenv("GRPO_ACTORS_SHARED_GPU", "0")
    monkeypatch.setattr(FakeLearner, "warm_up", lambda learner: pytest.fail("warmed up"))
    with ring(ring_config(tmp_path, trainer={"max_steps": 3})) as run:
        run.start().wait()


def test_an_engine_that_waits_for_the_trainer_can_be_stopped(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a trainer it waits, and a drain ends the wait."""
    monkeypatch.setenv("GRPO_ACTORS_SHARED_GPU", "1")
    monkeypatch.setitem(assembly.ENGINES, "fake", lambda *_: pytest.fail("started"))
    with ring(ring_config(tmp_path)) as run:
        run.start("packer-0", "inference-0")
        waiting = run["inference-0"]
        time.sleep(0.5)
        waiting.actor.drain()
        waiting.thread.join(PATIENCE_SECONDS)
        assert not waiting.thread.is_alive()
        assert waiting.error is None
