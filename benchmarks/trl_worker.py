"""TRL's side of `benchmarks.trainer_vs_trl`: GRPOTrainer on given completions. Runs in TRL's environment.

    PYTHON benchmarks/trl_worker.py FOLDER

The worker calls `trainer.train()`, with all parts of a TRL step: collation, padding, shuffling, accumulation, clipping,
optimizer and metrics. Only `_generate_and_score_completions` is replaced, by a function that returns the batch in
FOLDER, padded as TRL pads it. Each line on stdin requests a step; a line of JSON answers it.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def status_bytes(name: str) -> int:
    """Return VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def padded(folder: Path) -> dict[str, torch.Tensor]:
    """Return the batch in TRL's form after generation and scoring: prompts padded left, completions padded right."""
    batch = np.load(folder / "batch.npz")
    offsets, prompts = batch["sample_offsets"], batch["prompt_lengths"]
    ids = [batch["token_ids"][start:end] for start, end in pairwise(offsets)]
    heads = [torch.from_numpy(x[:n].astype(np.int64)) for x, n in zip(ids, prompts, strict=True)]
    tails = [torch.from_numpy(x[n:].astype(np.int64)) for x, n in zip(ids, prompts, strict=True)]

    def pad(rows: list[torch.Tensor], side: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)

    mask = pad([torch.ones_like(x) for x in tails], "right")
    return {
        "prompt_ids": pad(heads, "left"),
        "prompt_mask": pad([torch.ones_like(x) for x in heads], "left"),
        "completion_ids": pad(tails, "right"),
        "completion_mask": mask,
        "advantages": torch.from_numpy(batch["advantages"][offsets[1:] - 1]).float(),
        "num_items_in_batch": mask.sum(),
    }


class Turns(TrainerCallback):
    """Callback that waits for a request before a step, answers after it, and writes the first step's gradients."""

    def __init__(self, folder: Path, imported: int) -> None:
        self._folder, self._imported = folder, imported
        self._wall = self._cpu = 0.0

    def on_step_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        """Wait for the request, then start the clock."""
        if not sys.stdin.readline():
            control.should_training_stop = True
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        """Write the gradients that the optimizer gets."""
        if state.global_step == 0:
            found = {n: p.grad.numpy() for n, p in kwargs["model"].named_parameters() if p.grad is not None}
            np.savez(self._folder / "trl.npz", **found)

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        """Answer the request."""
        seconds, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        peak = status_bytes("VmHWM") - self._imported
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak}), flush=True)


def main() -> None:
    """Train until stdin ends."""
    folder = Path(sys.argv[1])
    given = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(given["threads"])
    imported = status_bytes("VmRSS")
    batch = padded(folder)
    num_completions, micro_batch = len(batch["advantages"]), given["trl_micro_batch"]
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_completions // micro_batch,
        num_generations=given["group_size"],
        max_completion_length=batch["completion_ids"].shape[1],
        loss_type="dapo",
        beta=0.0,
        learning_rate=given["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=given["max_grad_norm"],
        max_steps=given["max_steps"],
        gradient_checkpointing=given["gradient_checkpointing"],
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1000,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=lambda prompts, completions, **columns: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["<bos>"] * num_completions}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Turns(folder, imported)],
    )
    trainer._generate_and_score_completions = lambda inputs: dict(batch)
    trainer.train()


if __name__ == "__main__":
    main()
