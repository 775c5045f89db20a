"""Text as it grows: characters across tokens, stop strings across both."""

import random

import pytest

from actors.engines.protocol import Completion
from actors.engines.text import ShownText, StopWatch, TextStream, first_stop, open_end, text_of


def from_bytes(token_ids: list[int]) -> str:
    """A token per byte, as the smallest tokens of byte-level tokenizers; 0 is special."""
    return bytes(token for token in token_ids if token).decode(errors="replace")


def from_words(token_ids: list[int]) -> str:
    """A token per word with blanks between them: a token's text depends on whether it is the first."""
    return " ".join(f"w{token}" for token in token_ids)


def pieces_of(tokens: list[int], reason: str, stop_reason: str | int | None = None) -> list[Completion]:
    """A completion token by token."""
    last = Completion(tokens[-1:], [-1.0], [], reason, stop_reason=stop_reason)
    return [*(Completion([token], [-1.0]) for token in tokens[:-1]), last]


def test_a_character_comes_when_its_last_byte_has() -> None:
    """ä is two bytes, € three."""
    stream = TextStream(from_bytes)
    assert [stream.add([byte]) for byte in "xä€y".encode()] == ["x", "", "ä", "", "", "€", "y"]
    assert stream.rest() == ""


def test_bytes_that_never_become_a_character_come_at_the_end() -> None:
    """As a decoder of the whole text writes them."""
    stream = TextStream(from_bytes)
    assert [stream.add([byte]) for byte in b"x\xe2\x82"] == ["x", "", ""]
    assert stream.rest() == from_bytes(list(b"\xe2\x82"))


def test_blanks_between_words_are_kept() -> None:
    """Each word alone would have none."""
    stream = TextStream(from_words)
    assert [stream.add([1]), stream.add([2, 3]), stream.add([4])] == ["w1", " w2 w3", " w4"]


@pytest.mark.parametrize(
    ("text", "stops", "first", "held"),
    [
        ("one E", ["END"], None, 1),
        ("one EN", ["END"], None, 2),
        ("one END!", ["END"], "END", 0),
        ("abcab", ["abd", "b"], "b", 2),
        ("aab", ["ab", "aab"], "aab", 0),
        ("aaa", ["aab"], None, 2),
        ("plain", [], None, 0),
    ],
)
def test_stop_strings_are_found_and_their_beginnings_seen(
    text: str, stops: list[str], first: str | None, held: int
) -> None:
    """The one that begins first; at the end, the longest part that may become one."""
    assert (first_stop(text, stops), open_end(text, stops)) == (first, held)


def test_a_watch_stops_with_the_token_that_completes_a_string() -> None:
    """Across tokens and characters; a stop token is told by its id."""
    watch = StopWatch(["€ E"], [7], from_bytes)
    found = [watch.add(byte) for byte in "a€ EN".encode()]
    assert found == [None, None, None, None, None, "€ E", None]
    assert watch.add(7) == 7


def test_what_is_shown_piece_by_piece_is_the_example_of_the_module() -> None:
    """Words as tokens, `END` as the stop string."""
    words = ["one E", "N", "Emy", " EN", "D"]
    shown = ShownText(["END"], lambda tokens: "".join(words[token] for token in tokens))
    pieces = pieces_of([0, 1, 2, 3, 4], "stop", "END")
    assert [shown.add(piece) for piece in pieces] == ["one ", "", "ENEmy", " ", ""]


@pytest.mark.parametrize("seed", range(30))
def test_shown_pieces_joined_are_the_text_of_the_whole(seed: int) -> None:
    """Random bytes of few kinds, cut by a stop string, by a stop token, or by nothing."""
    draw = random.Random(seed)
    stops, watched = ["ab", "bä", "aaa"][: seed % 4], [120] if seed % 2 else []
    watch, tokens, ended = StopWatch(stops, watched, from_bytes), list[int](), None
    while ended is None and len(tokens) < 40:
        tokens.append(draw.choice(list("aabäx".encode()[: 4 + seed % 3])))
        ended = watch.add(tokens[-1])
    reason = "length" if ended is None else "stop"
    shown = ShownText(stops, from_bytes)
    joined = "".join(shown.add(piece) for piece in pieces_of(tokens, reason, ended))
    whole = text_of(Completion(tokens, [], [], reason, stop_reason=ended), from_bytes)
    assert joined == whole
    assert not any(stop in whole for stop in stops)


def test_text_ends_before_the_token_that_ends_it() -> None:
    """The end of sequence, also one that is no special token."""
    assert text_of(Completion([97, 98, 33], [], [], "stop"), from_bytes) == "ab"
    assert text_of(Completion([97, 98, 33], [], [], "length"), from_bytes) == "ab!"
