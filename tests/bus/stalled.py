"""An inbox that reads nothing for a while, in a process of its own: libzmq might end it.

    python -m tests.bus.stalled KEYS SECONDS [kill]

Prints the number of messages that the sender was rid of before the pause, and those that came afterwards. `kill`: the
sender is stopped and killed at the start of the pause.
"""

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from bus.data import Inbox, Outbox
from bus.topology import Addresses
from schemas.config import RunConfig, check_tree
from schemas.messages import RolloutGroup
from tests.schemas.messages.examples import GROUP_FIELDS

NUM_TOKENS, STOPPED_SECONDS = 100_000, 6.0


def config(keys: str) -> RunConfig:
    """A run with short queues."""
    bus = {"control": "tcp://127.0.0.1:1", "high_water_mark": 2} | ({"keys": keys} if keys else {})
    return check_tree(
        {
            "output_dir": f"/tmp/stalled-{os.getpid()}",
            "model": {"path": "none"},
            "environments": [{"type": "arithmetic"}],
            "reward": {"functions": [{"path": "exact_match"}]},
            "trainer": {"max_steps": 1},
            "bus": bus,
        }
    )


def send(pipe: Connection, address: str, keys: str) -> None:
    """Send until nothing is taken for a second, tell how many were, and live on."""
    group = RolloutGroup(
        **GROUP_FIELDS
        | {
            "sample_offsets": np.array([0, 3, NUM_TOKENS]),
            "token_ids": np.zeros(NUM_TOKENS, np.int32),
            "loss_mask": np.ones(NUM_TOKENS, np.uint8),
            "logprobs": np.zeros(NUM_TOKENS, np.float32),
        }
    )
    outbox = Outbox("groups", address, config(keys).bus, "rollout-0")
    num, taken_at = 0, time.monotonic()
    while not num or time.monotonic() - taken_at < 1.0:
        if outbox.try_send(group):
            num, taken_at = num + 1, time.monotonic()
        time.sleep(0.001)
    pipe.send(num)
    time.sleep(600.0)


def main() -> None:
    """Receive nothing for a while, then all."""
    keys, seconds = sys.argv[1], float(sys.argv[2])
    run = config(keys)
    inbox = Inbox("groups", Addresses(run), run.bus, "reward-0", "b0")
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    sender = context.Process(target=send, args=(theirs, inbox.address, keys), daemon=True)
    sender.start()
    num = pipe.recv()
    if "kill" in sys.argv:
        # stopped first: a process that is killed with unread bytes of its connection resets it
        assert sender.pid is not None
        os.kill(sender.pid, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        sender.kill()
        sender.join()
    time.sleep(seconds)
    received = 0
    while inbox.receive(3.0) is not None:
        received += 1
    sender.kill()
    print(num, received)


if __name__ == "__main__":
    main()
