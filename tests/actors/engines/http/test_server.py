"""The HTTP server through the official OpenAI client, and through a bare socket where a client misbehaves."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import prometheus_client
import pytest

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import Engine
from bus.weights import Weights
from schemas import limits
from tests import models
from tests.actors.engines.engines import WAIT, Gate, MakeEngine, ask, give_up_at, load_in_thread, policy, sample
from tests.conftest import ModelFolder

MODEL = "tiny"
PROMPT, TEXT = [1, 4, 5, 3], "ab="

Serve = Callable[..., CompletionServer]


@pytest.fixture
def engine(make_engine: MakeEngine) -> EmbeddedEngine:
    """Completions reach max_tokens."""
    return make_engine(eos=models.NEVER)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(engine, request_timeout=30)`: a server on a free port, closed at the end."""
    made: list[CompletionServer] = []

    def start(engine: Engine, request_timeout: float = WAIT, port: int = 0, **more: Any) -> CompletionServer:
        made.append(CompletionServer(engine, MODEL, "boot7", "127.0.0.1", port, request_timeout, **more))
        return made[-1]

    yield start
    for server in made:
        server.close()


def client_of(server: CompletionServer) -> openai.OpenAI:
    """The official client, as a user sets it up."""
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=WAIT)


@pytest.fixture
def client(serve: Serve, engine: EmbeddedEngine) -> openai.OpenAI:
    """A client of a server of the engine."""
    return client_of(serve(engine))


def call(server: CompletionServer, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """Status and decoded answer of a plain HTTP request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def until(condition: Callable[[], bool]) -> None:
    """Wait, bounded."""
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("what was waited for did not come")


# --- what is served --------------------------------------------------------------------------------------------------


def test_official_client_lists_the_model(client: openai.OpenAI) -> None:
    """One, by the name that requests use."""
    assert [model.id for model in client.models.list()] == [MODEL]


def test_text_and_token_ids_are_the_same_prompt(client: openai.OpenAI, engine: EmbeddedEngine) -> None:
    """Text goes through the model's tokenizer, special tokens included; the answer is what the engine samples."""
    asked: Any = {"model": MODEL, "max_tokens": 6, "seed": 5, "n": 2}
    by_text, by_ids = (client.completions.create(prompt=prompt, **asked) for prompt in (TEXT, PROMPT))
    [expected] = sample(engine, ask(PROMPT, n=2, max_tokens=6, seed=5))
    texts = [engine.detokenize(completion.token_ids) for completion in expected]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_ids.choices] == texts
    assert [choice.index for choice in by_text.choices] == [0, 1]
    assert {choice.finish_reason for choice in by_text.choices} == {"length"}
    usage = by_text.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 12, 16)


def test_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    """Choices of the first prompt come first, whether texts or token ids."""
    asked: Any = {"model": MODEL, "max_tokens": 3, "seed": 5, "n": 2, "temperature": 0}
    one, other = (client.completions.create(prompt=p, **asked).choices[0].text for p in (TEXT, "xyz="))
    assert one != other
    for prompts in ([TEXT, "xyz="], [PROMPT, [1, 27, 28, 29, 3]]):
        answer = client.completions.create(prompt=prompts, **asked)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == [one, one, other, other]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_logprobs_tokens_and_policies_come_when_asked_for(
    client: openai.OpenAI, engine: EmbeddedEngine, model_folder: ModelFolder
) -> None:
    """logprobs=0 gives those of sampled tokens, return_token_ids the tokens, and segments the policy."""
    engine.load(policy(4), other_weights(model_folder, 0.1), WAIT)
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "seed": 1}
    full = client.completions.create(logprobs=0, extra_body={"return_token_ids": True}, **asked).choices[0]
    [[expected]] = sample(engine, ask(PROMPT, max_tokens=5, seed=1))
    assert full.logprobs is not None
    assert full.logprobs.token_logprobs == expected.logprobs
    extra = full.model_extra or {}
    assert (extra["token_ids"], extra["segments"]) == (expected.token_ids, [[0, 1, 4]])
    bare = client.completions.create(**asked).choices[0]
    assert bare.logprobs is None
    assert "token_ids" not in (bare.model_extra or {})


@pytest.mark.slow
def test_without_a_seed_every_request_is_another(client: openai.OpenAI) -> None:
    """And with max_tokens left out there are OpenAI's 16."""
    texts = {client.completions.create(model=MODEL, prompt=TEXT).choices[0].text for _ in range(3)}
    assert len(texts) == 3
    assert client.completions.create(model=MODEL, prompt=TEXT).usage.completion_tokens == 16  # type: ignore[union-attr]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"n": 0}, "n: "),
        ({"n": 9}, "n: 9 exceeds 8 (inference.engine.max_sequences)"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"max_tokens": 61}, "max_tokens: 4 prompt tokens and 61 new ones exceed 64"),
        ({"temperature": -1}, "temperature: "),
        ({"top_p": 0}, "top_p: "),
        ({"top_p": 1.5}, "top_p: "),
        ({"seed": -1}, "seed: "),
        ({"logprobs": 21}, "logprobs: "),
        ({"max_tokens": 4, "max_completion_tokens": 4}, "max_tokens: is the older name of max_completion_tokens"),
        ({"top_k": -2}, "top_k: "),
        ({"min_p": 1.5}, "min_p: "),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"99": 1}}, "logit_bias: token ids must be from 0 to 29"),
        ({"stop_token_ids": [30]}, "stop_token_ids: token ids must be from 0 to 29"),
        ({"stop": [""]}, "stop.0: "),
        ({"stop": 5}, "stop: "),
        ({"echo": True}, "echo: "),
        ({"stream": "perhaps"}, "stream: "),
        ({"stream_options": {"include_usage": True}}, "stream_options: needs stream: true"),
        ({"stream": True, "stream_options": {"pace": 1}}, "stream_options.pace: is not known or not supported here"),
        ({"prompt": []}, "prompt: is empty"),
        ({"prompt": [[1], []]}, "prompt: is empty"),
        ({"prompt": [1, 30]}, "prompt: token ids must be from 0 to 29"),
        ({"prompt": {"a": 1}}, "prompt: must be a text, token ids, or a list of either"),
        ({"best_of": 4}, "best_of: is not known or not supported here"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served_is_a_400_that_names_the_field(
    client: openai.OpenAI, change: dict[str, Any], problem: str
) -> None:
    """Also a field that this server does not know: ignoring it would be answering another question."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4} | change
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body=body, cast_to=object)
    assert caught.value.body["message"].startswith(problem)  # type: ignore[index]


def test_another_model_is_not_served(client: openai.OpenAI) -> None:
    """404, with the name that is served."""
    with pytest.raises(openai.NotFoundError, match=f"'gpt' is not served here, '{MODEL}' is"):
        client.completions.create(model="gpt", prompt=TEXT)


@pytest.mark.parametrize(
    ("path", "body", "method", "status", "problem"),
    [
        ("/v1/completions", b"{not json", "POST", 400, "body: Invalid JSON"),
        ("/v1/completions", b"[1]", "POST", 400, "body: "),
        ("/v1/completions", None, "GET", 405, "Method Not Allowed"),
        ("/v1/chat/completions", {}, "POST", 400, "model: Field required"),
        ("/v1/embeddings", {}, "POST", 404, "Not Found"),
    ],
)
def test_what_is_no_request_gets_an_error_in_json(
    serve: Serve, engine: EmbeddedEngine, path: str, body: Any, method: str, status: int, problem: str
) -> None:
    """In the shape of OpenAI's errors, with HTTP's status."""
    found, answer = call(serve(engine), path, body, method)
    assert (found, answer["error"]["code"]) == (status, status)
    assert answer["error"]["message"].startswith(problem)


def test_the_good_prompts_beside_a_refused_one_are_not_sampled(client: openai.OpenAI, engine: EmbeddedEngine) -> None:
    """One bad prompt refuses the request, and what was queued of it is taken back."""
    gate = Gate(engine, 1)
    running = engine.submit(ask(PROMPT, n=8, max_tokens=2))
    gate.wait()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[[1, 4], [1, 999]], max_tokens=40)
    gate.open()
    later = engine.submit(ask(PROMPT, n=8, max_tokens=1))  # behind what would still be queued
    assert [len(future.result(WAIT)) for future in (running, later)] == [8, 8]
    assert engine.status().generated_tokens == 16 + 8


# --- clients and engines that go away --------------------------------------------------------------------------------


def post_and_leave(server: CompletionServer, body: dict[str, Any]) -> socket.socket:
    """A connection with a request on its way."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_a_client_that_goes_away_ends_its_request(serve: Serve, engine: EmbeddedEngine) -> None:
    """Its slots are free again long before its completions would have been."""
    # a timeout beyond what is waited for here: it would end the request too
    server, gate = serve(engine, request_timeout=4 * WAIT), Gate(engine, 2)
    connection = post_and_leave(server, {"model": MODEL, "prompt": PROMPT, "n": 8, "max_tokens": 60})
    gate.wait()
    connection.close()
    until(lambda: gate.future.cancelled())
    gate.open()
    until(lambda: engine.status().num_running == 0)
    assert engine.status().generated_tokens == 8 * 2


def test_a_request_that_takes_too_long_ends(serve: Serve, engine: EmbeddedEngine) -> None:
    """504 names the key, and the engine drops the request."""
    server = serve(engine)
    gate = give_up_at(server, engine, 2, 0.2)
    status, answer = call(server, "/v1/completions", {"model": MODEL, "prompt": PROMPT, "n": 8, "max_tokens": 60})
    gate.open()
    assert status == 504
    assert answer["error"]["message"] == "not finished within 0.2 s (inference.request_timeout)"
    until(lambda: engine.status().num_running == 0)
    assert engine.status().generated_tokens <= 8 * 2


def other_weights(model_folder: ModelFolder, change: float) -> Weights:
    """Weights that fit the engine, all moved a little."""
    from actors.models import loading

    tensors = loading.full_tensors(models.plain(model_folder(eos=models.NEVER)))
    return Weights("full", {name: tensor + change for name, tensor in tensors.items()})


def test_a_request_survives_a_weight_update(serve: Serve, engine: EmbeddedEngine, model_folder: ModelFolder) -> None:
    """One answer, its segments name both versions."""
    engine.load(policy(1), other_weights(model_folder, 0.0), WAIT)
    server, gate, answers = serve(engine), Gate(engine, 5), list[Any]()
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "return_token_ids": True}
    asking = threading.Thread(target=lambda: answers.append(call(server, "/v1/completions", body)))
    asking.start()
    gate.wait()
    done = load_in_thread(engine, 2, other_weights(model_folder, 0.1))
    gate.open()
    done.result(WAIT)
    asking.join(WAIT)
    [(status, answer)] = answers
    [choice] = json.loads(answer)["choices"]
    assert status == 200
    assert choice["segments"] == [[0, 1, 1], [5, 1, 2]]
    assert len(choice["token_ids"]) == 12


def test_an_engine_that_fails_is_a_503(serve: Serve, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request under way, later ones, and health: the server itself stays up and says why."""
    server = serve(engine)

    def fail(*arguments: Any) -> Any:
        raise MemoryError("no memory left")

    monkeypatch.setattr(Decoder, "decode", fail)
    body = {"model": MODEL, "prompt": PROMPT}
    for path, sent in (("/v1/completions", body), ("/v1/completions", body), ("/health", None)):
        status, answer = call(server, path, sent)
        assert status == 503
        assert "no memory left" in answer["error"]["message"]


# --- the server itself -----------------------------------------------------------------------------------------------


def test_health_names_process_and_policy(serve: Serve, engine: EmbeddedEngine, model_folder: ModelFolder) -> None:
    """No policy before the first version."""
    server = serve(engine)
    assert json.loads(call(server, "/health")[1]) == {"boot_id": "boot7", "policy": None}
    engine.load(policy(4), other_weights(model_folder, 0.0), WAIT)
    assert json.loads(call(server, "/health")[1])["policy"] == {"lineage": 1, "version": 4}


def test_metrics_are_those_of_the_given_registry(serve: Serve, engine: EmbeddedEngine) -> None:
    """In Prometheus's text format."""
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("grpo_test_answers", "All of them.", registry=registry).set(42)
    status, text = call(serve(engine, registry=registry), "/metrics")
    assert status == 200
    assert b"\ngrpo_test_answers 42.0\n" in text


def test_a_port_that_is_taken_is_an_error_at_once(serve: Serve, engine: EmbeddedEngine) -> None:
    """The constructor raises, so the actor ends instead of serving nobody."""
    taken = serve(engine).port
    with pytest.raises(OSError, match="address already in use"):
        serve(engine, port=taken)


def test_closing_twice_is_closing_once(serve: Serve, engine: EmbeddedEngine) -> None:
    """Nothing listens afterwards."""
    server = serve(engine)
    server.close()
    server.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=1)


def test_server_and_engine_agree_with_the_model(client: openai.OpenAI, model_folder: ModelFolder) -> None:
    """Greedy through HTTP is greedy in transformers."""
    import torch

    plain = models.plain(model_folder(eos=models.NEVER))
    whole = plain.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=6, eos_token_id=None)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    )
    assert (answer.choices[0].model_extra or {})["token_ids"] == whole[0, len(PROMPT) :].tolist()


# --- clients that say nothing, and those that ask too much -----------------------------------------------------------


def _raw(server: CompletionServer, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)
    connection.sendall(data)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1000) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_connections_that_never_ask_are_closed_and_others_are_served(serve, engine, monkeypatch):
    """Silent ones and half a head, with a key that nobody had to show yet; a client at work is left alone."""
    monkeypatch.setattr(limits, "HTTP_CONNECTION_SECONDS", 0.5)
    server = serve(engine, api_key="secret")
    silent = [_raw(server, b"") for _ in range(20)]
    half = _raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: ")
    until(lambda: all(map(_is_closed, [*silent, half])))
    monkeypatch.setattr(limits, "HTTP_CONNECTION_SECONDS", WAIT)  # for the time between connecting and asking
    assert call(server, "/health")[0] == 200


def test_idle_connections_beyond_the_bound_are_closed_oldest_first(serve, engine, monkeypatch):
    """The newest ones are kept."""
    monkeypatch.setattr(limits, "HTTP_CONNECTIONS", 5)
    server = serve(engine)
    first = [_raw(server, b"") for _ in range(10)]
    until(lambda: sum(map(_is_closed, first)) == 5)
    assert call(server, "/health")[0] == 200
    for connection in first:
        connection.close()


def test_body_that_does_not_come_is_answered_within_the_time_of_a_request(serve, engine):
    """Half a body: 504 with the key of the bound, and the connection ends."""
    server = serve(engine, request_timeout=0.3)
    body = _raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50000\r\n\r\n{")
    assert b"504" in body.recv(1000).split(b"\r\n")[0]
    body.close()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"prompt": [[1]] * 1025}, "prompt: 1025 prompts exceed the limit of 1024 per request"),
        ({"prompt": [[1]] * 100, "n": 100}, "n: 100 prompts × 100 exceed the limit of 8192 per request"),
        ({"prompt": "a", "n": 100_000}, "n: "),
        ({"prompt": "a", "stop": ["x"] * 65}, "stop: "),
        ({"prompt": "a", "stop": "x" * 1001}, "stop"),
        ({"prompt": "a", "stop_token_ids": [1] * 65}, "stop_token_ids: "),
        ({"prompt": "a", "logit_bias": {str(n): 1 for n in range(4097)}}, "logit_bias: "),
    ],
)
def test_request_that_asks_for_too_much_is_refused_in_words(serve, engine, more, words):
    """400 that begins with the parameter, before anything is queued at the engine."""
    status, answer = call(serve(engine), "/v1/completions", {"model": MODEL, **more})
    assert status == 400
    assert answer["error"]["message"].startswith(words)
