"""Prompts with images, with a real vLLM on the CPU: its logprobs are the trainer's. Part of `make test-system`."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from actors.engines.protocol import RequestError
from actors.engines.vllm.engine import VllmEngine
from actors.engines.vllm.inside.grpo_actors_owner_key import HEADER
from actors.learner.learner import TorchLearner
from actors.learner.teacher_server import TeacherServer
from schemas.config.model import ModelConfig
from schemas.config.trainer import TeacherServerConfig
from tests.actors.engines.embedded.test_images import Trainer, of_engine, requests
from tests.actors.engines.engines import WAIT, policy, sample
from tests.actors.engines.vllm.test_system import LORA, TIGHT, start
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.actors.learner.test_images import batch_of
from tests.actors.learner.test_reference_models import joined, trained_on
from tests.images import png

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]


def serve(model: Path, folder: Path, packages: str, **options: Any) -> VllmEngine:
    """An engine whose server finds torchvision."""
    with mock.patch.dict(os.environ, {"PYTHONPATH": packages}):
        return start(model, folder, startup=1200.0, **options)


@pytest.fixture(scope="module")
def full(seeing_model: Path, packages: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """All weights, float32."""
    engine = serve(seeing_model, tmp_path_factory.mktemp("full"), packages)
    yield engine
    engine.close()


def test_logprobs_are_the_trainers_under_each_version(full: VllmEngine, seeing_model: Path) -> None:
    """Images of several sizes, made smaller too, and text alone; as loaded, and after an update of all weights."""
    trainer = Trainer(seeing_model)
    prompts = trainer.prompts()
    for version in range(2):
        full.load(policy(version), trainer.learner.weights(), WAIT)
        for seed in (7, 8):  # the second time from the prefix cache
            groups = sample(full, *requests(prompts, n=2, max_tokens=9, seed=seed, ignore_eos=True))
            assert all(len(c.token_ids) == 9 and c.segments == [(0, 1, version)] for group in groups for c in group)
            torch.testing.assert_close(of_engine(groups), trainer.logprobs(prompts, groups), rtol=0, atol=TIGHT)
        trainer.learner.step(step_batch(random_samples(), step=version + 1))


def test_another_image_of_the_same_size_is_another_prompt(full: VllmEngine, seeing_model: Path) -> None:
    """The prefix cache tells images apart by their digests: the tokens of both prompts are equal."""
    trainer = Trainer(seeing_model)
    full.load(policy(5), trainer.learner.weights(), WAIT)
    first = requests(trainer.prompts(), max_tokens=5, temperature=0.0, ignore_eos=True)[2]
    [image] = first.images
    other = replace(first, images=(replace(image, data=png(48, 32, seed=9), digest="9" * 32),))
    [[one], [two], [again]] = sample(full, first, other, first)
    assert one.logprobs != two.logprobs
    assert one.logprobs == pytest.approx(again.logprobs, abs=TIGHT)


def test_a_prompt_with_other_places_than_the_servers_is_refused(full: VllmEngine, seeing_model: Path) -> None:
    """In words with both counts; the server serves on."""
    trainer = Trainer(seeing_model)
    asked = requests(trainer.prompts(), max_tokens=3, ignore_eos=True)[2]
    short = replace(asked, prompt_ids=asked.prompt_ids[:-2] + asked.prompt_ids[-1:])
    with pytest.raises(RequestError, match=r"vLLM makes \d+ tokens of the 1 images, and \d+ of the prompt"):
        full.submit(short).result(WAIT)
    assert len(sample(full, asked)[0][0].token_ids) == 3


def test_a_served_teacher_gives_the_logprobs_of_the_same_weights_here(
    full: VllmEngine, seeing_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainer.teacher_server` with samples of several images, one, and none, in rows of one sample or many."""
    # this server is an inference actor's; one that is started by hand asks for no key of an owner
    assert full._server is not None
    key = full._server.owner_key
    monkeypatch.setattr(TeacherServer, "_headers", lambda _: {HEADER: key})
    learner, model = TorchLearner(run_config(seeing_model)), ModelConfig(path=str(seeing_model))
    server = TeacherServer(TeacherServerConfig(url=full._client.url), model)
    for version, sequence_len in ((6, 48), (7, 400)):
        full.load(policy(version), learner.weights(), WAIT)
        (batch,) = batch_of(seeing_model, sequence_len)
        found = server.logprobs(batch, torch.device("cpu"))
        ours_T = joined(trained_on(learner, batch), "logprobs_T")
        torch.testing.assert_close(torch.cat([found[number] for number in sorted(found)]), ours_T, rtol=0, atol=TIGHT)


@pytest.fixture(scope="module")
def adapters(seeing_model: Path, packages: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Adapters of the language layers, float32."""
    engine = serve(seeing_model, tmp_path_factory.mktemp("lora"), packages, lora=True, dtype="float32")
    yield engine
    engine.close()


@pytest.mark.long
def test_logprobs_under_an_adapter_are_the_trainers(adapters: VllmEngine, seeing_model: Path) -> None:
    """Its layers go by the names of vLLM's language model; with images and without, before and after an update."""
    trainer = Trainer(seeing_model, {"rank": LORA.rank, "alpha": LORA.alpha})
    prompts, seen = trainer.prompts(), list[torch.Tensor]()
    for version in range(2):
        adapters.load(policy(version), trainer.learner.weights(), WAIT)
        groups = sample(adapters, *requests(prompts, n=2, max_tokens=9, seed=7, ignore_eos=True))
        assert all(c.segments == [(0, 1, version)] for group in groups for c in group)
        torch.testing.assert_close(of_engine(groups), trainer.logprobs(prompts, groups), rtol=0, atol=TIGHT)
        seen.append(trainer.logprobs(prompts, groups))
        trainer.learner.step(step_batch(random_samples(), step=version + 1))
        moved = (trainer.logprobs(prompts, groups) - seen[-1]).abs().max()
        assert float(moved) > 2 * TIGHT, "a server without the update would pass as well"
