"""What every engine promises to rollouts and to users, over HTTP: one suite for all of them.

A module of tests gives it a fixture `start` and inherits the tests:

    class TestEmbedded(EngineContract):
        @pytest.fixture
        def start(self) -> Iterator[Start]: ...
"""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from actors.engines.protocol import TakesTurns

WAIT = 120.0
LONG = 14
"""Tokens of a completion that is still under way when a test acts; engines may end theirs sooner, after 4 at least."""


@dataclass
class Served:
    """An engine behind HTTP."""

    url: str
    model: str
    prompt: list[int]
    load: Callable[[int], None]
    """Switch to the weights of this version, of lineage 1; each version has others."""
    num_running: Callable[[], int]
    """Completions under way."""
    num_generated: Callable[[], int]
    """Tokens since the start."""
    close: Callable[[], None]
    turns: TakesTurns | None = None
    """The engine, if it can rest."""
    stand: threading.Event = field(default_factory=threading.Event)
    """While it is set, completions stand behind their first tokens, until a version or the end of a client comes."""


class Start(Protocol):
    """Starts an engine under version 1."""

    def __call__(self) -> Served:
        """An engine of its own for the test, or one that is at rest."""
        ...


class EngineContract:
    """The promises, each a test."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_each_token_has_its_logprob(self, start: Start, stream: bool) -> None:
        """As many as tokens, all finite and none above 0, for each of n completions."""
        served = start()
        choices = completions(served, n=3, max_tokens=6, stream=stream)
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        for choice in choices:
            logprobs = choice["logprobs"]["token_logprobs"]
            assert 1 <= len(choice["token_ids"]) == len(logprobs) <= 6
            assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(logprobs)
            assert all(-1e4 < logprob <= 0 for logprob in logprobs)
            assert choice["finish_reason"] in ("stop", "length")

    def test_a_stream_is_the_answer_in_pieces(self, start: Start) -> None:
        """Text, tokens, logprobs, policies and reasons of the same seed."""
        served = start()
        whole, streamed = (completions(served, n=2, seed=3, max_tokens=6, stream=stream) for stream in (False, True))
        assert streamed == whole

    def test_the_same_seed_is_the_same_completion(self, start: Start) -> None:
        """And completion i of a request has seed + i."""
        served = start()
        several = completions(served, n=3, seed=40)
        again = [completions(served, seed=40 + i)[0] for i in range(3)]
        assert [choice["token_ids"] for choice in several] == [choice["token_ids"] for choice in again]
        assert len({tuple(choice["token_ids"]) for choice in several}) == 3

    def test_answers_name_process_and_policy(self, start: Start) -> None:
        """The same boot id as /health, and a segment from token 0 on."""
        served = start()
        health = json.loads(call(served, "/health")[1])
        assert health["policy"] == {"lineage": 1, "version": 1}
        answer = json.loads(call(served, "/v1/completions", body(served, max_tokens=2))[1])
        assert answer["boot_id"] == health["boot_id"]
        assert answer["choices"][0]["segments"] == [[0, 1, 1]]

    def test_a_request_after_an_update_is_sampled_by_the_new_policy(self, start: Start) -> None:
        """Stamped with it, with other logprobs than before; /health says so too."""
        served = start()
        [before] = completions(served)
        served.load(2)
        [after] = completions(served)
        assert (before["segments"], after["segments"]) == ([[0, 1, 1]], [[0, 1, 2]])
        assert before["logprobs"]["token_logprobs"] != after["logprobs"]["token_logprobs"]
        assert json.loads(call(served, "/health")[1])["policy"] == {"lineage": 1, "version": 2}

    def test_a_completion_across_an_update_names_both_policies(self, start: Start) -> None:
        """From token 0 the old one, from a later token on the new one."""
        served = start()
        asked, segments = body(served, max_tokens=LONG, seed=longest_seed(served)), list[list[int]]()
        served.stand.set()
        for number, chunk in enumerate(stream_of(served, asked)):
            segments += chunk["choices"][0]["segments"]
            if number == 0:
                served.load(2)
                served.stand.clear()
            if len(segments) == 2:
                break
        [first, second] = segments
        assert (first, second[1:]) == ([0, 1, 1], [1, 2])
        assert second[0] >= 1

    def test_an_engine_at_rest_samples_nothing_and_goes_on_later(self, start: Start) -> None:
        """A request waits meanwhile, and is answered as it would have been. A second order changes nothing."""
        served = start()
        if served.turns is None:
            pytest.skip("this engine does not rest")
        expected = completions(served, n=2, seed=5, max_tokens=6)
        for _ in range(2):
            served.turns.rest(WAIT)
        before, answers = served.num_generated(), list[Any]()
        asking = threading.Thread(target=lambda: answers.append(completions(served, n=2, seed=5, max_tokens=6)))
        asking.start()
        asking.join(0.5)
        assert (answers, served.num_generated()) == ([], before)
        for _ in range(2):
            served.turns.wake(WAIT)
        asking.join(WAIT)
        assert answers == [expected]

    def test_a_client_that_leaves_ends_all_its_completions(self, start: Start) -> None:
        """In the middle of a stream of four; another request is served."""
        served = start()
        chunks = stream_of(served, body(served, n=4, max_tokens=LONG, seed=longest_seed(served)))
        served.stand.set()
        next(chunks)
        assert served.num_running() == 4
        before = served.num_generated()
        chunks.close()
        until(lambda: served.num_running() == 0)
        assert served.num_generated() <= before + 4 * 3
        assert len(completions(served, max_tokens=1)) == 1

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"max_tokens": 0}, "max_tokens"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [10**6]}, "prompt: token ids must be from 0 to"),
            ({"temperature": -1}, "temperature"),
            ({"warmth": 1}, "warmth"),
            ({"echo": True}, "echo"),
            ({"model": "another"}, "model: 'another'"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_bad_request_is_refused_in_words(
        self, start: Start, change: dict[str, Any], words: str, stream: bool
    ) -> None:
        """4xx that begins with the parameter, before a stream begins; the engine goes on."""
        served = start()
        status, answer = call(served, "/v1/completions", body(served, stream=stream) | change)
        assert 400 <= status < 500
        assert json.loads(answer)["error"]["message"].startswith(words)
        assert len(completions(served, max_tokens=1)) == 1

    def test_closing_twice_is_closing_once(self, start: Start) -> None:
        """Nobody listens afterwards."""
        served = start()
        served.close()
        served.close()
        with pytest.raises(urllib.error.URLError):
            call(served, "/health")


def body(served: Served, **settings: Any) -> dict[str, Any]:
    """A request for tokens and logprobs."""
    asked = {"model": served.model, "prompt": served.prompt, "max_tokens": 8, "seed": 0}
    return asked | {"logprobs": 0, "return_token_ids": True} | settings


def call(served: Served, path: str, content: Any = None) -> tuple[int, bytes]:
    """Status and body of an answer."""
    data = None if content is None else json.dumps(content).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(served.url + path, data), timeout=WAIT) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def stream_of(served: Served, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a stream; closing it hangs up."""
    request = urllib.request.Request(f"{served.url}/v1/completions", json.dumps(content | {"stream": True}).encode())
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        for line in answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))


def completions(served: Served, stream: bool = False, **settings: Any) -> list[dict[str, Any]]:
    """The choices of an answer; those of a stream put together."""
    if not stream:
        status, answer = call(served, "/v1/completions", body(served, **settings))
        assert status == 200, answer
        return list(json.loads(answer)["choices"])
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream_of(served, body(served, **settings)):
        [piece] = chunk["choices"]
        if piece["index"] not in choices:
            choices[piece["index"]] = piece
        else:
            _join(choices[piece["index"]], piece)
    return [choices[index] for index in sorted(choices)]


def _join(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """What is a text or a list goes on, what is a reason is set."""
    for key, value in piece.items():
        if isinstance(value, dict):
            _join(whole[key], value)
        elif isinstance(value, str | list) and key != "finish_reason":
            whole[key] = whole[key] + value
        elif key != "index":
            whole[key] = value


def longest_seed(served: Served) -> int:
    """Of the first seeds the one whose completion has the most tokens."""
    choices = completions(served, n=4, max_tokens=LONG)
    return max(range(4), key=lambda seed: len(choices[seed]["token_ids"]))


def until(condition: Callable[[], bool]) -> None:
    """Wait, bounded."""
    pause = threading.Event()
    for _ in range(int(WAIT / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("what was waited for did not come")
