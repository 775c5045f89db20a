"""Folders of runs, written by the writers that a packer has: ledger, reporter and progress file. No process runs."""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from actors.ledger import Store
from actors.ledger.rows import AttemptOutcome, Changes, ExampleRef, Group, GroupState, Step
from actors.ledger.witness import START, next_chain
from actors.packer.results import step_values
from actors.packer.sample_images import SampleImages, images_of, sizes_of
from actors.telemetry.conversations import content_text
from actors.telemetry.reporter import Reporter, replace
from bus import codec
from schemas.config import RunConfig
from schemas.config.load import check_tree
from schemas.config.resolved import write_resolved
from schemas.messages import NO_POLICY, DroppedOrdinal, ImagePlace, PolicyVersion, ScoredGroup

NAMES = ("Ada", "Boris", "Chen", "Dana", "Emil", "Fatou", "Grete", "Hiro")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "tickets", "pears", "cards")
LEARNED = 12.0
"""Steps after which made-up answers are mostly right."""


def made_config(folder: Path, name: str = "made", **sections: Any) -> RunConfig:
    """The configuration of a run without a model; `sections` are merged into it."""
    tree: dict[str, Any] = {
        "name": name,
        "output_dir": str(folder),
        "model": {"path": str(folder / "model")},
        "environments": [{"type": "reverse_text", "name": "sums"}, {"type": "reverse_text", "name": "shop"}],
        "rollout": {"group_size": 4, "max_tokens": 64},
        "reward": {"functions": [{"path": "characters_in_place"}, {"path": "exact_match"}]},
        "packer": {"groups_per_step": 3, "sequence_len": 512},
        "trainer": {"max_steps": 40},
        "inference": {"engine": {"type": "fake"}},
        "eval": {"num_prompts": 0},
        "bus": {"control": "ipc"},
    }
    for section, keys in sections.items():
        tree[section] = {**tree.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return check_tree(tree)


@cache
def tokenizer() -> Tokenizer:
    """A byte level tokenizer of a few hundred pieces, which can write any text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [text for ordinal in range(200) for text in _answers(ordinal, 30, 2)[1]] + [
        _question(n)[0] for n in range(200)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def _question(ordinal: int) -> tuple[str, int]:
    rng = np.random.default_rng(ordinal)
    have, get = (int(value) for value in rng.integers(2, 60, 2))
    name, thing = NAMES[ordinal % len(NAMES)], THINGS[(ordinal // 3) % len(THINGS)]
    return f"{name} has {have} {thing} and gets {get} more. How many {thing} does {name} have now?", have + get


def _answers(ordinal: int, step: int, size: int) -> tuple[str, list[str], list[float]]:
    """Return a question, answers to it, and 1 for each that is right: the more often the later the step."""
    question, right = _question(ordinal)
    rng = np.random.default_rng([ordinal, step])
    texts, scores = [], []
    for number in range(size):
        is_right = bool(rng.random() < 0.2 + 0.7 * (1 - math.exp(-step / LEARNED)))
        given = right if is_right else right + int(rng.integers(1, 9))
        words = [
            f"We add both numbers. The sum is {given}.",
            f"First I write down what is known. Then I add: {right - 3} + 3 makes {given}. So the answer is {given}.",
            f"{given}",
            f"Let me think step by step.\n1. There are two amounts.\n2. Together they are {given}.\n\nAnswer: {given}",
        ]
        texts.append(words[(ordinal + number) % len(words)])
        scores.append(float(is_right))
    return question, texts, scores


@dataclass
class MadeGroup:
    """Texts and scores of a group before it is a message."""

    prompt: Any
    texts: list[str]
    scores: list[float]
    environment: str = "sums"
    transcripts: list[tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)


def sums(ordinal: int, step: int, size: int) -> MadeGroup:
    """A group of single turns."""
    question, texts, scores = _answers(ordinal, step, size)
    messages = [
        {"role": "system", "content": "Answer with a number at the end."},
        {"role": "user", "content": question},
    ]
    return MadeGroup(
        messages, texts, scores, stops=["length" if (ordinal + n) % 7 == 0 else "stop" for n in range(size)]
    )


def shop(ordinal: int, step: int, size: int) -> MadeGroup:
    """A group of trajectories with a call of a tool."""
    question, right = _question(ordinal)
    _, texts, scores = _answers(ordinal, step, size)
    prompt = [{"role": "user", "content": question}]
    transcripts = []
    for text in texts:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": right - 5, "b": 5}}}
        behind = [
            {"role": "assistant", "content": "", "reasoning_content": "A calculator is safer.", "tool_calls": [call]},
            {"role": "tool", "content": str(right)},
            {"role": "assistant", "content": text},
        ]
        transcripts.append((prompt, behind, {"checks": 1}))
    return MadeGroup(prompt, texts, scores, "shop", transcripts, ["done"] * size)


def message(ordinal: int, made: MadeGroup, version: int, run: str = "run") -> ScoredGroup:
    """The group as a reward actor sends it; a trajectory's tool result is of the environment."""
    encode = tokenizer().encode
    size = len(made.texts)
    prompt_ids = encode(made.prompt if isinstance(made.prompt, str) else content_text(made.prompt[-1]["content"])).ids
    tokens: list[int] = []
    segments: list[list[int]] = []
    offsets = [0]
    for g, text in enumerate(made.texts):
        turns = [(0, text)]
        if made.transcripts:
            behind = made.transcripts[g][1]
            turns = [(0, json.dumps(behind[0]["tool_calls"][0]["function"])), (1, behind[1]["content"]), (0, text)]
        for number, (origin, words) in enumerate(turns):
            policy = [1, version + (g % 2 if version else 0)] if origin == 0 else [NO_POLICY, NO_POLICY]
            segments.append([len(tokens), *policy, origin, number // 2])
            tokens += encode(words or " ").ids
        offsets.append(len(tokens))
    rng = np.random.default_rng(ordinal & 0xFFFF)
    per_segment = np.array(segments)
    origins = np.repeat(per_segment[:, 3], np.diff(per_segment[:, 0], append=len(tokens)))
    short = [0.2 if len(text) < 60 else 0.0 for text in made.texts]
    rewards = np.array([made.scores, short])
    total = rewards.sum(axis=0)
    advantages = (total - total.mean()) / (total.std() + 1e-6)
    return ScoredGroup(
        run=run,
        sender="rollout-0",
        ordinal=ordinal,
        attempt=1,
        purpose="train" if ordinal >= 0 else "eval",
        environment=made.environment,
        example_key=f"key{ordinal}",
        prompt=made.prompt,
        columns={"answer": "42", "level": 3},
        images=made.images,
        image_places=[ImagePlace(image=n, start=n, length=1) for n in range(len(made.images))],
        completions=made.texts,
        transcripts=[json.dumps(list(one)) for one in made.transcripts],
        stop_conditions=made.stops or ["stop"] * size,
        prompt_ids=np.array(prompt_ids, np.int32),
        prompt_offsets=np.array([0, len(prompt_ids)], np.int64),
        sample_offsets=np.array(offsets, np.int64),
        sample_completions=np.arange(size),
        sample_prompts=np.zeros(size, np.int64),
        token_ids=np.array(tokens, np.int32),
        loss_mask=(origins == 0).astype(np.uint8),
        logprobs=np.where(origins == 0, -rng.exponential(0.7, len(tokens)), 0.0).astype(np.float32),
        segments=per_segment.astype(np.int64),
        segment_temperatures=np.ones(len(segments), np.float32),
        counts=np.tile(np.array([[2, 1, 0]] if made.transcripts else [[1, 0, 0]], np.int64), (size, 1)),
        environment_rewards_EG=np.zeros((0, size)),
        turn_rewards=np.array([[g, 1, 0.5] for g in range(size)], np.float64) if made.transcripts else np.zeros((0, 3)),
        scorer="reward-0",
        reward_names=["right", "short"],
        rewards_FG=rewards,
        rewards_G=total,
        advantages_G=advantages.astype(np.float32),
    )


class MadeRun:
    """A run's folder that can grow. Steps have groups of both environments in turns.

    Args:
        config: of `made_config`.
        size: completions of a group.
    """

    def __init__(self, config: RunConfig, size: int = 4) -> None:
        self.config, self._size = config, size
        config.output.mkdir(parents=True, exist_ok=True)
        write_resolved(config)
        (config.output / "model").mkdir(exist_ok=True)
        tokenizer().save(str(config.output / "model" / "tokenizer.json"))
        self.store = Store(config.ledger_path)
        self.reporter = Reporter(config.output)
        self.images = SampleImages(config.output, self.reporter.writer, config.telemetry.sample_images_bytes)
        self._next, self._arrivals, self.last, self._chain = 0, 0, 0, START
        self._evals = 0

    def close(self) -> None:
        """Let go of the ledger."""
        self.store.close()

    def add_step(self, sampled: int = 1, groups: Sequence[MadeGroup] = (), dropped: int = 0) -> list[ScoredGroup]:
        """Train a step.

        Args:
            sampled: groups of the step in samples.jsonl.
            groups: the step's first groups; made up where there are fewer.
            dropped: groups dropped as stale before the step.
        """
        step = self.last = self.last + 1
        lost = [self._row(GroupState.DROPPED, reason="stale") for _ in range(dropped)]
        version = max(0, step - 2)
        messages = []
        for place in range(self.config.packer.groups_per_step):
            make = shop if (self._next + place) % 3 == 2 else sums
            made = groups[place] if place < len(groups) else make(self._next + place, step, self._size)
            messages.append(message(self._next + place, made, version, self.store.run))
        frames = [[bytes(frame) for frame in codec.encode(one)] for one in messages]
        digests = [hashlib.sha256(b"".join(one)).hexdigest() for one in frames]
        rows = [self._row(GroupState.TRAINED, one, step) for one in messages]
        drops = tuple(DroppedOrdinal(ordinal=row.ordinal, reason="stale") for row in lost)
        ordinals = tuple(row.ordinal for row in rows)
        self._chain = next_chain(self._chain, step, ordinals, drops, digests)
        composed = Step(step, ordinals, drops, tuple(digests), self._chain)
        changed = Changes(groups={row.ordinal: row for row in [*lost, *rows]}, steps=[composed])
        self.store.commit(changed, dict(zip(ordinals, zip(digests, frames, strict=True), strict=True)))
        self.reporter.report_step(step, step_values(step, messages) | self._trainers_values(step), "digest" + str(step))
        for one in messages[:sampled]:
            images = images_of(one)
            self.images.keep(images)
            self.reporter.report_samples(step, one, sizes_of(images))
        return messages

    def add_issued(self, failures: int = 0) -> int:
        """Issue a group that is being sampled; return its ordinal."""
        row = self._row(GroupState.ISSUED, failures=failures)
        self.store.commit(Changes(groups={row.ordinal: row}), {})
        return row.ordinal

    def add_evaluation(self, version: int) -> None:
        """Evaluate a version with two prompts."""
        groups = []
        for _ in range(2):
            self._evals += 1
            groups.append(message(-self._evals, sums(self._evals, version, 1), version, self.store.run))
            self.reporter.report_samples(version, groups[-1])
        mean = float(np.mean([one.rewards_G for one in groups]))
        score = 0.2 + 0.7 * (1 - math.exp(-version / LEARNED))
        self.reporter.report_eval(version, {"sums": {"exact_match": score, "mean_reward": mean, "reward/right": mean}})

    def save(self, step: int) -> None:
        """Make the steps up to this one durable."""
        (self.config.output / "checkpoints" / f"step_{step}").mkdir(parents=True, exist_ok=True)
        query = "UPDATE groups SET state = 'durable' WHERE state = 'trained' AND step <= ?"
        self.store.database.execute(query, (step,))

    def compact(self, step: int) -> None:
        """Remove rows, payloads and records of the steps up to this one, as a packer does."""
        found = [one for one in self.store.steps() if one.step <= step]
        gone = [ordinal for one in found for ordinal in (*one.ordinals, *(drop.ordinal for drop in one.dropped))]
        folded = {"step": step, "chain": found[-1].chain, "finished": [(0, max(gone) + 1)], "trained": len(gone)}
        folded |= {"trained_twice": 0, "evaluated": 0, "dropped": {"train": {}, "eval": {}}}
        steps = [one.step for one in found]
        self.store.commit(Changes(gone_groups=gone, gone_steps=steps, values={"folded": folded}), {})

    def report(self, age: float = 0.0, **values: Any) -> None:
        """Write progress.json, as old as this."""
        shown = progress(self.last, self.config.trainer.max_steps) | values
        replace(self.config.output / "progress.json", json.dumps({"time": time.time() - age} | shown) + "\n")

    def _row(
        self, state: GroupState, group: ScoredGroup | None = None, step: int | None = None, **fields: Any
    ) -> Group:
        ordinal, self._next = self._next, self._next + 1
        example = ExampleRef(group.environment if group else "sums", ordinal % 50, f"key{ordinal}")
        row = Group(ordinal, example, 1000 + ordinal, self._size, max(0, self.last - 2), None, state)
        row.attempt, row.outcome = 1 + fields.pop("failures", 0), AttemptOutcome.OPEN
        row.failures = row.attempt - 1
        if group is not None:
            row.arrival, self._arrivals = self._arrivals, self._arrivals + 1
            row.oldest_version, row.step = group.oldest_version, step
        elif state is GroupState.ISSUED:
            row.holder = "rollout-0"
        for name, value in fields.items():
            setattr(row, name, value)
        return row

    def _trainers_values(self, step: int) -> dict[str, float]:
        rng = np.random.default_rng([step, len(self.config.name), ord(self.config.name[0])])
        falling = math.exp(-step / LEARNED)
        return {
            "loss": 0.1 * float(rng.normal()),
            "entropy": 0.6 + 1.4 * falling + 0.03 * float(rng.normal()),
            "grad_norm": 0.4 + falling + 0.1 * float(rng.random()),
            "mismatch_kl": 1e-4 * float(rng.random()),
            "learning_rate": 1e-5 * (1 - step / 200),
            "tokens": 3000.0 + 400 * float(rng.random()),
            "seconds_wait_batch": 0.4 + 0.2 * float(rng.random()),
            "seconds_forward_backward": 1.1 + 0.1 * float(rng.random()),
            "seconds_publish": 0.08 + 0.02 * float(rng.random()),
            "time": 1.79e9 + 2.0 * step,
        }


def policy(version: int) -> PolicyVersion:
    """The policy of a version."""
    return PolicyVersion(lineage=1, version=version)


def progress(step: int, max_steps: int) -> dict[str, Any]:
    """The packer's progress of a run that waits for sampling."""
    return {
        "phase": "running", "step": step, "max_steps": max_steps, "reward": 0.7, "entropy": 0.9, "lag": 1.0,
        "steps_without_variance": 0, "steps_without_gradient": 0, "seconds_per_step": 2.0, "evals": {}, "issued": 14,
        "settled": 1, "composed": 0, "tokens_per_second": 1510.0, "idle": 0.31, "missing": [], "eval_open": 0,
        "peers": {"rollout": 1, "reward": 1, "inference": 1, "trainer": 1},
        "dropped": {"stale": 2}, "failed_attempts": 1, "num_issued": 120,
        "last_failure": "example 3: timeout", "failure": "",
        "unwritten": [], "packer": "packer-0", "seconds": 81.0, "served": step, "durable": step - step % 10,
        "queues": {"sampling": [14, 16], "scoring": [0, 8], "scored": [1, 12], "packed": [0, 6], "batches": [0, 2]},
        "means": {"sampling": 14.8, "scoring": 0.4, "scored": 0.8, "packed": 0.1}, "engine_slots": 0, "engine_load": 0,
        "lease": 3.0, "restarts": {}, "reissued": 1, "notes": [],
        "actors": [
            {"name": "trainer-0", "kind": "trainer", "age": 0.3, "phase": "running", "next_step": step + 1},
            {"name": "inference-0", "kind": "inference", "age": 0.2, "phase": "running", "engine": "serving",
             "version": step, "load": 56, "error": ""},
            {"name": "reward-0", "kind": "reward", "age": 0.4, "phase": "running", "load": 0},
            {"name": "rollout-0", "kind": "rollout", "age": 0.1, "phase": "running", "holds": 14, "free_slots": 2},
        ],
        "settings": {
            "rollout.max_concurrent_groups": 16, "reward.max_concurrent_groups": 8, "reward.timeout": 60.0,
            "packer.groups_per_step": 3, "packer.order": "ordinal", "packer.max_async_level": 1,
            "packer.oversampling_factor": 1.0, "trainer.num_ranks": 1, "bus.control": "ipc",
        },
    }  # fmt: skip


def record_values(config: RunConfig, messages: Sequence[ScoredGroup], step: int, num_groups: int) -> None:
    """Record the values per token of a step's first groups, as its trainer does, with logprobs near the engine's.

    The writer and the loss are the trainer's own; `trainers_logprobs` stands in for the model.
    """
    import torch

    from actors.algorithms.batches import batches_of_step
    from actors.algorithms.losses import compute_loss
    from actors.algorithms.losses.inputs import LossInputs
    from actors.learner.token_details import TokenDetailsWriter
    from schemas.messages import drop_fields

    header = {"run": "made", "term": 0, "incarnation": 0, "step": step, "digests": [""] * len(messages)}
    for batch in batches_of_step(messages, config, **header, **drop_fields(())):
        writer = TokenDetailsWriter(config.output, num_groups, config.trainer.loss.type)
        for number in range(len(batch.micro_batch_offsets) - 1):
            first, last = batch.micro_batch_offsets[number : number + 2].tolist()
            starts = (batch.sample_offsets[first:last] + batch.prompt_lengths[first:last]).tolist()
            behind = [slice(*pair) for pair in zip(starts, batch.sample_offsets[first + 1 : last + 1], strict=True)]
            lengths = torch.tensor([one.stop - one.start for one in behind])

            def joined(values: Any, behind: list[slice] = behind) -> Any:
                return torch.from_numpy(np.concatenate([values[one] for one in behind]))

            logprobs_T = joined(trainers_logprobs(batch.token_ids, batch.logprobs))
            inputs = LossInputs(
                logprobs_T,
                joined(batch.logprobs),
                joined(batch.advantages),
                joined(batch.loss_mask).bool(),
                torch.repeat_interleave(torch.arange(last - first), lengths),
                last - first,
                float(batch.loss_tokens.sum()),
                entropy_T=-2 * logprobs_T,
            )
            writer.record(batch, number, inputs, compute_loss(inputs, config.trainer).tokens)
        writer.write(batch)
        writer.close()


def trainers_logprobs(token_ids: Any, logprobs: Any) -> Any:
    """Return logprobs that depend on token and engine's logprob alone: 0.3 more or less, and for some tokens 3 less."""
    moved = np.where(token_ids % 2 == 0, 0.3, -0.3) - np.where(token_ids % 11 == 0, 3.0, 0.0)
    return np.minimum(logprobs + moved, -1e-3).astype(np.float32)
