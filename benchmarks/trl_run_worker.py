"""TRL's side of `benchmarks.run_vs_trl`: GRPOTrainer trains the quickstart's model. Runs in TRL's environment.

    PYTHON -m benchmarks.trl_run_worker FOLDER

FOLDER/settings.json has the hyperparameters, FOLDER/model the start model. The worker generates, scores and trains as
TRL does by default without vLLM, and appends a line of JSON for each step to FOLDER/trl.jsonl: time and mean reward.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from actors.datasets.generated import ReverseText
from actors.reward.builtin import characters_in_place
from schemas.config.data import ReverseTextConfig


class Lines(TrainerCallback):
    """Callback that appends a line for each step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        """Append time and mean reward of the step that has ended."""
        if logs and "reward" in logs:
            line = {"step": state.global_step, "time": time.time(), "reward_mean": logs["reward"]}
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")


def main() -> None:
    """Train."""
    folder = Path(sys.argv[1])
    given = json.loads((folder / "settings.json").read_text())
    environment = ReverseText(ReverseTextConfig(), "train", given["seed"])
    examples = [environment.example(i) for i in range(given["steps"] * given["groups"])]
    rows = {"prompt": [e.prompt for e in examples], "answer": [e.columns["answer"] for e in examples]}
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        seed=given["seed"],
        per_device_train_batch_size=given["groups"] * given["group_size"],
        num_generations=given["group_size"],
        max_completion_length=given["max_tokens"],
        temperature=1.0,
        loss_type="dapo",
        beta=0.0,
        epsilon=given["epsilon"],
        scale_rewards="group",
        learning_rate=given["learning_rate"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": given["min_lr_ratio"]},
        warmup_steps=given["warmup_steps"],
        adam_beta2=given["beta2"],
        adam_epsilon=given["eps"],
        weight_decay=0.0,
        max_grad_norm=given["max_grad_norm"],
        max_steps=given["steps"],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=characters_in_place,
        args=arguments,
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Lines(folder / "trl.jsonl")],
    )
    trainer.train()


if __name__ == "__main__":
    main()
