"""One rank of a sharded learner, as a process of its own: `python -m tests.actors.learner.shard_rank FOLDER RANK`.

FOLDER/task.json says what all ranks do; rank 0 leaves checkpoint/ (before the last step), weights.safetensors and
values.json (of each step) there.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from actors.learner.fsdp import FullySharded
from actors.learner.learner import TorchLearner
from actors.learner.ranks import GlooRanks
from schemas.config import check_tree
from tests.actors.learner.steps import batches_of, scored_group


def main(folder: Path, rank: int) -> None:
    """Restore, meet, train, save."""
    torch.set_num_threads(1)
    task = json.loads((folder / "task.json").read_text())
    config, values = check_tree(task["config"]), []
    learner = TorchLearner(config, parallelism=FullySharded(rank))
    if task["restore"]:
        learner.restore(Path(task["restore"]))
    ranks = GlooRanks(rank, task["size"], folder / "ranks", "127.0.0.1", lambda: None, 60.0)
    learner.join(ranks, lambda: None)
    for step in task["steps"]:
        if step == task["steps"][-1]:
            if rank == 0:
                learner.snapshot().write(folder / "checkpoint")
                learner.release_ranks()
            else:
                learner.serve_gathers()
        groups = [scored_group(ordinal) for ordinal in range(5)]
        batch = batches_of(groups, task["size"], config.trainer.num_minibatches, step)[rank]
        values.append({n: v for n, v in learner.step(batch, ranks).items() if "seconds" not in n})
    if rank == 0:
        save_file(learner.weights().tensors, folder / "weights.safetensors")
        (folder / "values.json").write_text(json.dumps(values))
        learner.release_ranks()
    else:
        learner.serve_gathers()
    sys.stdout.flush()
    os._exit(0)  # to tear collectives down in order is no part of the product: an actor leaves


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
