"""Turns of an engine on a device that the trainer uses too (`up.colocate: turns`).

Consumes orders from the directive. Emits in the heartbeat the newest order that was followed and whether the engine has
memory of the device. Waits, before the engine is made, for the first turn; a drain or the end of the run ends the wait.
"""

import structlog

from actors.engines.protocol import EngineStoppedError, TakesTurns
from actors.process.fault_points import point
from actors.process.membership import Drain, Membership
from actors.telemetry.spans import span
from schemas.messages import InferenceDirective

log = structlog.get_logger("inference")


class EngineTurns:
    """Turns of one engine. The heartbeat tells of memory before it is taken, and after it is given back.

    Args:
        membership: place in the run, for directives and heartbeats.
        timeout: seconds for the engine to rest or to wake.
        poll_seconds: longest wait before the directive is looked at again.
    """

    def __init__(self, membership: Membership, timeout: float, poll_seconds: float) -> None:
        self._membership, self._timeout, self._poll_seconds = membership, timeout, poll_seconds
        self._turn, self._holds = 0, False

    def wait(self, drain: Drain) -> bool:
        """Wait for the first turn, in which the engine may load; return False if the actor shall exit instead.

        Raises:
            PeerRefusedError, StartOverError, PackerSilentError: as `Membership.latest`.
        """
        log.info("engine waits for its turn on the device that the trainer uses (up.colocate: turns)")
        while not drain:
            directive = self._membership.latest()
            if directive is not None and directive.phase == "done":
                return False
            if isinstance(directive, InferenceDirective):
                self._say(directive.turn, holds=directive.has_turn)
                if directive.has_turn:
                    return True
            self._membership.wait(self._poll_seconds)
        return False

    @property
    def rests(self) -> bool:
        """Whether the engine has no memory of the device, and samples nothing."""
        return not self._holds

    def follow(self, engine: TakesTurns, directive: InferenceDirective) -> None:
        """Have the engine rest or go on, as the directive orders.

        Raises:
            EngineStoppedError: the engine has failed, or been closed, or neither rests nor wakes: the actor must exit.
        """
        try:
            if directive.has_turn and not self._holds:
                self._say(directive.turn, holds=True)
                point("inference.before_wake")
                with span("wake"):
                    engine.wake(self._timeout)
            elif not directive.has_turn and self._holds:
                with span("give memory back"):
                    engine.rest(self._timeout)
                point("inference.rests")
        except TimeoutError as error:
            order = "take its memory again" if directive.has_turn else "give its memory back to the trainer"
            raise EngineStoppedError(
                f"the engine did not {order} within {self._timeout:g} s (weights.timeout, up.colocate: turns)"
            ) from error
        self._say(directive.turn, holds=directive.has_turn)

    def _say(self, turn: int, *, holds: bool) -> None:
        if (turn, holds) != (self._turn, self._holds):
            self._turn, self._holds = turn, holds
            self._membership.report(turn=turn, holds_device=holds)
