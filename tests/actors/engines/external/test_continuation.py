"""Interrupted completions, and what goes on behind them."""

from actors.engines.external.continuation import cut_at_stop, joined, rest_of
from actors.engines.protocol import Completion, SampleRequest
from schemas.config.sampling import SamplingParams

ASKED = SampleRequest([1, 5], 2, 8, 40, SamplingParams(top_p=0.9))


def test_the_rest_of_a_completion_goes_on_behind_its_tokens() -> None:
    """Its seed follows from the completion's own seed and the place alone, and is neither's."""
    so_far = Completion([7, 8, 9], [-1.0] * 3, [(0, 1, 4)], "abort")
    rest = rest_of(ASKED, 1, so_far)
    assert (rest.prompt_ids, rest.num_completions, rest.max_tokens) == ([1, 5, 7, 8, 9], 1, 5)
    again, other = rest_of(ASKED, 1, so_far), rest_of(ASKED, 0, so_far)
    assert rest.seed == again.seed
    assert len({rest.seed, other.seed, 40, 41}) == 4


def test_a_continuation_joins_with_its_segments() -> None:
    """Those of the continuation are moved behind what was there; the same policy goes on in one segment."""
    so_far = Completion([7, 8], [-1.0, -2.0], [(0, 1, 4)], "abort")
    rest = Completion([9, 2], [-3.0, -4.0], [(0, 1, 4), (1, 1, 5)], "stop")
    whole = joined(so_far, rest)
    assert whole == Completion([7, 8, 9, 2], [-1.0, -2.0, -3.0, -4.0], [(0, 1, 4), (3, 1, 5)], "stop")


def test_a_stop_string_across_the_seam_ends_a_joined_completion() -> None:
    """`ab` was sampled as a | b c: what comes behind it was never wanted."""
    text = {4: "a", 5: "b", 6: "c"}
    whole = Completion([6, 4, 5, 6], [-1.0] * 4, [(0, 1, 4), (3, 1, 5)], "length")
    cut = cut_at_stop(whole, ("ab",), lambda tokens: "".join(text[t] for t in tokens))
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == ([6, 4, 5], "stop", "ab")
    assert (len(cut.logprobs), cut.segments) == (3, [(0, 1, 4)])
    assert cut_at_stop(whole, ("zz",), lambda tokens: "".join(text[t] for t in tokens)) is whole
