"""An engine's end of the rendezvous in a process of its own: `python -m tests.bus.weights_peer MANIFEST UPDATE BOOT`.

Prints a line per bucket that it has checked. It stops itself before it checks the one that `GRPO_STOP_BEFORE` names, so
that a test can freeze it in the middle of a broadcast.
"""

import os
import signal
import sys
from typing import Any
from unittest import mock

from bus.weights.buckets import verify
from bus.weights.rendezvous import RendezvousReceiver
from schemas.messages import Manifest, WeightMember, WeightUpdate

STOP_BEFORE = int(os.environ.get("GRPO_STOP_BEFORE", "-1"))


def verify_or_stop(key: bytes, number: int, *bucket: Any) -> None:
    """As the channel does."""
    if number == STOP_BEFORE:
        os.kill(os.getpid(), signal.SIGSTOP)
    verify(key, number, *bucket)
    print("bucket", number, flush=True)


if __name__ == "__main__":
    manifest = Manifest.model_validate_json(sys.argv[1])
    members = [WeightMember(boot_id=boot_id, num_ranks=1) for boot_id in sys.argv[4:]]
    update = WeightUpdate(update=sys.argv[2], process_group=sys.argv[2], policy=manifest.policy, members=members)
    with mock.patch("bus.weights.buckets.verify", verify_or_stop):
        RendezvousReceiver(sys.argv[3], "127.0.0.1", timeout=120.0).receive(manifest, update, lambda: None)
