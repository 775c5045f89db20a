"""An engine's end of the rendezvous in a process of its own: `python -m tests.bus.weights_peer MANIFEST UPDATE BOOT`.

Prints a line per bucket, then the digest of what it has received. It stops itself before the bucket that
`GRPO_STOP_BEFORE` names, so that a test can freeze it in the middle of a broadcast.
"""

import os
import signal
import sys

from bus.weights.rendezvous import RendezvousReceiver
from schemas.messages import Manifest, WeightMember, WeightUpdate

if __name__ == "__main__":
    manifest = Manifest.model_validate_json(sys.argv[1])
    members = [WeightMember(boot_id=boot_id, num_ranks=1) for boot_id in sys.argv[4:]]
    update = WeightUpdate(update=sys.argv[2], group=sys.argv[2], policy=manifest.policy, members=members)
    receiver = RendezvousReceiver(sys.argv[3], "127.0.0.1", timeout=20.0)
    stop_before = int(os.environ.get("GRPO_STOP_BEFORE", "-1"))
    for i, _ in enumerate(receiver.buckets(manifest, update, lambda: None)):
        if i == stop_before:
            os.kill(os.getpid(), signal.SIGSTOP)
        print("bucket", i, flush=True)
    print("done", flush=True)
