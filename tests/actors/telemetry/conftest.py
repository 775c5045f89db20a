"""Patience: a thread that writes may be held up for seconds, and only a few tests are about its not answering."""

import pytest

from actors.telemetry import logs, writer


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for what is written, however long it takes on a busy machine; tests of hanging writes set less."""
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(logs, "PATIENCE_SECONDS", 60.0)
