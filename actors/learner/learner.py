"""Model and optimizer of one rank: takes a `StepBatch`, returns measurements, and holds the updated policy.

Trained weights and optimizer state are float32. With `model.dtype: bfloat16` trainer and engine compute in bfloat16. In
full training the float32 weights are rounded for the computation: by `MasterWeights`, or while shards are gathered.
Adapters are computed under autocast, over a frozen base in bfloat16.

    step     fixed logprobs ─▶ update 1, 2, … (one per minibatch and iteration) ─▶ metrics
    update   micro-batches: forward, loss, backward ─▶ sum over ranks ─▶ clip ─▶ optimizer
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from actors.algorithms import chord
from actors.algorithms.advantages.tokens import reward_discount
from actors.algorithms.entropy import EntropyControl, acting_coef, controlled
from actors.algorithms.losses import CustomLoss, LossInputs, compute_loss
from actors.algorithms.losses.average import token_normaliser
from actors.algorithms.losses.components import Component, mixed_loss
from actors.algorithms.losses.distillation import at_step
from actors.algorithms.losses.metrics import metrics_of
from actors.algorithms.mismatch import judged, mismatch_sums
from actors.algorithms.schedules import learning_rate
from actors.learner import formats, reference_kl
from actors.learner.batch_images import BatchImages
from actors.learner.devices import Stopwatch
from actors.learner.master_weights import MasterWeights
from actors.learner.micro_batches import MicroBatch, dummy_micro_batch, micro_batch, non_empty
from actors.learner.optimizer import make_optimizer
from actors.learner.parallelism import DataParallel, Parallelism
from actors.learner.prefetch import prefetched
from actors.learner.ranks import SINGLE_RANK, Ranks
from actors.learner.reference_models import NONE, FixedLogprobs, ReferenceModels
from actors.learner.shards import clip_gradients
from actors.learner.snapshots import (
    Snapshot,
    control_snapshot,
    optimizer_snapshot,
    restore_optimizer,
    restored_control,
)
from actors.learner.supervised import SupervisedExamples
from actors.learner.token_details import TokenDetailsWriter
from actors.models import attention, loading, router_replay, shared_base, token_logprobs
from actors.models.determinism import is_inexact, make_deterministic
from actors.models.heads import check_divides
from actors.process.fault_points import point
from bus.weights import Weights
from schemas.config import RunConfig
from schemas.config.objective import ObjectiveConfig
from schemas.errors import ConfigError, RunFailedError
from schemas.messages import StepBatch

log = structlog.get_logger("learner")

WEIGHTS, SNAPSHOT = b"weights", b"snapshot"
"""Requests of rank 0 to the other ranks, to take part in gathering."""


@dataclass(frozen=True)
class _RankStep:
    """One rank's part of a step: the batch, and by micro-batch the logprobs that no update of the step changes."""

    batch: StepBatch
    fixed: Mapping[int, FixedLogprobs]


@dataclass(frozen=True)
class _Gradients:
    """Results of computing the gradients of one update, summed over all ranks."""

    loss: float
    norm: float
    """Global norm before clipping."""
    sums: Mapping[str, float]
    """Sums of metrics by name."""
    mismatch_max: float

    @property
    def finite(self) -> bool:
        """True if loss and norm are finite, so that the update may be applied."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class TorchLearner:
    """Learner with a transformers model, full fine-tuning or LoRA.

    Args:
        config: configuration of the run.
        custom_loss: function at `trainer.loss.path`, for a loss of type `custom`.
        parallelism: division of the model over ranks. None: each rank has the whole model.
        shares_base: True to hold the base in memory that engines map (`up.share_base`).

    Raises:
        ConfigError: the model, adapter, optimizer, teacher or supervised data can't be loaded.
    """

    def __init__(
        self,
        config: RunConfig,
        custom_loss: CustomLoss | None = None,
        parallelism: Parallelism | None = None,
        shares_base: bool = False,
    ) -> None:
        self._config, self._custom_loss = config, custom_loss
        self._parallelism: Parallelism = parallelism or DataParallel()
        torch.manual_seed(config.seed)  # equal initial adapters on all ranks
        self._dtype = loading.TORCH_DTYPES[config.model.dtype]
        self._device = loading.device_of(config.model)
        if config.trainer.deterministic:
            make_deterministic(self._device)
        self._shares_base = shares_base
        self._routing: router_replay.Routing | None = None
        self.model = self._load()
        check_divides(self.model, config.trainer)
        self._masters = MasterWeights(self.model, self._load_masters())
        # before any sharding: the transform of the logits is probed on whole weights
        self._token_logprobs = token_logprobs.as_configured(self.model, config.model, config.packer.sequence_len)
        self._trainable = [p for p in self.trained.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(self.trained, config.trainer)
        self._restored_from: Path | None = None
        """Folder of the checkpoint that `join` restores."""
        self._images = BatchImages(self.model, config.model)
        self._reference_models = ReferenceModels(
            config, self._token_logprobs, self._autocast, self._parallelism, self._images
        )
        sft = config.trainer.sft
        self._supervised = (
            SupervisedExamples(config, sft, self._token_logprobs, self._autocast, self._images) if sft else None
        )
        self._entropy_control = EntropyControl(config.trainer.entropy_coef)
        self._mismatch_cause = ""
        self.details: TokenDetailsWriter | None = None
        """Writer of values per token; None: they are not recorded."""
        self._watch = Stopwatch(self._device)
        """Stopwatch of the step under way."""

    def _load(self) -> nn.Module:
        """Return the policy as it is trained. The order of the changes matters."""
        config = self._config.model
        base_dtype = self._dtype
        if self._parallelism.sharded and config.lora is None:
            # mapped from the files as they are, on each rank: `join` makes float32 masters of this rank's part alone
            base_dtype = loading.stored_dtype(config.path) or torch.float32
        kernel = attention.implementation(config, self._device)
        loaded_as = config.model_copy(update={"device": "cpu"}) if self._shares_base else config
        model = loading.load_model(self._parallelism.loaded_as(loaded_as), base_dtype, attention=kernel)
        if self._shares_base:
            # kept: other processes can't map a block that is freed
            self._base = shared_base.share(model, self._device, self._config.output)
        if not config.dropout:
            loading.switch_off_dropout(model)
        if config.lora is not None:
            model = loading.add_lora(model, config)  # after the switch: model.lora.dropout stays on
            if self._config.inference.engine.has_server:
                _check_served(loading.adapter_tensors(model))
        if self._config.trainer.router_replay:
            self._routing = router_replay.install(model)
        if config.gradient_checkpointing:
            loading.checkpoint_gradients(model, config)
        if config.compile:
            loading.compile_layers(model)
        return model.train()

    def _load_masters(self) -> nn.Module | None:
        """Return the policy in float32 for `MasterWeights`; None if the weights are trained as they are."""
        config = self._config.model
        if self._parallelism.sharded or config.lora is not None or self._dtype is torch.float32:
            return None
        # never run, so any attention will do
        return loading.load_model(config, torch.float32, attention=attention.PADDED)

    @property
    def trained(self) -> nn.Module:
        """Model with the float32 weights that are trained, saved and restored."""
        return self._masters.model

    def restore(self, folder: Path) -> None:
        """Restore weights, optimizer, reference and entropy control from a checkpoint. Call before `join`."""
        self._entropy_control = restored_control(folder, EntropyControl(self._config.trainer.entropy_coef))
        self._reference_models.restore(folder)
        if self._parallelism.sharded:
            # weights and state would be three times the model on each rank: `join` restores this rank's part alone
            self._restored_from = folder
        else:
            self._restore_weights(folder)
            restore_optimizer(folder, self._optimizer)

    def _restore_weights(self, folder: Path) -> None:
        formats.restore(self.trained, self._parallelism.loaded_as(self._config.model), folder)
        self._masters.round()

    def join(self, ranks: Ranks, shall_wait: Callable[[], object]) -> None:
        """Join the other ranks. With a sharded model, keep this rank's part of weights and optimizer state."""
        self._parallelism.join(self.model, self._device, self._dtype, ranks, shall_wait)
        self._token_logprobs.row_ranks = self._parallelism.policy_row_ranks
        self._reference_models.divide_rows(self._parallelism.row_ranks)
        if self._parallelism.sharded:
            # spread parameters are new objects, so the optimizer is made again; its state comes from the checkpoint
            self._trainable = [p for p in self.model.parameters() if p.requires_grad]
            self._optimizer = make_optimizer(self.model, self._config.trainer)
            if self._restored_from is not None:
                self._restore_weights(self._restored_from)
                restore_optimizer(self._restored_from, self._optimizer)

    def warm_up(self) -> None:
        """Compute a made-up row of `packer.sequence_len` tokens, forward and backward. Nothing is updated.

        Random numbers need no care: each update seeds its own.
        """
        length = self._config.packer.sequence_len
        sample_len = min(length, self._config.rollout.max_tokens + 1)  # no longer than the model's positions
        with self._parallelism.watched():
            self._compute_in_vain(dummy_micro_batch(self._device, length // sample_len, sample_len))
        self._optimizer.zero_grad(set_to_none=True)

    def release_memory(self) -> None:
        """Give the memory of activations back, which torch keeps for the next step. Weights and optimizer stay."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def inexact(self) -> str:
        """Reason why a step that is computed again may have other bits; empty if it has the same."""
        if is_inexact(self._device):
            return "computed on a GPU without trainer.deterministic"
        if self._config.trainer.teacher_server is not None:
            return "a server computed the teacher's logprobs"
        return "layers were compiled (model.compile)" if self._config.model.compile else ""

    # --- a step --------------------------------------------------------------------------------------------------

    def step(self, batch: StepBatch, ranks: Ranks = SINGLE_RANK, before: Sequence[StepBatch] = ()) -> dict[str, float]:
        """Apply an optimizer update per minibatch and iteration; each iteration takes the minibatches in order.

        All random numbers of an update follow from the run's seed, the step, the rank and the place in the step, so a
        step can be replayed. Gradients that are not finite are computed a second time: an error of the machine passes,
        an error of the run stays.

        Raises:
            FloatingPointError: gradients are not finite the second time either. They have not been applied, but earlier
                updates of this step have, so the weights in memory are no version of the policy.
            RunFailedError: trainer and engine differ by more than `trainer.mismatch.stop`, or the batch's experts are
                none of the model. Nothing has been applied.
            RanksBrokenError: another rank is gone.
        """
        watch = self._watch = Stopwatch(self._device)
        watch.mark()
        num_updates = self._config.trainer.num_iterations * batch.num_minibatches
        rate = 0.0
        updates: list[_Gradients] = []
        with self._parallelism.watched():
            # with a single update the old policy is the current one, and its logprobs are computed anyway
            with_old = num_updates > 1 or reference_kl.needs_old(self._config)
            batches: Sequence[StepBatch] = (*before, batch)
            if self._routing is not None:
                for each in batches:
                    router_replay.check(each, self._routing)
            with watch.part("fixed logprobs"):
                fixed = [self._reference_models.logprobs(each, with_old) for each in batches]
            exchange = partial(self._exchange, ranks)
            batches = reference_kl.with_advantages_of_step(batches, fixed, self._config, exchange, self._device)
            parts = [_RankStep(*both) for both in zip(batches, fixed, strict=True)]
            for update in range(num_updates):
                updates.append(self._finite_gradients(parts, ranks, update, num_updates))
                if update == 0:  # later updates have weights from which no engine has sampled
                    self._watch_mismatch(batch.step, updates[0].sums)
                watch.mark()
                rate = learning_rate(batch.step, self._config.trainer, update + 1)
                self._optimizer.set_rate(rate)
                with watch.part("optimizer"):
                    self._optimizer.step()
                    self._masters.round()
                    self._optimizer.zero_grad(set_to_none=True)
                watch.mark()
            self._reference_models.follow(self.trained, batch.step)
        measured = self._measured(updates, rate)
        adaptive = self._config.trainer.adaptive_entropy
        # equal on every rank, since the measurements are sums over ranks; a step without tokens has no entropy
        if adaptive is not None and measured["tokens"]:
            self._entropy_control = controlled(self._entropy_control, adaptive, measured["entropy_regularised"])
        laps = watch.laps()
        watch.tell()
        if self.details is not None:
            self.details.write(batch)
        # laps: gradients and optimizer of each update, in turn
        return measured | {
            "torch_threads": float(torch.get_num_threads()),
            "seconds_forward_backward": sum(laps[0::2]),
            "seconds_optimizer": sum(laps[1::2]),
        }

    def _finite_gradients(self, parts: Sequence[_RankStep], ranks: Ranks, update: int, num_updates: int) -> _Gradients:
        batch = parts[-1].batch
        gradients = self._gradients(parts, ranks, update)
        if gradients.finite:
            return gradients
        # loss and norm are equal on all ranks, so all of them compute again without an exchange
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
        """Compute the gradients of one update: equal on every rank, and clipped."""
        own: list[Tensor] = []
        messages = []
        for part in parts:  # in the order of ranks, in which a gang sums too: float addition depends on the order
            earlier, message = own, self._rank_gradients(part, update)
            messages.append(message)
            own = [gradient for gradient in (parameter.grad for parameter in self._trainable) if gradient is not None]
            for gradient, sum_before in zip(own, earlier, strict=bool(earlier)):  # the first rank has none before it
                gradient += sum_before
        point("trainer.gradients")
        # sums, not means: each loss is divided by the tokens of all ranks already
        with self._watch.part("sum gradients"):
            self._parallelism.sum_gradients(ranks, own)
        everybody: dict[str, float] = {}
        # the own message comes back with the exchange, in its place among the ranks
        for message in [*messages[:-1], *self._exchange(ranks, messages[-1])]:
            _merge(everybody, json.loads(message))
        with self._watch.part("clip gradients"):
            norm = clip_gradients(self._trainable, self._config.trainer.max_grad_norm)
        mismatch_max, loss = everybody.pop("mismatch_max"), everybody.pop("loss", 0.0)
        return _Gradients(loss, norm, everybody, mismatch_max)

    def _exchange(self, ranks: Ranks, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in order; of ranks that compute the same rows, those of the first."""
        together = self._parallelism.row_ranks
        return ranks.exchange(message)[:: together.size if together else 1]

    def _rank_gradients(self, part: _RankStep, update: int) -> bytes:
        """Compute the gradients of one rank's micro-batches, in newly allocated memory; return measurements as JSON."""
        batch, minibatch = part.batch, update % part.batch.num_minibatches
        # once per update, so that a second computation of it has the same dropout
        row_ranks = self._parallelism.row_ranks
        rank = batch.rank if row_ranks is None else batch.rank * row_ranks.size + row_ranks.place
        torch.manual_seed(update_seed(self._config.seed, batch.step, update, rank))
        # to None, not to zeros: the caller still holds the gradients of the rank before
        self._optimizer.zero_grad(set_to_none=True)
        measured: dict[str, float] = {"mismatch_max": 0.0}
        numbers = non_empty(batch, minibatch)
        # backward passes accumulate in `parameter.grad`; ranks exchange nothing before the last, unless sharded
        found = []
        micros = self._micro_batches(batch, numbers)
        # the first use of each minibatch: later iterations have other weights than the step started from
        is_first = update < batch.num_minibatches
        for number in numbers:
            with self._watch.part("forward and backward", micro_batch=number):
                found.append(self._backward(part, minibatch, number, next(micros), is_first))
        if self._parallelism.sharded:
            # other ranks may have more micro-batches with samples, and each backward is a collective
            for _ in range(_num_micro_batches(batch, minibatch) - len(numbers)):
                self._compute_in_vain(dummy_micro_batch(self._device))
        if found:
            # read once, behind the last backward pass: a device that is waited for stands still until its next work
            values = iter(torch.cat([values for _, values in found]).tolist())
            for names, _ in found:
                _merge(measured, {name: next(values) for name in names})
        if self._supervised and self._mu(batch.step):
            _merge(measured, self._supervised.backward(batch, minibatch, self._mu(batch.step)))
        for parameter in self._trainable:
            if parameter.grad is None:  # no sample of this rank reaches it, but ranks sum all alike
                parameter.grad = torch.zeros_like(parameter)
        return json.dumps(measured).encode()

    def _micro_batches(self, batch: StepBatch, numbers: Sequence[int]) -> Iterator[MicroBatch]:
        def make(number: int, device: torch.device) -> MicroBatch:
            return micro_batch(batch, number, device, self._config.packer.sequence_len, self._images)

        # features of images are computed by the model itself, and a CPU has no time to gain
        if self._device.type == "cpu" or batch.images:
            return (make(number, self._device) for number in numbers)
        return prefetched(numbers, make, self._device)

    def _compute_in_vain(self, dummy: MicroBatch) -> None:
        """Compute a made-up micro-batch, forward and backward, with the collectives of a real one."""
        with self._autocast():
            logprobs_T, _ = self._token_logprobs.of(dummy.row, dummy.token_ids_T, dummy.temperatures_T)
        # × 0: gradients are zeros, so nothing changes
        (logprobs_T.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def _backward(
        self, part: _RankStep, minibatch: int, number: int, micro: MicroBatch, is_first: bool
    ) -> tuple[list[str], Tensor]:
        """Compute the gradients of one micro-batch; return names and values of loss, metrics and largest mismatch."""
        objective = at_step(self._objective, part.batch.step)
        with self._autocast():
            logprobs_T, entropy_T = self._token_logprobs.of(
                micro.row, micro.token_ids_T, micro.temperatures_T, micro.wanted_K, objective.entropy_coef > 0
            )
        # outside autocast: ratios and sums of the loss stay float32
        inputs = self._inputs(micro, part.fixed.get(number, NONE), part.batch, minibatch, logprobs_T, entropy_T)
        if all((one.rl_weight, one.ref_kl_weight) == (1.0, 0.0) for one in self._config.environments):
            with self._same_randomness(part.batch, number):
                output = compute_loss(inputs, objective, self._custom_loss)
        else:
            # each component is divided by its own tokens, so neither dilutes the other
            normaliser = self._config.trainer.loss.compat.loss_normalizer
            ref_kl_tokens = token_normaliser(part.batch.ref_kl_tokens, minibatch, normaliser)
            ref_kl = Component(micro.ref_kl_weights_T, ref_kl_tokens) if inputs.teacher_logprobs_T is not None else None
            output = mixed_loss(inputs, objective, Component(micro.rl_weights_T, inputs.loss_tokens), ref_kl=ref_kl)
        if self.details is not None and is_first:
            self.details.record(part.batch, number, inputs, output.tokens)
        # the supervised part of the mixture has a separate backward pass, see `SupervisedExamples`
        loss = chord.mixed(output.loss, torch.zeros_like(output.loss), self._mu(part.batch.step))
        loss.backward()  # type: ignore[no-untyped-call]
        measured = output.sums | mismatch_sums(inputs)
        measured |= {"loss": loss.detach(), "entropy": inputs.masked(entropy_T.detach()).sum()}
        # one tensor on the device; float64, in which counts of tokens stay exact
        return list(measured), torch.stack([value.detach().double() for value in measured.values()])

    @contextmanager
    def _same_randomness(self, batch: StepBatch, number: int) -> Iterator[None]:
        """Let a user's loss draw the same numbers on all ranks that compute the same rows."""
        if self._parallelism.row_ranks is None or self._custom_loss is None:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(update_seed(self._config.seed, batch.step, number, batch.rank))
            yield

    # --- the loss ------------------------------------------------------------------------------------------------

    def _inputs(
        self,
        micro: MicroBatch,
        fixed: FixedLogprobs,
        batch: StepBatch,
        minibatch: int,
        logprobs_T: Tensor,
        entropy_T: Tensor,
    ) -> LossInputs:
        """Return the inputs of the loss for one micro-batch.

        Averages are over the minibatch, as the step of one update.
        """
        return LossInputs(
            logprobs_T=logprobs_T,
            inference_logprobs_T=micro.inference_logprobs_T,
            advantages_T=micro.advantages_T,
            loss_mask_T=micro.loss_mask_T,
            completion_of_T=micro.completion_of_T,
            num_completions=micro.num_completions,
            shares_B=micro.shares_B,
            # denominators count all ranks, so that shares add up to the loss of the step, however it was packed
            loss_tokens=token_normaliser(
                batch.loss_tokens, minibatch, self._config.trainer.loss.compat.loss_normalizer
            ),
            step_completions=int(batch.num_completions[minibatch]),
            # equally many on each rank, empty ones included
            num_micro_batches=_num_micro_batches(batch, minibatch) * batch.num_ranks,
            max_completion_length=self._config.rollout.max_tokens,
            old_logprobs_T=fixed.old_T,
            reference_logprobs_T=fixed.reference_T,
            teacher_logprobs_T=fixed.teacher_T,
            entropy_T=entropy_T,
            versions_T=micro.versions_T,
            version=batch.step - 1,  # the version before this step's update
            reward_discount=reward_discount(self._config.reward.advantage),
        )

    @property
    def _objective(self) -> ObjectiveConfig:
        """Objective of the current or next step: as configured, with the adapted entropy coefficient."""
        trainer = reference_kl.objective_of(self._config)
        if trainer.adaptive_entropy is None:
            return trainer
        return trainer.model_copy(update={"entropy_coef": acting_coef(self._entropy_control, trainer.adaptive_entropy)})

    def _mu(self, step: int) -> float:
        sft = self._config.trainer.sft
        return chord.mu(step - 1, sft) if sft else 0.0  # μ counts steps from 0

    def _autocast(self) -> AbstractContextManager[Any]:
        # without adapters all weights are in the precision of computation when they compute
        if self._dtype is torch.float32 or self._config.model.lora is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    # --- after the updates ---------------------------------------------------------------------------------------

    def _measured(self, updates: Sequence[_Gradients], rate: float) -> dict[str, float]:
        """Return the step's metrics.

        Loss and gradient norm are means over updates, others means over all tokens seen.
        """
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
            # tokens of the batch count once, however many iterations use them
            "tokens": sums.get("tokens", 0.0) / self._config.trainer.num_iterations,
        }

    def _watch_mismatch(self, step: int, sums: Mapping[str, float]) -> None:
        """Warn if trainer and engine differ. Raises RunFailedError above `trainer.mismatch.stop`."""
        if not self._config.inference.engine.loads_model:  # the engine's logprobs are made up
            return
        found = judged(sums, self._config.trainer.mismatch)
        if found is not None and found.stops:
            raise RunFailedError(f"step {step}: {found.words}")
        cause = found.cause if found is not None else ""
        if found is not None and cause != self._mismatch_cause:  # a warning per change of the cause, not per step
            log.warning("trainer and engine differ", step=step, cause=cause, detail=found.words)
        self._mismatch_cause = cause

    # --- publish and save ----------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Return the adapter, or all weights, in the published precision. For rank 0.

        Tensors are on the CPU; in channel `device` they stay on the model's device, and the next step changes them.
        """
        on_host = self._config.weights.channel != "device"
        with self._parallelism.gathering(WEIGHTS):
            return formats.weights(self.model, self._config.model, on_host=on_host)

    def snapshot(self) -> Snapshot:
        """Return files for transformers (full) or peft (LoRA) to load; `trainer/` holds the rest of the state.

        For rank 0. The content fits any number of ranks, with and without shards.
        """
        with self._parallelism.gathering(SNAPSHOT):
            return self._gathered_snapshot(keep=True)

    def serve_gathers(self) -> None:
        """Help rank 0 to gather weights and snapshots, until rank 0 calls `release_ranks`. For other ranks than 0."""
        self._parallelism.serve(
            {
                WEIGHTS: lambda: formats.weights(self.model, self._config.model, keep=False),
                SNAPSHOT: lambda: self._gathered_snapshot(keep=False),
            }
        )

    def release_ranks(self) -> None:
        """Release the other ranks from `serve_gathers`. For rank 0."""
        self._parallelism.release()

    def _gathered_snapshot(self, keep: bool) -> Snapshot:
        # model before optimizer, on every rank: each tensor is a collective, so the order must be the same
        model = formats.snapshot(self.trained, self._config.model, keep)
        optimizer = optimizer_snapshot(self._optimizer, keep)
        own = model.with_files(optimizer).with_files(control_snapshot(self._entropy_control))
        # each rank has the whole reference, so nothing is gathered
        return own.with_files(self._reference_models.snapshot()) if keep else own


def _check_served(adapter: Iterable[str]) -> None:
    """Check that a server loads an adapter.

    Raises:
        ConfigError: experts have adapters: peft joins those of a layer, with twice the rank, and vLLM refuses them.
    """
    joined = next((name for name in adapter if ".experts." in name), None)
    if joined is not None:
        raise ConfigError(
            f"model.lora.target_modules: experts would have adapters ({joined}), which servers do not load; name the "
            "modules of attention, for example [q_proj, k_proj, v_proj, o_proj]"
        )


def update_seed(seed: int, step: int, update: int, rank: int) -> int:
    """Return the seed of all random numbers (dropout) of one rank in one update."""
    digest = hashlib.sha256(f"{seed} step {step} update {update} rank {rank}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def _num_micro_batches(batch: StepBatch, minibatch: int) -> int:
    """Return the number of a minibatch's micro-batches on each rank, empty ones included."""
    return int(batch.minibatch_offsets[minibatch + 1] - batch.minibatch_offsets[minibatch])


def _merge(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Add the measurements of a micro-batch, rank or update; for `mismatch_max` keep the larger."""
    for name, value in part.items():
        before = total.get(name, 0.0)
        total[name] = max(before, value) if name == "mismatch_max" else before + value
