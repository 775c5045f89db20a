"""The ranks of a gang's learner, each a process of its own: `python -m tests.actors.learner.shard_rank FOLDER`.

They are forks of this process, which has imported torch once for all. FOLDER/task.json says what all ranks do, and how
many there are; what a rank writes is in rank_N.log, and the first that fails ends all others. Rank 0 leaves checkpoint/
(before the last step), weights.safetensors, gradients.safetensors (see `Gradients`), values.json (of each step) and
computed.json (see `Computed`) there.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actors.assembly import make_learner
from actors.learner.learner import TorchLearner
from actors.learner.ranks import GlooRanks
from actors.process.exits import leave
from schemas.config import check_tree
from schemas.messages import ScoredGroup
from schemas.routed import packed
from tests.actors.learner.steps import batches_of, branched_group, scored_group


def routed_group(ordinal: int) -> ScoredGroup:
    """A group with made-up experts: of four, two for each token in two layers."""
    group, rng = scored_group(ordinal), np.random.default_rng(ordinal)
    count = len(group.prompt_ids) + len(group.token_ids)
    rows = [[rng.permutation(4)[:2] for _ in range(2)] for _ in range(count)]
    pieces, layout = packed(np.array(rows, np.int8))
    return group.model_copy(update={"routed_experts": pieces, "expert_layout": layout})


GROUPS = {"single turns": scored_group, "branches": branched_group, "routed": routed_group}


class Gradients:
    """The gradients of the newest update, whole and clipped, by name. All ranks must have one, since they gather."""

    def __init__(self, learner: TorchLearner) -> None:
        self.found: dict[str, Tensor] = {}
        self._trained = learner.trained
        self._hook = register_optimizer_step_pre_hook(self._keep)

    def close(self) -> None:
        """Leave other optimizers of this process alone."""
        self._hook.remove()

    def _keep(self, *_: Any) -> None:
        for name, parameter in self._trained.named_parameters():
            gradient: Any = parameter.grad
            if gradient is not None:
                # a copy: the optimizer and the next update overwrite it
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                self.found[name] = whole.clone()


class Computed:
    """What a rank computes in its first training step: precision, and layers gathered by the time that each runs."""

    def __init__(self, learner: TorchLearner) -> None:
        self.dtypes: dict[str, set[str]] = {"weights": set(), "activations": set()}
        self.gathered: list[int] = []
        self._num_gathers = 0
        model: Any = learner.model
        for layer in model.get_decoder().layers:
            layer.mlp.register_forward_hook(self._runs)  # inside the layer, whose weights are gathered
            layer.register_forward_hook(lambda layer, _, output: self.dtypes["activations"].add(str(output.dtype)))
        distributed: Any = torch.distributed
        name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
        gather = getattr(distributed, name)

        def counted(*arguments: Any, **keys: Any) -> Any:
            self._num_gathers += 1
            return gather(*arguments, **keys)

        setattr(distributed, name, counted)

    def _runs(self, mlp: Any, inputs: Any, output: Any) -> None:
        if len(self.gathered) < 2:  # layers of the first forward
            self.gathered.append(self._num_gathers)
        self.dtypes["weights"].add(str(next(mlp.parameters()).dtype))
        self.dtypes["activations"].add(str(output.dtype))

    def write(self, learner: TorchLearner, path: Path) -> None:
        """Write all of it, with the precision of the weights that are trained."""
        trained = sorted({str(parameter.dtype) for parameter in learner.trained.parameters()})
        dtypes = {name: sorted(found) for name, found in self.dtypes.items()} | {"trained": trained}
        path.write_text(json.dumps({"dtypes": dtypes, "gathered": self.gathered}))


def main(folder: Path, rank: int) -> None:
    """Restore, meet, train, save."""
    torch.set_num_threads(1)
    task = json.loads((folder / "task.json").read_text())
    config, values = check_tree(task["config"]), []
    learner: Any = make_learner(config, rank=rank)
    if task["restore"]:
        learner.restore(Path(task["restore"]))
    ranks = GlooRanks(rank, task["size"], folder / "ranks", "127.0.0.1", lambda: None, 240.0)
    learner.join(ranks, lambda: None)
    computed, gradients = Computed(learner), Gradients(learner)
    for step in task["steps"]:
        if step == task["steps"][-1]:
            if rank == 0:
                learner.snapshot().write(folder / "checkpoint")
                learner.release_ranks()
            else:
                learner.serve_gathers()
        groups = [GROUPS[task["groups"]](ordinal) for ordinal in range(5)]
        together = config.trainer.ranks_per_row
        batches = batches_of(groups, task["size"] // together, config.trainer.num_minibatches, step)
        batch = batches[config.trainer.row_group_of(rank)]
        values.append({n: v for n, v in learner.step(batch, ranks).items() if "seconds" not in n})
    if rank == 0:
        save_file(learner.weights().tensors, folder / "weights.safetensors")
        save_file(gradients.found, folder / "gradients.safetensors")
        (folder / "values.json").write_text(json.dumps(values))
        computed.write(learner, folder / "computed.json")
        learner.release_ranks()
    else:
        learner.serve_gathers()
    leave(0)  # to tear collectives down in order is no part of the product: an actor leaves


def forked(folder: Path, rank: int) -> int:
    """Start a rank; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stderr.fileno())
    try:
        main(folder, rank)
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # of a rank that has left, this is never reached


def main_of_all(folder: Path) -> None:
    """Start all ranks, and wait for them."""
    size = json.loads((folder / "task.json").read_text())["size"]
    pids = [forked(folder, rank) for rank in range(size)]
    for _ in range(size):
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"rank failed with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main_of_all(Path(sys.argv[1]))
