"""Text of tokens as they come, and the strings that end it.

A stop string may lie across tokens, and a token across characters. So text is looked through as it grows, and what may
yet turn out to be the beginning of a stop string is held back from readers:

    stop ["END"]     tokens  "one E" "N" "Emy" " EN" "D"     shown  "one " "" "ENEmy" " " ""
"""

from collections.abc import Callable, Sequence

from actors.engines.protocol import Completion

Detokenize = Callable[[list[int]], str]

UNFINISHED = "\ufffd"
"""What decoders write for bytes that are no whole character yet."""


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The stop string that begins first in a text."""
    return min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=(0, None))[1]


def open_end(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    sizes = (k for stop in stops for k in range(1, min(len(stop) - 1, len(text)) + 1) if text.endswith(stop[:k]))
    return max(sizes, default=0)


def text_of(completion: Completion, detokenize: Detokenize) -> str:
    """The text of a whole completion, without the token or the string that ended it."""
    if completion.finish_reason != "stop":
        return detokenize(completion.token_ids)
    if isinstance(completion.stop_reason, str):
        return detokenize(completion.token_ids).partition(completion.stop_reason)[0]
    return detokenize(completion.token_ids[:-1])


class TextStream:
    """Text of one completion's tokens, each character once.

    The text of a token may depend on the one before it (a blank between words), so tokens are decoded together with
    those of the last text, and wait while their own ends inside a character.
    """

    def __init__(self, detokenize: Detokenize) -> None:
        self._detokenize = detokenize
        self._tokens: list[int] = []
        self._context, self._told = 0, 0

    def add(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        self._tokens += token_ids
        text = self.rest()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._context, self._told = self._told, len(self._tokens)
        return text

    def rest(self) -> str:
        """The text of tokens that still wait."""
        context = self._detokenize(self._tokens[self._context : self._told])
        return self._detokenize(self._tokens[self._context :])[len(context) :]


class StopWatch:
    """Looks in one completion for the stop tokens and stop strings of its request."""

    def __init__(self, stop: Sequence[str], stop_token_ids: Sequence[int], detokenize: Detokenize) -> None:
        self._stop, self._stop_token_ids = stop, frozenset(stop_token_ids)
        self._stream, self._end = TextStream(detokenize), ""
        self._kept = max(map(len, stop), default=1) - 1

    def add(self, token_id: int) -> str | int | None:
        """What this token has ended the completion with, if anything."""
        if token_id in self._stop_token_ids:
            return token_id
        if not self._stop:
            return None
        text = self._end + self._stream.add([token_id])
        self._end = text[max(0, len(text) - self._kept) :]
        return first_stop(text, self._stop)


class ShownText:
    """The text of one completion's pieces as a reader gets it; joined, it is `text_of` the whole."""

    def __init__(self, stop: Sequence[str], detokenize: Detokenize) -> None:
        self._stop, self._stream, self._held = stop, TextStream(detokenize), ""

    def add(self, piece: Completion) -> str:
        """What can be shown now."""
        if piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str):
            return self._held + self._stream.add(piece.token_ids[:-1]) + self._stream.rest()
        text = self._held + self._stream.add(piece.token_ids)
        if isinstance(piece.stop_reason, str):
            return text.partition(piece.stop_reason)[0]
        if piece.finish_reason:
            return text + self._stream.rest()
        size = len(text) - open_end(text, self._stop)
        self._held = text[size:]
        return text[:size]
