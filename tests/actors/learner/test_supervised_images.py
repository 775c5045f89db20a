"""Supervised examples with images (CHORD): gradients of transformers alone, however packed, and faults in words."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner.learner import TorchLearner
from actors.ops.preflight import preflight
from schemas.config import RunConfig
from schemas.errors import ConfigError, RunFailedError
from tests import models
from tests.actors.learner.steps import batches_of, run_config, scored_group
from tests.actors.learner.test_images import LARGE, ROWS, SMALL, WIDE, batch_of
from tests.actors.learner.test_supervised import gradients
from tests.actors.models.vision.seeing import Piece, loaded, plain_logprobs, seen
from tests.conftest import ModelFolder
from tests.images import png

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<eos>' if m.role == 'assistant' else 'b' }}{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
"""`u=` and the parts of a message with a `b` behind them; the answer begins with `a=` and ends with `<eos>`."""
FILES = {"small.png": SMALL, "wide.png": WIDE, "large.png": LARGE}
EXAMPLES: list[tuple[list[str], str]] = [
    (["small.png", "xy", "wide.png"], "cde"),
    (["large.png"], "q"),
    (["just", "text"], "xyz"),
    (["how", "large.png", "large.png"], "rs"),
]
"""Parts of the prompt, and the completion: images of unlike sizes, one alone, none, one image twice."""
CONSTANT = {"mu_warmup_steps": 0, "mu_decay_steps": 0}


def letters(text: str) -> list[int]:
    """Tokens of letters and `=`."""
    return [models.VOCABULARY.index(letter) for letter in text]


def part(piece: str, number: int) -> dict[str, Any]:
    """A part of a message; every other image is a data URL."""
    if piece not in FILES:
        return {"type": "text", "text": piece}
    if number % 2:
        return {"type": "image", "path": f"pictures/{piece}"}
    url = f"data:image/png;base64,{base64.b64encode(FILES[piece]).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def row(parts: list[str], completion: str) -> dict[str, Any]:
    """A row of the file."""
    content = [part(piece, number) for number, piece in enumerate(parts)]
    return {"prompt": [{"role": "user", "content": content}], "completion": completion}


class Job:
    """A run of a tiny model that sees, and learns supervised examples."""

    def __init__(self, tmp_path: Path, given: ModelFolder, family: str) -> None:
        self.folder, self.file = tmp_path / "model", tmp_path / "sft.jsonl"
        self.folder.mkdir()
        for source in given(family).iterdir():
            (self.folder / source.name).write_bytes(source.read_bytes())
        (self.folder / "chat_template.jinja").write_text(TEMPLATE)
        pictures = tmp_path / "pictures"
        pictures.mkdir()
        for name, data in FILES.items():
            (pictures / name).write_bytes(data)
        self.write([row(*each) for each in EXAMPLES])

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Write the file."""
        self.file.write_text("".join(json.dumps(each) + "\n" for each in rows))

    def config(
        self, mu: float = 1.0, sequence_len: int = 400, model: Any = None, images: Any = None, **trainer: Any
    ) -> RunConfig:
        """A run whose steps have all examples, with a constant μ."""
        sft = {"path": str(self.file), "batch_size": len(EXAMPLES), "mu_peak": mu, "mu_valley": mu} | CONSTANT
        config = run_config(self.folder, sft=sft | {"images": images or {}}, max_grad_norm=1e9, **trainer)
        tree = config.model_dump()
        tree["model"] |= model or {}
        tree["packer"]["sequence_len"] = sequence_len
        return RunConfig.model_validate(tree)

    def plain_gradients(self) -> dict[str, torch.Tensor]:
        """Of the mean negative logprob of the completions' tokens, by transformers, sample by sample, from pixels."""
        _, reader, cache = loaded(self.folder)
        model, total, count = models.plain(self.folder), torch.zeros(()), 0
        for parts, completion in EXAMPLES:
            pieces: list[Piece] = [*letters("u=")]
            for piece in parts:
                pieces += [FILES[piece]] if piece in FILES else letters(piece)
            following = [*letters(completion), models.EOS]
            prompt = seen([*pieces, *letters("ba=")], cache, reader)
            total = total - plain_logprobs(model, prompt, following).sum()
            count += len(following)
        (total / count).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def job(tmp_path: Path, model_folder: ModelFolder, request: pytest.FixtureRequest) -> Job:
    """The run of a family, qwen3_vl by default."""
    return Job(tmp_path, model_folder, getattr(request, "param", "qwen3_vl"))


@pytest.mark.parametrize("sequence_len", ROWS)
@pytest.mark.parametrize("job", models.SEEING, indirect=True)
@pytest.mark.parametrize("vision", [False, True], ids=["frozen", "trained"])
def test_the_gradient_is_transformers_of_each_example_alone(job: Job, sequence_len: int, vision: bool) -> None:
    """From pixels, tower and projector frozen or trained, one example in a row or all; within 1e-5 of the largest."""
    keys = {"train_vision_tower": True, "train_projector": True} if vision else {}
    learner = TorchLearner(job.config(sequence_len=sequence_len, model=keys))
    (batch,) = batch_of(job.folder, sequence_len)
    found, expected = gradients(learner, batch), job.plain_gradients()
    assert any("visual" in name for name in found) == vision
    assert {name for name in expected if vision or "visual" not in name} <= found.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() < 1e-5 * max(1.0, float(expected[name].abs().max())), name


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["full", "lora"])
def test_mu_mixes_examples_and_completions_with_images(job: Job, lora: Any) -> None:
    """0.25: three quarters of the gradient of the policy, a quarter of that of the examples; two ranks have it too."""
    found = []
    for mu in (0.25, 0.0, 1.0):
        found.append(gradients(TorchLearner(job.config(mu, model={"lora": lora})), batch_of(job.folder)[0]))
    mixed, policy, supervised = found
    first, second = batch_of(job.folder, num_ranks=2)
    dealt = gradients(TorchLearner(job.config(0.25, model={"lora": lora})), second, [first])
    assert any(gradient.abs().max() > 0 for gradient in supervised.values())
    for name, gradient in mixed.items():
        torch.testing.assert_close(gradient, 0.75 * policy[name] + 0.25 * supervised[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(dealt[name], gradient, rtol=1e-4, atol=1e-6)


def test_images_of_a_column_are_those_of_parts(job: Job) -> None:
    """They stand in front of the text of the first user message."""
    losses = []
    text, images = {"type": "text", "text": "xy"}, [{"type": "image", "path": f"pictures/{name}"} for name in FILES]
    for rows, keys in (
        ([{"prompt": [{"role": "user", "content": [*images, text]}], "completion": "ab"}], {}),
        (
            [
                {
                    "prompt": [{"role": "user", "content": "xy"}],
                    "completion": {"role": "assistant", "content": "ab"},
                    "seen": [f"pictures/{name}" for name in FILES],
                }
            ],
            {"column": "seen"},
        ),
    ):
        job.write(rows * len(EXAMPLES))
        losses.append(TorchLearner(job.config(images=keys)).step(batches_of([scored_group(0)])[0])["loss"])
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize("damage", ["another", "gone", "broken"])
def test_an_image_that_changes_during_a_run_ends_it_in_words(job: Job, damage: str) -> None:
    """The tokens of the prompt were counted from the first one, and a replayed step could not be equal."""
    learner, (batch,) = TorchLearner(job.config()), batch_of(job.folder)
    learner.step(batch)
    # example 4 has it by path
    file = job.file.parent / "pictures" / "large.png"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(png(64, 50, seed=9) if damage == "another" else b"no image")
    words = "image 1 has changed since the trainer started" if damage == "another" else "could be used when the trainer"
    with pytest.raises(RunFailedError, match=rf"trainer\.sft\.path: .*sft\.jsonl, line 4: .*{words}"):
        learner.step(batch)


def test_a_row_that_has_lost_an_image_during_a_run_ends_it_in_words(job: Job) -> None:
    """The file was written over in place; other bytes would be learned under the tokens of the first ones."""
    learner, (batch,) = TorchLearner(job.config()), batch_of(job.folder)
    whole = json.dumps(row(*EXAMPLES[3]))
    less = json.dumps(row(["how", "large.png"], "rs")).ljust(len(whole))
    with job.file.open("r+") as file:
        written = file.read()
        file.seek(0)
        file.write(written.replace(whole, less))
    with pytest.raises(RunFailedError, match=r"line 4: image 2 has changed since the trainer started"):
        learner.step(batch)


@pytest.mark.parametrize(
    ("changed", "images", "problem"),
    [
        ({}, {"max_images": 1}, r"line 1: has 2 images, and trainer\.sft\.images\.max_images is 1"),
        ({}, {"max_bytes": 60}, r"line 1: image 1 .* and trainer\.sft\.images\.max_bytes is 60"),
        ({}, {"max_pixels": 60}, r"line 1: image 1 has 8 . 8 pixels, and trainer\.sft\.images\.max_pixels is 60"),
        ({"prompt": "ab", "seen": ["a.png"]}, {"column": "seen"}, "line 1: column seen has images, and the prompt is"),
        (
            {"completion": {"role": "assistant", "content": [{"type": "image", "path": "pictures/small.png"}]}},
            {},
            "line 1: the completion: message 1 has a part of type 'image'; leave out the rows with images",
        ),
        (
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"}, part("small.png", 1)]}
                ]
            },
            {},
            "line 1: the images have no tokens: the chat template has written 2 placeholders for 1 images",
        ),
    ],
)
def test_images_that_can_not_be_learned_are_named(job: Job, changed: Any, images: Any, problem: str) -> None:
    """Line, image and key."""
    job.write([row(*EXAMPLES[0]) | changed])
    with pytest.raises(ConfigError, match=problem):
        TorchLearner(job.config(images=images))


def test_a_model_that_sees_nothing_refuses_the_examples(job: Job, tmp_path: Path, model_folder: ModelFolder) -> None:
    """`actors check` and the trainer name the model."""
    config = job.config()
    tree = config.model_dump()
    tree["model"]["path"] = str(model_folder())
    # what a run needs besides, for the check
    tree["environments"] = [{"type": "jsonl", "path": str(tmp_path / "train.jsonl")}]
    (tmp_path / "train.jsonl").write_text('{"prompt": "ab"}\n')
    blind = RunConfig.model_validate(tree)
    with pytest.raises(ConfigError, match=r"takes no images: it has neither preprocessor_config.json nor"):
        preflight(blind, starts=False)
