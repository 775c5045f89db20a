"""Process groups of torch apart from its global one: gloo between hosts, NCCL between GPUs.

The loss of a member ends a collective of gloo with an error. Over NCCL the collective hangs, or torch's watchdog sees
it and ends the process with SIGABRT, which a supervisor counts as a crash. So the watchdog is told to leave the process
alone: the packer decides that a member is lost, and a process that hears so aborts its group.
"""

import os
from datetime import timedelta
from typing import Any


def gloo(store: Any, rank: int, size: int, device: Any, timeout: timedelta) -> Any:
    """Return a group of all members through their hosts, once all are there.

    Args:
        store: store in which the members find each other.
        device: gloo's device, made with an address of this machine: by default gloo takes that of the machine's name.
        timeout: of the meeting and of each collective.
    """
    import torch

    distributed: Any = torch.distributed
    options = distributed.ProcessGroupGloo._Options()
    options._devices, options._timeout = [device], timeout
    return distributed.ProcessGroupGloo(store, rank, size, options)


def nccl(store: Any, rank: int, size: int, device: Any, timeout: timedelta) -> Any:
    """Return a group of all members between their GPUs, once all are there.

    Args:
        store: store in which the members find each other.
        device: GPU of this process, with its number.
        timeout: of each collective.
    """
    import torch

    restrain_watchdog()
    distributed: Any = torch.distributed
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = distributed.ProcessGroupNCCL(store, rank, size, options)
    # NCCL connects in its first collective by default, in a call that nobody can leave
    group.eager_connect_single_device(device)
    return group


def restrain_watchdog() -> None:
    """Keep the watchdog of NCCL's groups from ending the process. Call before a group is made."""
    # set even over another value: torchrun sets 1
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # else the watchdog's monitor writes torch's record of collectives after an error, and then ends the process itself
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
