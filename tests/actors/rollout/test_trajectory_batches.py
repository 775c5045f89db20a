"""From trajectories to the batches of all ranks: each sampled token is trained once, and as if computed alone."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.algorithms.batches import build_batches
from actors.learner.learner import TorchLearner
from actors.learner.micro_batches import micro_batch, non_empty
from actors.rollout.episode import Trajectory
from actors.rollout.trajectory_group import build_trajectory_group
from actors.trajectories.chat import Chat
from actors.trajectories.recorder import Recorder, TurnLimits
from actors.trajectories.tree import SampledTurn, TrajectoryTree
from bus import codec
from schemas.messages import ScoredGroup, StepBatch, drop_fields
from tests import models
from tests.actors.learner.steps import run_config
from tests.actors.rollout.doubles import ticket
from tests.conftest import ModelFolder

SEQUENCE_LEN = 80
TAG = 1 / 1024
"""Distance of the logprobs of two sampled tokens: a logprob tells which token it is."""


class Tokens:
    """Sampled tokens, each with a logprob of its own; and those that shall train."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.number = rng, 0
        self.trained: list[float] = []
        """Logprobs of the tokens that shall be in the loss."""

    def any(self, most: int, least: int = 0) -> list[int]:
        """Ids of a text."""
        return [self.rng.randrange(4, 30) for _ in range(self.rng.randint(least, most))]

    def turn(self, ids: Sequence[int] = ()) -> SampledTurn:
        """A turn of these tokens, or of any."""
        ids = list(ids) or self.any(4, 1)
        logprobs = [-TAG * (self.number + i + 1) for i in range(len(ids))]
        self.number += len(ids)
        trains = self.rng.random() < 0.85
        self.trained += logprobs if trains else []
        cut = self.rng.randrange(len(ids))
        segments = [(0, 1, 3), *([(cut, 1, 4)] if cut else [])]
        return SampledTurn(ids, logprobs, segments, self.rng.choice([1.0, 0.5]), trains)


def a_tree(tokens: Tokens, opening: list[int], most_turns: int = 7) -> TrajectoryTree:
    """Turns that continue an earlier one, branch from one or from its middle, are asked again, or begin anew."""
    tree, rng = TrajectoryTree(), tokens.rng
    asked: list[list[int]] = []
    for _ in range(rng.randint(1, most_turns)):
        way = rng.choice(["on", "on", "on", "branch", "edit", "again", "anew"]) if asked else "first"
        boundary = 0
        ids: Sequence[int] = ()
        if way == "on":
            prompt = [*tree.ids(tree.num_turns - 1), *tokens.any(3)]
            boundary = rng.randint(0, 1)
        elif way == "branch":
            prompt = [*tree.ids(rng.randrange(tree.num_turns)), *tokens.any(3)]
        elif way == "edit":
            # as a template does that leaves earlier thoughts out
            before = tree.ids(rng.randrange(tree.num_turns))
            prompt = [*before[: rng.randint(1, len(before))], *tokens.any(3)]
        elif way == "again":
            # also with the very same answer, as a retry at temperature 0 has it
            number = rng.randrange(tree.num_turns)
            prompt = asked[number]
            ids = rng.choice([(), tree.ids(number)[len(prompt) :]])
        else:
            prompt = opening if rng.random() < 0.5 else tokens.any(4, 1)
        if len(prompt) > SEQUENCE_LEN - 5:
            break
        asked.append(list(prompt))
        tree.add(prompt, tokens.turn(ids), boundary)
    return tree


def trajectory(tree: TrajectoryTree) -> Trajectory:
    """A trajectory with these tokens; the texts count for nothing here."""
    recorder = Recorder(cast(Chat, None), cast(Any, None), TurnLimits(SEQUENCE_LEN, 4), 0, tree)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    return Trajectory(recorder, messages, 1)


def scored(ordinal: int, trees: Sequence[TrajectoryTree], rng: random.Random) -> ScoredGroup:
    """The group of these trajectories, with advantages, as the packer gets it."""
    group = build_trajectory_group("run", "rollout-0", ticket(ordinal), {}, [trajectory(tree) for tree in trees])
    whole = ScoredGroup(
        **group.__dict__,
        scorer="reward-0",
        reward_names=["r"],
        rewards_FG=np.ones((1, len(trees))),
        rewards_G=np.ones(len(trees)),
        advantages_G=np.array([rng.choice([-1.0, 0.5, 2.0]) for _ in trees], np.float32),
    )
    whole.check()
    sent = codec.decode([bytes(frame) for frame in codec.encode(whole)])
    assert isinstance(sent, ScoredGroup)
    return sent


def a_step(seed: int, most_turns: int = 7) -> tuple[list[ScoredGroup], list[list[TrajectoryTree]], list[float]]:
    """Groups of a step, their trees, and the logprobs of all tokens that shall be in the loss."""
    rng = random.Random(seed)
    tokens = Tokens(rng)
    trees = []
    for _ in range(rng.randint(2, 4)):
        opening = tokens.any(5, 1)
        trees.append([a_tree(tokens, opening, most_turns) for _ in range(rng.randint(1, 4))])
    groups = [scored(ordinal, members, rng) for ordinal, members in enumerate(trees)]
    return groups, trees, tokens.trained


def built(groups: Sequence[ScoredGroup], num_ranks: int, num_minibatches: int) -> list[StepBatch]:
    """The batches of all ranks."""
    header = {"run": "run", "term": 1, "incarnation": 1, "step": 5, **drop_fields([])}
    digests = [f"d{group.ordinal}" for group in groups]
    return build_batches(groups, num_ranks, SEQUENCE_LEN, num_minibatches, digests=digests, **header)


LAYOUTS = [(1, 1), (3, 1), (1, 2), (3, 2)]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), layout=st.sampled_from(LAYOUTS), most_turns=st.sampled_from([2, 7, 20]))
def test_each_sampled_token_is_in_the_loss_once_over_all_ranks(
    seed: int, layout: tuple[int, int], most_turns: int
) -> None:
    """And no other; rows hold what fits, and the shares of a completion's samples are one completion."""
    groups, trees, trained = a_step(seed, most_turns)
    batches = built(groups, *layout)
    for batch in batches:
        batch.check()
    found = [float(p) for batch in batches for p in batch.logprobs[batch.loss_mask > 0]]
    assert Counter(found) == Counter(float(np.float32(p)) for p in trained)
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == len(trained)
    assert batches[0].loss_tokens.sum() == len(trained)
    samples = [sample for members in trees for tree in members for sample in tree.samples()]
    assert sum(batch.completions.size for batch in batches) == len(samples)
    completions = np.concatenate([batch.completions for batch in batches])
    shares = np.bincount(completions, np.concatenate([batch.sample_shares for batch in batches]))
    np.testing.assert_allclose(shares, 1.0, atol=1e-6)
    assert shares.size == sum(map(len, trees)) == batches[0].num_completions.sum()
    for batch in batches:
        for first, last in zip(batch.micro_batch_offsets, batch.micro_batch_offsets[1:], strict=False):
            # a row holds a shared prefix once, and that is what fits
            held = batch.sample_offsets[last] - batch.sample_offsets[first] - batch.sample_shared[first:last].sum()
            assert held <= SEQUENCE_LEN


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), layout=st.sampled_from(LAYOUTS))
def test_each_trained_row_is_what_the_model_saw(seed: int, layout: tuple[int, int]) -> None:
    """Prompt, tokens and temperatures of each sample are those of the tree, whatever was packed beside them."""
    groups, trees, _ = a_step(seed)
    expected = Counter(
        (tuple(sample.prompt_ids + sample.token_ids), len(sample.prompt_ids), tuple(sample.temperatures))
        for members in trees
        for tree in members
        for sample in tree.samples()
    )
    found: Counter[Any] = Counter()
    for batch in built(groups, *layout):
        for number, start in enumerate(batch.sample_offsets[:-1].tolist()):
            end, prompt = int(batch.sample_offsets[number + 1]), int(batch.prompt_lengths[number])
            temperatures = batch.temperatures[start + prompt : end].tolist()
            found[tuple(batch.token_ids[start:end].tolist()), prompt, tuple(temperatures)] += 1
    assert found == expected


def logprobs_alone(model: Any, ids: Sequence[int], temperatures: Sequence[float]) -> torch.Tensor:
    """The logprob of each token behind the first, at its temperature, of a row by itself."""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1].float()
    scaled = logits / torch.tensor(list(temperatures)[1:])[:, None]
    return torch.log_softmax(scaled, -1).gather(1, torch.tensor(list(ids))[1:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_packed_samples_have_the_logprobs_of_samples_alone(
    model_folder: ModelFolder, seed: int, layout: tuple[int, int]
) -> None:
    """Rows with shared prompts, branches and tokens of the environment."""
    groups, _, _ = a_step(seed)
    config = run_config(model_folder())
    learner, plain = TorchLearner(config), models.plain(model_folder())
    compared = 0
    for batch in built(groups, *layout):
        for number in non_empty(batch):
            micro = micro_batch(batch, number, torch.device("cpu"))
            with torch.no_grad():
                packed_T, _ = learner._token_logprobs.of(micro.row, micro.token_ids_T, micro.temperatures_T)
                first, last = batch.micro_batch_offsets[number : number + 2].tolist()
                alone = []
                for sample in range(first, last):
                    start, end = batch.sample_offsets[sample : sample + 2].tolist()
                    ids, heats = batch.token_ids[start:end].tolist(), batch.temperatures[start:end].tolist()
                    alone.append(logprobs_alone(plain, ids, heats)[int(batch.prompt_lengths[sample]) - 1 :])
            torch.testing.assert_close(packed_T, torch.cat(alone), rtol=0, atol=1e-5)
            compared += packed_T.numel()
    assert compared == sum(group.token_ids.size for group in groups)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_cut_turns_that_do_not_train_changes_nothing(
    model_folder: ModelFolder, layout: tuple[int, int]
) -> None:
    """`train_cut_turns: false`, and all turns were cut off: the loss is 0 and finite, and no weight moves."""
    groups, _, _ = a_step(1)
    masked = [group.model_copy(update={"loss_mask": np.zeros_like(group.loss_mask)}) for group in groups]
    config = run_config(model_folder(), loss={"type": "grpo"}, num_minibatches=layout[1])
    learner = TorchLearner(config)
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    batches = built(masked, *layout)
    measured = learner.step(batches[-1], before=batches[:-1])
    assert (measured["loss"], measured["grad_norm"], measured["tokens"]) == (0.0, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))


@pytest.mark.parametrize("layout", [(1, 1), (3, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_mean_over_trajectories_whatever_their_branches(
    model_folder: ModelFolder, seed: int, layout: tuple[int, int]
) -> None:
    """Of the mean over a trajectory's trained tokens: value and gradient are those of rows computed one by one."""
    groups, trees, _ = a_step(seed)
    config = run_config(model_folder(), loss={"type": "grpo"}, max_grad_norm=1e9)
    batches = built(groups, *layout)
    measured = TorchLearner(config).step(batches[-1], before=batches[:-1])
    plain = models.plain(model_folder())
    total, num_trajectories = torch.zeros(()), 0
    for group, members in zip(groups, trees, strict=True):
        for advantage, tree in zip(group.advantages_G.tolist(), members, strict=True):
            num_trajectories += 1
            values = []
            for sample in tree.samples():
                ids, heats = sample.prompt_ids + sample.token_ids, [1.0] * len(sample.prompt_ids) + sample.temperatures
                logprobs = logprobs_alone(plain, ids, heats)[len(sample.prompt_ids) - 1 :]
                trains = torch.tensor(sample.loss_mask).bool()
                values.append(-advantage * (logprobs - logprobs.detach()).exp()[trains])
            trained = torch.cat(values)
            total = total + (trained.mean() if trained.numel() else 0.0)
    loss = total / num_trajectories
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in plain.parameters() if p.grad is not None))
    assert measured["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert measured["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
