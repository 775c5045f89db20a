"""The trainer's base for an engine that maps it (`up.share_base`)."""

from typing import TYPE_CHECKING

from actors.engines.protocol import EngineStoppedError
from schemas.config import RunConfig

if TYPE_CHECKING:
    from actors.models.shared_base import Manifest


def trainers_base(config: RunConfig, timeout: float | None = None) -> "Manifest | None":
    """Return the description of the trainer's base, waiting for it; None if this engine loads the base itself.

    Args:
        config: configuration of the run.
        timeout: seconds to wait; None: as long as a trainer may load.

    Raises:
        EngineStoppedError: there was none in time; the next start of the actor may find one.
    """
    if not config.up.share_base:
        return None
    from actors.models import shared_base  # imports torch

    try:
        return shared_base.find(config.output, shared_base.PATIENCE_SECONDS if timeout is None else timeout)
    except TimeoutError as error:
        raise EngineStoppedError(str(error)) from None
