"""Values per token of some groups of each step, as the trainer has computed them, in files below output_dir.

Consumes arrays that a step computes anyway, and keeps references to them: nothing is added to the step's work, and
nothing waits for the device. After the step, when the device has been waited for, they are copied and a thread writes
them. If the disk is slower than the steps, whole steps are left out.

`tokens/step_000041.rank0.safetensors` has the arrays below, of the samples of this rank, joined. Axes: B samples, T
tokens behind the prompts.

    ordinals_B, completions_B       group, and completion among all of the step, of each sample
    offsets_B                       start of each sample in T, and T
    token_ids_T, versions_T         −1 as version: not written by a model, but by an environment
    loss_mask_T
    inference_logprobs_T            of the engine; NaN: unknown
    logprobs_T                      of the trainer, before the step's update
    old_logprobs_T, reference_logprobs_T, teacher_logprobs_T        where the objective has them
    advantages_T, entropy_T, ratio_T
    values_T                        loss of the token before the average
    loss_T                          part of the token in the step's loss, so values_T over a divisor
    rule/NAME_T                     1: the rule masks or clips the token

Values of tokens outside the loss mask mean nothing.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from actors.algorithms.losses import LossInputs
from actors.algorithms.losses.average import token_shares
from actors.algorithms.losses.inputs import TokenDetails
from actors.telemetry.token_files import FOLDER, NAME, name_of
from bus import threads
from schemas.messages import StepBatch

log = structlog.get_logger("learner")

MAX_BYTES = 256 << 20
"""Bytes of a rank's files, above which the files of the oldest steps are removed."""
FURTHER = ("old_logprobs_T", "reference_logprobs_T", "teacher_logprobs_T", "entropy_T")
"""Arrays of `LossInputs` that not every objective has."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Kept:
    """Values computed for a micro-batch with a chosen group."""

    inputs: LossInputs
    tokens: TokenDetails | None


class TokenDetailsWriter:
    """Writer of the values per token of one rank.

    Args:
        output: output_dir of the run.
        num_groups: groups of each step, the first ones.
        loss: type of the loss, for readers.
    """

    def __init__(self, output: Path, num_groups: int, loss: str) -> None:
        self._folder, self._num_groups, self._loss = output / FOLDER, num_groups, loss
        self._kept: dict[int, _Kept] = {}
        """By number of the micro-batch."""
        self._files: _RankFiles | None = None
        """Made by the thread that writes."""
        self._pool = threads.Workers(1, "tokens")
        self._running: Future[None] | None = None

    def record(self, batch: StepBatch, number: int, inputs: LossInputs, tokens: TokenDetails | None) -> None:
        """Keep the arrays of a micro-batch that has samples of the chosen groups; no others.

        A micro-batch that is computed again replaces its values.
        """
        first, last = batch.micro_batch_offsets[number : number + 2]
        if _are_of(batch.sample_ordinals[first:last], batch.ordinals[: self._num_groups]).any():
            self._kept[number] = _Kept(inputs.detached(), tokens)

    def write(self, batch: StepBatch) -> None:
        """Write what was kept, in the background. After the step, when its values are there."""
        kept, self._kept = self._kept, {}
        if not kept:
            return
        if self._running is not None:
            if not self._running.done():
                log.warning("values of tokens left out: the disk is slower than the steps", step=batch.step)
                return
            if (error := self._running.exception()) is not None:
                log.warning("values of tokens not written", folder=str(self._folder), detail=str(error))
        arrays = arrays_of(batch, kept, batch.ordinals[: self._num_groups])
        details = next(iter(kept.values())).tokens
        facts = {
            "step": str(batch.step),
            "loss": self._loss,
            "average": details.average if details is not None else "",
            "loss_tokens": str(batch.loss_tokens.tolist()),
        }
        self._running = self._pool.submit(self._save, batch.step, batch.rank, arrays, facts)

    def close(self) -> None:
        """Wait for the write under way."""
        self._pool.shutdown(wait=True)

    def _save(self, step: int, rank: int, arrays: Arrays, facts: Mapping[str, str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._files is None:
            self._files = _RankFiles(self._folder, rank)
        staging = self._folder / f".{name_of(step, rank)}"
        save_file(arrays, staging, dict(facts))
        self._files.add(step, staging)


class _RankFiles:
    """Files of one rank, of MAX_BYTES at most, or one.

    The folder is read once, since that of a long run has tens of thousands of files.

    Args:
        folder: folder of the files.
        rank: the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        steps = sorted(int(name[1]) for path in folder.iterdir() if (name := NAME.fullmatch(path.name)))
        paths = {step: folder / name_of(step, rank) for step in steps}
        self._sizes = {step: path.stat().st_size for step, path in paths.items() if path.exists()}
        """Bytes by step, those written longest ago first."""
        self._num_bytes = sum(self._sizes.values())

    def add(self, step: int, staging: Path) -> None:
        """Give a file the name of its step, in the place of an older file of this step, and remove the oldest files."""
        size = staging.stat().st_size
        staging.replace(self._folder / name_of(step, self._rank))
        self._num_bytes += size - self._sizes.pop(step, 0)
        self._sizes[step] = size
        while self._num_bytes > MAX_BYTES and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            (self._folder / name_of(oldest, self._rank)).unlink(missing_ok=True)
            self._num_bytes -= self._sizes.pop(oldest)


def arrays_of(batch: StepBatch, kept: Mapping[int, Any], ordinals: NDArray[np.int64]) -> Arrays:
    """Return the arrays of the module's docstring, of the samples of these groups.

    Args:
        batch: batch of the rank.
        kept: values of micro-batches by number.
        ordinals: the groups.
    """
    pieces: list[Arrays] = []
    for number in sorted(kept):
        first, last = (int(i) for i in batch.micro_batch_offsets[number : number + 2])
        lengths_B = np.diff(batch.sample_offsets[first : last + 1]) - batch.prompt_lengths[first:last]
        chosen_B = _are_of(batch.sample_ordinals[first:last], ordinals)
        sizes = lengths_B[chosen_B]
        # places of the tokens, in the batch and among the micro-batch's tokens behind prompts
        behind = _places((batch.sample_offsets[first:last] + batch.prompt_lengths[first:last])[chosen_B], sizes)
        place = _places((np.cumsum(lengths_B) - lengths_B)[chosen_B], sizes)
        pieces.append(
            {
                "ordinals_B": batch.sample_ordinals[first:last][chosen_B],
                "completions_B": batch.completions[first:last][chosen_B],
                "sizes_B": sizes,
                "token_ids_T": batch.token_ids[behind],
                "versions_T": batch.versions[behind],
                "loss_mask_T": batch.loss_mask[behind],
                "inference_logprobs_T": batch.logprobs[behind],
            }
            | {name: array[place] for name, array in _values_of(kept[number]).items()}
        )
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    return joined | {"offsets_B": np.cumsum([0, *joined.pop("sizes_B")]).astype(np.int64)}


def _are_of(ordinals_B: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which samples are of these groups; `numpy.isin` takes longer for the few of a micro-batch."""
    return np.asarray((ordinals_B[:, None] == groups).any(axis=1))


def _places(starts: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of ranges, one behind the other."""
    return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())


def _values_of(kept: _Kept) -> Arrays:
    """Return what the trainer has computed for each token of a micro-batch, on the CPU."""
    inputs, tokens = kept.inputs, kept.tokens
    found: dict[str, Tensor | None] = {"logprobs_T": inputs.logprobs_T, "advantages_T": inputs.advantages_T}
    found |= {name: getattr(inputs, name) for name in FURTHER}
    if tokens is not None:
        found |= {"ratio_T": tokens.ratio_T, "values_T": tokens.values_T}
        # as the loss has them: a KL in the reward and a teacher's weights are in it
        found["advantages_T"] = tokens.inputs.advantages_T
        found["loss_T"] = token_shares(tokens.inputs, tokens.values_T, tokens.average)
        found |= {f"rule/{name}_T": flags_T & tokens.inputs.loss_mask_T for name, flags_T in tokens.rules.items()}
    return {name: _plain(values_T) for name, values_T in found.items() if values_T is not None}


def _plain(values_T: Tensor) -> NDArray[Any]:
    values_T = values_T.cpu()
    return values_T.float().numpy() if values_T.is_floating_point() else values_T.numpy().astype(np.uint8)
