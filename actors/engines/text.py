"""Text of tokens as they arrive, and detection of stop strings.

A stop string may span several tokens, and so may a character. The growing text is searched, and an ending that
may become a stop string is held back from the reader:

    stop ["END"]     tokens  "one E" "N" "Emy" " EN" "D"     shown  "one " "" "ENEmy" " " ""
"""

from collections.abc import Callable, Sequence

from actors.engines.protocol import Completion

Detokenize = Callable[[list[int]], str]

UNFINISHED = "\ufffd"
"""Replacement character of decoders, for the bytes of an incomplete character."""


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the stop string with the earliest place in a text; None if the text has no stop string."""
    return min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=(0, None))[1]


def open_end(text: str, stops: Sequence[str]) -> int:
    """Return the number of characters at the end of a text with which a stop string may start."""
    # a whole stop string is found by `first_stop`, so only proper beginnings count
    sizes = (k for stop in stops for k in range(1, min(len(stop) - 1, len(text)) + 1) if text.endswith(stop[:k]))
    return max(sizes, default=0)


def text_of(completion: Completion, detokenize: Detokenize) -> str:
    """Return the text of a whole completion, without the token or stop string at the end."""
    if completion.finish_reason != "stop":
        return detokenize(completion.token_ids)
    if isinstance(completion.stop_reason, str):
        return detokenize(completion.token_ids).partition(completion.stop_reason)[0]
    # without the last token: the end of sequence, or a stop token
    return detokenize(completion.token_ids[:-1])


class TextStream:
    """Incremental decoder: returns each character of a completion once.

    The text of a token may depend on the token before (a blank between words). So new tokens are decoded together with
    the tokens of the last returned text, and tokens ending inside a character wait for the next tokens.
    """

    def __init__(self, detokenize: Detokenize) -> None:
        self._detokenize = detokenize
        self._tokens: list[int] = []
        self._context, self._told = 0, 0
        # tokens from `_context` to `_told` are those of the last returned text

    def add(self, token_ids: list[int]) -> str:
        """Add tokens and return the text now complete; empty while a character is incomplete."""
        self._tokens += token_ids
        text = self.rest()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._context, self._told = self._told, len(self._tokens)
        return text

    def rest(self) -> str:
        """Return the text of the waiting tokens, with incomplete characters."""
        context = self._detokenize(self._tokens[self._context : self._told])
        return self._detokenize(self._tokens[self._context :])[len(context) :]


class StopWatch:
    """Detector of a request's stop tokens and stop strings in a single completion.

    Args:
        min_tokens: number of tokens in which no stop string counts.
    """

    def __init__(
        self, stop: Sequence[str], stop_token_ids: Sequence[int], detokenize: Detokenize, min_tokens: int = 0
    ) -> None:
        self._stop, self._stop_token_ids = stop, frozenset(stop_token_ids)
        self._unwatched = min_tokens
        self._stream, self._end = TextStream(detokenize), ""
        # the longest proper beginning of a stop string
        self._kept = max(map(len, stop), default=1) - 1

    def add(self, token_id: int) -> str | int | None:
        """Add a token; return the stop token or stop string now at the end, or None."""
        if token_id in self._stop_token_ids:
            return token_id
        if not self._stop:
            return None
        text = self._end + self._stream.add([token_id])
        # a stop string that begins in these tokens does not count, as in vLLM
        if self._unwatched > 0:
            self._unwatched -= 1
            return None
        # keep only the end that may be part of a stop string: the cost per token does not grow with the completion
        self._end = text[max(0, len(text) - self._kept) :]
        return first_stop(text, self._stop)


class ShownText:
    """Text of a completion for readers of pieces; joined, the shown pieces equal `text_of` the whole."""

    def __init__(self, stop: Sequence[str], detokenize: Detokenize) -> None:
        self._stop, self._stream, self._held = stop, TextStream(detokenize), ""

    def add(self, piece: Completion) -> str:
        """Add a piece and return the text to show now."""
        if piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str):
            # a stop token, or the end of sequence: not part of the text
            return self._held + self._stream.add(piece.token_ids[:-1]) + self._stream.rest()
        text = self._held + self._stream.add(piece.token_ids)
        if isinstance(piece.stop_reason, str):
            return text.partition(piece.stop_reason)[0]
        # an end without a stop string: everything held back is text
        if piece.finish_reason:
            return text + self._stream.rest()
        size = len(text) - open_end(text, self._stop)
        self._held = text[size:]
        return text[:size]
