"""What an actor tells a probe of its main loop, over HTTP."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from actors.process.liveness import Liveness


@pytest.fixture
def probed() -> Iterator[tuple[Liveness, str]]:
    """A Liveness beside the metrics of an empty registry, and their address."""
    alive = Liveness()
    server, thread = start_http_server(0, "127.0.0.1", CollectorRegistry())
    app = server.get_app()
    assert app is not None
    server.set_app(alive.wrap(app))
    yield alive, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(60.0)


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_each_turn_is_counted_timed_and_passed_on() -> None:
    """A loop that has not turned yet has stood still for ever."""
    alive, passed_on = Liveness(), []
    alive.on_turn = lambda: passed_on.append(alive.turns)
    assert alive.still_seconds == float("inf")
    alive.turn()
    alive.turn()
    assert passed_on == [1, 2]
    assert alive.still_seconds < 60.0


def test_probe_tells_a_loop_that_turns_from_one_that_starts_or_stands(probed: tuple[Liveness, str]) -> None:
    """As long as the probe says; a bad question is named."""
    alive, address = probed
    assert _get(f"{address}/healthz") == (503, "starting: the main loop has not iterated yet\n")
    alive.turn()
    assert _get(f"{address}/healthz")[0] == 200
    assert _get(f"{address}/healthz?within=3600")[0] == 200
    status, words = _get(f"{address}/healthz?within=0")
    assert status == 503
    assert words.startswith("the main loop has not iterated for ")
    assert words.endswith("more than 0 s\n")
    assert _get(f"{address}/healthz?within=soon") == (400, "/healthz?within=SECONDS: not a number\n")


def test_metrics_stay_where_they_were(probed: tuple[Liveness, str]) -> None:
    """Beside the probe."""
    assert _get(f"{probed[1]}/metrics")[0] == 200
