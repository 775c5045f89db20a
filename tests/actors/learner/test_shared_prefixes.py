"""Branches whose prefixes are computed once: the logprobs of samples alone, and the steps of samples in copies."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import micro_batch, non_empty
from actors.learner.ranks import SINGLE_RANK
from actors.models import attention, loading
from actors.models.token_logprobs import TokenLogprobs
from schemas.config import RunConfig, check_tree
from schemas.config.model import ModelConfig
from schemas.config.resume import as_tree
from schemas.messages import StepBatch
from tests import models
from tests.actors.learner.steps import batches_of, branched_group, run_config, scored_group
from tests.actors.models import flash_attn, varlen_attn
from tests.conftest import ModelFolder
from tests.marks import long_but

CPU = torch.device("cpu")
SIZES = [(1, 8), (4, 8), (16, 8), (1, 70), (4, 70), (16, 70)]
"""Branches and tokens of a trunk. A tree with the last of these is longer than a row."""
ROW = 96


@pytest.fixture(params=["padded", "varlen", "flash", "flex"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each on a CPU, as in the tests of attention."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    with varlen_attn.kernels_for_cpus():
        yield str(request.param)


@pytest.mark.parametrize(("branches", "trunk"), SIZES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_each_sampled_token_trains_once(branches: int, trunk: int, num_ranks: int) -> None:
    """The mask of all ranks' batches is that of the groups, token by token, and no row is longer than it may be."""
    groups = [branched_group(ordinal, branches, trunk, trajectories=3) for ordinal in range(2)]
    batches = batches_of(groups, num_ranks, sequence_len=ROW)
    shared = 0
    trained: list[tuple[int, int, tuple[int, ...]]] = []
    for batch in batches:
        batch.check()
        shared += int(batch.sample_shared.sum())
        for b, (start, end) in enumerate(zip(batch.sample_offsets[:-1], batch.sample_offsets[1:], strict=True)):
            prompt = int(batch.prompt_lengths[b])
            assert not batch.loss_mask[start : start + prompt].any()
            trained += [
                (int(batch.completions[b]), prompt, tuple(batch.token_ids[start : start + place + 1].tolist()))
                for place in np.flatnonzero(batch.loss_mask[start:end]).tolist()
            ]
        for first, last in zip(batch.micro_batch_offsets[:-1], batch.micro_batch_offsets[1:], strict=True):
            held = batch.sample_offsets[last] - batch.sample_offsets[first] - batch.sample_shared[first:last].sum()
            assert held <= ROW
    assert len(trained) == len(set(trained)), "a token is trained twice"
    assert len(trained) == sum(int(group.loss_mask.sum()) for group in groups) == batches[0].loss_tokens.sum()
    assert shared > 0


@pytest.mark.slow
@pytest.mark.parametrize(("branches", "trunk"), SIZES)
def test_logprobs_are_those_of_each_sample_alone(
    model_folder: ModelFolder, kernel: str, branches: int, trunk: int
) -> None:
    """Of all tokens, those of tools and of trajectories that do not train included."""
    config = ModelConfig(path=str(model_folder()), dtype="float32", device="cpu")
    packed = TokenLogprobs(loading.load_model(config, torch.float32, attention=attention.NAMES[kernel]))
    alone, compared = models.plain(model_folder()), 0
    (batch,) = batches_of([branched_group(ordinal, branches, trunk) for ordinal in range(2)], sequence_len=ROW)
    with torch.no_grad():
        for number in non_empty(batch):
            micro = micro_batch(batch, number, CPU)
            found_T, _ = packed.of(micro.row, micro.token_ids_T, micro.temperatures_T)
            expected = []
            for b in range(*batch.micro_batch_offsets[number : number + 2].tolist()):
                start, end = batch.sample_offsets[b : b + 2].tolist()
                ids, prompt = batch.token_ids[start:end].tolist(), int(batch.prompt_lengths[b])
                expected.append(models.logprobs(alone, ids[:prompt], ids[prompt:]))
            torch.testing.assert_close(found_T, torch.cat(expected), rtol=0, atol=1e-5)
            compared += len(found_T)
    assert compared == int((np.diff(batch.sample_offsets) - batch.prompt_lengths).sum())


REFERENCE = {"beta": 0.1}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "surogate": {},
    "reference": {"reference": REFERENCE},
    "moving reference": {"reference": REFERENCE | {"sync": {"every_steps": 1, "alpha": 0.5}}},
    "reference in the reward": {"reference": REFERENCE | {"place": "reward", "old_logprobs": "inference"}},
    "reference in the group's reward": {"reference": REFERENCE | {"place": "group_reward", "estimator": "k1"}},
    "gspo": {"loss": {"type": "gspo"}, "num_iterations": 2},
    "gspo_token": {"loss": {"type": "gspo_token"}, "num_iterations": 2, "num_minibatches": 2},
    "dapo, old logprobs": {"loss": {"type": "dapo"}, "num_iterations": 2, "num_minibatches": 2, "entropy_coef": 0.01},
    "lora": {"lora": {"rank": 4}, "reference": REFERENCE},
    "checkpointing": {"model": {"gradient_checkpointing": True}},
    "lora, checkpointing": {"lora": {"rank": 4}, "model": {"gradient_checkpointing": True}},
}


def config_of(model: Any, keys: dict[str, Any]) -> RunConfig:
    """A run; eps keeps AdamW from making a whole step of a gradient that is only rounding."""
    given = dict(keys)
    changes = given.pop("model", {})
    tree = as_tree(run_config(model, learning_rate=1e-3, optimizer={"eps": 1e-4}, **given))
    tree["model"] |= changes
    return check_tree(tree)


def in_copies(batch: StepBatch) -> StepBatch:
    """The batch without a word of what samples have in common, which is a right batch too."""
    found = batch.model_copy(update={"sample_shared": np.zeros_like(batch.sample_shared)})
    found.check()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_steps_are_those_of_samples_in_copies(model_folder: ModelFolder, name: str) -> None:
    """Three steps of groups with branches and of a group without: measurements and weights within 1e-5."""
    config = config_of(model_folder(), OBJECTIVES[name])
    shared, copies = TorchLearner(config), TorchLearner(config)
    for step in (1, 2, 3):
        groups = [branched_group(3 * step), branched_group(3 * step + 1, branches=2, trunk=20), scored_group(step)]
        (batch,) = batches_of(groups, 1, config.trainer.num_minibatches, step)
        assert batch.sample_shared.sum() > (batch.prompt_lengths.min() + 1) * len(groups)
        found, expected = shared.step(batch), copies.step(in_copies(batch))
        for key in ("loss", "grad_norm", "entropy", "tokens"):
            assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
        assert found["tokens"] == batch.loss_tokens.sum()
    for one, other in zip(shared.trained.parameters(), copies.trained.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_ranks", long_but([2], [1, 2, 4]))
def test_a_replay_has_the_bits_of_the_step(model_folder: ModelFolder, num_ranks: int) -> None:
    """Batches of several ranks, built again from the same groups and computed again by one process."""
    config = config_of(model_folder(), OBJECTIVES["dapo, old logprobs"])
    first, again = TorchLearner(config), TorchLearner(config)
    for step in (1, 2):
        dealt, rebuilt = (
            batches_of([branched_group(o + step, 16) for o in range(3)], num_ranks, 2, step, ROW) for _ in range(2)
        )
        assert all(one.equals(other) for one, other in zip(dealt, rebuilt, strict=True))
        found, expected = (
            learner.step(batches[-1], SINGLE_RANK, batches[:-1])
            for learner, batches in ((first, dealt), (again, rebuilt))
        )
        assert (found["loss"], found["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    for one, other in zip(first.trained.parameters(), again.trained.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["surogate", "reference", "checkpointing"])
def test_fewer_rows_with_prompts_counted_once_train_the_same(model_folder: ModelFolder, name: str) -> None:
    """Six samples of 6 + 3 to 8 tokens and branches in rows of 40: loss, norm and weights within 1e-5."""
    config = config_of(model_folder(), OBJECTIVES[name])
    learners = once, apart = TorchLearner(config), TorchLearner(config)
    for step in (1, 2):
        groups = [
            scored_group(3 * step, (3, 8, 5, 6, 7, 4)),
            scored_group(3 * step + 1, (9, 9, 9, 9)),
            branched_group(0),
        ]
        batches = [batches_of(groups, step=step, prompts_count_once=flag)[0] for flag in (True, False)]
        assert batches[0].num_micro_batches < batches[1].num_micro_batches
        found, expected = (learner.step(batch) for learner, batch in zip(learners, batches, strict=True))
        for key in ("loss", "grad_norm", "entropy", "tokens"):
            assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    for one, other in zip(once.model.parameters(), apart.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    micro = micro_batch(batches[0], 0, torch.device("cpu"), 40)
    samples = sum(index.size for index in micro.row.samples)
    assert micro.row.has_many_copies == (samples > 40)
    assert samples > 40
