"""Logprobs that no update of a step changes: of the policy before the first update, of the reference, of the teacher.

Under LoRA the reference is the policy without the adapter. Otherwise a second model is read from `model.path` in
`model.dtype`. Restored checkpoints do not change this model, unless it follows the policy (`trainer.reference.sync`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from actors.learner.batch_images import BatchImages
from actors.learner.micro_batches import MicroBatch, dummy_micro_batch, micro_batch, non_empty
from actors.learner.moving_reference import MovingReference
from actors.learner.parallelism import Parallelism
from actors.learner.snapshots import Snapshot
from actors.learner.teacher_server import TeacherServer
from actors.models import loading
from actors.models.attention.row_ranks import RowRanks
from actors.models.heads import check_divides
from actors.models.token_logprobs import TokenLogprobs, as_configured
from actors.models.tokenizer import vocabulary
from actors.models.vision.parts import vision_part
from schemas.config import RunConfig
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError, RunFailedError
from schemas.messages import StepBatch

log = structlog.get_logger("learner")

TEACHER_KEY = "trainer.teacher.path"
"""Configuration key of the teacher, for errors."""
Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class FixedLogprobs:
    """Logprobs of a micro-batch's T completion tokens; None where not needed."""

    old_T: Tensor | None = None
    """Logprobs of the policy before the first update."""
    reference_T: Tensor | None = None
    teacher_T: Tensor | None = None

    @property
    def finite(self) -> bool:
        """True if all logprobs present are finite."""
        found = [values_T for values_T in (self.old_T, self.reference_T, self.teacher_T) if values_T is not None]
        return all(bool(torch.isfinite(values_T).all()) for values_T in found)


NONE = FixedLogprobs()


class ReferenceModels:
    """Reference and teacher, if configured, next to the trained policy.

    Args:
        config: configuration of the run.
        policy: policy, also the reference if the policy has an adapter.
        autocast: context in which the policy computes.
        parallelism: division of the policy over ranks.
        images: features of images from the policy, which are the reference's too while vision tower and projector are
            frozen; None if no batch has images.

    Raises:
        ConfigError: the teacher can't be loaded, or has another vocabulary than the policy.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: TokenLogprobs,
        autocast: Autocast,
        parallelism: Parallelism,
        images: BatchImages | None = None,
    ) -> None:
        self._policy, self._autocast, self._parallelism, self._images = policy, autocast, parallelism, images
        self._device = loading.device_of(config.model)
        self._wants_reference, has_adapter = config.trainer.reference is not None, config.model.lora is not None
        longest = config.packer.sequence_len
        self._reference = _frozen(config.model, longest) if self._wants_reference and not has_adapter else None
        self._moving: MovingReference | None = None
        if self._reference is not None and config.trainer.reference is not None and config.trainer.reference.sync:
            self._moving = MovingReference(self._reference.model, config.model, config.trainer.reference.sync)
        # a part that is trained gives the reference other features than the policy
        self._reference_images: BatchImages | None = None
        if self._wants_reference and config.model.trained_vision:
            self._reference_images = BatchImages((self._reference or policy).model, config.model)
        self._teacher: TokenLogprobs | None = None
        self._teacher_images: BatchImages | None = None
        self._server: TeacherServer | None = None
        server = config.trainer.teacher_server
        if config.trainer.teacher is not None:
            # a teacher is never quantised
            given = config.trainer.teacher.model_dump() | {"quantization": None, "attention": "auto"}
            given |= dict.fromkeys(config.model.trained_vision, False)
            teacher = config.model.model_copy(update=given)
            # token by token: the teacher's logprobs are looked up by the policy's token ids
            check_vocabulary(config.model, teacher)
            if server is None:
                self._teacher = _frozen(teacher, longest, TEACHER_KEY)
                check_divides(self._teacher.model, config.trainer, TEACHER_KEY)
                if vision_part(self._teacher.model) is not None:
                    self._teacher_images = BatchImages(self._teacher.model, teacher)
            else:
                self._server = TeacherServer(server, teacher)

    def divide_rows(self, ranks: RowRanks | None) -> None:
        """Compute rows together with other ranks from now on, as the policy does; None: whole rows."""
        for model in (self._reference, self._teacher):
            if model is not None:
                model.row_ranks = ranks

    def logprobs(self, batch: StepBatch, with_old: bool) -> dict[int, FixedLogprobs]:
        """Return the fixed logprobs of a batch by micro-batch. Infinite or NaN logprobs are computed a second time.

        Args:
            batch: batch of one rank.
            with_old: include the policy's. A step with a single update needs none: the loss computes the same logprobs.
        """
        if not (with_old or self._wants_reference or self._teacher or self._server):
            return {}
        # all samples of the step at once, while no other rank waits in a collective
        taught = self._server.logprobs(batch, self._device) if self._server else {}
        numbers = non_empty(batch)
        found: dict[int, FixedLogprobs] = {}
        for _ in range(2):  # an error of the machine passes, an error of the run stays
            found = {
                number: self.of(
                    self._seen(batch, number, self._policy.model, self._images),
                    with_old,
                    taught.get(number),
                    self._seen_by_reference(batch, number),
                    self._seen_by_teacher(batch, number),
                )
                for number in numbers
            }
            if self._parallelism.sharded:
                # a forward of the policy is a collective, so a rank without samples computes as often as the others
                for _ in range(batch.num_micro_batches - len(numbers)):
                    self.of(dummy_micro_batch(self._device), with_old)
            broken = [number for number, logprobs in found.items() if not logprobs.finite]
            if self._parallelism.agree(not broken):
                break
            log.warning("logprobs computed again", step=batch.step, micro_batches=broken)
        return found

    def follow(self, policy: nn.Module, step: int) -> None:
        """Move the reference towards the policy after a step, if configured. Together with all ranks."""
        if self._moving is not None:
            self._moving.follow(policy, step)

    def snapshot(self) -> Snapshot:
        """Return the files of a checkpoint: weights of a reference that follows the policy, else none."""
        return self._moving.snapshot() if self._moving is not None else Snapshot()

    def restore(self, folder: Path) -> None:
        """Restore the reference from a checkpoint's folder, if it follows the policy."""
        if self._moving is not None:
            self._moving.restore(folder)

    def _seen(self, batch: StepBatch, number: int, model: nn.Module, images: BatchImages | None) -> MicroBatch:
        """Return a micro-batch whose images have the features of a model, without gradient and dropout."""
        with without_dropout(model), torch.no_grad():
            return micro_batch(batch, number, self._device, images=images)

    def _seen_by_reference(self, batch: StepBatch, number: int) -> MicroBatch | None:
        """Return a micro-batch with the reference's features of images; None if they are the policy's."""
        if self._reference_images is None or not batch.images:
            return None
        if self._reference is not None:
            return self._seen(batch, number, self._reference.model, self._reference_images)
        adapted: Any = self._policy.model
        with adapted.disable_adapter():
            return self._seen(batch, number, adapted, self._reference_images)

    def _seen_by_teacher(self, batch: StepBatch, number: int) -> MicroBatch | None:
        """Return a micro-batch with the teacher's features of images; None if there is no teacher, or no image.

        Raises:
            RunFailedError: the teacher has no vision tower.
        """
        if self._teacher is None or not batch.images:
            return None
        if self._teacher_images is None:
            raise RunFailedError(
                f"step {batch.step}: {TEACHER_KEY} has no vision tower, and the batch has images; name a "
                "vision-language model as teacher, or leave out the rows with images"
            )
        return self._seen(batch, number, self._teacher.model, self._teacher_images)

    def of(
        self,
        micro: MicroBatch,
        with_old: bool,
        teacher_T: Tensor | None = None,
        by_reference: MicroBatch | None = None,
        by_teacher: MicroBatch | None = None,
    ) -> FixedLogprobs:
        """Return the fixed logprobs of a micro-batch.

        Args:
            micro: the micro-batch.
            with_old: include the policy's.
            teacher_T: logprobs of a teacher that is served elsewhere.
            by_reference: the micro-batch with the reference's features of images. None: it has the same features.
            by_teacher: the micro-batch with the teacher's features of images. None: it has no images.
        """
        by_reference, by_teacher = by_reference or micro, by_teacher or micro
        old_T = logprobs_without_gradient(self._policy, micro, self._autocast) if with_old else None
        reference_T = None
        if self._reference is not None:
            reference_T = logprobs_without_gradient(self._reference, by_reference)
        elif self._wants_reference:
            # under LoRA the base model is the reference, so no second model is loaded
            adapted: Any = self._policy.model
            with adapted.disable_adapter():
                reference_T = logprobs_without_gradient(self._policy, by_reference, self._autocast)
        if self._teacher is not None:
            teacher_T = logprobs_without_gradient(self._teacher, by_teacher)
        return FixedLogprobs(old_T, reference_T, teacher_T)


def logprobs_without_gradient(chosen: TokenLogprobs, micro: MicroBatch, autocast: Autocast = nullcontext) -> Tensor:
    """Return (T,) logprobs of completion tokens at sampling temperature, without dropout; 0 outside the loss mask."""
    with without_dropout(chosen.model), torch.no_grad(), autocast():
        return chosen.of(micro.row, micro.token_ids_T, micro.temperatures_T, micro.wanted_K)[0]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch a model to eval mode for the block."""
    # the mode is put back even after an error: gradient checkpointing works in training mode alone
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def check_vocabulary(model: ModelConfig, teacher: ModelConfig) -> None:
    """Compare the vocabularies of policy and teacher. Sizes of padded embeddings may differ.

    Raises:
        ConfigError: the vocabularies differ; names the first such token.
    """
    ours, theirs = vocabulary(model), vocabulary(teacher, TEACHER_KEY)
    if ours != theirs:
        token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"{TEACHER_KEY}: {teacher.path} has another vocabulary than model.path {model.path}: token {token!r} is "
            f"{theirs.get(token, 'missing')} there and {ours.get(token, 'missing')} here; a teacher shares the "
            "tokenizer of the policy"
        )


def _frozen(config: ModelConfig, sequence_len: int, key: str = "model.path") -> TokenLogprobs:
    model = loading.load_model(config, loading.TORCH_DTYPES[config.dtype], key=key)
    return as_configured(model.requires_grad_(False).eval(), config, sequence_len)
