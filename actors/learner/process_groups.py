"""Process groups of torch for the ranks of a gang: gloo through the CPUs, NCCL between GPUs.

The loss of a rank ends a collective of gloo with an error. Over NCCL the collective hangs, or torch's watchdog notices
and ends the process with SIGABRT, which a supervisor counts as a crash. So the watchdog is told to leave the process
alone: the packer decides that a rank is lost, and the order to exit makes this rank `abort` its group.
"""

import os
from datetime import timedelta
from typing import Any

import structlog
import torch

from bus import threads

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
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    # the configured address: by default gloo takes the address of the machine's name
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = UNBOUNDED
    return distributed.ProcessGroupGloo(store, rank, size, options)


def nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Return a group of all ranks between their GPUs, once all are there.

    Args:
        store: store in which the ranks find each other.
        device: GPU of this rank.
    """
    restrain_watchdog()
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = UNBOUNDED
    group = distributed.ProcessGroupNCCL(store, rank, size, options)
    # NCCL connects in its first collective by default, in a call that nobody can leave
    group.eager_connect_single_device(torch.device(device.type, torch.cuda.current_device()))
    return group


def restrain_watchdog() -> None:
    """Keep the watchdog of NCCL's groups from ending the process. Call before a group is made."""
    # set even over another value: torchrun sets 1
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # else the watchdog's monitor writes torch's record of collectives after an error, and then ends the process itself
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"


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
