"""A simulated inference actor: keeps its engine at the version that the packer names."""

from typing import TYPE_CHECKING

from actors.simulate.engine import Engine
from actors.simulate.requests import POLL_SECONDS
from schemas.messages import InferenceHeartbeat, PolicyVersion

if TYPE_CHECKING:
    from actors.simulate.ring import Ring


class Inference:
    """Inference actor.

    Args:
        ring: the simulation.
        engine: its engine.
    """

    def __init__(self, ring: "Ring", engine: Engine) -> None:
        self._ring, self.engine = ring, engine
        self._sequence = 0

    def join(self) -> None:
        """Let a started engine take part."""
        self._ring.packer.join(self.engine.identity, self.told)
        self.beat()

    @property
    def _boot_id(self) -> str:
        # unlike an identity's, a boot id names a process without its name
        return f"{self.engine.name}-{self.engine.boot}"

    def beat(self) -> None:
        """Send a heartbeat."""
        self._sequence += 1
        heartbeat = InferenceHeartbeat.model_construct(
            run=self._ring.machine.run,
            name=self.engine.name,
            boot_id=self._boot_id,
            sequence=self._sequence,
            phase="draining" if self.engine.leaves else "running",
            fingerprint=None,
            metrics_url="",
            term=0,
            url=f"inproc://{self.engine.identity}",
            engine_state="clean" if self.engine.policy is not None else "starting",
            policy=self.engine.policy,
            load=self.engine.load,
            generated_tokens=self.engine.tokens,
            holds_two_versions=False,
            update_seconds={},
            weight_ranks=int(self._ring.config.weights.channel != "filesystem"),
        )
        self._ring.send(self._ring.packer.hear, self.engine.identity, heartbeat)

    def told(self) -> None:
        """Load the version that the packer names, unless one is on its way."""
        wanted = self._wanted()
        if wanted is None or wanted == self.engine.policy or self.engine.loading is not None:
            return
        self.engine.loading = wanted
        self._ring.events.after(self._ring.times.wire_seconds, self._arrived, self.engine.boot, wanted)

    def _wanted(self) -> PolicyVersion | None:
        machine = self._ring.machine
        if self._ring.config.weights.channel == "filesystem":
            return machine.engines.target.policy if machine.engines.target else None
        update = machine.updates.current
        return update.policy if update is not None and update.names(self._boot_id) else None

    def _arrived(self, boot: int, policy: PolicyVersion) -> None:
        if self.engine.alive and boot == self.engine.boot:
            self.engine.enter(policy, self._entered)

    def _entered(self) -> None:
        self.engine.reported_load = self.engine.load
        self._ring.requests.forget_engines()
        self.beat()
        # a newer version may have been named meanwhile
        self.told()
        # rollout actors hear of the version by way of the packer
        hops = 2 * self._ring.times.hop_seconds + self._ring.times.round_seconds
        self._ring.events.after(hops + POLL_SECONDS, self._ring.requests.search)
