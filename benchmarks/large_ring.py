"""Heartbeats and memory of the packer while groups of 64 x 32768 tokens pass it.

    python -m benchmarks.large_ring [--seconds 30] [--json PATH]

`whole ring`: real actors of every kind, each in a process of its own. The engine answers at once with completions of
32 768 tokens, the reward is a hash, and the learner computes nothing, so that all time goes into moving groups.
`packer full`: packer and trainer are real; a double of rollout, engine and reward actor sends each scored group as soon
as its ticket comes, so that the packer always has groups to take in.

`answer ms`  longest time between two answers of the packer to a bare peer that sends a heartbeat every 50 ms
`beat ms`    longest time between two heartbeats of an actor, as the packer's socket reads them; they send one every 100
             ms
`limit ms`   a third of a lease
`kept MB`    most bytes of groups that the packer kept, of which `packer.memory_bytes` are allowed
`MB`         most resident memory of the packer's process, without that before the first group; batches, groups on their
             way and the allocator's free memory included
"""

import argparse
import hashlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from actors.engines.fake import FakeEngine
from actors.engines.protocol import Completion
from actors.learner.fake import FakeLearner
from actors.packer.loop import PackerActor
from actors.process.membership import Membership
from actors.runtime import run_actor
from benchmarks.control import Peers
from benchmarks.machine import publish, scratch
from benchmarks.peers import Engine, Peer, Reward, Rollout, template
from bus import threads
from bus.data import Outbox
from schemas.config import RunConfig, check_tree
from schemas.messages import ObserverDirective, PolicyVersion, RewardDirective, ScoredGroup
from tests.ports import free_port

COMPLETIONS, TOKENS = 64, 32_768
MEMORY_BYTES = 256 << 20
LEASE_SECONDS, BEAT_SECONDS, ANSWER_SECONDS = 3.0, 0.1, 0.05
START_SECONDS = 150.0
MEASURED = ("loss", "grad_norm", "learning_rate", "mismatch_kl", "mismatch_max", "masked_fraction", "entropy", "tokens")
"""Measurements that each step has."""
RINGS = {
    "whole ring": ("packer", "trainer", "inference", "reward", "rollout"),
    "packer full": ("packer", "trainer", "double"),
}
STEPS = {"whole ring": [(4, 3, 1)], "packer full": [(4, 3, 1), (32, 1, 2)]}
"""Groups of a step, `packer.max_async_level`, and ranks of the trainer."""


def config(folder: Path, groups_per_step: int, level: int, num_ranks: int) -> RunConfig:
    """Return the configuration of a run without a model."""
    return check_tree(
        {
            "output_dir": str(folder / "out"),
            "model": {"path": "fake"},
            "environments": [{"type": "reverse_text"}],
            "rollout": {"group_size": COMPLETIONS, "max_tokens": TOKENS, "max_concurrent_groups": 4},
            "reward": {"functions": [{"path": f"{Path(__file__).resolve()}:scattered"}]},
            "packer": {
                "groups_per_step": groups_per_step,
                "sequence_len": TOKENS + 1024,
                "max_async_level": level,
                "memory_bytes": MEMORY_BYTES,
            },
            "trainer": {"max_steps": 100_000, "num_ranks": num_ranks, "checkpoint": {"interval": 50}},
            "inference": {"engine": {"type": "fake"}},
            "weights": {"directory": str(folder / "weights")},
            "eval": {"num_prompts": 0},
            "bus": {
                "control": f"tcp://127.0.0.1:{free_port()}",
                "beat_interval": BEAT_SECONDS,
                "lease": LEASE_SECONDS,
            },
        }
    )


def scattered(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward without a meaning: completions of a group have different ones."""
    return [float(i % 7) for i in range(len(completions))]


def answer(self: FakeEngine, request: Any, future: Any) -> None:
    """Answer a request at once, with all tokens that it may have. In place of `FakeEngine._sample`."""
    with self._lock:
        self._waiting -= request.num_completions
        self._generated += request.num_completions * request.max_tokens
        policy = self._policy
    assert policy is not None
    start = hashlib.sha256(str(request.seed).encode()).digest()[0]
    token_ids = [2 + (start + i) % 62 for i in range(request.max_tokens)]
    one: dict[str, Any] = {
        "token_ids": token_ids,
        "logprobs": [-0.5] * request.max_tokens,
        "segments": [(0, policy.lineage, policy.version)],
        "finish_reason": "length",
    }
    future.set_result([Completion(**one) for _ in range(request.num_completions)])


class Watch:
    """Longest times between two heartbeats of each peer, in the packer's process."""

    def __init__(self) -> None:
        self.packer: PackerActor | None = None
        self._last: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._kept = 0
        self._groups = 0

    def install(self) -> None:
        """Note each heartbeat as the packer's control thread reads it, and the bytes that are kept after each round."""
        watch, heard, repeated, run_round = self, PackerActor.heard, PackerActor._repeated, PackerActor.run_round

        def heard_noted(actor: PackerActor, identity: bytes, heartbeat: Any) -> None:
            watch.packer = actor
            watch.note(identity.decode())
            heard(actor, identity, heartbeat)

        def repeated_noted(actor: PackerActor, found: list[Any]) -> None:
            for one in found:
                watch.note(one.peer)
            repeated(actor, found)

        def round_noted(actor: PackerActor, timeout: float) -> Any:
            result = run_round(actor, timeout)
            watch._kept = max(watch._kept, actor._payloads.num_bytes)
            return result

        PackerActor.heard, PackerActor._repeated = heard_noted, repeated_noted  # type: ignore[assignment, method-assign]
        PackerActor.run_round = round_noted  # type: ignore[assignment, method-assign]

    def note(self, name: str) -> None:
        """Note a heartbeat."""
        now = time.monotonic()
        if name in self._last:
            self._longest[name] = max(self._longest.get(name, 0.0), now - self._last[name])
        self._last[name] = now

    def begin(self) -> None:
        """Forget the start of the run."""
        self._longest, self._kept, self._groups = {}, 0, self.num_groups

    @property
    def num_groups(self) -> int:
        """Number of groups trained."""
        machine = self.packer.machine if self.packer else None
        return machine.trained_step * machine.settings.groups_per_step if machine else 0

    def found(self) -> dict[str, Any]:
        """Return what has been seen since `begin`."""
        return {"longest": self._longest, "kept": self._kept, "groups": self.num_groups - self._groups}

    def serve(self, pipe: Connection) -> None:
        """Answer the orders of a pipe."""
        while True:
            order = pipe.recv()
            if order == "begin":
                self.begin()
            pipe.send((self.num_groups, memory(), self.found()))


def memory() -> tuple[int, int]:
    """Return bytes of this process that are resident now, and that were at most."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(1024 * int(lines[key].split()[0]) for key in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


class Double:
    """Rollout actor, engine and reward actor in a process: a scored group goes out as soon as its ticket comes."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._rollout, self._reward, self._engine = (
            Rollout("", "rollout-0", 2 * run.packer.groups_per_step),
            Reward("", "reward-0"),
            Engine("", "inference-0"),
        )
        peers: list[Peer] = [self._rollout, self._reward, self._engine]
        self._members = {peer.name: (peer, Membership(run, peer.kind, peer.name)) for peer in peers}

    def live(self) -> None:
        """Work until the process is killed."""
        for peer, member in self._members.values():
            member.start(phase="running", **peer.fields())
        directive = None
        while not isinstance(directive, RewardDirective):
            self._turn()
            directive = self._members["reward-0"][1].latest()
        outbox = Outbox("scored", directive.packer_address, self._run.bus, "reward-0")
        group = template(self._run, directive.run)
        while True:
            self._turn()
            if self._engine.policy is not None:
                group = self._send(outbox, group, self._engine.policy)

    def _turn(self) -> None:
        for peer, member in self._members.values():
            directive = member.wait(0.002)
            if directive is not None and not isinstance(directive, ObserverDirective):
                peer.obey(directive)
            member.report(**peer.fields())

    def _send(self, outbox: Outbox, group: ScoredGroup, policy: PolicyVersion) -> ScoredGroup:
        """Send a group for each ticket while there is room; return the group with the newest version."""
        if (policy.lineage, policy.version) != tuple(group.segments[0, 1:3]):
            segments = group.segments.copy()
            segments[:, 1:3] = policy.lineage, policy.version
            group = group.model_copy(update={"segments": segments})
        while self._rollout.to_send:
            ticket = self._rollout.to_send[0]
            stamped = {"ordinal": ticket.ordinal, "attempt": ticket.attempt, "purpose": ticket.purpose}
            named = {"sender": "rollout-0", "scorer": "reward-0", "example_key": ticket.example_key}
            if not outbox.try_send(group.model_copy(update=stamped | named)):
                break
            self._rollout.to_send.pop(0)
            self._reward.held.add((ticket.ordinal, ticket.attempt))
        return group


def be(name: str, run: RunConfig, pipe: Connection | None) -> None:
    """Be an actor, or the double. Runs in a child process until it is killed."""
    written = os.open(run.output / f"{name}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(written, 1)
    os.dup2(written, 2)
    if name == "double-0":
        Double(run).live()
    FakeEngine._sample = answer  # type: ignore[method-assign]
    FakeLearner.step = lambda self, batch, ranks, before=(): dict.fromkeys(MEASURED, 0.0)  # type: ignore[method-assign]
    if pipe is not None:
        watch = Watch()
        watch.install()
        threads.start_helper("watch", lambda: watch.serve(pipe))
    run_actor(name.rpartition("-")[0], name, run)


class Answers(Peers):
    """A bare peer that sends a heartbeat every ANSWER_SECONDS, whatever else goes on, and times the answers."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__(run, "rollout", 1)
        # without free slots it gets no tickets
        self.names = ["rollout-9"]

    def watch(self, seconds: float) -> float:
        """Send heartbeats for some time; return the longest time between two answers, in seconds."""
        number, heard, longest = self.answers, time.monotonic(), 0.0
        until, due = heard + seconds, heard
        while time.monotonic() < until:
            if time.monotonic() >= due:
                self.send(0)
                due += ANSWER_SECONDS
            self.read(max(0.0, due - time.monotonic()))
            if self.answers != number:
                number, now = self.answers, time.monotonic()
                longest, heard = max(longest, now - heard), now
        return max(longest, time.monotonic() - heard)


def measure(ring: str, groups_per_step: int, level: int, num_ranks: int, seconds: float) -> dict[str, Any]:
    """Measure a ring with steps of so many groups."""
    context = multiprocessing.get_context("spawn")
    with scratch() as folder:
        run = config(folder.resolve(), groups_per_step, level, num_ranks)
        run.output.mkdir(parents=True)
        pipe, theirs = context.Pipe()
        names = [f"{kind}-{i}" for kind in RINGS[ring] for i in range(num_ranks if kind == "trainer" else 1)]
        children = [
            context.Process(target=be, args=(name, run, theirs if name == "packer-0" else None)) for name in names
        ]
        for child in children:
            child.start()
        try:
            answers = Answers(run)
            before = asked(pipe, "look")[1]
            deadline = time.monotonic() + START_SECONDS
            while asked(pipe, "look")[0] < 2 * groups_per_step:
                assert time.monotonic() < deadline, f"no two steps within {START_SECONDS:g} s; see {folder}"
                answers.watch(0.2)
            asked(pipe, "begin")
            started = time.monotonic()
            longest = answers.watch(seconds)
            _, (_, most), found = asked(pipe, "look")
            took = time.monotonic() - started
        finally:
            for child in children:
                child.kill()
                child.join()
    return {
        "ring": ring,
        "groups/step": groups_per_step,
        "ranks": num_ranks,
        "groups/s": found["groups"] / took,
        "answer ms": 1000 * longest,
        "beat ms": 1000 * max(found["longest"].values()),
        "limit ms": 1000 * LEASE_SECONDS / 3,
        "kept MB": found["kept"] / 1e6,
        "allowed MB": MEMORY_BYTES / 1e6,
        "MB": (most - before[0]) / 1e6,
        "by peer": {name.partition("/")[0]: round(1000 * gap) for name, gap in found["longest"].items()},
    }


def asked(pipe: Connection, order: str) -> Any:
    """Ask the packer's process."""
    pipe.send(order)
    assert pipe.poll(START_SECONDS), f"the packer's process has not answered within {START_SECONDS:g} s"
    return pipe.recv()


def main() -> None:
    """Measure both rings, print a table, and write results with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rings", default=",".join(RINGS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(ring, *step, arguments.seconds) for ring in arguments.rings.split(",") for step in STEPS[ring]]
    publish({"large_ring": rows}, rows, arguments.json)


if __name__ == "__main__":
    main()
