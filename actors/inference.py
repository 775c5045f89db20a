"""The inference actor: owns an engine, keeps it at the version that State names.

Consumes manifests from State. Emits beats with the engine's address, policy and load. Waits on State, and inside an
update on the weight channel and on the engine's next token boundary, both under `weights.timeout`. A version that
can't be loaded leaves the old one serving; it is tried again with the next State. An engine that no longer holds what
it has loaded (P25) serves no policy: by files it is loaded again at once, by broadcast the packer names it an update.
"""

import time
from collections.abc import Callable
from functools import partial

import structlog

from actors.engines.access import api_key, server_tls
from actors.engines.protocol import Engine, EngineStoppedError
from actors.engines.server import CompletionServer
from actors.faults import point
from actors.ledger.updates import MAX_FAILURES
from actors.membership import Drain, Membership
from actors.telemetry.logs import bind_everywhere
from actors.telemetry.metrics import Metrics
from bus.counts import EdgeCounts
from bus.weights import UpdateAbandonedError, WeightReceiver
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import InferenceBeat, InferenceState, Manifest, UpdateFailure, WeightUpdate

log = structlog.get_logger("inference")

POLL_SECONDS = 0.2
RETRY_UPDATE_SECONDS = 1.0
NO_UPDATE: dict[str, float] = {}


class InferenceActor:
    """Serves the policy.

    Args:
        make_engine: called after the first beat, since loading takes long.
        make_receiver: the end of the weight channel for a boot id.
        port: of HTTP; 0: any free one.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        metrics: Metrics,
        make_engine: Callable[[], Engine],
        make_receiver: Callable[[str], WeightReceiver],
        port: int = 0,
        lose: Callable[[str], bool] | None = None,
    ) -> None:
        self._config, self._metrics = config, metrics
        self._make_engine, self._port = make_engine, port
        self._drain = Drain()
        self._counted_tokens, self._counted_seconds = 0, 0.0
        self._retry_at = 0.0
        self._update_id = 0
        self._entered = ""
        """The update that was entered last."""
        self._failed = ""
        """The one of which the beat says that it failed here."""
        self._failures = 0
        """Versions in a row that could not be loaded."""
        self._error = ""
        metrics.set("grpo_inference_policy_version", -1)
        self.membership = Membership(config, InferenceBeat, name, lose=lose)
        self._receiver = make_receiver(self.membership.boot_id)

    @property
    def edges(self) -> list[EdgeCounts]:
        """Counts of this actor's sockets."""
        return [self.membership.counts]

    def run(self, metrics_url: str = "") -> None:
        """Until the run is done, or drained."""
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
            engine = self._make_engine()
            try:
                self._serve(engine)
            finally:
                engine.close()
        finally:
            self.membership.close()

    def drain(self) -> None:
        """Take no new work; end when what runs has finished, or late. From any thread."""
        self._drain.begin()

    def _serve(self, engine: Engine) -> None:
        server = self._listen(engine)
        settings = self._config.inference
        scheme = "https" if settings.tls_cert else "http"
        url = f"{scheme}://{settings.advertise_host or settings.host}:{server.port}"
        self.membership.report(phase="running", url=url, holds_two_versions=engine.holds_two_versions)
        log.info("engine serves", url=url)
        try:
            while not self._follow(engine):
                self.membership.wait(POLL_SECONDS)
        finally:
            self.membership.report(engine_state="starting")  # closing takes some engines seconds, and beats go on
            server.close()

    def _listen(self, engine: Engine) -> CompletionServer:
        settings = self._config.inference
        try:
            return CompletionServer(
                engine,
                self._config.model.path,
                self.membership.boot_id,
                settings.host,
                self._port,
                settings.request_timeout,
                registry=self._metrics.registry,
                api_key=api_key(settings),
                tls=server_tls(settings),
            )
        except OSError as error:
            raise ConfigError(
                f"inference.host, inference.port: {settings.host}:{self._port} can't be bound: "
                f"{error.strerror}; port 0 takes any free one"
            ) from error

    def _follow(self, engine: Engine) -> bool:
        """Do what the newest State says; True at the end."""
        state = self.membership.latest()
        if isinstance(state, InferenceState) and state.update_id >= self._update_id:  # a late one names an old version
            self._update_id = state.update_id
            manifest = state.manifest
            if manifest is not None and manifest.policy != engine.status().policy and self._may_enter(state):
                self._update(engine, manifest, state.update)
        self._report(engine)
        status = engine.status()
        done = state is not None and state.phase == "done"
        return done or self._drain.may_leave(holds_work=status.num_running + status.num_waiting > 0)

    def _may_enter(self, state: InferenceState) -> bool:
        """A file can be read at any time; an update is entered once, and only by those whom it names (P24)."""
        if self._config.weights.channel == "filesystem":
            return time.monotonic() >= self._retry_at
        update = state.update
        named = update is not None and update.names(self.membership.boot_id) and update.update != self._entered
        return named and state.manifest is not None and update is not None and update.policy == state.manifest.policy

    def _update(self, engine: Engine, manifest: Manifest, update: WeightUpdate | None) -> None:
        started = time.monotonic()
        self._entered = update.update if update else ""
        try:
            weights = self._receiver.receive(manifest, update, partial(self._check_worth_it, engine))
            received = time.monotonic()
            point("inference.received")
            pause = engine.load(manifest.policy, weights, self._config.weights.timeout)
        except UpdateAbandonedError as error:  # no fault of this engine's: the packer names another update
            log.warning("weight update given up", policy=str(manifest.policy), detail=str(error))
            self._metrics.count("grpo_inference_weight_updates_total", outcome="abandoned")
            return
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("weights not loaded", policy=str(manifest.policy), detail=str(error))
            self._metrics.count("grpo_inference_weight_updates_total", outcome="failed")
            self._retry_at, self._error = time.monotonic() + RETRY_UPDATE_SECONDS, str(error)
            self._say_failed(str(error))
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

    def _say_failed(self, detail: str) -> None:
        """Tell that the update entered last is not what this engine serves.

        Also of one that had succeeded: the packer may not have heard of its success, and would wait for it.
        """
        if self._entered and self._failed != self._entered:
            self._failed = self._entered
            failure = UpdateFailure(update=self._entered, missed=[], detail=detail)
            self.membership.report(failed_update=failure, error=self._error)

    def _give_up_after(self, update: WeightUpdate | None, error: Exception) -> None:
        """End when the packer names this engine no more: a new process is named again.

        Raises:
            EngineStoppedError: so many versions of the rendezvous channel have failed here, the last one so.
        """
        self._failures += 1
        if update is not None and self._failures >= MAX_FAILURES:
            raise EngineStoppedError(f"weights could not be loaded {self._failures} times in a row: {error}") from error

    def _check_worth_it(self, engine: Engine) -> None:
        """Give up an update when State names another one.

        Raises:
            UpdateAbandonedError: it does.
            EngineStoppedError: the engine has failed meanwhile.
        """
        point("inference.receiving")
        engine.status()
        state = self.membership.latest()
        if isinstance(state, InferenceState) and state.update is not None and state.update.update != self._entered:
            raise UpdateAbandonedError("the packer names another update")

    def _report(self, engine: Engine) -> None:
        status = engine.status()
        self._metrics.set("grpo_inference_running_completions", status.num_running)
        self._metrics.set("grpo_inference_waiting_completions", status.num_waiting)
        self._metrics.count("grpo_inference_generated_tokens_total", status.generated_tokens - self._counted_tokens)
        self._metrics.count("grpo_inference_busy_seconds_total", status.busy_seconds - self._counted_seconds)
        self._counted_tokens, self._counted_seconds = status.generated_tokens, status.busy_seconds
        if status.state != "clean":  # it is again when a version has been loaded
            self.membership.report(engine_state=status.state, policy=None, update_seconds=NO_UPDATE)
            self._say_failed(f"the engine is {status.state}")
        self.membership.report(
            urgent=False,
            phase=self._drain.phase,
            error=self._error,
            load=status.num_running + status.num_waiting,
            generated_tokens=status.generated_tokens,
        )
