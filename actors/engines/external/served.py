"""Base of engines in front of an external server: the parts common to vLLM and SGLang.

A request waits at a gate, open while the server's weights are known, and becomes one or more calls of the server. An
answer counts only if all its tokens carry labels of this engine's boot id: P25 (each segment of a group names its
policy; see `labels`). Otherwise another process has loaded weights or the server has restarted: the answer is dropped,
the gate closes, `status` says `quarantined`, and the actor loads again. The request is then sampled again.

Adapters are served under a name per version. A new adapter is loaded next to the old ones, without a pause; requests
under way finish with the version of their start. When more than `max_loras` versions would be in use, the requests
of the oldest version continue with the current version (update mode `drain`: the engine waits until they finish).

Full weights are overwritten in place, from files, while the server is paused, as the update mode says. Each version has
a different salt in the prefix cache, so no version reads keys and values of another. If a switch fails halfway the
engine is `dirty`: the server stays paused until a whole version has been loaded.
"""

import asyncio
import contextlib
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import structlog

from actors.engines.external.continuation import ABORTED, cut_at_stop, joined, rest_of
from actors.engines.external.images import image_token
from actors.engines.external.labels import ADAPTER_PREFIX, ServedWeights
from actors.engines.external.relay import Relay
from actors.engines.external.staging import Staging, model_shapes, vocab_size
from actors.engines.external.upstream import RefusedError
from actors.engines.protocol import Completion, EngineStatus, EngineStoppedError, SampleRequest
from actors.engines.tokenizing import Tokenizing
from actors.models.served_images import Pixels
from bus.run_folder import Scratch
from bus.weights import Weights
from schemas.config.model import ModelConfig
from schemas.config.services import UpdateMode
from schemas.errors import ConfigError
from schemas.messages import EngineState, PolicyVersion

log = structlog.get_logger("engine")

POLL_SECONDS = 0.2
"""Seconds between two looks at a starting or ending server."""
ROOM_SECONDS = 0.02
"""Seconds between two looks at requests, while a switch waits for their end."""

Ask = Callable[[SampleRequest], Awaitable[Completion]]
"""Function to send a request to the server; returns the only completion."""


class Client(Protocol):
    """Calls offered by every external server."""

    async def label(self, label: str) -> None:
        """Set the label of the tokens sampled from now on."""
        ...

    async def adapters(self) -> list[str]:
        """Return the names of all loaded adapters."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder and serve the adapter under a name, next to others."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests. The answers come at once, with the tokens sampled so far."""
        ...

    async def resume(self) -> None:
        """Resume after a pause. Has no effect on a running server."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def server_of(urls: Sequence[str], server_index: int) -> str:
    """Return the server at this index, that of the inference actor with this number.

    Raises:
        ConfigError: `inference.engine.urls` has no entry for this actor.
    """
    if server_index >= len(urls):
        raise ConfigError(f"inference.engine.urls: has none for inference-{server_index}")
    return urls[server_index]


class ServedEngine(Tokenizing, ABC):
    """Engine in front of an external server; the module describes the states.

    Args:
        server: name of the software in the makers' spelling, for errors.
        model: model of the policy; with `lora` the server serves adapters.
        update_mode: treatment of running requests when full weights are overwritten.
        max_loras: number of adapters held by the server.
        scratch: folder readable for the server, for weights without files from the channel.
    """

    _client: Client
    _key_setting = "inference.engine.api_key_env"
    """Configuration key of the secret for the server's endpoints for weights."""

    def __init__(
        self, server: str, model: ModelConfig, update_mode: UpdateMode, max_loras: int, scratch: Scratch
    ) -> None:
        super().__init__(model)
        self._name = server
        self._mode, self._max_loras = update_mode, max_loras
        self._serves_adapters = self.holds_two_versions = model.lora is not None
        self._vocab_size = vocab_size(model)
        self._image_token, self._pixels = image_token(model), Pixels(model)
        self._shapes = {} if self._serves_adapters else model_shapes(model)
        self._staging = Staging(scratch, server)
        self._serving = ServedWeights(uuid.uuid4().hex[:12], None, 0)
        """Version of the label on new tokens."""
        self._labels: dict[str, PolicyVersion | None] = {}
        """Policy by label, for every version loaded so far: answers under way may carry old labels."""
        self._num_updates = 0
        self._adapters: list[ServedWeights] = []
        """Adapters in the server, oldest first."""
        self._under_way: dict[str, ServedWeights] = {}
        """Version of each call under way, by request id."""
        self._state: EngineState = "clean"
        self._loading = threading.Lock()

    def _start(self, connect: Callable[[], Coroutine[Any, Any, None]], timeout: float) -> None:
        """Start the relay and take the server over. Every constructor ends with this call."""
        self._relay = Relay(self._name.lower(), self._sample)
        try:
            # twice the timeout: once for the server's start, once for the takeover
            self._relay.call(connect(), 2 * timeout)
        except BaseException:
            self.close()
            raise

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Send a request to the server. Pieces are whole completions, passed on once the labels are verified.

        Raises:
            RequestError: the request can never be served.
            EngineStoppedError: the server is gone, or the engine has been closed.
        """
        self._check(request)
        return self._relay.submit(request)

    def load(self, policy: PolicyVersion, weights: Weights, timeout: float) -> float:
        """Have the server switch to these weights; return the seconds without decoding, at most.

        Raises:
            ValueError: the weights do not fit the model, or the server refuses them.
            TimeoutError: the switch took more than `timeout` seconds. `status` says which version is served.
            EngineStoppedError: the server is gone, or the engine has been closed.
        """
        self._relay.ensure_alive()
        expected = "adapter" if self._serves_adapters else "full"
        if weights.content != expected:
            raise ValueError(
                f"the trainer publishes {weights.content} weights, this engine holds {expected}; is model.lora "
                "the same in both?"
            )
        with self._loading:
            self._num_updates += 1
            version = ServedWeights(self._serving.boot, policy, self._num_updates)
            try:
                # each of at most three parts has the timeout: loading an adapter, the pause, overwriting
                return self._relay.call(self._switch(version, weights, timeout), 3 * timeout)
            finally:
                # a server may read an adapter again while serving it
                if version not in self._adapters:
                    self._staging.forget(version.name)

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state; without a policy while the server's weights are unknown.

        Raises:
            EngineStoppedError: the server is gone.
        """
        if self._relay.failure:
            raise EngineStoppedError(self._relay.failure)
        policy = self._serving.policy if self._state == "clean" else None
        relay = self._relay
        # 0 waiting: the server queues, and does not tell
        return EngineStatus(policy, relay.num_running, 0, relay.generated_tokens, relay.busy_seconds, state=self._state)

    def close(self) -> None:
        """Fail all requests, and stop the server if this engine started it."""
        self._relay.close(self._leave)
        self._end_server()
        self._staging.close()

    # --- what each server does in its own way --------------------------------------------------------------------

    @abstractmethod
    def _check(self, request: SampleRequest) -> None:
        """Check a request for reasons why the server would refuse, or would cut the completion short silently.

        Raises:
            RequestError: the request can never be served.
        """

    @abstractmethod
    async def _sample(self, asked: SampleRequest) -> list[Completion]:
        """Return all completions of a request, each whole."""

    @abstractmethod
    def _switch(self, version: ServedWeights, weights: Weights, timeout: float) -> Coroutine[Any, Any, float]:
        """Return the coroutine for switching to a version.

        The version's files are written before the call returns, in the caller's thread: the loop serves requests
        meanwhile.
        """

    @abstractmethod
    async def _stand_still(self) -> float:
        """Have the server stop decoding, as the update mode says; return the monotonic time of the stop."""

    def _end_server(self) -> None:
        """Stop the server if this engine started it."""

    async def _leave(self) -> None:
        # there is no client if connecting failed
        if hasattr(self, "_client"):
            await self._client.close()

    # --- the loop's thread: requests -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self, version: ServedWeights) -> Iterator[str]:
        """Register a call of the server while the call runs; yield the request id for the server."""
        request_id = uuid.uuid4().hex
        self._under_way[request_id] = version
        try:
            yield request_id
        finally:
            del self._under_way[request_id]

    async def _continued(self, asked: SampleRequest, number: int, begun: Completion, ask: Ask) -> Completion:
        """Return completion `number` in full, continued after each abort."""
        # the server has looked for stop strings in a completion that it has not interrupted
        if begun.finish_reason != ABORTED:
            return begun
        completion = begun
        # behind the tokens so far a form would begin again, so these completions are sampled again from their start
        while asked.form is not None and completion.finish_reason == ABORTED:
            completion = await ask(replace(asked, num_completions=1, seed=asked.seed + number))
        while completion.finish_reason == ABORTED:
            completion = joined(completion, await ask(rest_of(asked, number, completion)))
        if not asked.stop:
            return completion
        return cut_at_stop(completion, asked.stop, self.detokenize, asked.sampling.min_tokens)

    def _quarantine(self, version: ServedWeights, reason: str) -> None:
        # otherwise an earlier answer has reported it
        if self._serving is version and self._state == "clean":
            log.error("served weights do not match", detail=reason)
            self._state = "quarantined"
            self._gate.clear()

    # --- the loop's thread: weights ------------------------------------------------------------------------------

    async def _take_over(self, url: str, timeout: float) -> None:
        """Label a server of unknown state with a version of this engine. Adapters of earlier engines are unloaded.

        The server may be paused: a crash of an engine in an update leaves a paused server.

        Raises:
            ConfigError: the server refuses, most likely because of a missing key.
            EngineStoppedError: the takeover took longer than `timeout` seconds.
        """
        self._gate = asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                await self._client.resume()
                for name in await self._client.adapters() if self._serves_adapters else ():
                    # the same names will be needed, and room is scarce
                    if name.startswith(ADAPTER_PREFIX):
                        await self._client.unload_adapter(name)
                await self._take(self._serving)
        except TimeoutError:
            raise EngineStoppedError(
                f"{self._name} at {url} could not be taken over within {timeout:g} s "
                "(inference.engine.startup_timeout); do requests of others use its adapters?"
            ) from None
        except RefusedError as error:
            raise ConfigError(f"{self._key_setting}: {error}") from None

    async def _take(self, version: ServedWeights) -> None:
        """Label the server's tokens with this version, and open the gate."""
        # registered first: answers may carry the label as soon as it is set
        self._labels[version.label] = version.policy
        await self._client.label(version.label)
        self._open(version)

    def _open(self, version: ServedWeights) -> None:
        self._serving, self._state = version, "clean"
        self._gate.set()

    async def _switch_adapter(self, version: ServedWeights, folder: Path, timeout: float) -> float:
        async with self._in_time(version, timeout):
            seconds = await self._add_adapter(version, folder)
            await self._take(version)
        return seconds

    async def _add_adapter(self, version: ServedWeights, folder: Path) -> float:
        """Load an adapter next to the loaded ones, once there is room; return the seconds of loading.

        Unused adapters are unloaded; if that is not enough, the oldest is given up.
        """
        while True:
            # the version being served must stay, even without requests
            in_use = {*self._under_way.values(), self._serving}
            for unused in [adapter for adapter in self._adapters if adapter not in in_use]:
                self._adapters.remove(unused)
                await self._client.unload_adapter(unused.adapter)
                self._staging.forget(unused.name)
            if len(self._adapters) < self._max_loras:
                break
            if self._mode != "drain":
                # the aborted requests continue with the current version
                await self._client.abort([i for i, used in self._under_way.items() if used == self._adapters[0]])
            await asyncio.sleep(ROOM_SECONDS)
        started = time.monotonic()
        await self._client.load_adapter(version.adapter, folder)
        self._adapters.append(version)
        return time.monotonic() - started

    async def _switch_all(
        self, version: ServedWeights, overwrite: Callable[[], Awaitable[None]], timeout: float
    ) -> float:
        """Switch all weights: `overwrite` gives the server weights and label."""
        self._gate.clear()
        try:
            async with self._in_time(version, timeout):
                since = await self._stand_still()
        except (TimeoutError, RefusedError):
            # nothing has been overwritten: a clean server may go on with the old weights
            if self._state == "clean":
                self._gate.set()
                try:
                    async with asyncio.timeout(timeout):
                        await self._client.resume()
                except (TimeoutError, RefusedError, EngineStoppedError) as error:
                    # logged alone: the error of the switch is the one to report
                    log.error("server may still be paused", detail=str(error) or f"no answer within {timeout:g} s")
            raise
        # from here on the server may hold pieces of two versions
        self._state = "dirty"
        self._labels[version.label] = version.policy
        async with self._in_time(version, timeout):
            await overwrite()
            await self._client.resume()
        self._open(version)
        return time.monotonic() - since

    @contextlib.asynccontextmanager
    async def _in_time(self, version: ServedWeights, timeout: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout):
                yield
        except TimeoutError:
            raise TimeoutError(
                f"weights {version.policy} were not switched in within {timeout:g} s (weights.timeout, "
                f"weights.update_mode {self._mode})"
            ) from None
