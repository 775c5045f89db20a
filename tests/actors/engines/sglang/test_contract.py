"""What every engine promises, held against SGLang's in front of a stub server.

Two promises read otherwise here: SGLang says which weights have sampled when a completion ends, so a stream has each of
them as one piece.
"""

import json
import threading
import urllib.request

import pytest

from tests.actors.engines.sglang.conftest import MakeSglang
from tests.actors.engines.sglang.stub import StubServer
from tests.actors.engines.test_contract import Serve, serve  # noqa: F401 - a fixture
from tests.engine_contract import LONG, EngineContract, Start, body, completions, until


class TestSglang(EngineContract):
    @pytest.fixture
    def start(self, serve: Serve, make_sglang: MakeSglang, stub: StubServer) -> Start:  # noqa: F811
        """The stub holds completions where a test says so."""
        return lambda: serve(make_sglang())

    def test_a_completion_across_an_update_names_both_policies(self, start: Start, stub: StubServer) -> None:
        """From token 0 the old one, from a later token on the new one; told at its end."""
        served = start()
        stub.holding = True

        def update() -> None:
            until(lambda: stub.num_sampled >= 2)
            served.load(2)
            stub.holding = False

        thread = threading.Thread(target=update)
        thread.start()
        [choice] = completions(served, max_tokens=LONG, stream=True)
        thread.join()
        [first, second] = choice["segments"]
        assert (first, second[1:]) == ([0, 1, 1], [1, 2])
        assert 2 <= second[0] < LONG

    def test_a_client_that_leaves_ends_all_its_completions(self, start: Start, stub: StubServer) -> None:
        """While four are under way; another request is served."""
        served = start()
        stub.holding = True
        content = json.dumps(body(served, n=4, max_tokens=LONG, stream=True)).encode()
        answer = urllib.request.urlopen(urllib.request.Request(f"{served.url}/v1/completions", content))
        until(lambda: stub.num_running() == 4)
        assert served.num_running() == 4
        answer.close()
        until(lambda: served.num_running() == stub.num_running() == 0)
        until(lambda: len(stub.asked("/abort_request")) == 4)
        assert stub.num_sampled < 4 * LONG
        assert len(completions(served, max_tokens=1)) == 1
