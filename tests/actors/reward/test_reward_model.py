"""Reward models: values of a tiny random classifier in a worker process against a plain forward; refused models."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.reward.errors import RewardError
from actors.reward.functions import NamedReward, load_rewards
from actors.reward.reward_model import RewardModel
from actors.reward.scorer import Scorer
from actors.reward.workers import WorkerHost
from schemas.config.data import RewardFunctionConfig
from schemas.errors import ConfigError
from tests import models
from tests.actors.reward.conftest import WAIT
from tests.actors.reward.test_scorer import _group as group_of
from tests.processes import children
from tests.reward_models import build_reward_model, direct_logit
from tests.ring.harness import wait_until

TEXTS = ["abc", "", "zebra", "a" * 60]
CHAT = [{"role": "user", "content": "reverse abc"}]
OPTIONS = {"revision": "", "device": "cpu", "dtype": "float32", "batch_size": 3, "max_length": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model on disk."""
    made = tmp_path_factory.mktemp("models") / "judge-tiny"
    build_reward_model(made)
    return made


@pytest.fixture
def host() -> Iterator[WorkerHost]:
    """Workers that are ended with the test."""
    made = WorkerHost(WAIT)
    yield made
    made.close()


def loaded(host: WorkerHost, folder: Path, **keys: Any) -> tuple[NamedReward, Scorer]:
    """The reward of a model, and a scorer for it."""
    [reward] = load_rewards([RewardFunctionConfig(model=str(folder), device="cpu", **keys)], host)
    host.wait_until_loaded()
    return reward, Scorer(WAIT, 4)


@pytest.mark.slow
def test_values_are_those_of_a_plain_forward(host: WorkerHost, folder: Path) -> None:
    """Of text prompts joined, of chats in the model's own template; batches with padding change nothing."""
    reward, scorer = loaded(host, folder, batch_size=3)
    assert reward.name == "judge-tiny"
    found = scorer.score([reward], group_of(TEXTS, "x="))
    expected = [direct_logit(folder, "x=" + text) for text in TEXTS]
    assert np.allclose(found, [expected], atol=1e-5, rtol=0)
    assert len({round(value, 4) for value in expected}) == len(TEXTS)
    found = scorer.score([reward], group_of(TEXTS, CHAT))
    chats = [f"<bos>u=reverse abc<eos><bos>a={text}<eos>" for text in TEXTS]
    assert np.allclose(found, [[direct_logit(folder, text) for text in chats]], atol=1e-5, rtol=0)
    scorer.runner.close()


@pytest.mark.long
def test_a_killed_model_costs_attempts_and_comes_back(host: WorkerHost, folder: Path) -> None:
    """The attempt that it was computing fails as `reward_lost`, and is never a reward; the next ones are right."""
    reward, scorer = loaded(host, folder)
    expected = scorer.score([reward], group_of(TEXTS, "x="))
    os.kill(worker(), signal.SIGKILL)

    def scored_again() -> Any:
        try:
            return [scorer.score([reward], group_of(TEXTS, "x="))]
        except RewardError as error:
            assert error.reason == "reward_lost"  # noqa: PT017 - one of two ways that are right
            return None

    assert np.array_equal(wait_until(scored_again, "a new worker")[0], expected)
    scorer.runner.close()


def worker() -> int:
    """Id of the worker that this process has started."""
    [found] = [child.pid for child in children(os.getpid()) if "environments/worker" in " ".join(child.command)]
    return found


def test_a_longer_text_loses_its_start(folder: Path) -> None:
    """The limit is the configured one, or that of the model's configuration: 96 positions."""
    short = RewardModel(str(folder), **OPTIONS | {"max_length": 5})
    assert short(["x="], ["abcdefgh"]) == pytest.approx([direct_logit(folder, "defgh")], abs=1e-5)
    whole = RewardModel(str(folder), **OPTIONS)
    text = "ab" * 60
    assert whole([text], ["c"]) == pytest.approx([direct_logit(folder, text + "c", 96)], abs=1e-5)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A head that the files do not have would be random; several labels are no reward."""
    models.build(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"is no sequence classifier: its files have no score\.weight"):
        RewardModel(str(tmp_path / "policy"), **OPTIONS)
    build_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ValueError, match="has 2 labels; a reward model has one"):
        RewardModel(str(tmp_path / "two"), **OPTIONS)


def test_chats_need_a_template(tmp_path: Path) -> None:
    """Of the reward model's own tokenizer."""
    build_reward_model(tmp_path / "plain", template="")
    model = RewardModel(str(tmp_path / "plain"), **OPTIONS)
    with pytest.raises(ValueError, match="the reward model's tokenizer has no chat_template"):
        model([CHAT], [[{"role": "assistant", "content": "a"}]])


@pytest.mark.slow
def test_a_model_that_cant_be_loaded_ends_the_start(host: WorkerHost, tmp_path: Path) -> None:
    """With the key and the words of the worker."""
    models.build(tmp_path / "policy")
    load_rewards([RewardFunctionConfig(model=str(tmp_path / "policy"), device="cpu")], host)
    with pytest.raises(ConfigError, match=r"reward.functions.0.model: .*is no sequence classifier"):
        host.wait_until_loaded()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "needs either path (a function) or model (a reward model)"),
        ({"path": "exact_match", "model": "m"}, "needs either path (a function) or model (a reward model)"),
        ({"model": "m", "python": "same"}, "a reward model takes no python and no kwargs; remove them"),
        ({"model": "m", "kwargs": {"a": 1}}, "a reward model takes no python and no kwargs; remove them"),
    ],
)
def test_a_function_or_a_model(keys: dict[str, Any], words: str) -> None:
    """Exactly one of the two."""
    with pytest.raises(ValueError, match="validation error") as raised:
        RewardFunctionConfig(**keys)
    assert words in str(raised.value)
