"""Values per token: the loss of a token can be computed by hand, and recording them changes no bit of a step."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from safetensors import safe_open
from structlog.testing import capture_logs

from actors.algorithms.losses import LOSSES, compute_loss
from actors.algorithms.losses.average import token_shares
from actors.algorithms.losses.inputs import LossInputs
from actors.assembly import make_learner
from actors.learner import token_details
from actors.learner.learner import TorchLearner
from actors.learner.token_details import TokenDetailsWriter
from schemas.config import RunConfig
from schemas.config.objective import ObjectiveConfig
from tests.actors.learner.steps import Sampled, random_samples, run_config, step_batch
from tests.conftest import ModelFolder

QUICKSTART = yaml.safe_load((Path(__file__).parents[3] / "examples/quickstart/run.yaml").read_text())["trainer"]["loss"]
Arrays = dict[str, NDArray[Any]]


def read(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Arrays and facts of a file."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def learner(config: RunConfig, output: Path | None = None, num_groups: int = 99) -> TorchLearner:
    """A learner, with a writer if there is an output_dir."""
    made = TorchLearner(config)
    if output is not None:
        made.details = TokenDetailsWriter(output, num_groups, config.trainer.loss.type)
    return made


def near(samples: list[Sampled]) -> list[Sampled]:
    """Samples whose engine was near the trainer, but for a token that it thought nearly impossible."""
    for sample in samples:
        sample.logprobs = [-3.2 - 0.05 * i for i in range(len(sample.completion))]
    samples[1].logprobs[0] = -30.0
    return samples


def test_the_loss_of_one_token_of_the_quickstart_is_computed_by_hand(model_folder: ModelFolder, tmp_path: Path) -> None:
    """The quickstart's loss: −r·(A − kl_tau·log r)·logp over the tokens of the step, 0 where a rule masks the token.

    Its arguments are what the file says alone. All tokens together have the loss that the step reports.
    """
    config = run_config(model_folder(), loss=QUICKSTART)
    loss = config.trainer.loss
    assert loss.type == "surogate"
    made = learner(config, tmp_path)
    measured = made.step(step_batch(near(random_samples()), micro_batches=2))
    assert made.details is not None
    made.details.close()
    arrays, facts = read(tmp_path / "tokens" / "step_000001.rank0.safetensors")
    assert (facts["loss"], facts["average"], facts["step"]) == ("surogate", "step_tokens", "1")
    (loss_tokens,) = yaml.safe_load(facts["loss_tokens"])
    offsets = arrays["offsets_B"].tolist()
    by_hand, num_masked = [], 0
    for first, last in pairwise(offsets):
        logp = [float(arrays["logprobs_T"][t]) for t in range(first, last)]
        log_r = [p - float(q) for p, q in zip(logp, arrays["inference_logprobs_T"][first:last], strict=True)]
        r = [math.exp(min(one, 40.0)) for one in log_r]
        geo = math.exp(sum(log_r) / len(log_r))
        for t in range(last - first):
            is_masked = (
                not loss.token_mask_low <= r[t] <= loss.token_mask_high
                or not loss.geo_mask_low <= geo <= loss.geo_mask_high
                or min(r) < loss.sequence_mask_low
                or max(r) > loss.sequence_mask_high
            )
            advantage = float(arrays["advantages_T"][first + t])
            coefficient = r[t] * (loss.adv_tau * advantage - loss.kl_tau * log_r[t])
            by_hand.append(0.0 if is_masked else -coefficient * logp[t] / loss_tokens)
            rules = [name for name in arrays if name.startswith("rule/") and arrays[name][first + t]]
            assert bool(rules) == is_masked
            num_masked += is_masked
            assert arrays["loss_T"][first + t] == pytest.approx(by_hand[-1], abs=1e-5)
    assert 0 < num_masked < len(by_hand)
    assert sum(by_hand) == pytest.approx(measured["loss"], abs=1e-5)
    # every token was written by the model of version 0, and its ratio to the engine is that of the loss
    assert arrays["versions_T"].tolist() == [0] * len(by_hand)
    assert arrays["loss_mask_T"].tolist() == [1] * len(by_hand)
    assert np.isfinite(arrays["entropy_T"]).all()
    kept = arrays["rule/high_T"] == 0
    ratios = np.exp(arrays["logprobs_T"] - arrays["inference_logprobs_T"])
    np.testing.assert_allclose(arrays["ratio_T"][kept], ratios[kept], rtol=1e-5)


@pytest.mark.parametrize(("num_groups", "expected"), [(1, [0] * 4), (2, [0] * 4 + [1] * 4), (50, [0] * 4 + [1] * 4)])
def test_the_first_groups_of_a_step_are_recorded_with_their_tokens(
    model_folder: ModelFolder, tmp_path: Path, num_groups: int, expected: list[int]
) -> None:
    """In micro-batches that mix both groups."""
    samples = random_samples()
    made = learner(run_config(model_folder()), tmp_path, num_groups)
    made.step(step_batch(samples, step=7, micro_batches=3))
    assert made.details is not None
    made.details.close()
    arrays, _ = read(tmp_path / "tokens" / "step_000007.rank0.safetensors")
    assert arrays["ordinals_B"].tolist() == expected
    assert arrays["completions_B"].tolist() == list(range(len(expected)))
    chosen = [sample for sample in samples if sample.ordinal in expected]
    assert arrays["token_ids_T"].tolist() == [token for sample in chosen for token in sample.completion]
    assert np.diff(arrays["offsets_B"]).tolist() == [len(sample.completion) for sample in chosen]
    assert {array.size for name, array in arrays.items() if name.endswith("_T")} == {arrays["token_ids_T"].size}


@pytest.mark.parametrize("loss", ["surogate", "grpo", "dapo"])
def test_recording_changes_no_bit_of_the_weights(model_folder: ModelFolder, tmp_path: Path, loss: str) -> None:
    """Three steps of two updates each."""
    config = run_config(model_folder(), loss={"type": loss}, num_iterations=2)
    plain, recorded = learner(config), learner(config, tmp_path)
    for step in (1, 2, 3):
        batch = step_batch(random_samples(step), step=step, micro_batches=2)
        first, second = plain.step(batch), recorded.step(batch)
        same = [name for name in first if not name.startswith("seconds")]
        assert [first[name] for name in same] == [second[name] for name in same]
    assert recorded.details is not None
    recorded.details.close()
    ours, theirs = plain.model.state_dict(), recorded.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(list((tmp_path / "tokens").iterdir())) == 3


@pytest.mark.parametrize("config", sorted(LOSSES, key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_the_parts_of_all_tokens_add_up_to_the_loss(config: Any) -> None:
    """With every loss and its average."""
    random_numbers = torch.Generator().manual_seed(0)
    logprobs_BT = -torch.rand(3, 5, generator=random_numbers) - 0.5
    old_BT = logprobs_BT + 0.3 * torch.randn(3, 5, generator=random_numbers)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    inputs = LossInputs.of_padded(
        logprobs_BT,
        old_BT,
        torch.tensor([1.0, -0.5, 0.25]),
        mask,
        max_completion_length=5,
        old_logprobs_BT=old_BT,
        teacher_logprobs_BT=old_BT,
        reference_logprobs_BT=old_BT,
        entropy_BT=torch.ones(3, 5),
        versions_BT=torch.zeros(3, 5),
        version=2,
    )
    output = compute_loss(inputs, ObjectiveConfig(loss=config()))
    assert output.tokens is not None
    parts_T = token_shares(output.tokens.inputs, output.tokens.values_T, output.tokens.average)
    assert float(parts_T.sum()) == pytest.approx(float(output.loss), abs=1e-6)
    assert all(
        flags_T.dtype is torch.bool and flags_T.shape == parts_T.shape for flags_T in output.tokens.rules.values()
    )


@pytest.mark.parametrize("resumed", [False, True])
def test_the_oldest_steps_go_when_there_are_too_many_bytes(
    model_folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """Of the own rank alone, and never the newest; a step that is trained again replaces its file."""
    made = learner(run_config(model_folder()), tmp_path)
    assert made.details is not None
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "step_000001.rank1.safetensors").touch()
    for step in (1, 2, 3, 3):
        made.step(step_batch(random_samples(), step=step))
        assert made.details._running is not None
        made.details._running.result(60)
        if resumed:
            made.details.close()
            made.details = TokenDetailsWriter(tmp_path, 99, "surogate")
        monkeypatch.setattr(
            token_details,
            "MAX_BYTES",
            2 * (folder / "step_000001.rank0.safetensors").stat().st_size if step == 1 else token_details.MAX_BYTES,
        )
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_000001.rank1.safetensors", "step_000002.rank0.safetensors", "step_000003.rank0.safetensors",
    ]  # fmt: skip


def test_a_disk_that_takes_no_values_of_tokens_fails_no_step(model_folder: ModelFolder, tmp_path: Path) -> None:
    """It is said at the next step."""
    (tmp_path / "tokens").touch()
    made = learner(run_config(model_folder()), tmp_path)
    assert made.details is not None
    with capture_logs() as said:
        for step in (1, 2):
            made.step(step_batch(random_samples(), step=step))
            while made.details._running is not None and not made.details._running.done():
                pass
    assert "values of tokens not written" in [line["event"] for line in said]


def test_the_key_gives_a_trainer_a_writer_and_a_replay_none(model_folder: ModelFolder, tmp_path: Path) -> None:
    """A replay must not replace what the run has written."""
    config = run_config(model_folder()).model_copy(update={"output_dir": str(tmp_path)})
    on = config.model_copy(update={"telemetry": config.telemetry.model_copy(update={"token_details": 1})})
    assert getattr(make_learner(on, rank=0), "details", None) is not None
    assert getattr(make_learner(on), "details", None) is None
    assert getattr(make_learner(config, rank=0), "details", None) is None
