"""Prompts with images: the engine's logprobs are the trainer's, whatever runs beside, and across new weights."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.protocol import Completion, PromptImage, RequestError, SampleRequest
from actors.learner.learner import TorchLearner
from actors.models.attention import pack_row
from actors.models.token_logprobs import TokenLogprobs
from actors.models.vision.features import FeatureCache
from actors.models.vision.images import ImageReader
from actors.models.vision.row_images import PlacedImage
from schemas.config.embedded_engine import EmbeddedEngineConfig
from tests import models
from tests.actors.engines.engines import WAIT, MakeEngine, ask, held, load_in_thread, policy, sample
from tests.actors.learner.steps import random_samples, run_config, step_batch
from tests.actors.learner.test_images import batch_of
from tests.actors.models.vision.seeing import Seen, seen
from tests.conftest import ModelFolder
from tests.images import png

LORA = {"rank": 4, "alpha": 8.0}
TRAINED: dict[str, Any] = {"train_vision_tower": True, "train_projector": True}
SMALL, WIDE, LARGE = png(8, 8), png(16, 40, seed=1), png(48, 32, seed=2)
PROMPTS: list[list[Any]] = [[1, 5, SMALL, 6, WIDE, 7], [1, 20, 21], [1, LARGE], [1, 5, 6, 7, WIDE]]


class Trainer:
    """Learner with the features of images."""

    def __init__(self, folder: Path, lora: Any = None, dtype: str = "float32", **model: Any) -> None:
        config = run_config(folder, dtype, lora)
        self.config = config.model_copy(update={"model": config.model.model_copy(update=model)})
        self.learner = TorchLearner(self.config)
        self.reader = ImageReader(self.config.model)
        self.cache = FeatureCache(self.learner.model, self.reader)

    def prompts(self) -> list[Seen]:
        """Prompts of the tests, with features of the weights as they are."""
        self.cache.forget()
        return [seen(pieces, self.cache, self.reader) for pieces in PROMPTS]

    def logprobs(self, prompts: list[Seen], groups: list[list[Completion]]) -> torch.Tensor:
        """Logprobs of all completions, in one packed row with shared prompts."""
        ids: list[int] = []
        images: list[list[PlacedImage]] = []
        offsets, sizes, shared, chosen = [0], [], [], []
        for prompt, group in zip(prompts, groups, strict=True):
            for number, completion in enumerate(group):
                ids += prompt.ids + completion.token_ids
                offsets.append(len(ids))
                sizes.append(len(prompt.ids))
                shared.append(len(prompt.ids) if number else 0)
                images.append(prompt.images)
                chosen += completion.token_ids
        row = pack_row(
            np.array(ids, np.int32), np.array(offsets), np.array(sizes), shared, torch.device("cpu"), images=images
        )
        with torch.no_grad():
            return TokenLogprobs(self.learner.model).of(row, torch.tensor(chosen), None)[0]


def request(prompt: Seen, files: list[bytes], **settings: Any) -> SampleRequest:
    """A request with the images of a prompt."""
    images = tuple(
        PromptImage(image.start, image.digest, data) for image, data in zip(prompt.images, files, strict=True)
    )
    return replace(ask(prompt.ids, **settings), images=images)


def requests(prompts: list[Seen], **settings: Any) -> list[SampleRequest]:
    """A request for each of PROMPTS."""
    return [
        request(prompt, [piece for piece in pieces if isinstance(piece, bytes)], **settings)
        for prompt, pieces in zip(prompts, PROMPTS, strict=True)
    ]


def of_engine(groups: list[list[Completion]]) -> torch.Tensor:
    """Logprobs of all completions."""
    return torch.tensor([logprob for group in groups for c in group for logprob in c.logprobs])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lora"), [("qwen3_vl", None), ("qwen3_vl", LORA), ("qwen2_5_vl", None)])
def test_engine_and_trainer_agree_on_prompts_with_images(
    model_folder: ModelFolder, make_engine: MakeEngine, family: str, lora: Any
) -> None:
    """Images of several sizes beside text alone, all running together; as loaded, and after an update."""
    folder = model_folder(family, eos=models.NEVER)
    trainer = Trainer(folder, lora)
    engine = make_engine(family, eos=models.NEVER, lora=lora is not None)
    prompts = trainer.prompts()
    for version in range(2):
        engine.load(policy(version), trainer.learner.weights(), WAIT)
        groups = sample(engine, *requests(prompts, n=2, max_tokens=9, seed=7))
        assert all(len(c.token_ids) == 9 for group in groups for c in group)
        torch.testing.assert_close(of_engine(groups), trainer.logprobs(prompts, groups), rtol=0, atol=1e-5)
        trainer.learner.step(step_batch(random_samples(), step=version + 1))


@pytest.mark.parametrize(("lora", "dtype"), [(None, "float32"), (None, "bfloat16"), (LORA, "bfloat16")])
def test_features_have_the_same_bits_in_trainer_and_engine(model_folder: ModelFolder, lora: Any, dtype: str) -> None:
    """With float32 masters, and under the autocast of adapters, in which a tower would compute otherwise."""
    trainer = Trainer(model_folder("qwen3_vl"), lora, dtype)
    decoder = Decoder(trainer.config.model, EmbeddedEngineConfig(type="embedded"))
    with torch.autocast("cpu", torch.bfloat16, enabled=lora is not None):
        ours = trainer.cache.of("wide", WIDE)
    theirs = decoder.place(0, "wide", WIDE).features
    assert ours.tokens_ND.dtype == getattr(torch, dtype)
    for one, other in zip((ours.tokens_ND, *ours.layers_ND), (theirs.tokens_ND, *theirs.layers_ND), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_images_are_computed_again_with_new_weights_between_two_tokens(
    model_folder: ModelFolder, make_engine: MakeEngine
) -> None:
    """Mode `interrupt`: later tokens have the logprobs of the new weights on the whole prompt, images included."""
    trainer = Trainer(model_folder("qwen3_vl", eos=models.NEVER))
    engine = make_engine("qwen3_vl", eos=models.NEVER)
    engine.load(policy(0), trainer.learner.weights(), WAIT)
    prompt = trainer.prompts()[0]
    with held(engine, 4, request(prompt, [SMALL, WIDE], max_tokens=9)) as [future]:
        trainer.learner.step(step_batch(random_samples()))
        switched = load_in_thread(engine, 1, trainer.learner.weights())
    [completion] = future.result(WAIT)
    switched.result(WAIT)
    [*_, (first, _, version)] = completion.segments
    assert version == 1
    found = trainer.logprobs([prompt], [[completion]])
    torch.testing.assert_close(of_engine([[completion]])[first:], found[first:], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "dtype"), [(None, "float32"), (LORA, "float32"), (None, "bfloat16"), (LORA, "bfloat16")]
)
def test_an_update_of_the_tower_gives_the_engine_new_features(model_folder: ModelFolder, lora: Any, dtype: str) -> None:
    """Of images that it has computed before; with the trainer's bits."""
    trainer = Trainer(model_folder("qwen3_vl"), lora, dtype, **TRAINED)
    decoder = Decoder(trainer.config.model, EmbeddedEngineConfig(type="embedded"))
    (batch,) = batch_of(model_folder("qwen3_vl"))
    kept = []
    for version in range(2):
        decoder.load(trainer.learner.weights(), version)
        trainer.cache.forget()
        with torch.no_grad():
            ours = trainer.cache.of("wide", WIDE)
        theirs = decoder.place(0, "wide", WIDE).features
        for one, other in zip((ours.tokens_ND, *ours.layers_ND), (theirs.tokens_ND, *theirs.layers_ND), strict=True):
            assert torch.equal(one, other)
        kept.append(ours)
        trainer.learner.step(batch)
    assert not torch.equal(kept[0].tokens_ND, kept[1].tokens_ND)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["interrupt", "drain"])
def test_requests_that_wait_or_run_see_their_images_through_the_new_tower(model_folder: ModelFolder, mode: Any) -> None:
    """A request that runs when the weights change, and one whose images were computed while no row was free."""
    folder = model_folder("qwen3_vl", eos=models.NEVER)
    trainer = Trainer(folder, **TRAINED)
    (batch,) = batch_of(folder)
    limits = EmbeddedEngineConfig(type="embedded", max_sequences=3, max_sequence_len=64)
    engine = EmbeddedEngine(trainer.config.model, limits, mode)
    try:
        engine.load(policy(0), trainer.learner.weights(), WAIT)
        prompt = trainer.prompts()[0]
        # one row is free, which is one too few
        waiting = request(prompt, [SMALL, WIDE], max_tokens=9, n=2)
        with held(engine, 4, request(prompt, [SMALL, WIDE], max_tokens=9, n=2)) as [running]:
            late = engine.submit(waiting)
            trainer.learner.step(batch)
            switched = load_in_thread(engine, 1, trainer.learner.weights())
        ran, waited = running.result(WAIT), late.result(WAIT)
        switched.result(WAIT)
    finally:
        engine.close()
    after = trainer.prompts()[0]
    found = trainer.logprobs([after], [waited])
    assert all(segment[2] == 1 for completion in waited for segment in completion.segments)
    torch.testing.assert_close(of_engine([waited]), found, rtol=0, atol=1e-5)
    for completion in ran:
        [*_, (first, _, version)] = completion.segments
        assert version == (1 if mode == "interrupt" else 0)
        if mode == "interrupt":
            found = trainer.logprobs([after], [[completion]])
            torch.testing.assert_close(of_engine([[completion]])[first:], found[first:], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_request_with_a_wrong_image_is_refused_and_others_go_on(
    model_folder: ModelFolder, make_engine: MakeEngine
) -> None:
    """No image, an image of another size than its place, and any number of both."""
    trainer = Trainer(model_folder("qwen3_vl", eos=models.NEVER))
    engine = make_engine("qwen3_vl", eos=models.NEVER)
    prompt = trainer.prompts()[2]
    wrong = [replace(image, data=data) for image in request(prompt, [LARGE]).images for data in (b"hello", SMALL)]
    wrong = [replace(image, digest=sha256(image.data).hexdigest()) for image in wrong]
    for _ in range(5):
        for image, words in zip(wrong, ("are no image", "has 1 tokens, and the prompt has not as many"), strict=True):
            with pytest.raises(RequestError, match=words):
                engine.submit(replace(ask(prompt.ids), images=(image,))).result(WAIT)
    [[completion]] = sample(engine, request(prompt, [LARGE], max_tokens=3))
    assert len(completion.token_ids) == 3


def test_a_model_of_text_alone_refuses_images(make_engine: MakeEngine) -> None:
    """The message names model.path."""
    with pytest.raises(RequestError, match=r"images: the model sees none; model\.path"):
        make_engine().submit(replace(ask([1, 2]), images=(PromptImage(0, "abc", SMALL),)))
