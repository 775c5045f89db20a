"""One rank's model and optimizer: a `StepBatch` in, an updated policy out.

Weights and optimizer state are float32 where they are trained; with `model.dtype: bfloat16` the computation runs under
autocast, and what is published is rounded to bfloat16, so that an engine computes with what it serves.
"""

import json
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from actors.algorithms.losses import LossInputs, compute_loss
from actors.algorithms.losses.metrics import metrics_of
from actors.algorithms.schedules import learning_rate
from actors.policy import attention, loading
from actors.policy.logprobs import chosen_logprobs
from actors.policy.optimizer import make_optimizer
from bus.weights import Weights
from schemas.config import RunConfig
from schemas.messages import StepBatch


class Learner(Protocol):
    """What the trainer actor drives. `TorchLearner` is the real one, `actors.policy.fake.FakeLearner` its double."""

    def step(self, batch: StepBatch) -> dict[str, float]:
        """Train one step; returns what was measured, under the reporter's keys."""
        ...

    def weights(self) -> Weights:
        """The current policy, to be published."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint: the model in its public format, and `trainer/` to go on from."""
        ...

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        ...


class TorchLearner:
    """A transformers model, full fine-tuning or LoRA."""

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

    def step(self, batch: StepBatch) -> dict[str, float]:
        """Forward and backward over all micro-batches, then one optimizer update.

        Raises:
            FloatingPointError: loss or gradient is not finite; nothing has been updated.
        """
        started = time.perf_counter()
        mismatch_max, sums = 0.0, Counter[str]()
        for m in range(batch.num_micro_batches):
            first, last = (int(i) for i in batch.micro_batch_offsets[m : m + 2])
            if last > first:
                part = self._micro_batch(batch, first, last)
                mismatch_max = max(mismatch_max, part.pop("mismatch_max"))
                sums.update(part)
        loss = sums.pop("loss", 0.0)
        computed = time.perf_counter()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        grad_norm = float(nn.utils.clip_grad_norm_(parameters, self._config.trainer.max_grad_norm))
        if not np.isfinite(loss) or not np.isfinite(grad_norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"step {batch.step}: loss {loss}, gradient norm {grad_norm}; look at mismatch_kl and "
                "masked_fraction of the steps before; a lower trainer.learning_rate usually helps"
            )
        rate = learning_rate(batch.step, self._config.trainer)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return metrics_of(dict(sums)) | {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "mismatch_max": mismatch_max,
            "tokens": sums["tokens"],
            "seconds_forward_backward": computed - started,
            "seconds_optimizer": time.perf_counter() - computed,
        }

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
        output = compute_loss(inputs, self._config.trainer.loss)
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

    def save(self, folder: Path) -> None:
        """`folder` loads with transformers (full) or peft (LoRA); `folder/trainer` holds optimizer and RNG state."""
        model: Any = self.model
        if self._lora:
            model.save_pretrained(folder, save_embedding_layers=False)
        else:
            model.save_pretrained(folder)
            for name, data in loading.tokenizer_files(self._config.model.path).items():
                (folder / name).write_bytes(data)
        save_state(folder / "trainer", self._optimizer)

    def restore(self, folder: Path) -> None:
        """Weights, optimizer and RNG as they were saved."""
        from safetensors.torch import load_file

        if self._lora:
            loading.copy_into(
                loading.adapter_tensors(self.model), load_file(folder / "adapter_model.safetensors"), str(folder)
            )
        else:
            saved = loading.load_model(self._config.model, attention.NAME, torch.float32, str(folder))
            loading.copy_into(loading.full_tensors(self.model), loading.full_tensors(saved), str(folder))
        load_state(folder / "trainer", self._optimizer)

    def _adapter_config(self) -> str:
        model: Any = self.model
        settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
        return json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))


def _published(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }


def save_state(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Optimizer and RNG state as safetensors and JSON: data only, no pickle."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    state = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value.cpu().contiguous()
        for index, values in state["state"].items()
        for name, value in values.items()
    }
    tensors["rng"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng_cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / "optimizer.safetensors")
    (folder / "optimizer.json").write_text(json.dumps(state["param_groups"]), encoding="utf-8")


def load_state(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """What `save_state` wrote, into an optimizer over the same parameters."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "optimizer.safetensors")
    torch.set_rng_state(tensors.pop("rng"))
    cuda_rng = tensors.pop("rng_cuda", None)
    if cuda_rng is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda_rng)
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    groups = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))
    optimizer.load_state_dict({"state": state, "param_groups": groups})
