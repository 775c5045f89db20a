"""The official OpenAI client against the server, as against vLLM: chat, streams, stops, logprobs, of each engine.

Expected values come from the engine's own completions and from transformers; what one reads in a stream is compared
with the answer in one piece.
"""

import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

from actors.engines.embedded.decoder import Decoder
from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.fake import FakeEngine
from actors.engines.http.server import CompletionServer
from actors.engines.protocol import Engine
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.model import ModelConfig
from tests import models
from tests.actors.engines.engines import WAIT, Gate, MakeEngine, ask, give_up_at, sample
from tests.conftest import ModelFolder
from tests.engine_contract import until

MODEL = "tiny"
PROMPT = [1, 4, 5, 3]
MESSAGES: Any = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
CHAT_IDS = [1, 4, 5, 6, 7, 3]
"""`<bos>abcd=`, what the template makes of MESSAGES."""
TEMPLATE = (
    "<bos>{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="session")
def chat_folder(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template; its completions reach max_tokens."""
    folder = shutil.copytree(model_folder(eos=models.NEVER), tmp_path_factory.mktemp("chat") / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def embedded(chat_folder: Path) -> Iterator[EmbeddedEngine]:
    """With eight slots of 64 tokens."""
    config = EmbeddedEngineConfig(max_sequences=8, max_sequence_len=64)
    made = EmbeddedEngine(ModelConfig(path=str(chat_folder), dtype="float32", device="cpu"), config, "interrupt")
    yield made
    made.close()


@pytest.fixture(params=["embedded", "fake"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine."""
    if request.param == "embedded":
        yield request.getfixturevalue("embedded")
        return
    made = FakeEngine(FakeEngineConfig(vocab_size=30))
    yield made
    made.close()


def client_of(server: CompletionServer) -> openai.OpenAI:
    """A client, as a user sets it up."""
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=WAIT)


def serving(engine: Engine) -> Iterator[openai.OpenAI]:
    """A client of a server of this engine."""
    server = CompletionServer(engine, MODEL, "boot7", "127.0.0.1", 0, WAIT)
    yield client_of(server)
    server.close()


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    """Of either engine."""
    yield from serving(engine)


@pytest.fixture
def embedded_client(embedded: EmbeddedEngine) -> Iterator[openai.OpenAI]:
    """Of the engine that has a distribution."""
    yield from serving(embedded)


def extra(**vllm: Any) -> dict[str, Any]:
    """Parameters of vLLM that the client has no names for."""
    return {"extra_body": vllm}


# --- chat ------------------------------------------------------------------------------------------------------------


def test_chat_is_the_completion_of_the_rendered_messages(
    embedded_client: openai.OpenAI, embedded: EmbeddedEngine
) -> None:
    """Through the model's template; the answer is a message, its end what may be sent back as the next turn."""
    answer = embedded_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=6, seed=5, n=2, **extra(return_token_ids=True)
    )
    [expected] = sample(embedded, ask(CHAT_IDS, n=2, max_tokens=6, seed=5))
    assert answer.object == "chat.completion"
    assert [choice.message.role for choice in answer.choices] == ["assistant", "assistant"]
    assert [choice.message.content for choice in answer.choices] == [embedded.detokenize(c.token_ids) for c in expected]
    assert [(choice.model_extra or {})["token_ids"] for choice in answer.choices] == [c.token_ids for c in expected]
    assert (answer.model_extra or {})["prompt_token_ids"] == CHAT_IDS
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    again = embedded_client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, answer.choices[0].message, MESSAGES[1]], max_tokens=1
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens == 6 + 6 + 2


@pytest.mark.slow
def test_a_chat_without_max_tokens_may_fill_the_context(embedded_client: openai.OpenAI) -> None:
    """64 tokens with the prompt; where none is left the message says so."""
    answer = embedded_client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (64, "length")
    with pytest.raises(openai.BadRequestError, match="max_tokens: 64 prompt tokens and 1 new ones exceed 64"):
        embedded_client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a" * 62}])


def test_text_parts_are_lines(client: openai.OpenAI, engine: Engine) -> None:
    """What is no text is refused."""
    parts: Any = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    asked: Any = {"model": MODEL, "max_tokens": 3, "seed": 0}
    in_parts, in_one = (
        client.chat.completions.create(messages=[{"role": "user", "content": content}], **asked)
        for content in (parts, "ab\nc")
    )
    assert in_parts.choices[0].message.content == in_one.choices[0].message.content
    image: Any = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content: .*must be a text"):
        client.chat.completions.create(messages=[{"role": "user", "content": image}], **asked)


def test_a_model_without_a_template_refuses_chats(make_engine: MakeEngine) -> None:
    """400 that names the model and what to do; completions are served all the same."""
    for client in serving(make_engine()):
        with pytest.raises(openai.BadRequestError, match=r"messages: model\.path: .* has no chat template"):
            client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert client.completions.create(model=MODEL, prompt="ab=", max_tokens=2).choices


def test_messages_that_the_template_refuses_are_a_400_in_its_words(embedded_client: openai.OpenAI) -> None:
    """`raise_exception` of the template."""
    messages: Any = [{"role": "tool", "content": "a"}]
    with pytest.raises(openai.BadRequestError, match=r"messages: the model's chat template refuses .*no tools here"):
        embedded_client.chat.completions.create(model=MODEL, messages=messages)


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    """Text, tokens and logprobs of both choices, in order; the counts of tokens at the end."""
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 7, "seed": 3, "n": 2, "logprobs": 0}
    asked |= extra(return_token_ids=True)
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        pieces = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert "".join(piece.text for piece in pieces) == choice.text
        tokens = [token for piece in pieces for token in (piece.model_extra or {})["token_ids"]]
        assert tokens == (choice.model_extra or {})["token_ids"]
        logprobs = [lp for piece in pieces for lp in piece.logprobs.token_logprobs]  # type: ignore[union-attr]
        offsets = [at for piece in pieces for at in piece.logprobs.text_offset]  # type: ignore[union-attr]
        assert choice.logprobs is not None
        assert (logprobs, offsets) == (choice.logprobs.token_logprobs, choice.logprobs.text_offset)
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        assert (pieces[0].model_extra or {})["prompt_token_ids"] == PROMPT


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    """The role comes alone and first; without include_usage no counts come."""
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 7, "seed": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_the_clients_own_assembly_of_a_stream_is_the_whole_chat(client: openai.OpenAI) -> None:
    """`chat.completions.stream`, which joins chunks."""
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 50, "seed": 1, "n": 2, "logprobs": True}
    asked |= extra(stop_token_ids=[5, 10, 15, 20])  # so that none ends with its length, which this way is an error
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        joined = stream.get_final_completion()
    for ours, theirs in zip(joined.choices, whole.choices, strict=True):
        assert ours.message.content == theirs.message.content
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert ours.logprobs.content == theirs.logprobs.content


def test_leaving_a_stream_ends_all_its_completions_at_the_next_token(
    embedded_client: openai.OpenAI, embedded: EmbeddedEngine
) -> None:
    """Four of them, held at their third token: none has more than that when they have ended."""
    gate = Gate(embedded, 3)
    stream = embedded_client.completions.create(model=MODEL, prompt=PROMPT, n=4, max_tokens=60, stream=True)
    gate.wait()
    assert embedded.status().num_running == 4
    stream.close()
    until(lambda: gate.future.cancelled())
    gate.open()
    until(lambda: embedded.status().num_running == 0)
    assert embedded.status().generated_tokens == 4 * 3


def test_an_engine_that_fails_in_a_stream_is_an_error_of_the_client(
    embedded_client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first byte there is no status left to say it with."""

    def fail(*arguments: Any) -> Any:
        raise MemoryError("no memory left")

    monkeypatch.setattr(Decoder, "decode", fail)
    stream = embedded_client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, stream=True)
    assert next(stream).choices
    with pytest.raises(openai.APIError, match="no memory left"):
        next(stream)


def test_a_stream_that_takes_too_long_ends_with_an_error_and_frees_its_slots(embedded: EmbeddedEngine) -> None:
    """The message names the key."""
    server = CompletionServer(embedded, MODEL, "boot7", "127.0.0.1", 0, WAIT)
    gate, client = give_up_at(server, embedded, 2, 0.2), client_of(server)
    try:
        stream = client.completions.create(model=MODEL, prompt=PROMPT, n=2, max_tokens=60, stream=True)
        with pytest.raises(openai.APIError, match=r"not finished within 0\.2 s \(inference\.request_timeout\)"):
            list(stream)
        until(lambda: gate.future.cancelled())
    finally:
        gate.open()
        server.close()
    until(lambda: embedded.status().num_running == 0)
    assert embedded.status().generated_tokens == 2 * 2


# --- where completions end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text_and_nothing_else(
    client: openai.OpenAI, engine: Engine, stream: bool
) -> None:
    """Two neighbouring letters of a completion: no text from them on, but all tokens until the second, and logprobs."""
    [[free]] = sample(engine, ask(PROMPT, max_tokens=8, seed=2))
    text = engine.detokenize(free.token_ids)
    cut = next(i for i in range(1, 6) if text.find(text[i : i + 2]) == i)
    stop = text[cut : cut + 2]
    size = next(k for k in range(9) if stop in engine.detokenize(free.token_ids[:k]))
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "seed": 2, "logprobs": 0}
    asked |= {"stop": ["##", stop]} | extra(return_token_ids=True)
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
    else:
        choices = client.completions.create(**asked).choices
    assert "".join(choice.text for choice in choices) == text[:cut]
    tokens = [token for choice in choices for token in (choice.model_extra or {})["token_ids"]]
    logprobs = [lp for choice in choices for lp in choice.logprobs.token_logprobs]  # type: ignore[union-attr]
    assert tokens == free.token_ids[:size]
    assert logprobs == pytest.approx(free.logprobs[:size], abs=1e-5)
    assert choices[-1].finish_reason == "stop"
    assert (choices[-1].model_extra or {})["stop_reason"] == stop


def test_a_stop_token_ends_a_completion_and_is_no_text(client: openai.OpenAI, engine: Engine) -> None:
    """Its id is the stop reason; as `stop` a single text is a list of one; the end of sequence has no stop reason."""
    [[free]] = sample(engine, ask(PROMPT, max_tokens=8, seed=2))
    token = free.token_ids[2]
    at = free.token_ids.index(token)
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "seed": 2}
    by_id = client.completions.create(**asked, **extra(stop_token_ids=[token], return_token_ids=True)).choices[0]
    by_text = client.completions.create(stop=engine.detokenize([token]), **asked).choices[0]
    told = by_id.model_extra or {}
    assert (told["token_ids"], told["stop_reason"]) == (free.token_ids[: at + 1], token)
    assert by_id.text == by_text.text == engine.detokenize(free.token_ids[:at])
    assert by_id.finish_reason == by_text.finish_reason == "stop"


def test_a_stop_string_with_the_last_token_is_a_stop(client: openai.OpenAI, engine: Engine) -> None:
    """And not `length`."""
    [[free]] = sample(engine, ask(PROMPT, max_tokens=1, seed=2))
    letter = engine.detokenize(free.token_ids)
    choice = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, seed=2, stop=letter).choices[0]
    assert (choice.text, choice.finish_reason) == ("", "stop")


# --- distributions ---------------------------------------------------------------------------------------------------


def plain_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """By transformers, behind each token."""
    with torch.no_grad():
        return models.plain(folder)(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_logprobs_are_those_of_all_settings_together(embedded_client: openai.OpenAI, chat_folder: Path) -> None:
    """Computed again from plain logits: bias, then temperature, min_p, top_k, top_p, each renormalised."""
    settings: Any = {"temperature": 1.3, "top_p": 0.9, "logit_bias": {"7": 3.0, "9": -100}}
    answer = embedded_client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, seed=1, n=4, logprobs=3, **settings,
        **extra(top_k=6, min_p=0.05, return_token_ids=True),
    )  # fmt: skip
    for choice in answer.choices:
        tokens = (choice.model_extra or {})["token_ids"]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert 9 not in tokens
        logits_TV = plain_logits(chat_folder, PROMPT + tokens)[len(PROMPT) - 1 : -1].double()
        logits_TV[:, 7] += 3.0
        logits_TV[:, 9] -= 100.0
        for logits_V, token, logprob in zip(logits_TV / 1.3, tokens, choice.logprobs.token_logprobs, strict=True):
            ranked = sorted(enumerate(logits_V.softmax(-1).tolist()), key=lambda item: -item[1])
            kept = [item for item in ranked if item[1] >= 0.05 * ranked[0][1]][:6]
            total, nucleus = sum(p for _, p in kept), dict[int, float]()
            for other, p in kept:
                if sum(nucleus.values()) < 0.9:
                    nucleus[other] = p / total
            assert logprob == pytest.approx(math.log(nucleus[token] / sum(nucleus.values())), abs=1e-4)


def test_alternatives_are_the_most_probable_tokens(embedded_client: openai.OpenAI, chat_folder: Path) -> None:
    """Of a completion by text with the sampled token beside them, of a chat as a list with bytes."""
    asked: Any = {"model": MODEL, "max_tokens": 4, "seed": 8}
    by_text = embedded_client.completions.create(
        prompt=CHAT_IDS, logprobs=3, **asked, **extra(return_token_ids=True)
    ).choices[0]
    by_list = embedded_client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **asked)
    tokens, names = (by_text.model_extra or {})["token_ids"], models.VOCABULARY
    log_p_TV = plain_logits(chat_folder, CHAT_IDS + tokens)[len(CHAT_IDS) - 1 : -1].log_softmax(-1)
    assert by_text.logprobs is not None
    assert by_list.choices[0].logprobs is not None
    rows = zip(
        tokens, log_p_TV, by_text.logprobs.top_logprobs or [], by_list.choices[0].logprobs.content or [], strict=True
    )
    for token, log_p_V, texts, entry in rows:
        best = {names[int(i)]: pytest.approx(float(log_p_V[i]), abs=1e-4) for i in log_p_V.topk(3).indices}
        assert texts == best | {names[token]: pytest.approx(float(log_p_V[token]), abs=1e-4)}
        assert [(other.token, other.logprob) for other in entry.top_logprobs] == list(best.items())
        assert (entry.token, bytes(entry.bytes or [])) == (names[token], names[token].encode())
    assert by_text.logprobs.tokens == [names[token] for token in tokens]
    lengths = [len(names[token]) for token in tokens]
    assert by_text.logprobs.text_offset == [sum(lengths[:i]) for i in range(4)]


def test_an_alternative_that_cannot_be_sampled_has_openais_least_logprob(embedded_client: openai.OpenAI) -> None:
    """JSON knows no infinity: with top_k 1 the second best has −9999, and the best 0."""
    answer = embedded_client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, logprobs=2, seed=0, **extra(top_k=1)
    )
    assert answer.choices[0].logprobs is not None
    [alternatives] = answer.choices[0].logprobs.top_logprobs or []
    assert sorted(alternatives.values()) == [-9999.0, 0.0]


def test_a_bias_decides_and_a_tiny_temperature_is_greedy(embedded_client: openai.OpenAI) -> None:
    """+100 makes a token certain; 1e-30, by which no logit can be divided, takes the most probable one."""
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "seed": 1}
    biased = embedded_client.completions.create(logit_bias={"10": 100}, **asked).choices[0].text
    assert biased == models.VOCABULARY[10] * 5
    cold, greedy = (embedded_client.completions.create(temperature=t, **asked).choices[0].text for t in (1e-30, 0))
    assert cold == greedy


def test_the_fake_engine_refuses_by_name_what_needs_a_distribution() -> None:
    """And serves what does not."""
    fake = FakeEngine(FakeEngineConfig(vocab_size=30))
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
    for client in serving(fake):
        for name, change in (
            ("top_k", extra(top_k=5)),
            ("min_p", extra(min_p=0.1)),
            ("presence_penalty", {"presence_penalty": 0.5}),
            ("repetition_penalty", extra(repetition_penalty=1.5)),
            ("ignore_eos", extra(ignore_eos=True)),
            ("logit_bias", {"logit_bias": {"5": 1}}),
            ("logprobs, top_logprobs", {"logprobs": 2}),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(**asked, **change)
            assert caught.value.body["message"].startswith(f"{name}: the fake engine")  # type: ignore[index]
        assert client.completions.create(**asked, logprobs=0, temperature=0.5, top_p=0.5, **extra(top_k=-1)).choices
    fake.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing"),
        ({"messages": [{"role": "user", "content": "a", "refusal": "b"}]}, "messages.0.refusal: is not known"),
        ({"functions": []}, "functions: is not known or not supported here"),
        ({"top_logprobs": 2}, "top_logprobs: needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: "),
        ({"audio": {"voice": "a"}}, "audio: is not known"),
        ({"n": 0}, "n: "),
        ({"min_tokens": 3}, "min_tokens: 3 exceeds the limit of 2 new tokens"),
    ],
    ids=str,
)
def test_a_chat_that_cannot_be_served_is_refused_by_name(
    client: openai.OpenAI, change: dict[str, Any], words: str
) -> None:
    """A 400 in the parameter's name, from either engine; null is as good as nothing."""
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=asked | change, cast_to=object)
    assert caught.value.body["message"].startswith(words)  # type: ignore[index]
    assert client.post("/chat/completions", body=asked | dict.fromkeys(change, None) | asked, cast_to=object)


def test_engines_without_structured_outputs_refuse_a_demanded_form(client: openai.OpenAI) -> None:
    """Both engines say which ones can."""
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match=r"response_format, tool_choice: engine .* use vllm or sglang"):
        client.chat.completions.create(**asked, response_format={"type": "json_object"})


def test_streams_do_not_disturb_each_other(client: openai.OpenAI) -> None:
    """Four at once, each with another prompt: every one is its whole answer."""
    found: dict[int, str] = {}

    def read(i: int) -> None:
        chunks = client.completions.create(model=MODEL, prompt=[1, 4 + i, 3], max_tokens=7, seed=i, stream=True)
        found[i] = "".join(chunk.choices[0].text for chunk in chunks)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    asked: Any = {"model": MODEL, "max_tokens": 7}
    expected = [client.completions.create(prompt=[1, 4 + i, 3], seed=i, **asked).choices[0].text for i in range(4)]
    assert [found[i] for i in range(4)] == expected


def test_the_example_of_the_page_works_and_a_run_answers_to_its_name(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/reference/asking.md, with the port of this server; the model's path is a name too, any other is refused."""
    page = (Path(__file__).parents[4] / "docs/reference/asking.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    server = CompletionServer(engine, "/models/tiny", "boot7", "127.0.0.1", 0, WAIT, run_name="run")
    try:
        url = f"http://127.0.0.1:{server.port}/v1"
        exec(compile(code.replace("http://127.0.0.1:8000/v1", url), "docs/reference/asking.md", "exec"), {})
        assert capsys.readouterr().out.strip()
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=WAIT)
        assert [model.id for model in client.models.list()] == ["/models/tiny", "run"]
        with pytest.raises(openai.NotFoundError, match="'other' is not served here, '/models/tiny' or 'run' is"):
            client.completions.create(model="other", prompt="abc")
    finally:
        server.close()
