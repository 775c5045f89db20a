"""A model that writes what it is told, token by token, in the language of a real family."""

from collections.abc import Callable, Sequence

from actors.trajectories.chat import Chat as Language
from actors.trajectories.parsing import syntax_of
from actors.trajectories.recorder import Recorder, TurnAnswer, TurnLimits, TurnRequest
from tests.actors.trajectories.families import Chat


def language(chat: Chat) -> Language:
    """The language of a family."""
    return Language(chat.bridges, chat.encode, chat.decode, chat.family.ends, syntax_of(chat.family.template))


class Writer:
    """Engine whose answers are texts: given ones in turn, or those of a function of the request."""

    def __init__(self, chat: Chat, texts: Sequence[str] | Callable[[TurnRequest], str], end: str = "") -> None:
        self._chat, self._texts, self._end = chat, texts, end or chat.family.ends[0]
        self.requests: list[TurnRequest] = []
        self.answers: list[TurnAnswer] = []

    async def sample(self, request: TurnRequest) -> TurnAnswer:
        """Write; cut at the request's limit of tokens."""
        text = self._texts(request) if callable(self._texts) else self._texts[len(self.requests)]
        self.requests.append(request)
        # a stop string ends an answer in place of its end
        ids = self._chat.encode(text if text.endswith(request.stop) else text + self._end)
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        logprobs = [-0.001 * (token % 999) - 0.001 for token in ids]
        version = len(self.answers) // 2
        answer = TurnAnswer(ids, logprobs, [(0, 1, version)], "length" if cut else "stop", 0.7)
        self.answers.append(answer)
        return answer

    def recorder(self, limits: TurnLimits | None = None, seed: int = 7) -> Recorder:
        """A recorder of this model's trajectory."""
        return Recorder(language(self._chat), self.sample, limits or TurnLimits(100_000, 1000, 1000), seed)
