"""vLLM as an engine: between the actor's threads and the server's HTTP (see `relay`).

Consumes requests and weights. A request waits at a gate, which is open while the server's weights are known, becomes
one call of `/inference/v1/generate`, and its answer counts only if all its tokens carry labels of this engine's boot id
(P25; see `labels`). If one does not, the answer is dropped, the gate closes, `status` says `quarantined`, and the
actor loads again; the request is sampled anew then.

Adapters are served under a name per version. A new one is loaded beside the old one, without a pause; requests under
way end with the version they began with, and only when more than `max_loras` versions would be in use do those of the
oldest one go on with the current one (update mode drain: are waited for). The alternative, one name and
`load_inplace`, swaps no faster (6 ms against 9 ms for an adapter of rank 4 of a tiny model), but the server then reads
the adapter from disk again at each token, which made decoding 1.5 times slower, and every request would see two
versions.

All weights are overwritten in place, from files, while the server stands still:

    drain       running requests end first; new ones wait
    interrupt   the server stops between two tokens, forgets all keys and values, and goes on under the new weights
    inflight    the same, and keeps them; no request that comes later is served from them

Noise is on the norms of all weights as they are laid out. Those under an adapter are all versions' own, so with noise
an adapter is switched like all weights: requests under way are interrupted (update mode drain: are waited for), the
server stands still while the norms are overwritten, and what was interrupted is computed again under the new version,
in mode inflight too.

If a switch fails in the middle the engine is `dirty`: the server stays paused until a whole version has been loaded.
"""

import asyncio
import contextlib
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog

from actors.engines.continuation import ABORTED, cut_at_stop, joined, rest_of
from actors.engines.folders import Folders, check_fit, model_shapes, shapes_of, vocab_size
from actors.engines.labels import UnknownWeightsError, Version
from actors.engines.protocol import (
    Completion,
    EngineStatus,
    EngineStoppedError,
    RequestError,
    SampleRequest,
    check_token_ids,
)
from actors.engines.relay import Relay
from actors.engines.tokenizing import Tokenizing
from actors.engines.upstream import RefusedError
from actors.engines.vllm import answers
from actors.engines.vllm.client import VllmClient
from actors.engines.vllm.process import END_SECONDS, WHOLE_PROMPTS, OwnServer, api_key
from actors.engines.vllm.versions import check_version, installed
from actors.environments.prompts import eos_ids
from bus.weights import Weights
from bus.weights.filesystem import FILE_NAMES
from schemas.config.engines import VllmEngineConfig
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import EngineState, Policy

if TYPE_CHECKING:
    import torch

    from actors.algorithms.noise import NormNoise

log = structlog.get_logger("engine")

POLL_SECONDS = 0.2
WATCH_SECONDS = 1.0
ROOM_SECONDS = 0.02
"""Between two looks at whether the oldest adapter is still in use."""
GREEDY_BELOW = 1e-5
"""The temperature that vLLM takes for 0."""


class VllmEngine(Tokenizing):
    """See the module.

    Args:
        model: the policy; with `lora` the server serves adapters of it.
        config: of the server.
        update_mode: of weights.
        log_path: of an owned server.
        scratch: a folder for weights that the channel does not lay out as files.
        ordinal: which of `inference.engine.urls` is this one's.
        noise: on the norms of what is served; with `lora` for an owned server alone.

    Raises:
        ConfigError: the server can't be used, and why.
        EngineStoppedError: it has ended at its start, or takes longer than `startup_timeout`.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: VllmEngineConfig,
        update_mode: Literal["drain", "interrupt", "inflight"],
        log_path: Path,
        scratch: Path,
        ordinal: int = 0,
        noise: "NormNoise | None" = None,
    ) -> None:
        super().__init__(model)
        self._model, self._config, self._mode, self._noise = model, config, update_mode, noise
        self._serves_adapters = model.lora is not None
        self.holds_two_versions = self._serves_adapters and noise is None
        self._sets_norms = self._serves_adapters and noise is not None
        self._clean_norms: dict[str, torch.Tensor] = {}
        self._eos = eos_ids(model)
        self._folders = Folders(scratch, "vLLM")
        self._shapes, self._vocab_size = model_shapes(model) if model.lora is None else {}, vocab_size(model)
        self._serving = Version(uuid.uuid4().hex[:12], None, 0)
        self._labels: dict[str, Policy | None] = {}
        self._num_updates = 0
        self._adapters: list[Version] = []
        self._under_way: dict[str, Version] = {}
        self._state: EngineState = "clean"
        self._loading = threading.Lock()
        self._server = None if config.urls else self._start_server(log_path)
        url = self._server.url if self._server else self._url(ordinal)
        self._relay = Relay("vllm", self._sample)
        try:
            self._relay.call(self._connect(url), config.startup_timeout)
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
                return self._relay.call(self._switch(version, policy.version, weights, timeout), 3 * timeout)
            finally:
                if version not in self._adapters:  # those may be read again for as long as they are served
                    self._folders.forget(version.name)

    def status(self) -> EngineStatus:
        """A snapshot; no policy while it is not known which weights the server holds."""
        if not self._relay.failure and self._server is not None and (ended := self._server.ended()):
            self._fail(ended)
        if self._relay.failure:
            raise EngineStoppedError(self._relay.failure)
        policy = self._serving.policy if self._state == "clean" else None
        relay = self._relay
        return EngineStatus(policy, relay.num_running, 0, relay.generated_tokens, relay.busy_seconds, state=self._state)

    def close(self) -> None:
        """End the server if it is ours, and the thread."""
        self._relay.close(self._leave)
        if self._server is not None:
            self._server.close(0.0 if self._relay.failure else END_SECONDS)
        self._folders.close()

    def _url(self, ordinal: int) -> str:
        if ordinal >= len(self._config.urls):
            raise ConfigError(f"inference.engine.urls: has none for inference-{ordinal}")
        return self._config.urls[ordinal]

    def _start_server(self, log_path: Path) -> OwnServer:
        python = self._config.python or sys.executable
        found = installed(python)
        check_version(found.version, python)
        server = OwnServer(self._model, self._config, found.on_cpu, log_path, self._sets_norms)
        log.info("vLLM starts", url=server.url, log=str(log_path))
        return server

    def _switch(self, version: Version, number: int, weights: Weights, timeout: float) -> Coroutine[Any, Any, float]:
        """The way to a version, whose files are written here; `number` decides on its noise."""
        from actors.engines.vllm.norms import model_norms, noisy  # here: torch is slow to import

        if not self._serves_adapters:
            clean_or_noisy = weights if self._noise is None else noisy(weights, self._noise, number)
            folder = self._folders.full(version.name, clean_or_noisy, with_head=self._on_cpu)
            check_fit(self._shapes, shapes_of(folder / FILE_NAMES["full"]))
            return self._switch_all(version, partial(self._client.reload, folder), timeout)
        folder = self._folders.adapter(version.name, weights)
        if self._noise is None:
            return self._switch_adapter(version, folder, timeout)
        self._clean_norms = self._clean_norms or model_norms(self._model)
        norms = self._folders.norms(version.name, self._noise.on(self._clean_norms, number))
        return self._switch_adapter_and_norms(version, folder, norms, timeout)

    def _check(self, request: SampleRequest) -> None:
        size, new = len(request.prompt_ids), request.max_tokens or 1
        if size == 0:
            raise RequestError("prompt: is empty")
        for name, tokens in (("prompt", request.prompt_ids), ("logit_bias", request.logit_bias)):
            check_token_ids(name, tokens, self._vocab_size)
        if size + new > self._longest:  # the server would cut the completion short without a word
            raise RequestError(
                f"max_tokens: {size} prompt tokens and {new} new ones exceed {self._longest} "
                "(inference.engine.max_model_len, or the model's own limit)"
            )

    # --- the loop's thread: the server ---------------------------------------------------------------------------

    async def _connect(self, url: str) -> None:
        self._gate, self._alarm = asyncio.Event(), asyncio.Event()
        self._client = VllmClient(url, api_key(self._config), self._server.door_key if self._server else "")
        await self._until_it_serves()
        check_version(await self._client.version(), url)
        settings = await self._settings()
        self._longest = int(settings["model_config"]["max_model_len"])
        self._on_cpu = settings["device_config"]["device"] == "cpu"
        await self._take(self._serving)
        self._relay.keep(self._watch())

    async def _until_it_serves(self) -> None:
        deadline = time.monotonic() + self._config.startup_timeout
        while trouble := await self._client.trouble():
            if self._server is not None and (ended := self._server.ended()):
                raise EngineStoppedError(ended)
            if time.monotonic() > deadline:
                words = f"; the last lines of its log:\n{self._server.last_lines()}" if self._server else ""
                raise EngineStoppedError(
                    f"{trouble} after {self._config.startup_timeout:g} s (inference.engine.startup_timeout){words}"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def _settings(self) -> dict[str, Any]:
        """The server's configuration, where it can be used.

        Raises:
            ConfigError: an endpoint or an option is missing.
        """
        try:
            settings = await self._client.settings()
        except RefusedError as error:
            raise ConfigError(f"inference.engine.urls: {error}; start it with VLLM_SERVER_DEV_MODE=1") from None
        mode = settings["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ConfigError(
                f"inference.engine.urls: {self._client.url} gives {mode}; start it with "
                "--logprobs-mode processed_logprobs"
            )
        if self._serves_adapters and settings.get("lora_config") is None:
            raise ConfigError(
                f"inference.engine.urls: {self._client.url} serves no adapters (model.lora); start it with "
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        on_cpu = settings["device_config"]["device"] == "cpu"
        if on_cpu and settings["scheduler_config"]["enable_chunked_prefill"]:
            raise ConfigError(f"inference.engine.urls: on CPUs vLLM needs {WHOLE_PROMPTS}, or long prompts end it")
        return settings

    async def _watch(self) -> None:
        """Until the server can't serve any more."""
        while not self._relay.failure:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._alarm.wait(), WATCH_SECONDS)
            self._alarm.clear()
            if trouble := await self._trouble():
                self._fail(trouble)

    async def _trouble(self) -> str:
        """Why the server can't serve; of an owned one that has ended, the last lines of its log."""
        trouble = await self._client.trouble()
        if trouble and self._server is not None:
            await asyncio.sleep(POLL_SECONDS)  # its guard is about to end
            trouble = self._server.ended() or trouble
        return trouble

    def _fail(self, reason: str) -> None:
        log.error("vLLM has ended", reason=reason)
        self._relay.fail(reason)

    async def _leave(self) -> None:
        if hasattr(self, "_client"):
            await self._client.close()

    # --- the loop's thread: requests -----------------------------------------------------------------------------

    async def _sample(self, asked: SampleRequest) -> list[Completion]:
        # without chance all completions are the same one, and the server refuses to sample it n times
        n = 1 if asked.temperature < GREEDY_BELOW else asked.num_completions
        completions = await self._ask(replace(asked, num_completions=n))
        completions = await asyncio.gather(*(self._whole(asked, i, c) for i, c in enumerate(completions)))
        return completions * (asked.num_completions // n)

    async def _whole(self, asked: SampleRequest, number: int, completion: Completion) -> Completion:
        """A completion to its end, however often it is interrupted."""
        if completion.finish_reason != ABORTED:
            return completion
        while completion.finish_reason == ABORTED:
            [rest] = await self._ask(rest_of(asked, number, completion))
            completion = joined(completion, rest)
        return cut_at_stop(completion, asked.stop, self.detokenize) if asked.stop else completion

    async def _ask(self, asked: SampleRequest) -> list[Completion]:
        """One call of the server, again after each answer that was nobody's."""
        while True:
            await self._gate.wait()
            version, request_id = self._serving, uuid.uuid4().hex
            adapter = version if self._serves_adapters else None
            body = {
                "request_id": request_id,
                "token_ids": asked.prompt_ids,
                "sampling_params": answers.sampling_params(asked, self._eos),
                "cache_salt": version.name,
            }
            if adapter and adapter.policy:
                body["model"] = adapter.adapter
            self._under_way[request_id] = version
            try:
                answer = await self._client.generate(body)
                return answers.completions_of(answer, asked, self._eos, self._labels, adapter)
            except UnknownWeightsError as error:
                self._quarantine(version, str(error))
            except EngineStoppedError:
                self._alarm.set()  # whoever asks again is to find the actor gone
                raise
            finally:
                del self._under_way[request_id]

    def _quarantine(self, version: Version, reason: str) -> None:
        if self._serving is version and self._state == "clean":  # else another answer has said so already
            log.error("weights are not ours", detail=reason)
            self._state = "quarantined"
            self._gate.clear()

    # --- the loop's thread: weights ------------------------------------------------------------------------------

    async def _take(self, version: Version) -> None:
        """The server's weights are these from now on."""
        self._labels[version.label] = version.policy
        await self._client.label(version.label)
        self._serving, self._state = version, "clean"
        self._gate.set()

    async def _switch_adapter(self, version: Version, folder: Path, timeout: float) -> float:
        async with self._in_time(version, timeout):
            seconds = await self._add_adapter(version, folder)
            await self._take(version)
        return seconds

    async def _switch_adapter_and_norms(self, version: Version, folder: Path, norms: Path, timeout: float) -> float:
        async with self._in_time(version, timeout):
            await self._add_adapter(version, folder)
        return await self._switch_all(version, partial(self._client.set_norms, norms), timeout)

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
            if len(self._adapters) < self._config.max_loras:
                return
            if self._mode != "drain":
                oldest = [i for i, version in self._under_way.items() if version == self._adapters[0]]
                await self._client.abort(oldest)
            await asyncio.sleep(ROOM_SECONDS)

    async def _switch_all(self, version: Version, overwrite: Callable[[], Awaitable[None]], timeout: float) -> float:
        was_clean = self._state == "clean"
        self._gate.clear()
        started = time.monotonic()
        try:
            async with self._in_time(version, timeout):
                while self._serves_adapters and self._under_way:  # they can't go on with another adapter
                    if self._mode != "drain":
                        await self._client.abort(list(self._under_way))
                    await asyncio.sleep(ROOM_SECONDS)
                await self._client.pause(wait=self._mode == "drain", clear_cache=self._mode != "inflight")
        except (TimeoutError, RefusedError):  # nothing has been overwritten
            if was_clean:
                self._gate.set()
                await self._client.resume()
            raise
        started = time.monotonic() if self._mode == "drain" else started
        self._state = "dirty"
        async with self._in_time(version, timeout):
            await overwrite()
            await self._take(version)
            await self._client.resume()
        return time.monotonic() - started

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
