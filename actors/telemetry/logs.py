"""Logs: structlog, for people on a terminal and JSON for machines, with actor, name, step and policy as fields."""

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog

from schemas.config.services import TelemetryConfig


def configure_logs(config: TelemetryConfig, stream: TextIO | None = None) -> None:
    """Set up logging of this process; called once, by the runtime."""
    stream = stream or sys.stderr
    as_json = config.log_format == "json" or (config.log_format == "auto" and not stream.isatty())
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=stream.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Tolerant(stream))),
        cache_logger_on_first_use=False,
    )


class _Tolerant:
    """Loses what can't be written: a full disk must not end a process that has something to say about it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def bind_everywhere(**fields: str | int) -> None:
    """Fields of every line of this process from now on, whichever thread writes it."""
    _FIELDS.update(fields)
    processors = structlog.get_config()["processors"]
    if _add_fields not in processors:
        structlog.configure(processors=[_add_fields, *processors])


_FIELDS: dict[str, str | int] = {}


def _add_fields(logger: object, method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    return {**_FIELDS, **event}
