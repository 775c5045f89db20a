"""An engine in front of a server of others: what those of vLLM and SGLang have in common.

A request waits at a gate, which is open while the server's weights are known, becomes one call of the server or more,
and an answer counts only if all its tokens carry labels of this engine's boot id (P25; see `labels`). If one does not
(somebody else has loaded weights, or the server has been started anew), the answer is dropped, the gate closes,
`status` says `quarantined`, and the actor loads again; the request is sampled anew then.

Adapters are served under a name per version. A new one is loaded beside the old one, without a pause; requests under
way end with the version they began with, and only when more than `max_loras` versions would be in use do those of the
oldest one go on with the current one (update mode drain: are waited for).

All weights are overwritten in place, from files, while the server stands still, in the way of the update mode. Each
version has a salt of its own in the prefix cache, so that none is served what another one has computed. If a switch
fails in the middle the engine is `dirty`: the server stays paused until a whole version has been loaded.
"""

import asyncio
import contextlib
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import structlog

from actors.engines.continuation import ABORTED, cut_at_stop, joined, rest_of
from actors.engines.folders import Folders, model_shapes, vocab_size
from actors.engines.labels import ADAPTER_PREFIX, Version
from actors.engines.protocol import Completion, EngineStatus, EngineStoppedError, SampleRequest
from actors.engines.relay import Relay
from actors.engines.tokenizing import Tokenizing
from actors.engines.upstream import RefusedError
from actors.environments.prompts import eos_ids
from bus.weights import Weights
from schemas.config.model import ModelConfig
from schemas.config.services import UpdateMode
from schemas.errors import ConfigError
from schemas.messages import EngineState, Policy

log = structlog.get_logger("engine")

POLL_SECONDS = 0.2
ROOM_SECONDS = 0.02
"""Between two looks at whether requests that are waited for have ended."""

Ask = Callable[[SampleRequest], Awaitable[Completion]]


class Client(Protocol):
    """What a server is asked for where it makes no difference which one it is."""

    async def label(self, label: str) -> None:
        """Have tokens from here on carry this label."""
        ...

    async def adapters(self) -> list[str]:
        """Names of those that are loaded."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve an adapter under a name, beside those that are there."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their answers come at once, with what was sampled so far."""
        ...

    async def resume(self) -> None:
        """Go on after a pause."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def server_of(urls: Sequence[str], ordinal: int) -> str:
    """The server of inference actor `ordinal`.

    Raises:
        ConfigError: there is none.
    """
    if ordinal >= len(urls):
        raise ConfigError(f"inference.engine.urls: has none for inference-{ordinal}")
    return urls[ordinal]


class ServedEngine(Tokenizing, ABC):
    """See the module.

    Args:
        server: its name, as its makers write it.
        model: the policy; with `lora` the server serves adapters of it.
        update_mode: of weights.
        max_loras: adapters that the server holds.
        scratch: a folder, in sight of the server, for weights that the channel does not lay out as files.
    """

    _client: Client
    _key_setting = "inference.engine.api_key_env"
    """Of the key that the endpoints for weights ask for."""

    def __init__(self, server: str, model: ModelConfig, update_mode: UpdateMode, max_loras: int, scratch: Path) -> None:
        super().__init__(model)
        self._name = server
        self._mode, self._max_loras = update_mode, max_loras
        self._serves_adapters = self.holds_two_versions = model.lora is not None
        self._eos, self._vocab_size = eos_ids(model), vocab_size(model)
        self._shapes = {} if self._serves_adapters else model_shapes(model)
        self._folders = Folders(scratch, server)
        self._serving = Version(uuid.uuid4().hex[:12], None, 0)
        self._labels: dict[str, Policy | None] = {}
        self._num_updates = 0
        self._adapters: list[Version] = []
        self._under_way: dict[str, Version] = {}
        self._state: EngineState = "clean"
        self._loading = threading.Lock()

    def _start(self, connect: Callable[[], Coroutine[Any, Any, None]], timeout: float) -> None:
        """The last thing that a constructor does."""
        self._relay = Relay(self._name.lower(), self._sample)
        try:
            self._relay.call(connect(), 2 * timeout)  # until it serves, and until it is taken over
        except BaseException:
            self.close()
            raise

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Send a request on; its pieces are whole completions, told when the answer has proven whose they are."""
        self._check(request)
        return self._relay.submit(request)

    def load(self, policy: Policy, weights: Weights, timeout: float) -> float:
        """Have the server switch; returns the seconds for which it did not decode, at most."""
        self._relay.ensure_alive()
        expected = "adapter" if self._serves_adapters else "full"
        if weights.content != expected:
            raise ValueError(
                f"the trainer publishes {weights.content} weights, this engine holds {expected}; is model.lora "
                "the same in both?"
            )
        with self._loading:
            self._num_updates += 1
            version = Version(self._serving.boot, policy, self._num_updates)
            try:
                return self._relay.call(self._switch(version, weights, timeout), 3 * timeout)
            finally:
                if version not in self._adapters:  # those may be read again for as long as they are served
                    self._folders.forget(version.name)

    def status(self) -> EngineStatus:
        """A snapshot; no policy while it is not known which weights the server holds."""
        if self._relay.failure:
            raise EngineStoppedError(self._relay.failure)
        policy = self._serving.policy if self._state == "clean" else None
        relay = self._relay
        return EngineStatus(policy, relay.num_running, 0, relay.generated_tokens, relay.busy_seconds, state=self._state)

    def close(self) -> None:
        """End all requests; a server that is not ours goes on."""
        self._relay.close(self._leave)
        self._end_server()
        self._folders.close()

    # --- what each server does in its own way --------------------------------------------------------------------

    @abstractmethod
    def _check(self, request: SampleRequest) -> None:
        """Raise a RequestError where the server would refuse, or cut short without a word."""

    @abstractmethod
    async def _sample(self, asked: SampleRequest) -> list[Completion]:
        """All completions of a request, whole."""

    @abstractmethod
    def _switch(self, version: Version, weights: Weights, timeout: float) -> Coroutine[Any, Any, float]:
        """The way to a version, whose files are written here, in the thread of the caller."""

    @abstractmethod
    async def _stand_still(self) -> float:
        """Have the server decode no more, in the way of the update mode; returns the time since when it does not."""

    def _end_server(self) -> None:
        """If it is ours."""

    async def _leave(self) -> None:
        if hasattr(self, "_client"):  # it has been connected with
            await self._client.close()

    # --- the loop's thread: requests -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self, version: Version) -> Iterator[str]:
        """Around one call of the server; gives the id that the call has there."""
        request_id = uuid.uuid4().hex
        self._under_way[request_id] = version
        try:
            yield request_id
        finally:
            del self._under_way[request_id]

    async def _continued(self, asked: SampleRequest, number: int, begun: Completion, ask: Ask) -> Completion:
        """Completion `number` to its end, however often it is interrupted."""
        if begun.finish_reason != ABORTED:
            return begun
        completion = begun
        while completion.finish_reason == ABORTED:
            completion = joined(completion, await ask(rest_of(asked, number, completion)))
        return cut_at_stop(completion, asked.stop, self.detokenize) if asked.stop else completion

    def _quarantine(self, version: Version, reason: str) -> None:
        if self._serving is version and self._state == "clean":  # else another answer has said so already
            log.error("weights are not ours", detail=reason)
            self._state = "quarantined"
            self._gate.clear()

    # --- the loop's thread: weights ------------------------------------------------------------------------------

    async def _take_over(self, url: str, timeout: float) -> None:
        """Whatever the server holds is nobody's. An engine before this one, ended in an update, has left it paused.

        Raises:
            ConfigError: it refuses, most likely for want of a key.
            EngineStoppedError: it takes longer.
        """
        self._gate = asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                await self._client.resume()
                for name in await self._client.adapters() if self._serves_adapters else ():
                    if name.startswith(ADAPTER_PREFIX):  # such names come again, and room is scarce
                        await self._client.unload_adapter(name)
                await self._take(self._serving)
        except TimeoutError:
            raise EngineStoppedError(
                f"{self._name} at {url} could not be taken over within {timeout:g} s "
                "(inference.engine.startup_timeout); do requests of others use its adapters?"
            ) from None
        except RefusedError as error:
            raise ConfigError(f"{self._key_setting}: {error}") from None

    async def _take(self, version: Version) -> None:
        """The server's weights are these from now on."""
        self._labels[version.label] = version.policy
        await self._client.label(version.label)
        self._open(version)

    def _open(self, version: Version) -> None:
        self._serving, self._state = version, "clean"
        self._gate.set()

    async def _switch_adapter(self, version: Version, folder: Path, timeout: float) -> float:
        async with self._in_time(version, timeout):
            seconds = await self._add_adapter(version, folder)
            await self._take(version)
        return seconds

    async def _add_adapter(self, version: Version, folder: Path) -> float:
        """Beside those that are there; returns the seconds that it took."""
        await self._make_room()
        started = time.monotonic()
        await self._client.load_adapter(version.adapter, folder)
        self._adapters.append(version)
        return time.monotonic() - started

    async def _make_room(self) -> None:
        """For one more adapter: those that nobody uses go, and if there are still too many, the oldest is given up."""
        while True:
            in_use = {*self._under_way.values(), self._serving}
            for version in [adapter for adapter in self._adapters if adapter not in in_use]:
                self._adapters.remove(version)
                await self._client.unload_adapter(version.adapter)
                self._folders.forget(version.name)
            if len(self._adapters) < self._max_loras:
                return
            if self._mode != "drain":
                oldest = [i for i, version in self._under_way.items() if version == self._adapters[0]]
                await self._client.abort(oldest)
            await asyncio.sleep(ROOM_SECONDS)

    async def _switch_all(self, version: Version, overwrite: Callable[[], Awaitable[None]], timeout: float) -> float:
        """`overwrite` gives the server the weights and their label."""
        self._gate.clear()
        try:
            async with self._in_time(version, timeout):
                since = await self._stand_still()
        except (TimeoutError, RefusedError):  # nothing has been overwritten
            if self._state == "clean":
                self._gate.set()
                await self._go_on(timeout)
            raise
        self._state = "dirty"
        self._labels[version.label] = version.policy
        async with self._in_time(version, timeout):
            await overwrite()
            await self._client.resume()
        self._open(version)
        return time.monotonic() - since

    async def _go_on(self, timeout: float) -> None:
        """After a switch that has failed before anything was overwritten; its own error is the one to be told."""
        try:
            async with asyncio.timeout(timeout):
                await self._client.resume()
        except (TimeoutError, RefusedError, EngineStoppedError) as error:
            log.error("server may still be paused", detail=str(error) or f"no answer within {timeout:g} s")

    @contextlib.asynccontextmanager
    async def _in_time(self, version: Version, timeout: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError:
            raise TimeoutError(
                f"weights {version.policy} were not switched in within {timeout:g} s (weights.timeout, "
                f"weights.update_mode {self._mode})"
            ) from None
