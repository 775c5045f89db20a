"""The rows of running sequences: filled, ended, and closed up."""

import numpy as np

from actors.engines.embedded.running import Request, Running
from actors.engines.embedded.sampling import Drawn
from actors.engines.protocol import Completion, SampleRequest


def request(prompt: list[int], n: int = 1, max_tokens: int = 3, seed: int = 0) -> Request:
    """n completions of a prompt."""
    return Request(SampleRequest(prompt, n, max_tokens, seed))


def drawn(tokens: list[int], logprobs: list[float]) -> Drawn:
    """Without alternatives."""
    none = np.zeros((len(tokens), 0))
    return Drawn(np.array(tokens), np.array(logprobs, np.float32), none.astype(np.int64), none.astype(np.float32))


def letters(token_ids: list[int]) -> str:
    """chr(97 + token)."""
    return "".join(chr(97 + token) for token in token_ids)


def five() -> tuple[Running, list[Request]]:
    """Rows a, b, c, d, e of one token each, after a first sampled token 20 … 24."""
    running, requests = Running(8, 16, letters), [request([10 + i], seed=i) for i in range(5)]
    for one in requests:
        running.add(one, [(0, 1, 7)])
    running.append(0, drawn([20, 21, 22, 23, 24], [0, 1, 2, 3, 4]))
    return running, requests


def test_rows_at_the_end_move_into_the_gaps() -> None:
    """Of a b c d e, b and d end: e moves from row 4 to row 1, and three rows are left."""
    running, requests = five()
    assert running.remove([3, 1]) == ([4], [1], 2)
    assert running.requests == [requests[0], requests[4], requests[2]]
    tokens, positions = running.last_tokens()
    assert (tokens.tolist(), positions.tolist()) == ([20, 24, 22], [1, 1, 1])
    assert running.draws(0)[0].tolist() == [0, 4, 2]
    assert running.free == 5


def test_rows_that_end_at_the_end_move_nothing() -> None:
    """Of a b c d e, c, d and e end."""
    running, requests = five()
    assert running.remove([2, 3, 4]) == ([], [], 0)
    assert running.requests == requests[:2]


def test_a_request_is_finished_with_its_last_completion() -> None:
    """Two completions: the first stops after a token, the second is as long as it may be."""
    running, asked = Running(4, 16, letters), request([5, 6], n=2, max_tokens=2, seed=3)
    running.add(asked, [(0, 1, 7)])
    assert [array.tolist() for array in running.draws(0)] == [[3, 4], [0, 0]]
    running.append(0, drawn([2, 9], [-0.5, -0.25]))
    assert running.ended(0, np.array([2])) == {0: "stop"}
    assert running.finish({0: "stop"}) == []
    assert running.remove([0]) == ([1], [0], 3)
    running.stamp(1, 8)
    running.append(0, drawn([10], [-0.75]))
    assert running.ended(0, np.array([2])) == {0: "length"}
    assert running.finish({0: "length"}) == [asked]
    assert asked.completions == {
        0: Completion([2], [-0.5], [(0, 1, 7)], "stop"),
        1: Completion([9, 10], [-0.25, -0.75], [(0, 1, 7), (1, 1, 8)], "length"),
    }


def test_what_the_cache_holds_is_all_but_the_newest_token() -> None:
    """Its keys and values are computed with the next step."""
    running, _ = five()
    assert [part.tolist() for part in running.written()] == [[10], [11], [12], [13], [14]]
