"""The inference actor: owns an engine and keeps the engine at the version named by the directive.

Consumes manifests from the directive. Emits heartbeats with the engine's address, policy and load. Waits on the
directive, and inside an update on the weight channel and the engine's next token boundary, both under
`weights.timeout`. If a version can't be loaded, the old version keeps serving and loading is tried again. P25 (an
engine that has lost the loaded weights tells no policy): the engine loads again, from the file at once or with the next
update that names the engine.
"""

import math
import time
from collections.abc import Callable
from functools import partial

import structlog

from actors.engines.http.access import api_key, server_tls
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import Engine, EngineStoppedError
from actors.ledger.updates import MAX_FAILURES
from actors.process.fault_points import point
from actors.process.membership import Drain, Membership
from actors.telemetry.logs import bind_everywhere
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from bus.weights import UpdateAbandonedError, WeightReceiver
from schemas.config import RunConfig
from schemas.config.services import bracketed, is_wildcard, without_brackets
from schemas.errors import ConfigError
from schemas.messages import InferenceDirective, InferenceHeartbeat, Manifest, UpdateFailure, WeightUpdate

log = structlog.get_logger("inference")

POLL_SECONDS = 0.2
"""Longest wait before the directive and engine are looked at again."""
RETRY_UPDATE_SECONDS = 1.0
"""Pause before a version that could not be loaded is read again."""
GIVEN_UP_SECONDS = 1.0
"""Seconds until an abandoned update is reported: the trainer often knows more about the cause, and reports first."""
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
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        make_engine: Callable[[], Engine],
        make_receiver: Callable[[str], WeightReceiver],
        port: int = 0,
    ) -> None:
        self._config, self._metrics = config, metrics
        self._make_engine, self.port = make_engine, port
        self._drain = Drain()
        self._counted_tokens, self._counted_seconds = 0, 0.0
        self._retry_at = 0.0
        self._update_id = 0
        self._entered = ""
        """Name of the update entered last."""
        self._failed = ""
        """Name of the update reported as failed here."""
        self._given_up = (math.inf, "")
        """Time at which to report the update entered last as given up, and the reason."""
        self._failures = 0
        """Versions in a row that could not be loaded, rendezvous channel and file alike."""
        self._error = ""
        metrics.set("grpo_inference_policy_version", -1)  # no version yet; 0 is the model as configured
        self.membership = Membership(config, InferenceHeartbeat, name)
        self.name, self.liveness = name, self.membership.liveness
        self._receiver = make_receiver(self.membership.boot_id)

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
            weight_ranks=int(self._config.weights.channel == "rendezvous"),
        )
        try:
            engine = self._make_engine()  # heartbeats go on meanwhile, so the lease does not end
            try:
                self._serve(engine)
            finally:
                engine.close()
        finally:
            self.membership.close()

    def drain(self) -> None:
        """Take no new work, and exit once running requests have ended or the drain time is over. Thread-safe."""
        self._drain.begin()

    def _serve(self, engine: Engine) -> None:
        server = self._listen(engine)
        settings = self._config.inference
        scheme = "https" if settings.tls_cert else "http"
        url = f"{scheme}://{bracketed(self._reached_at())}:{server.port}"
        self.membership.report(phase="running", url=url, holds_two_versions=engine.holds_two_versions)
        log.info("engine serves", url=url)
        try:
            while not self.follow(engine):
                self.membership.wait(POLL_SECONDS)
        finally:
            self.membership.report(engine_state="starting")  # closing takes seconds with some engines; heartbeats go on
            server.close()

    def _reached_at(self) -> str:
        """Return the host under which other processes reach the server; loopback if the server listens everywhere."""
        settings = self._config.inference
        if settings.advertise_host:
            return settings.advertise_host
        if is_wildcard(settings.host):
            return "::1" if ":" in settings.host else "127.0.0.1"
        return settings.host

    def _listen(self, engine: Engine) -> CompletionServer:
        settings = self._config.inference
        try:
            return CompletionServer(
                engine,
                self._config.model.path,
                self.membership.boot_id,
                without_brackets(settings.host),
                self.port,
                settings.request_timeout,
                registry=self._metrics.registry,
                api_key=api_key(settings),
                tls=server_tls(settings),
                run_name=self._config.name,
            )
        except OSError as error:
            raise ConfigError(
                f"inference.host, inference.port: {settings.host}:{self.port} can't be bound: "
                f"{error.strerror}; port 0 takes any free one"
            ) from error

    def follow(self, engine: Engine) -> bool:
        """Follow the newest directive: one iteration of the main loop. Return True when the actor shall exit.

        Raises:
            EngineStoppedError: the engine has stopped, or can't load new versions any more.
            PeerRefusedError, StartOverError, PackerSilentError: as `Membership.latest`.
        """
        directive = self.membership.latest()
        # a directive that arrives late names an old version
        if isinstance(directive, InferenceDirective) and directive.update_id >= self._update_id:
            self._update_id = directive.update_id
            manifest = directive.manifest
            if manifest is not None and manifest.policy != engine.status().policy and self._may_enter(directive):
                self.update(engine, manifest, directive.update)
        self.report(engine)
        status = engine.status()
        done = directive is not None and directive.phase == "done"
        return done or self._drain.may_leave(holds_work=status.num_running + status.num_waiting > 0)

    def _may_enter(self, directive: InferenceDirective) -> bool:
        """Return whether the version named by the directive may be loaded now.

        A file can be read at any time. An update is entered once, and only by members (P24: the packer names
        each update with all members).
        """
        if self._config.weights.channel == "filesystem":
            return time.monotonic() >= self._retry_at
        update = directive.update
        named = update is not None and update.names(self.membership.boot_id) and update.update != self._entered
        return (
            named
            and directive.manifest is not None
            and update is not None
            and update.policy == directive.manifest.policy
        )

    def update(self, engine: Engine, manifest: Manifest, update: WeightUpdate | None) -> None:
        """Load a version into the engine. After an error the old version keeps serving; the heartbeat names the error.

        Raises:
            EngineStoppedError: the engine has failed, or the packer has excluded this engine from updates.
        """
        started = time.monotonic()
        self._entered, self._given_up = update.update if update else "", (math.inf, "")
        try:
            weights = self._receiver.receive(manifest, update, partial(self._check_worth_it, engine))
            received = time.monotonic()
            point("inference.received")
            pause = engine.load(manifest.policy, weights, self._config.weights.timeout)
        except UpdateAbandonedError as error:  # not this engine's fault
            log.warning("weight update given up", policy=str(manifest.policy), detail=str(error))
            self._given_up = (time.monotonic() + GIVEN_UP_SECONDS, str(error))
            self._metrics.count("grpo_inference_weight_updates_total", outcome="abandoned")
            return
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("weights not loaded", policy=str(manifest.policy), detail=str(error))
            self._metrics.count("grpo_inference_weight_updates_total", outcome="failed")
            self._retry_at, self._error = time.monotonic() + RETRY_UPDATE_SECONDS, str(error)
            self._say_failed(str(error), [self.membership.boot_id])
            self._give_up_after(update, error)
            return
        point("inference.loaded")
        parts = {"pause": pause, "wire": received - started, "load": time.monotonic() - received}
        self._metrics.count("grpo_inference_weight_updates_total", outcome="loaded")
        for part, seconds in parts.items():
            self._metrics.observe("grpo_inference_weight_update_seconds", seconds, part=part)
        self._metrics.set("grpo_inference_policy_version", manifest.policy.version)
        self._error, self._failures = "", 0
        bind_everywhere(policy=str(manifest.policy))
        self.membership.report(policy=manifest.policy, engine_state="clean", update_seconds=parts)

    def _say_failed(self, detail: str, missed: list[str]) -> None:
        """Report that the update entered last is not served here, once per update.

        Also used for an update that has succeeded before: the packer may not have heard of the success, and would wait.
        """
        if self._entered and self._failed != self._entered:
            self._failed = self._entered
            failure = UpdateFailure(update=self._entered, missed=missed, detail=detail)
            self.membership.report(failed_update=failure, error=self._error)

    def _give_up_after(self, update: WeightUpdate | None, error: Exception) -> None:
        """Raise once the packer has excluded this engine from updates. A new process is included again.

        Raises:
            EngineStoppedError: MAX_FAILURES versions in a row have failed, the last one by the rendezvous channel.
        """
        self._failures += 1
        if update is not None and self._failures >= MAX_FAILURES:
            raise EngineStoppedError(f"weights could not be loaded {self._failures} times in a row: {error}") from error

    def _check_worth_it(self, engine: Engine) -> None:
        """Check that the update under way is still wanted; called while it is received.

        Raises:
            UpdateAbandonedError: the directive names another update, this engine drains, or the run is done.
            EngineStoppedError: the engine has failed meanwhile.
        """
        point("inference.receiving")
        engine.status()  # raises if the engine has stopped
        # a receiver of files has no progress
        self.membership.report(urgent=False, update_progress=getattr(self._receiver, "progress", 0))
        directive = self.membership.latest()
        if self._drain or (directive is not None and directive.phase == "done"):
            raise UpdateAbandonedError("this engine leaves")
        if (
            isinstance(directive, InferenceDirective)
            and directive.update is not None
            and directive.update.update != self._entered
        ):
            raise UpdateAbandonedError("the packer names another update")

    def report(self, engine: Engine) -> None:
        """Report the state and the load of the engine in the heartbeat, and count its tokens."""
        status = engine.status()
        self._metrics.set("grpo_inference_running_completions", status.num_running)
        self._metrics.set("grpo_inference_waiting_completions", status.num_waiting)
        self._metrics.count("grpo_inference_generated_tokens_total", status.generated_tokens - self._counted_tokens)
        self._metrics.count("grpo_inference_busy_seconds_total", status.busy_seconds - self._counted_seconds)
        # engines count since their start, counters of metrics by increments
        self._counted_tokens, self._counted_seconds = status.generated_tokens, status.busy_seconds
        if status.state != "clean":  # clean again once a version is loaded
            self.membership.report(engine_state=status.state, policy=None, update_seconds=NO_UPDATE)
            self._say_failed(f"the engine is {status.state}", [self.membership.boot_id])
        tell_at, reason = self._given_up
        if time.monotonic() >= tell_at:
            self._say_failed(reason, [])
        self.membership.report(
            urgent=False,
            phase=self._drain.phase,
            error=self._error,
            load=status.num_running + status.num_waiting,
            generated_tokens=status.generated_tokens,
        )
