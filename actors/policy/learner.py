"""One rank's model and optimizer: a `StepBatch` in, an updated policy out.

Weights and optimizer state are float32 where they are trained; with `model.dtype: bfloat16` the computation runs under
autocast, and what is published is rounded to bfloat16, so that an engine computes with what it serves.
"""

import hashlib
import json
import math
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from actors.algorithms.losses import LossInputs, compute_loss
from actors.algorithms.losses.metrics import metrics_of
from actors.algorithms.schedules import learning_rate
from actors.faults import point
from actors.policy import attention, loading
from actors.policy.logprobs import chosen_logprobs
from actors.policy.optimizer import make_optimizer
from actors.policy.ranks import ALONE, Part, Ranks
from actors.policy.snapshots import Snapshot, copied, optimizer_snapshot, restore_optimizer
from bus.weights import Weights
from schemas.config import RunConfig
from schemas.messages import StepBatch

log = structlog.get_logger("learner")


class Learner(Protocol):
    """What the trainer actor drives. `TorchLearner` is the real one, `actors.policy.fake.FakeLearner` its double."""

    def part(self, batch: StepBatch) -> Part:
        """One rank's part of a step's gradients. Nothing is updated."""
        ...

    def step(self, batch: StepBatch, ranks: Ranks) -> dict[str, float]:
        """Train one step together with the other ranks; returns what was measured, under the reporter's keys."""
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


@dataclass(frozen=True)
class _Gradients:
    """What the gradients of one step tell, summed over all ranks."""

    loss: float
    norm: float
    sums: Counter[str]
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
        self._lora = lora is not None
        base_dtype = self._dtype if self._lora else torch.float32
        self.model: nn.Module = loading.load_model(config.model, attention.NAME, base_dtype)
        if lora is not None:
            self.model = loading.add_lora(self.model, lora)
        self.model.train()
        self._optimizer = make_optimizer(self.model, config.trainer.optimizer)

    def step(self, batch: StepBatch, ranks: Ranks = ALONE) -> dict[str, float]:
        """Forward and backward over all micro-batches, a sum over all ranks, then one optimizer update.

        Every random number of a step follows from the run's seed, the step and the rank, so a step can be replayed.
        Gradients that are not finite are computed once again: a fault of the machine passes, one of the run stays.

        Raises:
            FloatingPointError: they are not finite the second time either; nothing has been updated.
        """
        started = time.perf_counter()
        gradients = self._gradients(batch, ranks)
        if not gradients.finite:
            log.warning("step computed again", step=batch.step, loss=gradients.loss, grad_norm=gradients.norm)
            gradients = self._gradients(batch, ranks)
        computed = time.perf_counter()
        if not gradients.finite:
            self._optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"step {batch.step}: loss {gradients.loss}, gradient norm {gradients.norm}, twice; its groups are "
                f"{batch.ordinals.tolist()}. Look at mismatch_kl and masked_fraction of the steps before; a lower "
                "trainer.learning_rate usually helps (actors rewind goes back to an older checkpoint)"
            )
        rate = learning_rate(batch.step, self._config.trainer)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return metrics_of(dict(gradients.sums)) | {
            "loss": gradients.loss,
            "grad_norm": gradients.norm,
            "learning_rate": rate,
            "mismatch_max": gradients.mismatch_max,
            "tokens": gradients.sums["tokens"],
            "torch_threads": float(torch.get_num_threads()),
            "seconds_forward_backward": computed - started,
            "seconds_optimizer": time.perf_counter() - computed,
        }

    def _gradients(self, batch: StepBatch, ranks: Ranks) -> _Gradients:
        """Gradients of the whole step, on every rank the same, clipped."""
        part = self.part(batch)
        point("trainer.gradients")
        ranks.sum(part.tensors)
        everybody: dict[str, float] = {}
        for message in ranks.exchange(part.message):
            _merge(everybody, json.loads(message))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        norm = float(nn.utils.clip_grad_norm_(parameters, self._config.trainer.max_grad_norm))
        mismatch_max, loss = everybody.pop("mismatch_max"), everybody.pop("loss", 0.0)
        return _Gradients(loss, norm, Counter(everybody), mismatch_max)

    def part(self, batch: StepBatch) -> Part:
        """Gradients of this rank's micro-batches, in the parameters' own memory, and what was measured."""
        torch.manual_seed(step_seed(self._config.seed, batch.step, batch.rank))
        self._optimizer.zero_grad(set_to_none=True)
        measured: dict[str, float] = {"mismatch_max": 0.0}
        for m in range(batch.num_micro_batches):
            first, last = (int(i) for i in batch.micro_batch_offsets[m : m + 2])
            if last > first:
                _merge(measured, self._micro_batch(batch, first, last))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:  # this rank had no sample that reaches it
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return Part(gradients, json.dumps(measured).encode())

    def _micro_batch(self, batch: StepBatch, first: int, last: int) -> dict[str, float]:
        """Gradients of samples first…last−1; returns their share of the loss, metric sums, and the largest mismatch."""
        start, end = (int(i) for i in batch.sample_offsets[[first, last]])
        offsets = batch.sample_offsets[first : last + 1] - start
        prompts = batch.prompt_lengths[first:last]
        row = attention.pack_row(
            batch.token_ids[start:end], offsets, prompts, batch.sample_ordinals[first:last].tolist(), self._device
        )
        in_completion = np.ones(end - start, bool)
        for b, size in enumerate(prompts):
            in_completion[offsets[b] : offsets[b] + size] = False
        lengths = np.diff(offsets) - prompts

        def of_completions(name: str) -> Tensor:
            array = getattr(batch, name)[start:end][in_completion]
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

        inference_logprobs_T, mask_T = of_completions("logprobs"), of_completions("loss_mask").bool()
        with self._autocast():
            logits_TV = self.model(**row.forward_arguments()).logits[0]
        logprobs_T, entropy_T = chosen_logprobs(
            logits_TV, of_completions("token_ids").long(), of_completions("temperatures")
        )
        inputs = LossInputs(
            logprobs_T=logprobs_T,
            inference_logprobs_T=inference_logprobs_T,
            advantages_T=of_completions("advantages"),
            loss_mask_T=mask_T,
            completion_of_T=torch.from_numpy(np.repeat(np.arange(last - first), lengths)).to(self._device),
            num_completions=last - first,
            loss_tokens=batch.loss_tokens,
        )
        output = compute_loss(inputs, self._config.trainer)
        output.loss.backward()  # type: ignore[no-untyped-call]
        gap_T = (logprobs_T.detach() - inference_logprobs_T).abs().masked_fill(~mask_T, 0.0)
        measured = output.sums | {
            "loss": output.loss.detach(),
            "entropy": entropy_T.masked_fill(~mask_T, 0.0).sum(),
            "abs_log_ratio": gap_T.sum(),
            "mismatch_max": gap_T.max(),
        }
        # one tensor, so that a GPU is waited for once
        return dict(zip(measured, torch.stack([value.double() for value in measured.values()]).tolist(), strict=True))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)

    def weights(self) -> Weights:
        """The adapter, or all weights, in the published precision, on the CPU."""
        if self._lora:
            tensors = loading.adapter_tensors(self.model)
            return Weights(
                "adapter", _published(tensors, torch.float32), {"adapter_config.json": self._adapter_config()}
            )
        return Weights("full", _published(loading.full_tensors(self.model), self._dtype))

    def snapshot(self) -> Snapshot:
        """The folder loads with transformers (full) or peft (LoRA); `trainer/` in it holds the optimizer's state."""
        trainer = optimizer_snapshot(self._optimizer)
        if self._lora:
            tensors = {"adapter_model.safetensors": copied(loading.adapter_tensors(self.model))}
            texts = {"adapter_config.json": self._adapter_config().encode()}
            return Snapshot(tensors | trainer.tensors, texts | trainer.texts)
        model: Any = self.model
        weights = copied(loading.full_tensors(model))

        def write_model(folder: Path) -> None:
            model.save_pretrained(folder, state_dict=weights)

        texts = loading.tokenizer_files(self._config.model.path)
        return Snapshot(trainer.tensors, texts | trainer.texts, write_model)

    def restore(self, folder: Path) -> None:
        """Weights and optimizer as they were saved."""
        from safetensors.torch import load_file

        if self._lora:
            loading.copy_into(
                loading.adapter_tensors(self.model), load_file(folder / "adapter_model.safetensors"), str(folder)
            )
        else:
            saved = loading.load_model(self._config.model, attention.NAME, torch.float32, str(folder))
            loading.copy_into(loading.full_tensors(self.model), loading.full_tensors(saved), str(folder))
        restore_optimizer(folder, self._optimizer)

    def _adapter_config(self) -> str:
        model: Any = self.model
        settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
        return json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))


def _published(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }


def step_seed(seed: int, step: int, rank: int) -> int:
    """Of all random numbers of one rank in one step (dropout)."""
    digest = hashlib.sha256(f"{seed} step {step} rank {rank}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def _merge(total: dict[str, float], part: dict[str, float]) -> None:
    """Add what one micro-batch or one rank has measured; of the largest mismatch take the larger."""
    for name, value in part.items():
        before = total.get(name, 0.0)
        total[name] = max(before, value) if name == "mismatch_max" else before + value
