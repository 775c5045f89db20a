"""OpenAI's completions and vLLM's generate: prompts that the client has made itself."""

import math
from typing import Any

import pytest

from actors.rollout.sessions.dialects import completions, generate
from actors.rollout.sessions.dialects.calls import CallError, Json
from tests.actors.rollout.sessions.replies import read_events, reply


@pytest.mark.parametrize(("given", "prompt"), [("a b", "a b"), (["a b"], "a b"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_a_prompt_is_a_text_or_tokens(given: Any, prompt: Any) -> None:
    """A list with one of these is the same."""
    assert completions.call({"prompt": given}).prompt == prompt


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ["a", "b"]}, "prompt: 2 are more than one"),
        ({"prompt": [[1], [2]]}, "prompt: 2 are more than one"),
        ({"prompt": None}, "prompt: must be a text or token ids, and not empty"),
        ({"prompt": ""}, "prompt: must be"),
        ({"prompt": [""]}, "prompt: must be"),
        ({"prompt": [[]]}, "prompt: must be"),
        ({"prompt": [1, "a"]}, "prompt: must be a list of token ids"),
        ({"prompt": [True]}, "prompt: must be a list of token ids"),
        ({"prompt": {"a": 1}}, "prompt: must be a list of token ids"),
        ({"n": 2}, "n: a session answers with one choice"),
        ({"best_of": 2}, "best_of: a session answers with one choice"),
        ({"echo": True}, "echo: .*leave echo out"),
        ({"suffix": "."}, "suffix: .*leave suffix out"),
        ({"logprobs": "all"}, "logprobs: must be a whole number"),
        ({"max_tokens": 0}, "max_tokens: must be"),
        ({"stop": 1}, "stop: must be"),
    ],
)
def test_a_completion_that_can_not_be_served_is_refused_in_words(change: Json, words: str) -> None:
    """The words begin with the parameter's name."""
    with pytest.raises(CallError, match=words) as caught:
        completions.call({"prompt": "Go."} | change)
    assert str(caught.value).startswith(next(iter(change)))


def test_a_completion_is_the_text_as_the_model_wrote_it() -> None:
    """Not the content of its message; with logprobs if asked for, in a stream as in whole."""
    body = {"prompt": "Go.", "logprobs": 0, "stream": True, "stream_options": {"include_usage": True}}
    turn = reply("Well.", "Hm.", text="<think>Hm.</think> Well.", finish_reason="length")
    whole = completions.whole(body, turn)
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<think>Hm.</think> Well.", "length")
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -0.25]
    assert choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [7, 8])
    [(_, chunk), (_, last), (_, done)] = read_events(completions.events(body, turn))
    assert (chunk["choices"], chunk["id"], done) == (whole["choices"], whole["id"], "[DONE]")
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    alone = completions.whole({"prompt": "Go."}, reply("Well."))["choices"][0]
    assert (alone["text"], alone["logprobs"]) == ("Well.", None)
    assert len(read_events(completions.events({"prompt": "Go."}, turn))) == 2


def test_parameters_of_sampling_are_named_and_not_obeyed() -> None:
    """Those of vLLM too."""
    call = completions.call({"prompt": "Go.", "temperature": 0.1, "seed": 1, "stop": "x", "max_tokens": 5, "foo": 1})
    assert (call.pinned, call.ignored, call.stop, call.max_tokens) == (("seed", "temperature"), ("foo",), ("x",), 5)


ASKED: Json = {
    "model": "policy",
    "token_ids": [1, 2, 3],
    "sampling_params": {
        "temperature": 0.7,
        "max_tokens": 5,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 0,
    },
    "cache_salt": "salt",
    "priority": 1,
}


def test_tokens_go_in_and_come_out() -> None:
    """As the training client of verifiers asks, and by the rules of what it accepts."""
    call = generate.call(ASKED)
    assert (call.prompt, call.max_tokens, call.stream) == ([1, 2, 3], 5, False)
    assert (call.pinned, call.ignored) == (("stop_token_ids", "temperature"), ("routed_experts_prompt_start",))
    answer = generate.whole(ASKED, reply("Well."))
    [choice] = answer["choices"]
    assert (answer["request_id"], choice["token_ids"], choice["finish_reason"]) == ("turn0", [7, 8], "stop")
    for token, told in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert told["token"] == f"token_id:{token}"
        assert math.isfinite(told["logprob"])
    assert [data for _, data in read_events(generate.events(ASKED, reply("Well.")))] == [answer, "[DONE]"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": []}, "token_ids: must be a list of token ids"),
        ({"token_ids": None}, "token_ids: must be a list of token ids"),
        ({"features": {"mm_hashes": {}}}, "features: the policy sees nothing but tokens"),
        ({"content_parts": [{}]}, "content_parts: the policy sees nothing but tokens"),
        ({"output_mode": "text"}, "output_mode: a session answers with tokens"),
        ({"sampling_params": [1]}, "sampling_params: must be an object"),
        ({"sampling_params": {"n": 2}}, "sampling_params.n: a session answers with one choice"),
        ({"sampling_params": {"max_tokens": 1.5}}, "sampling_params.max_tokens: must be"),
        ({"sampling_params": {"stop": [1]}}, "sampling_params.stop: must be"),
    ],
)
def test_tokens_that_can_not_be_had_are_refused_in_words(change: Json, words: str) -> None:
    """The words begin with the parameter's name."""
    with pytest.raises(CallError, match=words) as caught:
        generate.call(ASKED | change)
    assert str(caught.value).startswith(next(iter(change)))
