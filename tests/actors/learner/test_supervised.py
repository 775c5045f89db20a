"""Supervised examples beside what the policy samples (CHORD): what is learned, by whom, and how much of it."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.algorithms.chord import sft_indices
from actors.learner.batch_images import BatchImages
from actors.learner.learner import TorchLearner
from actors.learner.optimizer import PolicyOptimizer
from actors.learner.ranks import SINGLE_RANK
from actors.learner.supervised import SupervisedExamples
from actors.models.token_logprobs import TokenLogprobs
from schemas.config import RunConfig
from schemas.errors import ConfigError
from tests import models
from tests.actors.learner.steps import batches_of, random_samples, run_config, scored_group, step_batch
from tests.conftest import ModelFolder

TEXTS = (("ab", "cde"), ("b", "xyz"), ("abc", "d"), ("q", "qrstu"), ("z", "z"))
ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]


@pytest.fixture
def sft_run(model_folder: ModelFolder, tmp_path: Path) -> Any:
    """`sft_run(mu, batch_size, **trainer)`: a run that learns ROWS with a constant μ."""
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def config(mu: float, batch_size: int = 5, phi: bool = False, **trainer: Any) -> RunConfig:
        sft = {"path": str(path), "batch_size": batch_size, "phi": phi}
        sft |= {"mu_peak": mu, "mu_valley": mu, "mu_warmup_steps": 0, "mu_decay_steps": 0}
        return run_config(model_folder(), sft=sft, max_grad_norm=1e9, **trainer)

    return config


def tokens(row: dict[str, str]) -> tuple[list[int], list[int]]:
    """One token per letter: the prompt behind the beginning of sequence, the completion up to its end."""
    return [models.BOS, *(ord(c) - 93 for c in row["prompt"])], [*(ord(c) - 93 for c in row["completion"]), models.EOS]


def gradients(learner: TorchLearner, batch: Any, before: Any = ()) -> dict[str, Tensor]:
    """Those that the optimizer gets of a step on all ranks, whose batches are these."""
    found: dict[str, Tensor] = {}

    def take(_: PolicyOptimizer) -> None:
        found.update({name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PolicyOptimizer, "step", take)
        learner.step(batch, SINGLE_RANK, before)
    return found


def plain_gradients(folder: Path, rows: list[dict[str, str]]) -> dict[str, Tensor]:
    """Of the mean negative logprob of the completions' tokens, sample by sample."""
    model, total, count = models.plain(folder), 0.0, 0
    for row in rows:
        prompt, completion = tokens(row)
        total, count = total - models.logprobs(model, prompt, completion).sum(), count + len(completion)
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_with_a_mu_of_one_the_gradient_is_that_of_supervised_learning(sft_run: Any, model_folder: ModelFolder) -> None:
    """All five rows, packed in one row here, one by one there; 1e-6 of the largest."""
    learner = TorchLearner(sft_run(1.0))
    found, expected = gradients(learner, step_batch(random_samples())), plain_gradients(model_folder(), ROWS)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 2e-6 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.slow
def test_mu_weighs_policy_and_supervised_gradient(sft_run: Any, model_folder: ModelFolder) -> None:
    """0.25: three quarters of one, a quarter of the other; the loss too, and the metric is the plain mean."""
    parts = [TorchLearner(sft_run(mu)) for mu in (0.25, 0.0, 1.0)]
    mixed, policy, supervised = (gradients(learner, step_batch(random_samples())) for learner in parts)
    for name, gradient in mixed.items():
        torch.testing.assert_close(gradient, 0.75 * policy[name] + 0.25 * supervised[name], rtol=1e-4, atol=1e-6)
    losses = [TorchLearner(sft_run(mu)).step(step_batch(random_samples())) for mu in (0.25, 0.0, 1.0)]
    assert losses[0]["loss"] == pytest.approx(0.75 * losses[1]["loss"] + 0.25 * losses[2]["loss"], rel=1e-5)
    assert losses[0]["sft_nll"] == pytest.approx(losses[2]["loss"], rel=1e-5)
    assert "sft_nll" not in losses[1]  # μ 0 costs nothing


@pytest.mark.slow
@pytest.mark.parametrize("phi", [False, True])
def test_ranks_and_minibatches_share_the_examples(sft_run: Any, phi: bool) -> None:
    """Two ranks have the gradient of one; two minibatches learn three and two of five rows."""
    config, groups = sft_run(0.5, phi=phi), [scored_group(i) for i in range(4)]
    (whole,), dealt = batches_of(groups), batches_of(groups, 2)
    one, two = gradients(TorchLearner(config), whole), gradients(TorchLearner(config), dealt[1], dealt[:1])
    for name, gradient in one.items():
        torch.testing.assert_close(two[name], gradient, rtol=1e-4, atol=1e-6)
    (batch,) = batches_of(groups, 1, 2)
    policy = TokenLogprobs(TorchLearner(config).model)
    images = BatchImages(policy.model, config.model)
    examples = SupervisedExamples(config, config.trainer.sft, policy, nullcontext, images)
    indices = sft_indices(5, 5, config.seed, batch.step)
    for minibatch in (0, 1):
        rows, count = examples.rows(batch, minibatch)
        learned = sorted(int(token) for row in rows for token in row.token_ids_T)
        expected = [tokens(ROWS[i])[1] for i in indices[minibatch::2]]
        assert learned == sorted(token for ids in expected for token in ids)
        assert count == sum(map(len, expected))


def test_a_step_learns_the_same_examples_again(sft_run: Any) -> None:
    """A function of seed and step: a replayed step has the same bits; another step other examples."""
    losses = [TorchLearner(sft_run(1.0, 2)).step(step_batch(random_samples(), step=s))["loss"] for s in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 6: not JSON"),
        ('{"prompt": "ab"}', "line 6: a row must be an object with `prompt` and `completion`"),
        ('{"prompt": 3, "completion": "a"}', "line 6: prompt and completion must be text"),
        ('{"prompt": [{"role": "user", "content": "a"}], "completion": 4}', "line 6: the completion of messages must"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}], "completion": "a"}',
            r"line 6: image 1 has the path 'a\.png' in .*, which can't be read",
        ),
        (
            '{"prompt": [{"role": "u", "content": "a"}], "completion": {"role": "a", "content": [{"type": "image"}]}}',
            "line 6: the completion: message 1 has a part of type 'image'; leave out the rows with images",
        ),
        ('{"prompt": "ab", "completion": "' + "a" * 3000 + '"}', "example 6 has 3 . 3001 .*packer.sequence_len"),
    ],
)
def test_a_row_that_can_not_be_learned_is_named(sft_run: Any, line: str, problem: str) -> None:
    """File, line and what a row must be."""
    config = sft_run(1.0)
    with Path(config.trainer.sft.path).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=rf"trainer\.sft\.path: .*{problem}"):
        TorchLearner(config)


def test_answers_to_messages_end_where_the_template_ends_them(tmp_path: Path) -> None:
    """What the chat template puts behind the opened turn, up to the end of sequence; nothing after it."""
    from actors.models.tokenizer import Tokenizer
    from schemas.config.model import ModelConfig

    models.build(tmp_path)
    template = "{% for m in messages %}{{ m.role[0] }}={{ m.content }}<eos>b{% endfor %}"
    template += "{% if add_generation_prompt %}a={% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(ModelConfig(path=str(tmp_path)))
    prompt: Any = [{"role": "user", "content": "ab"}]
    assert tokenizer.decode(tokenizer.encode(prompt)) == "u=abba="
    for answer in ("xy", {"role": "assistant", "content": "xy"}):
        assert tokenizer.encode_completion(prompt, answer) == [27, 28, models.EOS]
    assert tokenizer.encode_completion("ab", "xy") == [27, 28, models.EOS]
