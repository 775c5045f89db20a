"""A simulated trainer: all ranks of the gang in lockstep, as their exchanges keep them."""

from typing import TYPE_CHECKING

import numpy as np

from actors.algorithms.lag import lag_of
from actors.algorithms.packing import cost, pack
from actors.algorithms.run_length import checkpoint_interval
from actors.ledger import Step
from actors.simulate.models import train_step
from schemas.messages import CheckpointInfo, Manifest, PolicyVersion, TrainerHeartbeat

if TYPE_CHECKING:
    from actors.simulate.ring import Ring


class Trainer:
    """Gang of trainer ranks.

    Args:
        ring: the simulation.
        num_ranks: processes of the gang.
    """

    def __init__(self, ring: "Ring", num_ranks: int) -> None:
        self._ring, self.num_ranks = ring, num_ranks
        self.boot, self._sequence, self.alive = 1, 0, True
        self.incarnation, self.next_step = 0, 1
        self._published: list[Manifest] = []
        self._checkpoints: list[CheckpointInfo] = []
        self._batches: dict[int, Step] = {}
        self._offered: set[int] = set()
        """Steps whose batch has been sent to this gang."""
        self._wait_from: float | None = None
        """Time since when the trainer is ready for its next batch; None: it computes."""
        self._left, self._taken_in, self._computes = 0.0, 0.0, False
        """Seconds of computing left at full speed, and the time up to which they are counted."""
        self._wakes = 0
        self._slow = ring.cores.factor
        ring.cores.workers.append(self)
        self._interval = checkpoint_interval(ring.config.trainer)

    @property
    def identities(self) -> list[str]:
        """Name and boot id of each rank, as in ZeroMQ."""
        return [f"trainer-{rank}/{self.boot}" for rank in range(self.num_ranks)]

    def beat(self) -> None:
        """Send the heartbeats of all ranks."""
        self._sequence += 1
        for rank, identity in enumerate(self.identities):
            heartbeat = TrainerHeartbeat.model_construct(
                run=self._ring.machine.run,
                name=f"trainer-{rank}",
                boot_id=str(self.boot),
                sequence=self._sequence,
                phase="running",
                fingerprint=None,
                metrics_url="",
                term=0,
                rank=rank,
                num_ranks=self.num_ranks,
                address="inproc://trainer",
                incarnation=self.incarnation,
                next_step=self.next_step,
                checkpoints=list(self._checkpoints),
                published=list(self._published),
                reports=[],
                received=np.array(sorted(self._batches), np.int64),
            )
            self._ring.send(self._ring.packer.hear, identity, heartbeat)

    def told(self) -> None:
        """Join the gang that the packer has formed."""
        machine = self._ring.machine
        if not self.incarnation and machine.gang.members.get(0) == self.identities[0]:
            self.incarnation, self.next_step = machine.gang.incarnation, machine.gang.checkpoint + 1
            self._ring.events.after(self._ring.times.publish_seconds, self._first_published, self.boot)

    def offer(self) -> None:
        """Send the batches that the packer has for this gang on their way, each once."""
        for identity, _, step in self._ring.machine.batches_wanted():
            if identity == self.identities[0] and step.step not in self._offered:
                self._offered.add(step.step)
                times = self._ring.times
                self._ring.events.after(times.round_seconds + times.hop_seconds, self._get, step, self.boot)

    def _get(self, step: Step, boot: int) -> None:
        if boot == self.boot and step.step >= self.next_step:
            self._batches[step.step] = step
            self._start()

    def _first_published(self, boot: int) -> None:
        if boot != self.boot:
            return
        self._publish(self.next_step - 1)
        self._wait_from = self._ring.events.now
        self.beat()

    def _publish(self, version: int) -> None:
        policy = PolicyVersion(lineage=self.incarnation, version=version)
        text, channel = str(policy), self._ring.config.weights.channel
        self._published.append(
            Manifest.model_construct(policy=policy, channel=channel, content="full", uri=text, digest=text, num_bytes=1)
        )
        machine, keep = self._ring.machine, self._ring.config.weights.keep
        pinned, due = machine.evaluations.policy, machine.evaluations.next_version()
        wanted = (pinned.version if pinned else None, due)
        needed = min((one for one in wanted if one is not None), default=version)
        # as the weight channels prune: the newest versions, and those that an evaluation needs
        self._published = [one for one in self._published[:-keep] if one.policy.version >= needed] + self._published[
            -keep:
        ]

    # --- a step --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ring, step = self._ring, self._batches.get(self.next_step)
        if step is None or self._wait_from is None:
            return
        now = ring.events.now
        ring.meter.begin_step(step.step, now - self._wait_from, now)
        self._wait_from = None
        self._left, self._taken_in, self._computes = self._seconds_of(step), now, True
        ring.cores.compute(self, self.num_ranks)
        self._plan()

    def _seconds_of(self, step: Step) -> float:
        """Return the seconds of a step's micro-batches, packed by the real packing."""
        ring, lengths = self._ring, list[int]()
        for ordinal in step.ordinals:
            lengths += ring.samples[ordinal]
        # ranks beyond the last whole group do nothing, and fewer than a group are a smaller one
        together = min(ring.config.trainer.ranks_per_row, self.num_ranks)
        ranks = pack(lengths, ring.settings.sequence_len, self.num_ranks // together)
        return train_step(
            ring.times, [[cost(micro_batch, lengths) / together for micro_batch in rank] for rank in ranks]
        )

    def set_slowdown(self, factor: float) -> None:
        """Compute slower by a factor from now on."""
        if self._computes:
            self._take_in()
        self._slow = factor
        if self._computes:
            self._plan()

    def _take_in(self) -> None:
        now = self._ring.events.now
        self._left -= (now - self._taken_in) / self._slow
        self._taken_in = now

    def _plan(self) -> None:
        self._wakes += 1
        self._ring.events.after(max(0.0, self._left) * self._slow, self._computed, self._wakes, self.boot)

    def _computed(self, wakes: int, boot: int) -> None:
        if wakes != self._wakes or boot != self.boot or not self.alive:
            return
        self._computes = False
        self._ring.cores.compute(self, 0)
        self._ring.meter.computed(self._ring.events.now)
        self._ring.events.after(self._ring.times.publish_seconds, self._trained, boot)

    def _trained(self, boot: int) -> None:
        if boot != self.boot or not self.alive:
            return
        ring, step = self._ring, self._batches.pop(self.next_step)
        self._publish(step.step)
        self.next_step = step.step + 1
        rows = ring.machine.groups.rows
        versions = [rows[ordinal].oldest_version for ordinal in step.ordinals]
        lags = [lag_of(step.step, version) for version in versions if version is not None]
        ring.meter.end_step(step.step, ring.events.now, lags, sum(ring.tokens[o] for o in step.ordinals))
        is_last = step.step == ring.settings.max_steps
        stall = 0.0
        if step.step % self._interval == 0 or is_last:
            stall = ring.times.checkpoint_seconds
            ring.events.after(stall + ring.times.save_seconds, self._saved, step, boot)
        ring.events.after(stall, self._ready, boot)
        self.beat()

    def _ready(self, boot: int) -> None:
        if boot == self.boot and self.alive:
            self._wait_from = self._ring.events.now
            self._start()

    def _saved(self, step: Step, boot: int) -> None:
        if boot != self.boot or not self.alive:
            return
        keep = max(1, self._ring.config.trainer.checkpoint.num_resumable)
        self._checkpoints = [*self._checkpoints, CheckpointInfo(step=step.step, chain=step.chain)][-keep:]
        self._ring.forget_old()
        self.beat()

    # --- its end -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End all ranks; a rank alone would end the others too."""
        self._ring.cores.compute(self, 0)
        self.alive, self.incarnation, self._published, self._batches = False, 0, [], {}
        self._wait_from, self._computes, self._offered = None, False, set()
        self.boot += 1
        self._wakes += 1

    def restart(self) -> None:
        """Start the next gang, which sees the checkpoints of the one before."""
        self.alive, self._sequence = True, 0
        self.beat()
