"""Training of vision tower and projector: gradients, frozen parts that keep their bits, references, checkpoints."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner.batch_images import BatchImages
from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import micro_batch, non_empty
from actors.models import loading
from actors.models.memory import estimate
from actors.models.token_logprobs import TokenLogprobs
from actors.models.vision.parts import VISION, in_projector
from schemas.config import RunConfig
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import StepBatch
from tests import models
from tests.actors.learner.steps import run_config
from tests.actors.learner.test_images import CPU, PROMPTS, ROWS, batch_of
from tests.actors.learner.test_reference_models import joined, trained_on
from tests.actors.models.vision.seeing import loaded, model_config, plain_logprobs, seen
from tests.conftest import ModelFolder
from tests.marks import first_of, long_but

LORA = {"rank": 4, "alpha": 8.0}
TOWER, PROJECTOR = {"train_vision_tower": True}, {"train_projector": True}
BOTH = TOWER | PROJECTOR
PARTS: list[dict[str, Any]] = [TOWER, PROJECTOR, BOTH]
NAMES = ["tower", "projector", "both"]
# with so large an epsilon an update is nearly proportional to the gradient
PLAIN_UPDATES: dict[str, Any] = {"optimizer": {"type": "adamw", "eps": 1.0}, "learning_rate": 0.1}


def vision_config(folder: Path, parts: dict[str, Any], lora: Any = None, dtype: str = "float32", **keys: Any) -> Any:
    """A run that trains parts of the vision."""
    config = run_config(folder, dtype, lora, **keys)
    return RunConfig.model_validate(config.model_dump() | {"model": config.model.model_dump() | parts})


def is_trained(name: str, parts: dict[str, Any]) -> bool:
    """Whether a parameter belongs to what these keys train, under an adapter too."""
    inside = name.partition(f".{VISION}.")[2]
    return not inside or bool(parts.get("train_projector" if in_projector(inside) else "train_vision_tower"))


def expected_logprobs(folder: Path, batch: StepBatch, plain: Any) -> torch.Tensor:
    """Logprobs of all completions by transformers, each sample alone, from pixels."""
    _, reader, cache = loaded(folder)
    found = []
    for b, (start, end) in enumerate(pairwise(batch.sample_offsets.tolist())):
        prompts = PROMPTS[int(batch.sample_ordinals[b])]
        prompt = seen(prompts[int(batch.completions[b]) % 4 % len(prompts)], cache, reader)
        completion = batch.token_ids[start + batch.prompt_lengths[b] : end].tolist()
        found.append(plain_logprobs(plain, prompt, completion))
    return torch.cat(found)


@pytest.mark.parametrize("sequence_len", long_but([ROWS[1]], ROWS))
@pytest.mark.parametrize("parts", PARTS, ids=NAMES)
@pytest.mark.parametrize("family", models.SEEING)
def test_gradients_are_transformers_of_each_sample_alone(
    model_folder: ModelFolder, family: str, parts: dict[str, Any], sequence_len: int
) -> None:
    """However samples are packed: of trained parts and language layers; frozen parts have none."""
    folder = model_folder(family)
    (batch,) = batch_of(folder, sequence_len)
    config = model_config(folder, **parts)
    model = loading.load_model(config, torch.float32)
    images, policy = BatchImages(model, config), TokenLogprobs(model)
    for number in non_empty(batch):
        micro = micro_batch(batch, number, CPU, images=images)
        (policy.of(micro.row, micro.token_ids_T, None)[0] * micro.advantages_T).sum().backward()  # type: ignore[no-untyped-call]
    plain = models.plain(folder)
    advantages = torch.cat([micro_batch(batch, n, CPU, images=images).advantages_T for n in non_empty(batch)])
    (expected_logprobs(folder, batch, plain) * advantages).sum().backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in plain.named_parameters()}
    moved = 0
    for name, parameter in model.named_parameters():
        if not is_trained(name, parts):
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)
        moved += VISION in name and bool(parameter.grad.abs().max() > 1e-4)
    assert moved > 2


def weights_after(config: RunConfig, batches: list[StepBatch]) -> dict[str, torch.Tensor]:
    """Weights after one step of these batches, the last of which is the learner's own."""
    learner = TorchLearner(config)
    learner.step(batches[-1], before=batches[:-1])
    return {name: p.detach().clone() for name, p in learner.trained.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("lora", first_of([LORA, None]), ids=["lora", "full"])
@pytest.mark.parametrize("parts", PARTS, ids=NAMES)
def test_a_step_moves_trained_parts_alone_however_it_is_packed(
    model_folder: ModelFolder, parts: dict[str, Any], lora: Any
) -> None:
    """Rows of a sample or two, of all, of two ranks, and with checkpointing; twice the same bits."""
    folder = model_folder("qwen3_vl")
    config = vision_config(folder, parts, lora, **PLAIN_UPDATES)
    before = {name: p.detach().clone() for name, p in TorchLearner(config).trained.named_parameters()}
    few, again, many = (weights_after(config, batch_of(folder, length)) for length in (48, 48, 400))
    ranks = weights_after(config, batch_of(folder, 96, num_ranks=2))
    checkpointed = weights_after(vision_config(folder, parts | {"gradient_checkpointing": True}, lora, **PLAIN_UPDATES),
                                 batch_of(folder, 48))  # fmt: skip
    moved = {name for name, value in few.items() if not torch.equal(value, before[name])}
    if lora is None:
        # the key's bias moves no weight of the attention, so its gradient is rounding
        assert {name for name in before if is_trained(name, parts)} >= moved
    in_vision = {name for name in moved if f".{VISION}." in name}
    assert in_vision
    assert all(is_trained(name, parts) for name in in_vision)
    for name, value in few.items():
        assert torch.equal(value, again[name]), name
        for other in (many, ranks, checkpointed):
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "dtype", "reference"),
    first_of(
        [
            (None, "float32", {"beta": 0.5}),
            (LORA, "float32", {"beta": 0.5}),
            (None, "bfloat16", {"beta": 0.5}),
            (LORA | {"dropout": 0.5}, "float32", {"beta": 0.5}),
        ]
    ),
    ids=["full", "lora", "bfloat16", "dropout"],
)
def test_reference_and_old_logprobs_have_the_tower_of_their_time(
    model_folder: ModelFolder, lora: Any, dtype: str, reference: Any
) -> None:
    """The reference's stay those of the loaded model when the tower moves; old ones are the current policy's."""
    folder = model_folder("qwen3_vl")
    config = vision_config(folder, BOTH, lora, dtype, reference=reference, num_iterations=2)
    learner = TorchLearner(config)
    (batch,) = batch_of(folder)
    first, second = trained_on(learner, batch), trained_on(learner, batch)
    given = joined(first, "reference_logprobs_T")
    assert torch.equal(joined(second, "reference_logprobs_T"), given)
    assert (joined(second, "old_logprobs_T") - given).abs().max() > 1e-3
    if lora is None or not lora.get("dropout"):
        torch.testing.assert_close(joined(first, "old_logprobs_T"), joined(first, "logprobs_T"), rtol=0, atol=1e-5)
    if dtype == "float32":
        with torch.no_grad():
            expected = expected_logprobs(folder, batch, models.plain(folder))
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_reference_that_moves_takes_the_tower_along(model_folder: ModelFolder) -> None:
    """With a share of 1 the reference is the policy of the step before."""
    folder = model_folder("qwen3_vl")
    reference = {"beta": 0.5, "sync": {"every_steps": 1, "alpha": 1.0}}
    learner = TorchLearner(vision_config(folder, BOTH, reference=reference, num_iterations=2))
    (batch,) = batch_of(folder)
    trained_on(learner, batch)
    second = trained_on(learner, batch)
    torch.testing.assert_close(
        joined(second, "reference_logprobs_T"), joined(second, "old_logprobs_T"), rtol=0, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "dtype"), [(None, "float32"), (None, "bfloat16"), (LORA, "float32")])
def test_a_restored_learner_goes_on_to_the_bit(
    model_folder: ModelFolder, tmp_path: Path, lora: Any, dtype: str
) -> None:
    """The checkpoint has the trained tower, and its optimizer state."""
    folder = model_folder("qwen3_vl")
    config = vision_config(folder, BOTH, lora, dtype)
    learner, other = TorchLearner(config), TorchLearner(config)
    (batch,) = batch_of(folder)
    learner.step(batch)
    learner.snapshot().write(tmp_path)
    other.restore(tmp_path)
    (following,) = batch_of(folder, step=2)
    for each in (learner, other):
        each.step(following)
    ours, theirs = learner.weights().tensors, other.weights().tensors
    assert any(VISION in name for name in ours)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", PARTS, ids=NAMES)
def test_the_estimate_counts_what_is_trained(
    model_folder: ModelFolder, parts: dict[str, Any], lora: Any, dtype: str
) -> None:
    """All parts together have the bytes of the learner's parameters; gradients are of what is trained."""
    config = vision_config(model_folder("qwen3_vl"), parts, lora, dtype)
    found, learner = estimate(config), TorchLearner(config)
    held = {id(p): p for model in (learner.model, learner.trained) for p in model.parameters()}
    counted = found.weights + found.adapter + found.rounded_weights + found.vision
    assert counted == sum(p.numel() * p.element_size() for p in held.values())
    trained = sum(p.numel() * 4 for p in learner.trained.parameters() if p.requires_grad)
    assert 0 <= found.gradients - trained < trained
    assert found.optimizer == 2 * trained


def test_a_model_of_text_alone_has_no_part_to_train(model_folder: ModelFolder) -> None:
    """The message names the key."""
    config = ModelConfig(path=str(model_folder("qwen3")), dtype="float32", device="cpu", train_projector=True)
    with pytest.raises(ConfigError, match=r"model\.train_projector: .* has no vision tower; remove the key"):
        loading.load_model(config, torch.float32)


def test_adapters_that_reach_no_layer_of_a_trained_part_are_refused(model_folder: ModelFolder) -> None:
    """The message names the key of the part and the adapters' key."""
    lora: Any = {"target_modules": ["q_proj", "linear_fc1"]}
    config = model_config(model_folder("qwen3_vl"), lora={"target_modules": ["q_proj"]}, **TOWER)
    model = loading.load_model(config, torch.float32)
    with pytest.raises(ConfigError, match=r"model\.train_vision_tower: model\.lora\.target_modules names no layer"):
        loading.add_lora(model, config)
    config = model_config(model_folder("qwen3_vl"), lora=lora, **PROJECTOR)
    names = loading.adapter_tensors(loading.add_lora(loading.load_model(config, torch.float32), config)).keys()
    assert any(".merger.linear_fc1." in name for name in names)
    assert not any(".blocks." in name for name in names if VISION in name)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"inference": {"engine": {"type": "vllm"}}}, r"model\.train_vision_tower: engine vllm keeps the features"),
        (
            {"inference": {"engine": {"type": "vllm"}}},
            r"model\.train_projector: .* inference\.engine\.type to embedded",
        ),
        ({"trainer": {"max_steps": 1, "sharding": "fsdp"}}, r"model\.train_projector: trainer\.sharding fsdp keeps"),
    ],
)
def test_what_can_not_take_a_trained_part_refuses_it_by_key(
    model_folder: ModelFolder, sections: dict[str, Any], words: str
) -> None:
    """Each part is named, with a way out."""
    config = vision_config(model_folder("qwen3_vl"), BOTH)
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate(config.model_dump() | sections)
