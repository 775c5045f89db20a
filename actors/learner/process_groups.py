"""Process groups of torch for the ranks of a gang: gloo through the CPUs, NCCL between GPUs (`bus.torch_groups`).

The packer decides that a rank is lost, and the order to exit makes this rank `abort` its group.
"""

from datetime import timedelta
from typing import Any

import structlog
import torch

from bus import threads, torch_groups

log = structlog.get_logger("learner")

ABORT_SECONDS = 5.0
"""Longest wait for the end of collectives: NCCL's own abort may hang."""
UNBOUNDED = timedelta(days=1)
"""Timeout of the groups themselves. The packer decides through leases how long a collective may take."""


def gloo(store: Any, rank: int, size: int, host: str) -> Any:
    """Return a group of all ranks through their CPUs, once all are there.

    Args:
        store: store in which the ranks find each other.
        host: address of this machine, reachable for the other ranks.
    """
    # the configured address: by default gloo takes the address of the machine's name
    device = torch.distributed.ProcessGroupGloo.create_device(hostname=host)
    return torch_groups.gloo(store, rank, size, device, UNBOUNDED)


def nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Return a group of all ranks between their GPUs, once all are there.

    Args:
        store: store in which the ranks find each other.
        device: GPU of this rank.
    """
    here = torch.device(device.type, torch.cuda.current_device())
    return torch_groups.nccl(store, rank, size, here, UNBOUNDED)


def abort(group: Any) -> None:
    """End the collectives that a group has under way on this rank. Their results are garbage.

    Takes ABORT_SECONDS at most. The group can't be used any more.
    """

    def run() -> None:
        try:
            group.abort()
        except Exception as error:  # noqa: BLE001 - from torch or NCCL; the process is about to exit anyway
            log.warning("collectives not ended", why=str(error))

    threads.start_helper("abort", run).join(ABORT_SECONDS)
