"""Engines that are attached to, in a run's configuration."""

from pathlib import Path
from typing import Any

import pytest

from schemas.config.resume import class_of
from schemas.errors import ConfigError
from tests.ring.harness import ring_config

URLS = ["http://one:30000", "https://two:30000"]
SGLANG: Any = {"type": "sglang"}
POOL: Any = {"pool": {"urls": URLS}}


@pytest.mark.parametrize(
    ("inference", "problem"),
    [
        ({"engine": SGLANG | {"urls": URLS}}, None),
        ({"engine": SGLANG} | POOL, None),
        ({"engine": {"type": "vllm"}} | POOL, None),
        ({"engine": SGLANG | {"urls": URLS[:1]}}, "inference.engine.urls: 1 servers for up.inference 2"),
        ({"engine": SGLANG | {"urls": ["http://one:1/v1"]}}, "inference.engine.urls.0"),
        ({"engine": SGLANG | {"urls": URLS}} | POOL, "inference.engine.urls: inference.pool names the servers"),
        ({"engine": SGLANG, "port": 8000} | POOL, "inference.port: 8000 with inference.pool"),
        ({"engine": {"type": "fake"}} | POOL, "inference.pool: engine fake runs in its actor"),
        ({"engine": SGLANG, "pool": {"urls": []}}, "inference.pool.urls"),
    ],
)
def test_servers_fit_the_rest_of_the_run(tmp_path: Path, inference: Any, problem: str | None) -> None:
    """Both keys are named."""
    if problem is None:
        assert ring_config(tmp_path, inference=inference, up={"inference": 2})
        return
    with pytest.raises(ConfigError, match=problem):
        ring_config(tmp_path, inference=inference, up={"inference": 2})


def test_broadcasts_to_sglang_are_refused(tmp_path: Path) -> None:
    """It reads files."""
    with pytest.raises(ConfigError, match=r"weights.channel: rendezvous, .* sglang takes .* filesystem alone"):
        ring_config(tmp_path, inference={"engine": SGLANG | {"urls": URLS[:1]}}, weights={"channel": "rendezvous"})


def test_servers_may_change_when_a_run_goes_on() -> None:
    """Where completions come from is no part of what they are."""
    assert class_of("inference.engine.urls") == class_of("inference.pool.urls") == "free"
