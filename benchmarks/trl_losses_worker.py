"""TRL's side of `benchmarks.trl_losses`: a script of TRL on given completions. Runs in TRL's environment.

    PYTHON benchmarks/trl_losses_worker.py FOLDER

The script in FOLDER is run as it is. Replaced are the inputs that differ by chance: the rows of each generation and
their sampled tokens, the order in which a generation is dealt to its updates, and the weights of the new adapter.
Tokens of prompts, decoded texts, rewards, advantages, logprobs, loss, clipping, schedule and optimizer are TRL's.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer import grpo_trainer


class Given:
    """Generations to train on, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._generations = iter(json.loads((folder / "generations.json").read_text()))
        self._generate_and_score = GRPOTrainer._generate_and_score_completions

    def score(self, trainer, inputs):  # type: ignore[no-untyped-def]
        """Return the next generation as TRL scores it, in place of the one for TRL's own rows."""
        self._current = next(self._generations)
        if len(self._current["rows"]) != len(inputs):
            raise RuntimeError(f"TRL generates {len(inputs)} completions at once, not {len(self._current['rows'])}")
        return self._generate_and_score(trainer, [dict(row) for row in self._current["rows"]])

    def sample(self, trainer, prompt_ids, *_):  # type: ignore[no-untyped-def]
        """Return the sampled tokens."""
        if [list(ids) for ids in prompt_ids] != self._current["prompt_ids"]:
            raise RuntimeError(f"TRL's prompts are {prompt_ids[:2]}…, not {self._current['prompt_ids'][:2]}…")
        return self._current["completion_ids"], None


class FirstGradients(TrainerCallback):
    """Callback that writes the gradients of the first update, clipped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_pre_optimizer_step(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        """Write the gradients that the optimizer gets."""
        if state.global_step == 0:
            np.savez(self._folder / "trl.npz", **arrays(kwargs["model"], lambda p: p.grad))


def arrays(model, of):  # type: ignore[no-untyped-def]
    """Return an array for each trained parameter by name."""
    return {name: of(p).detach().numpy() for name, p in model.named_parameters() if p.requires_grad}


def main() -> None:
    """Run the script, and write gradients, weights and TRL's own log."""
    folder = Path(sys.argv[1])
    os.chdir(folder)
    given, train = Given(folder), GRPOTrainer.train

    def train_as_given(trainer):  # type: ignore[no-untyped-def]
        start = np.load(folder / "start.npz")
        named = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        if set(named) != set(start.files):
            raise RuntimeError(f"parameters of {set(named) ^ set(start.files)} are trained on one side alone")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(torch.from_numpy(start[name]))
        trainer.args.logging_steps = 1
        trainer.add_callback(FirstGradients(folder))
        output = train(trainer)
        np.savez(folder / "trl_end.npz", **arrays(trainer.model, lambda p: p))
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        (folder / "trl.json").write_text(json.dumps(history))
        return output

    GRPOTrainer.train = train_as_given
    GRPOTrainer._generate_and_score_completions = lambda trainer, inputs: given.score(trainer, inputs)
    GRPOTrainer._generate_single_turn = lambda trainer, *arguments: given.sample(trainer, *arguments)
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    runpy.run_path("script_trl.py", run_name="__main__")


if __name__ == "__main__":
    main()
