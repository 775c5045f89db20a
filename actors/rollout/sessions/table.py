"""The open sessions of a rollout actor, by their keys, and those that wait for a service to take them."""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator

from actors.rollout.sessions.dialects.calls import CallError
from actors.rollout.sessions.session import Session

REMEMBERED = 10_000
"""Ended sessions whose keys are still known, so that a late call is told that its session is over."""


class SessionTable:
    """Sessions of a rollout actor."""

    def __init__(self) -> None:
        # by digest of the key: the time of a look-up tells nothing about the keys that there are
        self._open: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: OrderedDict[str, Session] = OrderedDict()
        """Sessions that no service has taken yet, by id."""
        self._news = asyncio.Event()

    @contextlib.asynccontextmanager
    async def opened(self, session: Session) -> AsyncIterator[Session]:
        """Answer a session's calls inside the block."""
        digest = _digest(session.key)
        self._open[digest] = session
        try:
            yield session
        finally:
            del self._open[digest]
            self._waiting.pop(session.id, None)
            self._ended[digest] = None
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            await session.close()

    def find(self, key: str) -> Session:
        """Return the session of a key.

        Raises:
            CallError: no session has this key (401), or it is over (409).
        """
        digest = _digest(key)
        if session := self._open.get(digest):
            return session
        if digest in self._ended:
            raise CallError(409, "session: the trajectory is over", "session_ended")
        raise CallError(401, "key: no session has this key", "invalid_api_key")

    def offer(self, session: Session) -> None:
        """Let a service take a session."""
        self._waiting[session.id] = session
        self._news.set()

    async def take(self, seconds: float) -> Session:
        """Return the session that has waited longest, and wait for one where none is there.

        Raises:
            CallError: there was none in time (429).
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._waiting:
                    self._news.clear()
                    await self._news.wait()
        if not self._waiting:
            raise CallError(429, "session: no trajectory waits to be taken; ask again later", "no_session")
        return self._waiting.popitem(last=False)[1]

    @property
    def num_open(self) -> dict[str, int]:
        """Number of open sessions by environment."""
        counts: dict[str, int] = {}
        for session in self._open.values():
            counts[session.environment] = counts.get(session.environment, 0) + 1
        return counts


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
