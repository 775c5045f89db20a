"""Reference that follows the policy: after every N-th step it moves a share of the way to the policy (TR-DPO, TRL)."""

from pathlib import Path

import structlog
import torch
from safetensors import safe_open
from torch import Tensor, nn

from actors.learner.shards import gathered
from actors.learner.snapshots import Snapshot, copied
from actors.models import loading
from actors.models.attention import PADDED
from schemas.config.model import ModelConfig
from schemas.config.objective import ReferenceSyncConfig

log = structlog.get_logger("learner")

MOVED = "trainer/reference.safetensors"
"""File of the weights below a checkpoint's folder."""


def is_due(step: int, config: ReferenceSyncConfig) -> bool:
    """Return whether the reference moves at the end of a step. Depends on nothing else, so a replay moves it too."""
    return step % config.every_steps == 0


def mix_in(reference: Tensor, policy: Tensor, alpha: float) -> None:
    """Change a weight of the reference to (1 − alpha) · reference + alpha · policy, in place (TRL)."""
    reference.mul_(1.0 - alpha).add_(policy.to(reference), alpha=alpha)


class MovingReference:
    """Weights of a reference, kept in float32 and rounded into the model that computes.

    In bfloat16 a small share of a small difference would be rounded away.

    Args:
        model: reference model that computes.
        config: configuration of the reference model.
        sync: interval and share.
    """

    def __init__(self, model: nn.Module, config: ModelConfig, sync: ReferenceSyncConfig) -> None:
        self._sync = sync
        self._rounded = _parameters(model)
        self._exact = self._rounded
        if loading.TORCH_DTYPES[config.dtype] is not torch.float32:
            # never run, so any attention will do
            self._exact = _parameters(loading.load_model(config, torch.float32, attention=PADDED))
        self._round()

    def follow(self, policy: nn.Module, step: int) -> None:
        """Move towards the policy, if the step is one after which the reference moves.

        All ranks must call: a policy that is spread over ranks is gathered, one weight at a time, on each rank.
        """
        if not is_due(step, self._sync):
            return
        with torch.no_grad():
            # a mixture of two equal weights is rounded, so weights that never change are left out
            for name, weight in gathered(_parameters(policy, trained=True).items(), keep=True):
                mix_in(self._exact[name], weight, self._sync.alpha)
        self._round()
        log.info("reference moved towards the policy", step=step, alpha=self._sync.alpha)

    def snapshot(self) -> Snapshot:
        """Return the exact weights as a file of a checkpoint."""
        return Snapshot({MOVED: copied(self._exact.items())})

    def restore(self, folder: Path) -> None:
        """Restore the weights from a checkpoint's folder. A checkpoint of a run without them changes nothing.

        Raises:
            ValueError: the weights are of another model.
        """
        path = folder / MOVED
        if not path.is_file():
            return
        with safe_open(path, "pt") as file, torch.no_grad():
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            loading.check_alike(self._exact, shapes, str(path))
            for name, weight in self._exact.items():
                weight.copy_(file.get_tensor(name))
        self._round()

    def _round(self) -> None:
        if self._exact is not self._rounded:
            with torch.no_grad():
                for name, weight in self._rounded.items():
                    weight.copy_(self._exact[name])


def _parameters(model: nn.Module, trained: bool = False) -> dict[str, Tensor]:
    """Return the parameters by name, tied ones once. Buffers are constants, which a mixture would round.

    Args:
        trained: leave out frozen parameters.
    """
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad or not trained}
    return {name: tensor for name, tensor in loading.full_tensors(model).items() if name in names}
