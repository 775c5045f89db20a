"""vLLM's answers as completions, and requests in its terms."""

from typing import Any

import pytest

from actors.engines.external.labels import ServedWeights, UnknownWeightsError
from actors.engines.protocol import Completion, EngineStoppedError, SampleRequest
from actors.engines.vllm.answers import alternatives, completions_of, sampling_params
from schemas.config.sampling import SamplingParams
from schemas.messages import PolicyVersion

FOUR, FIVE = PolicyVersion(lineage=1, version=4), PolicyVersion(lineage=1, version=5)
LABELS = {"b:base.0": None, "b:1.4.1": FOUR, "b:1.4.2": FOUR, "b:1.5.3": FIVE}
EOS = frozenset({2})
ASKED = SampleRequest([1, 5], 2, 8, 40, SamplingParams(top_p=0.9))


def span(version: str, start: int, end: int) -> dict[str, Any]:
    """Tokens [start, end) by these weights."""
    return {"version": version, "start": start, "end": end}


def choice(index: int = 0, **changes: Any) -> dict[str, Any]:
    """Two tokens by 1.4, the second one the end of sequence."""
    content = [{"token_id": t, "logprob": -0.5, "top_logprobs": []} for t in (7, 2)]
    made = {
        "index": index,
        "token_ids": [7, 2],
        "finish_reason": "stop",
        "stop_reason": 2,
        "weight_versions": [span("b:1.4.1", 0, 2)],
        "logprobs": {"content": content},
    }
    return made | changes


def only(**changes: Any) -> Completion:
    """The completion of an answer with one choice."""
    [completion] = completions_of({"choices": [choice(**changes)]}, ASKED, EOS, LABELS)
    return completion


@pytest.mark.parametrize("spans", [[span("default", 0, 2)], [span("b:1.4.1", 0, 1), span("c:1.4.1", 1, 2)], None])
def test_a_label_that_nobody_here_has_set_makes_the_answer_nobodys(spans: Any) -> None:
    """Another server's, another boot's, or none at all: a single token of it is enough."""
    with pytest.raises(UnknownWeightsError):
        only(weight_versions=spans)


def test_choices_come_in_their_order_with_what_was_sampled() -> None:
    """Whatever order the server lists them in."""
    first, second = completions_of({"choices": [choice(1, token_ids=[9, 2]), choice(0)]}, ASKED, EOS, LABELS)
    assert (first.token_ids, second.token_ids) == ([7, 2], [9, 2])
    assert first == Completion([7, 2], [-0.5, -0.5], [(0, 1, 4)], "stop")


@pytest.mark.parametrize(("told", "asked_for", "reason"), [(2, (), None), (2, (2,), 2), ("ab", (), "ab"), (9, (9,), 9)])
def test_the_end_of_sequence_is_no_stop_reason_unless_asked_for(told: Any, asked_for: Any, reason: Any) -> None:
    """We tell the server the end of sequence as a stop token; clients get what other engines say."""
    asked = SampleRequest([1], 1, 8, 0, stop_token_ids=asked_for)
    [completion] = completions_of({"choices": [choice(stop_reason=told)]}, asked, EOS, LABELS)
    assert completion.stop_reason == reason


def test_a_token_without_logprob_fails_the_request() -> None:
    """The server writes -9999 for NaN, which must not be trained on."""
    content = [{"token_id": 7, "logprob": -9999.0, "top_logprobs": []}]
    with pytest.raises(EngineStoppedError, match="not finite"):
        only(logprobs={"content": content})


def test_an_adapters_request_is_of_the_version_that_it_named() -> None:
    """Labels change while it runs; the adapter does not. They only prove whose server it is."""
    changing = {"choices": [choice(weight_versions=[span("b:1.4.1", 0, 1), span("b:1.5.3", 1, 2)])]}
    [completion] = completions_of(changing, ASKED, EOS, LABELS, ServedWeights("b", FOUR, 1))
    assert completion.segments == [(0, 1, 4)]
    [bare] = completions_of(changing, ASKED, EOS, LABELS, ServedWeights("b", None, 0))
    assert bare.segments == []
    with pytest.raises(UnknownWeightsError):
        completions_of(
            {"choices": [choice(weight_versions=[span("x", 0, 2)])]}, ASKED, EOS, LABELS, ServedWeights("b", FOUR, 1)
        )


def test_alternatives_are_the_most_probable_ones() -> None:
    """The sampled token (4) comes first from the server, though it is the least probable."""
    listed = [{"token_id": t, "logprob": p} for t, p in ((4, -5.0), (8, -0.1), (9, -2.5))]
    assert alternatives(listed, 2) == [(8, -0.1), (9, -2.5)]


def test_a_request_in_the_servers_terms() -> None:
    """The end of sequence is a stop token; of 3 alternatives 4 are asked for; no max_tokens means the server's."""
    asked = SampleRequest([1], 2, None, 5, stop=("END",), stop_token_ids=(8,), num_top_logprobs=3)
    params = sampling_params(asked, EOS)
    assert (params["stop_token_ids"], params["ignore_eos"]) == ([2, 8], True)
    assert (params["logprobs"], params["stop"], params["detokenize"]) == (4, ["END"], True)
    assert "max_tokens" not in params
    assert sampling_params(ASKED, EOS)["logprobs"] == 0
    assert sampling_params(ASKED, EOS)["max_tokens"] == 8
