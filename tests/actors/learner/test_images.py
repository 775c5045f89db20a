"""Steps over prompts with images: the logprobs of samples alone, however they are packed, and the same bits again."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.datasets.image_header import size_of
from actors.learner.batch_images import BatchImages
from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import micro_batch, non_empty
from actors.models import loading
from actors.models.image_tokens import ImageTokens
from actors.models.token_logprobs import TokenLogprobs
from schemas.config.model import ModelConfig
from schemas.errors import RunFailedError
from schemas.messages import ScoredGroup, StepBatch
from tests import models
from tests.actors.learner.steps import batches_of, run_config, scored_group
from tests.actors.learner.test_reference_models import joined, trained_on
from tests.actors.models.vision.seeing import Piece, loaded, plain_logprobs, seen
from tests.conftest import ModelFolder
from tests.images import png

CPU = torch.device("cpu")
SMALL, WIDE, LARGE, OTHER = png(8, 8), png(16, 40, seed=1), png(64, 50, seed=2), png(64, 50, seed=3)
"""1, 10, 12 and 12 tokens."""
PROMPTS: list[list[list[Piece]]] = [
    [[1, 5, SMALL, 6, WIDE, 7]],
    [[1, 20, 21]],
    [[1, LARGE]],
    [[1, LARGE, 4, LARGE, 5], [1, LARGE, 4, OTHER, 5]],
]
"""Images of unlike sizes; none; one at the end of its prompt; prompts that differ by an image alone."""
ROWS = [48, 96, 400]
"""Capacities of a row: of a sample or two, of some, of all."""


def seen_group(ordinal: int, prompts: list[list[Piece]], rule: ImageTokens) -> ScoredGroup:
    """A group of four made-up completions, which have the prompts in turn."""
    ids, offsets, images, places = list[int](), [0], list[bytes](), list[dict[str, int]]()
    for prompt in prompts:
        for piece in prompt:
            if isinstance(piece, int):
                ids.append(piece)
                continue
            if piece not in images:
                images.append(piece)
            length = rule.num_tokens(*size_of(piece))
            places.append({"image": images.index(piece), "start": len(ids) + 1, "length": length})
            ids += [models.VISION_START, *[models.IMAGE] * length, models.VISION_END]
        offsets.append(len(ids))
    given = {
        "prompt_ids": np.array(ids, np.int32),
        "prompt_offsets": np.array(offsets),
        "sample_prompts": np.arange(4) % len(prompts),
        "images": images,
        "image_places": places,
    }
    return ScoredGroup(**scored_group(ordinal).__dict__ | given)


def batch_of(folder: Path, sequence_len: int = ROWS[1], num_ranks: int = 1, **keys: Any) -> list[StepBatch]:
    """What the packer makes of a group per entry of PROMPTS."""
    rule = ImageTokens.of_model(ModelConfig(path=str(folder)))
    groups = [seen_group(ordinal, prompts, rule) for ordinal, prompts in enumerate(PROMPTS)]
    return batches_of(groups, num_ranks, sequence_len=sequence_len, **keys)


def plain_of(folder: Path, batch: StepBatch) -> torch.Tensor:
    """Logprobs of the completions by transformers, each sample alone, of pixels and ids."""
    _, reader, cache = loaded(folder)
    plain, expected = models.plain(folder), []
    for b, (start, end) in enumerate(pairwise(batch.sample_offsets.tolist())):
        ordinal, number = int(batch.sample_ordinals[b]), int(batch.completions[b]) % 4
        prompt = seen(PROMPTS[ordinal][number % len(PROMPTS[ordinal])], cache, reader)
        assert prompt.ids == batch.token_ids[start : start + batch.prompt_lengths[b]].tolist()
        with torch.no_grad():
            completion = batch.token_ids[start + batch.prompt_lengths[b] : end].tolist()
            expected.append(plain_logprobs(plain, prompt, completion))
    return torch.cat(expected)


@pytest.mark.parametrize("sequence_len", ROWS)
@pytest.mark.parametrize("family", models.SEEING)
def test_logprobs_are_transformers_of_each_sample_alone(
    model_folder: ModelFolder, family: str, sequence_len: int
) -> None:
    """Of pixels and ids; each image is computed once, in however many rows and prompts it is."""
    folder = model_folder(family)
    (batch,) = batch_of(folder, sequence_len)
    config = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    model = loading.load_model(config, torch.float32)
    images, policy = BatchImages(model, config), TokenLogprobs(model)
    with torch.no_grad():
        found = [
            policy.of(micro.row, micro.token_ids_T, None)[0]
            for micro in (micro_batch(batch, number, CPU, images=images) for number in non_empty(batch))
        ]
    torch.testing.assert_close(torch.cat(found), plain_of(folder, batch), rtol=0, atol=1e-5)
    assert images._cache is not None
    assert images._cache.num_computed == len(batch.images) == 4


def weights_after(folder: Path, batches: list[StepBatch], **keys: Any) -> dict[str, torch.Tensor]:
    """Trained weights after one step of these batches, the last of which is the learner's own."""
    learner = TorchLearner(run_config(folder, **keys))
    learner.step(batches[-1], before=batches[:-1])
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("family", models.SEEING)
def test_a_step_is_the_same_however_it_is_packed(model_folder: ModelFolder, family: str) -> None:
    """Rows of a sample or two, of all, and of two ranks; twice the same bits, and a tower that stays."""
    folder = model_folder(family)
    # with so large an epsilon an update is nearly proportional to the gradient
    keys: dict[str, Any] = {"optimizer": {"type": "adamw", "eps": 1.0}, "learning_rate": 0.1}
    few, again, many = (weights_after(folder, batch_of(folder, length), **keys) for length in (48, 48, 400))
    ranks = weights_after(folder, batch_of(folder, 96, num_ranks=2), **keys)
    before = dict(loading.load_model(ModelConfig(path=str(folder)), torch.float32).named_parameters())
    moved = {name for name, value in few.items() if not torch.equal(value, before[name])}
    assert moved
    assert not any(".visual." in name for name in moved)
    for name, value in few.items():
        assert torch.equal(value, again[name]), name
        for other in (many, ranks):
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "reference", "model"),
    [
        (None, {"beta": 0.5}, {}),
        ({"rank": 4, "alpha": 8.0}, {"beta": 0.5}, {"gradient_checkpointing": True}),
        (None, {"beta": 0.5, "sync": {"every_steps": 1, "alpha": 0.5}}, {"gradient_checkpointing": True}),
    ],
    ids=["full", "adapter", "moving"],
)
def test_a_reference_sees_the_images(model_folder: ModelFolder, lora: Any, reference: Any, model: Any) -> None:
    """At the start its logprobs are the policy's own, and both differ from those of another image."""
    folder = model_folder("qwen3_vl")
    config = run_config(folder, lora=lora, reference=reference, num_iterations=2)
    config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    learner = TorchLearner(config)
    (batch,) = batch_of(folder)
    found = trained_on(learner, batch)
    policy_T, reference_T = joined(found, "logprobs_T"), joined(found, "reference_logprobs_T")
    torch.testing.assert_close(reference_T, policy_T, rtol=0, atol=1e-5)
    torch.testing.assert_close(joined(found, "old_logprobs_T"), policy_T, rtol=0, atol=1e-5)
    files = [png(*size_of(image), seed=50 + n) for n, image in enumerate(batch.images)]
    others = trained_on(TorchLearner(config), batch.model_copy(update={"images": files}))
    assert (joined(others, "reference_logprobs_T") - reference_T).abs().max() > 1e-3


def test_a_teacher_sees_the_images_with_its_own_tower(model_folder: ModelFolder) -> None:
    """Its logprobs are transformers' of each sample alone; a teacher without a tower is named."""
    folder, teacher = model_folder("qwen3_vl"), model_folder("qwen3_vl", seed=5)
    keys = {"teacher": {"path": str(teacher), "dtype": "float32"}, "loss": {"type": "surogate", "teacher_tau": 0.5}}
    learner = TorchLearner(run_config(folder, **keys))
    (batch,) = batch_of(folder)
    found = trained_on(learner, batch)
    expected = plain_of(teacher, batch)
    torch.testing.assert_close(joined(found, "teacher_logprobs_T"), expected, rtol=0, atol=1e-5)
    assert (joined(found, "logprobs_T") - expected).abs().max() > 1e-2
    learner._reference_models._teacher_images = None
    with pytest.raises(RunFailedError, match=r"trainer\.teacher\.path has no vision tower, and the batch has images"):
        learner.step(batch)


def test_images_that_are_not_the_models_end_the_run_in_words(model_folder: ModelFolder) -> None:
    """Files that no image processor reads, and images of other sizes than the prompt has tokens for."""
    folder = model_folder("qwen3_vl")
    (batch,) = batch_of(folder)
    config = ModelConfig(path=str(folder), dtype="float32", device="cpu")
    images = BatchImages(loading.load_model(config, torch.float32), config)
    broken = batch.model_copy(update={"images": [b"hello"] * 4})
    with pytest.raises(RunFailedError, match=r"step 1: image \w{32}: 5 bytes are no image that can be read"):
        micro_batch(broken, 0, CPU, images=images)
    smaller = batch.model_copy(update={"images": [SMALL] * 4})
    numbers = np.flatnonzero([any(place.length > 1 for place in places) for places in smaller.places_of_samples()])
    first = int(numbers[0])
    with pytest.raises(RunFailedError, match=r"image \w{32} has 1[02] tokens in the prompt and 1 for the trainer"):
        images.of(smaller, first, first + 1)
