"""Keys of `callbacks`: objects of the user that are told the events of a run."""

from typing import Any

from schemas.config.base import FunctionPath, Section
from schemas.config.resume_classes import Free


class CallbackConfig(Section):
    """A callback with the methods of transformers' TrainerCallback, called in a process of its own (`callbacks`)."""

    path: Free[FunctionPath]
    """Class, or function that returns an object: `package.module:Class` or `file.py:Class`, for example
    `transformers:EarlyStoppingCallback`."""
    kwargs: Free[dict[str, Any]] = {}
    """Keyword arguments of the class."""
    required: Free[bool] = False
    """True: an exception of this callback ends the run. False: it is logged and counted, and the other callbacks and
    the training go on."""
