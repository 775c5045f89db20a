"""One rank's model and optimizer: a `StepBatch` in, an updated policy out.

Weights and optimizer state are float32 where they are trained; with `model.dtype: bfloat16` the computation runs under
autocast, and what is published is rounded to bfloat16, so that an engine computes with what it serves.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor, nn

from actors.algorithms import chord
from actors.algorithms.entropy import EntropyControl, acting_coef, controlled
from actors.algorithms.losses import LossInputs, compute_loss
from actors.algorithms.losses.metrics import metrics_of
from actors.algorithms.mismatch import judged, mismatch_sums
from actors.algorithms.schedules import learning_rate
from actors.faults import point
from actors.policy import attention, formats, loading
from actors.policy.chosen import ChosenLogprobs
from actors.policy.frozen import NONE, FixedLogprobs, FrozenModels
from actors.policy.micro_batches import MicroBatch, filled, micro_batch
from actors.policy.optimizer import make_optimizer
from actors.policy.ranks import ALONE, Ranks
from actors.policy.shards import clip_gradients
from actors.policy.snapshots import (
    Snapshot,
    control_snapshot,
    optimizer_snapshot,
    restore_optimizer,
    restored_control,
)
from actors.policy.supervised import SupervisedExamples
from bus.weights import Weights
from schemas.config import RunConfig
from schemas.config.model import ModelConfig
from schemas.config.objective import ObjectiveConfig
from schemas.errors import RunFailedError
from schemas.messages import StepBatch

log = structlog.get_logger("learner")


class Learner(Protocol):
    """What the trainer actor drives. `TorchLearner` is the real one, `actors.policy.fake.FakeLearner` its double."""

    def step(self, batch: StepBatch, ranks: Ranks, before: Sequence[StepBatch] = ()) -> dict[str, float]:
        """Train one step together with the other ranks; returns what was measured, under the reporter's keys.

        Args:
            batch: of this rank.
            ranks: the others.
            before: batches of lower ranks that this process stands for as well: a replay has those of the whole gang.
        """
        ...

    def weights(self) -> Weights:
        """The current policy, to be published."""
        ...

    def snapshot(self) -> Snapshot:
        """All that a checkpoint holds: the model in its public format, and `trainer/` to go on from."""
        ...

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        ...

    def enter(self, ranks: Ranks, shall_wait: Callable[[], object]) -> None:
        """The gang is whole, and what was to be restored has been: a learner with shards takes its own.

        Args:
            ranks: this one among all.
            shall_wait: called in a thread while others are waited for; raises when the gang shall not wait any more.
        """
        ...

    def assist(self) -> None:
        """On other ranks than 0: lend shards for what rank 0 publishes and saves, until it dismisses this rank."""
        ...

    def dismiss(self) -> None:
        """On rank 0: it has published and saved what there was."""
        ...


@dataclass(frozen=True)
class _RankStep:
    """One rank's part of a step: its batch, and by micro-batch the logprobs that no update of the step changes."""

    batch: StepBatch
    fixed: Mapping[int, FixedLogprobs]


@dataclass(frozen=True)
class _Gradients:
    """What the gradients of one update tell, summed over all ranks."""

    loss: float
    norm: float
    sums: Mapping[str, float]
    mismatch_max: float

    @property
    def finite(self) -> bool:
        """Whether the weights may be updated with them."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class TorchLearner:
    """A transformers model, full fine-tuning or LoRA; on several ranks each has all of it (data parallel)."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        torch.manual_seed(config.seed)
        self._dtype = loading.TORCH_DTYPES[config.model.dtype]
        self._device = loading.device_of(config.model)
        lora = config.model.lora
        base_dtype = torch.float32 if lora is None else self._dtype
        kernel = attention.implementation(config.model, self._device)
        self.model: nn.Module = loading.load_model(self._loaded_as(config.model), base_dtype, attention=kernel)
        if lora is not None:
            self.model = loading.add_lora(self.model, lora)
        if config.model.gradient_checkpointing:
            loading.checkpoint_gradients(self.model, config.model)
        if config.model.compile:
            loading.compile_layers(self.model)
        self.model.train()
        self._chosen = ChosenLogprobs(self.model)
        self._trainable = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(self.model, config.trainer)
        self._frozen = FrozenModels(config, self._chosen, self._autocast)
        sft = config.trainer.sft
        self._supervised = SupervisedExamples(config, sft, self._chosen, self._autocast) if sft else None
        self._entropy_control = EntropyControl(config.trainer.entropy_coef)
        self._mismatch_cause = ""

    def step(self, batch: StepBatch, ranks: Ranks = ALONE, before: Sequence[StepBatch] = ()) -> dict[str, float]:
        """An optimizer update per minibatch and iteration, the minibatches in their order in each iteration.

        Every random number of an update follows from the run's seed, the step, the rank and its place in the step, so a
        step can be replayed. Gradients that are not finite are computed once again: a fault of the machine passes, one
        of the run stays.

        Raises:
            FloatingPointError: they are not finite the second time either. They have not been applied; those of the
            updates before it in this step have, so what is in memory now is no version of the policy.
            RunFailedError: trainer and engine differ by more than `trainer.mismatch.stop`; nothing has been applied.
        """
        started = time.perf_counter()
        num_updates = self._config.trainer.num_iterations * batch.num_minibatches
        rate = learning_rate(batch.step, self._config.trainer)
        parts = [_RankStep(each, self._fixed(each, num_updates > 1)) for each in (*before, batch)]
        updates, seconds_optimizer = [], 0.0
        for update in range(num_updates):
            updates.append(self._finite_gradients(parts, ranks, update, num_updates))
            if update == 0:  # the others are of weights that no engine has sampled from
                self._watch_mismatch(batch.step, updates[0].sums)
            computed = time.perf_counter()
            self._apply(rate)
            seconds_optimizer += time.perf_counter() - computed
        measured = self._measured(updates, rate)
        self._control_entropy(measured)
        return measured | {
            "torch_threads": float(torch.get_num_threads()),
            "seconds_forward_backward": time.perf_counter() - started - seconds_optimizer,
            "seconds_optimizer": seconds_optimizer,
        }

    def _watch_mismatch(self, step: int, sums: Mapping[str, float]) -> None:
        if self._config.inference.engine.type == "fake":
            return
        found = judged(sums, self._config.trainer.mismatch)
        if found is not None and found.stops:
            raise RunFailedError(f"step {step}: {found.words}")
        cause = found.cause if found is not None else ""
        if found is not None and cause != self._mismatch_cause:
            log.warning("trainer and engine differ", step=step, cause=cause, detail=found.words)
        self._mismatch_cause = cause

    def enter(self, ranks: Ranks, shall_wait: Callable[[], object]) -> None:
        """Nothing to share out."""

    def assist(self) -> None:
        """Rank 0 has all there is."""

    def dismiss(self) -> None:
        """Nobody assists."""

    # --- what shards change, see `actors.policy.sharding` --------------------------------------------------------

    def _loaded_as(self, model: ModelConfig) -> ModelConfig:
        return model

    def _fixed(self, batch: StepBatch, with_old: bool) -> Mapping[int, FixedLogprobs]:
        return self._frozen.logprobs(batch, with_old)

    def _keep_pace(self, batch: StepBatch, minibatch: int) -> None:
        """For other ranks, which have more micro-batches with samples: nothing is shared with them here."""

    def _sum(self, ranks: Ranks, gradients: Sequence[Tensor]) -> None:
        ranks.sum(gradients)

    # --- a step --------------------------------------------------------------------------------------------------

    def _finite_gradients(self, parts: Sequence[_RankStep], ranks: Ranks, update: int, num_updates: int) -> _Gradients:
        batch = parts[-1].batch
        gradients = self._gradients(parts, ranks, update)
        if gradients.finite:
            return gradients
        found = {"loss": gradients.loss, "grad_norm": gradients.norm}
        log.warning("step computed again", step=batch.step, update=update + 1, **found)
        gradients = self._gradients(parts, ranks, update)
        if gradients.finite:
            return gradients
        self._optimizer.zero_grad(set_to_none=True)
        place = f" (update {update + 1} of {num_updates})" if num_updates > 1 else ""
        raise FloatingPointError(
            f"step {batch.step}{place}: loss {gradients.loss}, gradient norm {gradients.norm}, twice; its groups are "
            f"{batch.ordinals.tolist()}. Look at mismatch_kl and masked_fraction of the steps before; a lower "
            "trainer.learning_rate usually helps (actors rewind goes back to an older checkpoint)"
        )

    def _gradients(self, parts: Sequence[_RankStep], ranks: Ranks, update: int) -> _Gradients:
        """Gradients of one update, on every rank the same, clipped."""
        own: list[Tensor] = []
        messages = []
        for part in parts:  # in the order of ranks, as they are summed where each is a process
            earlier, message = own, self._rank_gradients(part, update)
            messages.append(message)
            own = [gradient for gradient in (parameter.grad for parameter in self._trainable) if gradient is not None]
            for gradient, sum_before in zip(own, earlier, strict=bool(earlier)):
                gradient += sum_before
        point("trainer.gradients")
        self._sum(ranks, own)
        everybody: dict[str, float] = {}
        for message in [*messages[:-1], *ranks.exchange(messages[-1])]:
            _merge(everybody, json.loads(message))
        norm = clip_gradients(self._trainable, self._config.trainer.max_grad_norm)
        mismatch_max, loss = everybody.pop("mismatch_max"), everybody.pop("loss", 0.0)
        return _Gradients(loss, norm, everybody, mismatch_max)

    def _rank_gradients(self, part: _RankStep, update: int) -> bytes:
        """Gradients of one rank's micro-batches, in memory of their own; returns what was measured, as a message."""
        batch, minibatch = part.batch, update % part.batch.num_minibatches
        torch.manual_seed(update_seed(self._config.seed, batch.step, update, batch.rank))
        self._optimizer.zero_grad(set_to_none=True)
        measured: dict[str, float] = {"mismatch_max": 0.0}
        for number in filled(batch, minibatch):
            _merge(measured, self._backward(part, minibatch, number))
        self._keep_pace(batch, minibatch)
        if self._supervised and self._mu(batch.step):
            _merge(measured, self._supervised.backward(batch, minibatch, self._mu(batch.step)))
        for parameter in self._trainable:
            if parameter.grad is None:  # this rank had no sample that reaches it
                parameter.grad = torch.zeros_like(parameter)
        return json.dumps(measured).encode()

    def _backward(self, part: _RankStep, minibatch: int, number: int) -> dict[str, float]:
        """Gradients of one micro-batch; returns its share of the loss, metric sums, and the largest mismatch."""
        micro, objective = micro_batch(part.batch, number, self._device), self._objective
        with self._autocast():
            logprobs_T, entropy_T = self._chosen.of(
                micro.row, micro.token_ids_T, micro.temperatures_T, micro.wanted_K, objective.entropy_coef > 0
            )
        inputs = self._inputs(micro, part.fixed.get(number, NONE), part.batch, minibatch, logprobs_T, entropy_T)
        output = compute_loss(inputs, objective)
        # the supervised part of the mixture has a backward pass of its own, see `SupervisedExamples`
        loss = chord.mixed(output.loss, torch.zeros_like(output.loss), self._mu(part.batch.step))
        loss.backward()  # type: ignore[no-untyped-call]
        measured = output.sums | mismatch_sums(inputs)
        measured |= {"loss": loss.detach(), "entropy": inputs.masked(entropy_T.detach()).sum()}
        # one tensor, so that a GPU is waited for once
        return dict(zip(measured, torch.stack([value.double() for value in measured.values()]).tolist(), strict=True))

    @property
    def _objective(self) -> ObjectiveConfig:
        """Of the step under way, or else of the next one: as configured, but for an entropy coefficient that adapts."""
        trainer = self._config.trainer
        if trainer.adaptive_entropy is None:
            return trainer
        return trainer.model_copy(update={"entropy_coef": acting_coef(self._entropy_control, trainer.adaptive_entropy)})

    def _control_entropy(self, measured: Mapping[str, float]) -> None:
        """The coefficient of the next step, on every rank the same; a step without tokens tells nothing of entropy."""
        adaptive = self._config.trainer.adaptive_entropy
        if adaptive is not None and measured["tokens"]:
            self._entropy_control = controlled(self._entropy_control, adaptive, measured["entropy_regularised"])

    def _mu(self, step: int) -> float:
        sft = self._config.trainer.sft
        return chord.mu(step - 1, sft) if sft else 0.0

    def _inputs(
        self,
        micro: MicroBatch,
        fixed: FixedLogprobs,
        batch: StepBatch,
        minibatch: int,
        logprobs_T: Tensor,
        entropy_T: Tensor,
    ) -> LossInputs:
        """Of one micro-batch; what is averaged over is the minibatch, which takes the place of the step."""
        num_micro_batches = int(batch.minibatch_offsets[minibatch + 1] - batch.minibatch_offsets[minibatch])
        return LossInputs(
            logprobs_T=logprobs_T,
            inference_logprobs_T=micro.inference_logprobs_T,
            advantages_T=micro.advantages_T,
            loss_mask_T=micro.loss_mask_T,
            completion_of_T=micro.completion_of_T,
            num_completions=micro.num_completions,
            loss_tokens=int(batch.loss_tokens[minibatch]),
            step_completions=int(batch.num_completions[minibatch]),
            num_micro_batches=num_micro_batches * batch.num_ranks,
            max_completion_length=self._config.rollout.max_tokens,
            old_logprobs_T=fixed.old_T,
            reference_logprobs_T=fixed.reference_T,
            teacher_logprobs_T=fixed.teacher_T,
            entropy_T=entropy_T,
            versions_T=micro.versions_T,
            version=batch.step - 1,
        )

    def _apply(self, rate: float) -> None:
        self._optimizer.set_rate(rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _measured(self, updates: Sequence[_Gradients], rate: float) -> dict[str, float]:
        """Loss and gradient norm are means over the updates, the other metrics means over all that they went over."""
        sums: dict[str, float] = {}
        for update in updates:
            _merge(sums, update.sums)
        return metrics_of(sums) | {
            "loss": sum(update.loss for update in updates) / len(updates),
            "grad_norm": sum(update.norm for update in updates) / len(updates),
            "learning_rate": rate,
            "entropy_coef": self._objective.entropy_coef,
            "updates": float(len(updates)),
            "mismatch_max": max(update.mismatch_max for update in updates),
            # those of the batch, however often it was gone over
            "tokens": sums.get("tokens", 0.0) / self._config.trainer.num_iterations,
        }

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def weights(self) -> Weights:
        """The adapter, or all weights, in the published precision, on the CPU."""
        return formats.weights(self.model, self._config.model)

    def snapshot(self) -> Snapshot:
        """The folder loads with transformers (full) or peft (LoRA); `trainer/` in it holds what else goes on."""
        model = formats.snapshot(self.model, self._config.model)
        return model.with_files(optimizer_snapshot(self._optimizer)).with_files(control_snapshot(self._entropy_control))

    def restore(self, folder: Path) -> None:
        """Weights, optimizer and entropy control as they were saved."""
        formats.restore(self.model, self._loaded_as(self._config.model), folder)
        restore_optimizer(folder, self._optimizer)
        self._entropy_control = restored_control(folder, EntropyControl(self._config.trainer.entropy_coef))


def update_seed(seed: int, step: int, update: int, rank: int) -> int:
    """Of all random numbers of one rank in one update (dropout)."""
    digest = hashlib.sha256(f"{seed} step {step} update {update} rank {rank}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def _merge(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add what one micro-batch, rank or update has measured; of the largest mismatch take the larger."""
    for name, value in part.items():
        before = total.get(name, 0.0)
        total[name] = max(before, value) if name == "mismatch_max" else before + value
