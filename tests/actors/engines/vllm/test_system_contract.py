"""What every engine promises over HTTP, held against vLLM: one server for all of it (`make test-system`)."""

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from actors.engines.http.server import CompletionServer
from actors.engines.vllm.engine import VllmEngine
from bus.weights import Weights
from tests import models
from tests.actors.engines.engines import policy
from tests.actors.engines.vllm.conftest import ServableModel
from tests.actors.engines.vllm.test_system import LONG, PROMPT, WAIT, start, until_it_samples
from tests.engine_contract import EngineContract, Served, Start, body, call, completions, until
from tests.processes import in_group

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

LONG_WITHOUT_END = {"max_tokens": LONG, "logit_bias": {str(models.EOS): -100.0}}


@pytest.fixture(scope="module")
def engine(servable_model: ServableModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """All weights, float32, untied."""
    made = start(servable_model(0), tmp_path_factory.mktemp("contract"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights_of(servable_model: ServableModel) -> Callable[[int], Weights]:
    """The model's, moved by the version."""
    from safetensors.torch import load_file

    state = load_file(servable_model(0) / "model.safetensors")
    return lambda version: Weights("full", {name: tensor + 0.01 * version for name, tensor in state.items()})


class TestVllm(EngineContract):
    """Its pieces are whole completions (P25: nothing is given out before the answer has proven whose it is)."""

    @pytest.fixture
    def start(self, engine: VllmEngine, weights_of: Callable[[int], Weights]) -> Iterator[Start]:
        """Behind an HTTP server of its own; nothing slows a token of vLLM."""
        made: list[Served] = []

        def start() -> Served:
            server = CompletionServer(engine, "tiny", "boot7", "127.0.0.1", 0, WAIT)
            made.append(
                Served(
                    url=f"http://127.0.0.1:{server.port}",
                    model="tiny",
                    prompt=PROMPT,
                    load=lambda version: engine.load(policy(version), weights_of(version), WAIT) and None,
                    num_running=lambda: engine.status().num_running,
                    num_generated=lambda: engine.status().generated_tokens,
                    close=server.close,
                    turns=engine,
                )
            )
            made[-1].load(1)
            return made[-1]

        yield start
        for served in made:
            served.close()

    @pytest.fixture(autouse=True)
    def of_this_test(self, engine: VllmEngine) -> None:
        """For tests that look behind the engine."""
        self._engine = engine

    def test_a_completion_across_an_update_names_both_policies(self, start: Start) -> None:
        """From token 0 the old one, from a later token on the new one; told when the completion is whole."""
        served = start()
        choices: list[dict[str, Any]] = []

        def ask() -> threading.Thread:
            asking = threading.Thread(target=lambda: choices.extend(completions(served, n=2, **LONG_WITHOUT_END)))
            asking.start()
            return asking

        asking = until_it_samples(self._engine, ask, lambda asking: not asking.is_alive())
        served.load(2)
        asking.join(WAIT)
        assert len(choices) == 2
        for choice in choices:
            [first, second] = choice["segments"]
            assert (first, second[1:]) == ([0, 1, 1], [1, 2])
            assert 1 <= second[0] < LONG

    def test_a_client_that_leaves_ends_all_its_completions(self, start: Start) -> None:
        """In the middle of four; another request is served."""
        served = start()
        connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=WAIT)
        asked = body(served, n=4, stream=True) | LONG_WITHOUT_END
        connection.request("POST", "/v1/completions", json.dumps(asked))
        until(lambda: served.num_running() == 4)
        connection.close()
        until(lambda: served.num_running() == 0)
        assert len(completions(served, max_tokens=1)) == 1


# --- the end; this closes the module's server -------------------------------------------------------------------------


def test_a_server_killed_in_the_middle_of_a_request_answers_503_and_leaves_nothing(engine: VllmEngine) -> None:
    """The core, not the HTTP server: the request under way fails, and all later ones; closing closes twice."""
    assert not engine.holds_two_versions
    http_server = CompletionServer(engine, "tiny", "boot7", "127.0.0.1", 0, WAIT)
    served = Served(f"http://127.0.0.1:{http_server.port}", "tiny", PROMPT, print, int, int, http_server.close)
    answers: list[tuple[int, bytes]] = []
    asked = body(served) | LONG_WITHOUT_END
    asking = threading.Thread(target=lambda: answers.append(call(served, "/v1/completions", asked)))
    asking.start()
    until(lambda: engine.status().num_running == 1)
    assert engine._server is not None
    group = engine._server.process_group
    core = next(process.pid for process in in_group(group) if "EngineCore" in " ".join(process.command))
    os.kill(core, signal.SIGKILL)
    asking.join(WAIT)
    assert answers[0][0] == 503, answers
    assert call(served, "/v1/completions", body(served))[0] == 503
    http_server.close()
    for _ in range(2):
        engine.close()
    until(lambda: in_group(group) == [])
