"""The inference actor: owns an engine and keeps the engine at the version named by the directive.

Consumes directives. Emits heartbeats with the engine's address, policy and load. Waits on the directive, and in
`weight_updates` on a new version.
"""

from collections.abc import Callable
from typing import cast

import structlog

from actors.engines.protocol import Engine, TakesTurns
from actors.inference.listening import listen
from actors.inference.turns import EngineTurns
from actors.inference.weight_updates import WeightUpdates
from actors.process.membership import Drain, Membership
from actors.process.tasks import task
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import SHORT_SECONDS, span
from bus.counts import EdgeCounts
from bus.weights import WeightReceiver
from schemas.config import RunConfig
from schemas.messages import InferenceDirective, InferenceHeartbeat

log = structlog.get_logger("inference")

POLL_SECONDS = 0.2
"""Longest wait before the directive and engine are looked at again."""
NO_UPDATE: dict[str, float] = {}
"""Seconds of the last update for the heartbeat, when there was none."""


class InferenceActor:
    """Actor that serves the policy with an engine, over HTTP.

    Args:
        config: configuration of the run.
        name: name in the run.
        metrics: destination of the `grpo_inference_*` metrics.
        make_engine: maker of the engine; called after the first heartbeat, since loading takes long.
        make_receiver: function from a boot id to the receiving end of the weight channel.
        port: HTTP port; 0: any free port.
        shares_gpu: True if the trainer uses the engine's GPU too. The engine then starts after the trainer.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        make_engine: Callable[[], Engine],
        make_receiver: Callable[[str], WeightReceiver],
        port: int = 0,
        shares_gpu: bool = False,
    ) -> None:
        self._config, self._metrics = config, metrics
        self._make_engine, self.port, self._shares_gpu = make_engine, port, shares_gpu
        self._drain = Drain(config.inference.drain_timeout)
        self._counted_tokens, self._counted_seconds = 0, 0.0
        self.membership = Membership(config, InferenceHeartbeat, name)
        self.name, self.liveness = name, self.membership.liveness
        self._turns: EngineTurns | None = None
        if config.up.colocate == "turns":
            self._turns = EngineTurns(self.membership, config.weights.timeout, POLL_SECONDS)
        receiver = make_receiver(self.membership.boot_id)
        self.updates = WeightUpdates(config, metrics, self.membership, self._drain, receiver)

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts]

    def run(self, metrics_url: str = "") -> None:
        """Run until the run is done, or this actor has drained.

        Raises:
            ConfigError: the HTTP address can't be bound.
            EngineStoppedError: the engine has stopped, or can't load new versions any more.
            PeerRefusedError, StartOverError, PackerSilentError: as `Membership.latest`.
        """
        self.membership.start(
            metrics_url=metrics_url,
            url="",
            engine_state="starting",
            policy=None,
            load=0,
            generated_tokens=0,
            holds_two_versions=False,
            update_seconds=NO_UPDATE,
            weight_ranks=int(self._config.weights.channel != "filesystem"),
        )
        try:
            with span("wait for the trainer", waits=True, least=SHORT_SECONDS):
                if self._turns is not None:
                    if not self._turns.wait(self._drain):
                        return
                elif self._shares_gpu and not self._wait_for_trainer():
                    return
            # loading takes minutes: heartbeats go on meanwhile, so the lease does not end
            with span("load engine"), task("start engine"):
                engine = self._make_engine()
            try:
                self._serve(engine)
            finally:
                engine.close()
        finally:
            self.membership.close()

    def drain(self) -> None:
        """Take no new work, and exit once running requests have ended or the drain time is over. Thread-safe."""
        self._drain.begin()

    def _wait_for_trainer(self) -> bool:
        """Wait until the trainer has published; return False if this actor shall exit instead.

        A trainer publishes once it holds the memory of a step. An engine that loaded at the same time would race with
        the trainer for the GPU: both measure what is free while the other one grows.

        Raises:
            PeerRefusedError, StartOverError, PackerSilentError: as `Membership.latest`.
        """
        log.info("engine waits for the trainer, which shares its GPU (up.colocate)")
        while not self._drain:
            directive = self.membership.latest()
            if directive is not None and directive.phase == "done":
                return False
            if isinstance(directive, InferenceDirective) and directive.trainer_ready:
                return True
            self.membership.wait(POLL_SECONDS)
        return False

    def _serve(self, engine: Engine) -> None:
        boot_id, registry = self.membership.boot_id, self._metrics.registry
        server, url = listen(self._config, engine, boot_id, self.port, registry)
        self.membership.report(
            phase="running",
            url=url,
            holds_two_versions=engine.holds_two_versions,
            weight_place=self.updates.place,
        )
        log.info("engine serves", url=url)
        try:
            while not self.follow(engine):
                self.membership.wait(POLL_SECONDS)
        finally:
            # before closing, which takes seconds with some engines: heartbeats go on, and bring no more requests here
            self.membership.report(engine_state="starting")
            server.close()

    def follow(self, engine: Engine) -> bool:
        """Follow the newest directive: one iteration of the main loop. Return True when the actor shall exit.

        Raises:
            EngineStoppedError: the engine has stopped, or can't load new versions any more.
            PeerRefusedError, StartOverError, PackerSilentError: as `Membership.latest`.
        """
        directive = self.membership.latest()
        # before a look at the engine, whose base may have ended with the trainer (`up.share_base`)
        if directive is not None and directive.phase == "done":
            return True
        if isinstance(directive, InferenceDirective):
            if self._turns is not None and self._turns.rests:
                self._turns.follow(cast(TakesTurns, engine), directive)
            # an engine at rest loads nothing: it takes the newest version once it has its turn. One that is to rest
            # first ends an update that names it, since the other members wait
            if self._turns is None or not self._turns.rests:
                self.updates.follow(engine, directive)
            if self._turns is not None:
                self._turns.follow(cast(TakesTurns, engine), directive)
        self.report(engine)
        status = engine.status()
        return self._drain.may_leave(holds_work=status.num_running + status.num_waiting > 0)

    def report(self, engine: Engine) -> None:
        """Report the state and the load of the engine in the heartbeat, and count its tokens."""
        status = engine.status()
        self._metrics.set("grpo_inference_running_completions", status.num_running)
        self._metrics.set("grpo_inference_waiting_completions", status.num_waiting)
        self._metrics.count("grpo_inference_generated_tokens_total", status.generated_tokens - self._counted_tokens)
        self._metrics.count("grpo_inference_busy_seconds_total", status.busy_seconds - self._counted_seconds)
        # engines count since their start, counters of metrics by increments
        self._counted_tokens, self._counted_seconds = status.generated_tokens, status.busy_seconds
        # `WeightUpdates` alone reports "clean", once a version is loaded
        if status.state != "clean":
            self.membership.report(engine_state=status.state, policy=None, update_seconds=NO_UPDATE)
            self.updates.report_failed(f"the engine is {status.state}", [self.membership.boot_id])
        self.updates.report_given_up()
        self.membership.report(
            urgent=False,
            phase=self._drain.phase,
            error=self.updates.error,
            load=status.num_running + status.num_waiting,
            generated_tokens=status.generated_tokens,
            busy_seconds=status.busy_seconds,
        )
