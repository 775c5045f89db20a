"""Log lines carry who wrote them."""

import io
import json
import threading

import pytest
import structlog

from actors.telemetry import logs
from schemas.config.services import TelemetryConfig


@pytest.fixture
def stream(monkeypatch):
    """Where the lines go; structlog is as before afterwards."""
    monkeypatch.setattr(logs, "_FIELDS", {})
    buffer = io.StringIO()
    yield buffer
    structlog.reset_defaults()


def test_lines_are_json_where_there_is_no_terminal_with_fields_of_the_process(stream):
    """Actor and name stand in every line, also in those of other threads."""
    logs.configure_logs(TelemetryConfig(), stream)
    logs.bind_everywhere(actor="rollout", name="rollout-3")
    thread = threading.Thread(target=lambda: structlog.get_logger("x").warning("engine failed", ordinal=7))
    thread.start()
    thread.join()
    line = json.loads(stream.getvalue())
    assert line.pop("timestamp")
    assert line == {"actor": "rollout", "name": "rollout-3", "event": "engine failed", "level": "warning", "ordinal": 7}


def test_lines_below_the_level_are_left_out(stream):
    """telemetry.log_level warning: no info."""
    logs.configure_logs(TelemetryConfig(log_level="warning"), stream)
    structlog.get_logger("x").info("step trained")
    structlog.get_logger("x").error("gave up")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["gave up"]
