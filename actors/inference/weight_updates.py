"""Entry of new versions of the weights into the engine, with the state that the heartbeat tells.

A version is entered when the directive names it. Waits on the weight channel and on the engine's next token boundary,
both under `weights.timeout`. If a version can't be loaded, the old version keeps serving and loading is tried again.
P25 (an engine that has lost the loaded weights tells no policy): the engine loads again, from the file at once or with
the next update that names the engine.
"""

import math
import time
from functools import partial

import structlog

from actors.engines.protocol import Engine, EngineStoppedError
from actors.ledger.weight_updates import MAX_FAILURES
from actors.process.fault_points import point
from actors.process.membership import Drain, Membership
from actors.telemetry.logs import bind_everywhere
from actors.telemetry.metrics import Metrics
from actors.telemetry.spans import span
from bus.weights import UpdateAbandonedError, WeightReceiver
from schemas.config import RunConfig
from schemas.messages import InferenceDirective, Manifest, UpdateFailure, WeightUpdate

log = structlog.get_logger("inference")

RETRY_UPDATE_SECONDS = 1.0
"""Pause before a version that could not be loaded is read again."""
GIVEN_UP_SECONDS = 1.0
"""Seconds until an abandoned update is reported: the trainer often knows more about the cause, and reports first."""


class WeightUpdates:
    """Loader of the versions that directives name, for one engine.

    Args:
        config: configuration of the run.
        metrics: destination of the `grpo_inference_*` metrics.
        membership: place in the run, for directives and heartbeats.
        drain: order to leave, which ends an update under way.
        receiver: this actor's end of the weight channel.
    """

    def __init__(
        self, config: RunConfig, metrics: Metrics, membership: Membership, drain: Drain, receiver: WeightReceiver
    ) -> None:
        self._config, self._metrics, self._membership = config, metrics, membership
        self._drain, self._receiver = drain, receiver
        self.error = ""
        """Error of the newest version, for the heartbeat; empty if the version has been loaded."""
        self._retry_at = 0.0
        self._update_id = 0
        self._entered = ""
        """Name of the update entered last."""
        self._failed = ""
        """Name of the update reported as failed here."""
        self._given_up = (math.inf, "")
        """Time at which to report the update entered last as given up, and the reason."""
        self._failures = 0
        """Versions in a row that could not be loaded, by any channel."""
        # no version yet; 0 is the model as configured
        metrics.set("grpo_inference_policy_version", -1)

    @property
    def place(self) -> str:
        """Machine and device on which weights are received, for channel `device`. Imports torch."""
        # a receiver of files has none
        return str(getattr(self._receiver, "place", ""))

    def follow(self, engine: Engine, directive: InferenceDirective) -> None:
        """Load the version of a directive if the engine lacks the version and may load now.

        Raises:
            EngineStoppedError: as `load`.
        """
        # a directive that arrives late names an old version
        if directive.update_id < self._update_id:
            return
        self._update_id = directive.update_id
        manifest = directive.manifest
        if manifest is not None and manifest.policy != engine.status().policy and self._may_enter(directive):
            self.load(engine, manifest, directive.update)

    def _may_enter(self, directive: InferenceDirective) -> bool:
        """Return whether the version named by the directive may be loaded now.

        A file can be read at any time. An update is entered once, and only by members (P24: the packer names
        each update with all members).
        """
        if self._config.weights.channel == "filesystem":
            return time.monotonic() >= self._retry_at
        update = directive.update
        named = update is not None and update.names(self._membership.boot_id) and update.update != self._entered
        return (
            named
            and directive.manifest is not None
            and update is not None
            and update.policy == directive.manifest.policy
        )

    def load(self, engine: Engine, manifest: Manifest, update: WeightUpdate | None) -> None:
        """Load a version into the engine. After an error the old version keeps serving; the heartbeat names the error.

        Raises:
            EngineStoppedError: the engine has failed, or MAX_FAILURES versions in a row could not be loaded, the last
                one by a channel with updates. The packer has then excluded this engine from updates; a new process is
                included again.
        """
        started = time.monotonic()
        self._entered, self._given_up = update.update if update else "", (math.inf, "")
        try:
            with span("receive weights", version=manifest.policy.version):
                weights = self._receiver.receive(manifest, update, partial(self._check_worth_it, engine))
            received = time.monotonic()
            point("inference.received")
            with span("load weights", version=manifest.policy.version):
                pause = engine.load(manifest.policy, weights, self._config.weights.timeout)
        except UpdateAbandonedError as error:
            # not this engine's fault, so nothing is counted against the engine
            log.warning("weight update given up", policy=str(manifest.policy), detail=str(error))
            self._given_up = (time.monotonic() + GIVEN_UP_SECONDS, str(error))
            self._metrics.count("grpo_inference_weight_updates_total", outcome="abandoned")
            return
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("weights not loaded", policy=str(manifest.policy), detail=str(error))
            self._metrics.count("grpo_inference_weight_updates_total", outcome="failed")
            self._retry_at, self.error = time.monotonic() + RETRY_UPDATE_SECONDS, str(error)
            self._membership.report(weight_place=self.place)
            self.report_failed(str(error), [self._membership.boot_id])
            self._failures += 1
            if update is not None and self._failures >= MAX_FAILURES:
                words = f"weights could not be loaded {self._failures} times in a row: {error}"
                raise EngineStoppedError(words) from error
            return
        point("inference.loaded")
        parts = {"pause": pause, "wire": received - started, "load": time.monotonic() - received}
        self._metrics.count("grpo_inference_weight_updates_total", outcome="loaded")
        for part, seconds in parts.items():
            self._metrics.observe("grpo_inference_weight_update_seconds", seconds, part=part)
        self._metrics.set("grpo_inference_policy_version", manifest.policy.version)
        self.error, self._failures = "", 0
        bind_everywhere(policy=str(manifest.policy))
        self._membership.report(policy=manifest.policy, engine_state="clean", update_seconds=parts)

    def report_failed(self, detail: str, missed: list[str]) -> None:
        """Report that the update entered last is not served here, once per update.

        Also used for an update that has succeeded before: the packer may not have heard of the success, and would wait.
        """
        if self._entered and self._failed != self._entered:
            self._failed = self._entered
            failure = UpdateFailure(update=self._entered, missed=missed, detail=detail)
            self._membership.report(failed_update=failure, error=self.error)

    def report_given_up(self) -> None:
        """Report an abandoned update, GIVEN_UP_SECONDS after this engine has abandoned the update."""
        tell_at, reason = self._given_up
        if time.monotonic() >= tell_at:
            self.report_failed(reason, [])

    def _check_worth_it(self, engine: Engine) -> None:
        """Check that the update under way is still wanted; called while the weights are received.

        Raises:
            UpdateAbandonedError: the directive names another update, this engine drains, or the run is done.
            EngineStoppedError: the engine has failed meanwhile.
        """
        point("inference.receiving")
        # raises if the engine has stopped: no weights are worth receiving then
        engine.status()
        # a receiver of files has no progress
        self._membership.report(urgent=False, update_progress=getattr(self._receiver, "progress", 0))
        directive = self._membership.latest()
        if self._drain or (directive is not None and directive.phase == "done"):
            raise UpdateAbandonedError("this engine leaves")
        if (
            isinstance(directive, InferenceDirective)
            and directive.update is not None
            and directive.update.update != self._entered
        ):
            raise UpdateAbandonedError("the packer names another update")
