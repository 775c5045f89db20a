"""Server and client of the requests of rollout actors; the tests have engines of their own behind the server."""

from collections.abc import AsyncIterator, Iterator

import pytest

from actors.engines.fake import FakeEngine
from actors.engines.http.client import CompletionClient
from actors.engines.http.server import CompletionServer
from tests.actors.engines.engines import WAIT


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[CompletionServer]:
    """In front of it."""
    made = CompletionServer(engine, "tiny", "boot1", "127.0.0.1", 0, WAIT)
    yield made
    made.close()


@pytest.fixture
async def client() -> AsyncIterator[CompletionClient]:
    """With patience."""
    made = CompletionClient("tiny", WAIT, 4)
    yield made
    await made.close()
