"""vLLM as an engine, between the actor's threads and the server's HTTP. `external.served` describes the common part.

A request becomes one call of `/inference/v1/generate`. Adapters have a name per version. The alternative, one name and
`load_inplace`, swaps no faster (6 ms against 9 ms for an adapter of rank 4 of a tiny model), and the server then reads
the adapter from disk again at each token, which made decoding 1.5 times slower.

The server is paused while full weights are overwritten:

    drain       running requests finish first; new ones wait
    interrupt   the server stops between two tokens, drops all keys and values, and continues under the new weights
    inflight    the same, but the keys and values stay; later requests do not use the old ones

Noise is put on the norms of full weights when files are written. The norms under an adapter are shared by all
versions, so with noise an adapter is switched like full weights: requests under way are interrupted (update mode
`drain`: finish), the server is paused while the norms are overwritten, and interrupted requests are computed again
under the new version, in mode `inflight` too.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from actors.engines.external.images import check_places, check_prompt, urls_of
from actors.engines.external.labels import ServedWeights, UnknownWeightsError
from actors.engines.external.owned import END_SECONDS
from actors.engines.external.served import POLL_SECONDS, ROOM_SECONDS, ServedEngine, server_of
from actors.engines.external.staging import check_fit, shapes_of, with_head
from actors.engines.external.upstream import RefusedError
from actors.engines.protocol import (
    Completion,
    EngineStatus,
    EngineStoppedError,
    RequestError,
    SampleRequest,
    check_token_ids,
)
from actors.engines.vllm import answers
from actors.engines.vllm.client import VllmClient
from actors.engines.vllm.compat import check_version, installed
from actors.engines.vllm.process import WHOLE_PROMPTS, OwnServer, api_key
from actors.engines.vllm.shared_gpu import ServerMemory
from actors.process.tasks import task
from bus.run_folder import Scratch
from bus.weights import Weights
from bus.weights.filesystem import FILE_NAMES
from schemas.config.model import ModelConfig
from schemas.config.services import UpdateMode
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from actors.algorithms.noise import NormNoise
    from actors.models.shared_base import Manifest

log = structlog.get_logger("engine")

WATCH_SECONDS = 1.0
"""Seconds between two health checks of the server."""
GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily."""


class VllmEngine(ServedEngine):
    """Engine in front of a vLLM server, owned or found at a URL; the module describes updates.

    Args:
        model: model of the policy; with `lora` the server serves adapters.
        config: configuration of the server.
        update_mode: treatment of running requests when full weights are overwritten.
        log_path: log of an owned server.
        scratch: folder for weights without files from the channel.
        server_index: index of this actor in `inference.engine.urls`.
        noise: noise on the norms of the served weights; with `lora` only for an owned server.
        memory: limits of an owned server on a GPU that the trainer uses too; None: the whole GPU is the server's.
        takes_turns: True if an owned server gives the memory of its cache back while the trainer works.
        base: description of the trainer's base, which an owned server maps; None: the server loads the model's files.
        tells_experts: True if an owned server tells which experts its routers chose.

    Raises:
        ConfigError: the server can't be used; with the reason.
        EngineStoppedError: the server stopped during its start, or did not serve within `startup_timeout` seconds.
    """

    _client: VllmClient

    def __init__(
        self,
        model: ModelConfig,
        config: VllmEngineConfig,
        update_mode: UpdateMode,
        log_path: Path,
        scratch: Scratch,
        server_index: int = 0,
        noise: "NormNoise | None" = None,
        memory: ServerMemory | None = None,
        takes_turns: bool = False,
        base: "Manifest | None" = None,
        tells_experts: bool = False,
    ) -> None:
        self._base = base
        super().__init__("vLLM", model, update_mode, config.max_loras, scratch)
        self._model, self._config, self._noise = model, config, noise
        self._sets_norms = self._serves_adapters and noise is not None
        self.holds_two_versions = self._serves_adapters and noise is None
        self._clean_norms: dict[str, torch.Tensor] = {}
        self._server: OwnServer | None = None
        if not config.urls:
            python = config.python or sys.executable
            found = installed(python)
            check_version(found.version, python)
            self._server = OwnServer(
                model, config, found.on_cpu, log_path, memory, takes_turns, base.path if base else None, tells_experts
            )
            log.info("vLLM starts", url=self._server.url, log=str(log_path))
        url = self._server.url if self._server else server_of(config.urls, server_index)
        self._start(lambda: self._connect(url), config.startup_timeout)

    # --- any thread ----------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state; without a policy while the server's weights are unknown.

        Raises:
            EngineStoppedError: the server is gone.
        """
        if not self._relay.failure and self._server is not None and (ended := self._server.ended()):
            self._fail(ended)
        if not self._relay.failure and (gone := self._base_ended()):
            self._fail(gone)
        return super().status()

    def _base_ended(self) -> str:
        """Return the reason why the server's base may be gone; empty if it is there, or is the server's own."""
        return self._base.ended() if self._base is not None else ""

    def rest(self, timeout: float) -> None:
        """Pause the server between two tokens, and have it give the memory of its cache back.

        Raises:
            TimeoutError, EngineStoppedError: as `TakesTurns.rest`.
        """
        self._relay.call(_within(timeout, self._rest()), timeout)

    def wake(self, timeout: float) -> None:
        """Have the server take the memory again, and go on. Raises as `rest` does."""
        self._relay.call(_within(timeout, self._wake()), timeout)

    async def _rest(self) -> None:
        self._gate.clear()
        await self._client.pause(wait=False, clear_cache=False)
        if not self._on_cpu:
            await self._client.release_cache()

    async def _wake(self) -> None:
        if not self._on_cpu:
            await self._client.take_cache()
        await self._client.resume()
        if self._state == "clean":
            self._gate.set()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close(0.0 if self._relay.failure else END_SECONDS)

    def _switch(self, version: ServedWeights, weights: Weights, timeout: float) -> Coroutine[Any, Any, float]:
        from actors.engines.vllm.norms import model_norms, noisy  # imported here: torch is slow to import

        assert version.policy is not None
        number = version.policy.version  # the seed of its noise
        if not self._serves_adapters:
            if weights.share is not None and self._noise is None and self._server is not None:
                check_fit(self._shapes, {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()})
                take = partial(self._take_from_memory, weights.share)
                return self._switch_all(version, partial(self._overwrite, version, take), timeout)
            clean_or_noisy = weights if self._noise is None else noisy(weights, self._noise, number)
            folder = self._staging.full(version.name, clean_or_noisy, with_head=self._on_cpu)
            check_fit(self._shapes, shapes_of(folder / FILE_NAMES["full"]))
            reload = partial(self._reload, folder)
            return self._switch_all(version, partial(self._overwrite, version, reload), timeout)
        folder = self._staging.adapter(version.name, weights)
        if self._noise is None:
            return self._switch_adapter(version, folder, timeout)
        self._clean_norms = self._clean_norms or model_norms(self._model)
        norms = self._staging.norms(version.name, self._noise.on(self._clean_norms, number))
        return self._switch_adapter_and_norms(version, folder, norms, timeout)

    def _check(self, request: SampleRequest) -> None:
        size, new = len(request.prompt_ids), request.max_tokens or 1
        if size == 0:
            raise RequestError("prompt: is empty")
        check_places(request, self._image_token)
        for name, tokens in (("prompt", request.prompt_ids), ("logit_bias", request.logit_bias)):
            check_token_ids(name, tokens, self._vocab_size)
        # the server would cut the completion short silently
        if size + new > self._longest:
            raise RequestError(
                f"max_tokens: {size} prompt tokens and {new} new ones exceed {self._longest} "
                "(inference.engine.max_model_len, or the model's own limit)"
            )

    # --- the loop's thread: the server ---------------------------------------------------------------------------

    async def _connect(self, url: str) -> None:
        self._alarm = asyncio.Event()
        self._client = VllmClient(url, api_key(self._config), self._server.owner_key if self._server else "")
        deadline = time.monotonic() + self._config.startup_timeout
        with task(f"{'start' if self._server else 'wait for'} vLLM") as start:
            while trouble := await self._client.trouble():
                if self._server is not None and (ended := self._server.ended()):
                    raise EngineStoppedError(ended)
                if time.monotonic() > deadline:
                    words = f"; the last lines of its log:\n{self._server.last_lines()}" if self._server else ""
                    raise EngineStoppedError(
                        f"{trouble} after {self._config.startup_timeout:g} s (inference.engine.startup_timeout){words}"
                    )
                if self._server is not None:
                    self._server.show_start(start)
                await asyncio.sleep(POLL_SECONDS)
        check_version(await self._client.version(), url)
        settings = await self._settings()
        self._longest = int(settings["model_config"]["max_model_len"])
        self._on_cpu = settings["device_config"]["device"] == "cpu"
        await self._take_over(url, self._config.startup_timeout)
        if self._base is not None:
            log.info("vLLM maps the trainer's base", bytes=await self._client.mapped_bytes())
        self._relay.start_background(self._watch())

    async def _settings(self) -> dict[str, Any]:
        """Return the server's configuration, after checks of all requirements of this engine.

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
        """Watch the server until its end, then fail everything under way."""
        while not self._relay.failure:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._alarm.wait(), WATCH_SECONDS)
            self._alarm.clear()
            trouble = await self._client.trouble()
            if trouble and self._server is not None:
                # the guard of a dead server is about to exit, and the end of the log tells more than a lost connection
                await asyncio.sleep(POLL_SECONDS)
                trouble = self._server.ended() or trouble
            if trouble:
                self._fail(trouble)

    def _fail(self, reason: str) -> None:
        log.error("vLLM has ended", reason=reason)
        self._relay.fail(reason)

    # --- the loop's thread: requests -----------------------------------------------------------------------------

    async def _sample(self, asked: SampleRequest) -> list[Completion]:
        # greedy completions are all equal, and the server refuses n > 1
        n = 1 if asked.sampling.temperature < GREEDY_BELOW else asked.num_completions
        begun = await self._ask(replace(asked, num_completions=n))

        async def ask_one(rest: SampleRequest) -> Completion:
            [completion] = await self._ask(rest)
            return completion

        completions = await asyncio.gather(*(self._continued(asked, i, c, ask_one) for i, c in enumerate(begun)))
        return completions * (asked.num_completions // n)

    async def _ask(self, asked: SampleRequest) -> list[Completion]:
        """Send a request until an answer has labels of this engine; return the completions."""
        urls = await asyncio.to_thread(urls_of, asked, self._pixels) if asked.images else []
        while True:
            await self._gate.wait()
            version = self._serving
            adapter = version if self._serves_adapters else None
            body = {
                **answers.prompt_of(asked, urls),
                "sampling_params": answers.sampling_params(asked, self._eos),
                "cache_salt": version.name,
            }
            # the weights with which the server started have no adapter, and go by the model's name
            if adapter and adapter.policy:
                body["model"] = adapter.adapter
            try:
                with self._call(version) as request_id:
                    answer = await self._client.generate(body | {"request_id": request_id})
                # a trainer that lives now has lived while this was computed
                if gone := self._base_ended():
                    raise EngineStoppedError(gone)
                if asked.images:
                    check_prompt(asked, answer.get("prompt_token_ids"), self._name)
                return answers.completions_of(answer, asked, self._eos, self._labels, adapter)
            except UnknownWeightsError as error:
                self._quarantine(version, str(error))
            except EngineStoppedError:
                # `_watch` checks the server now, so that retries find the actor gone
                self._alarm.set()
                raise

    # --- the loop's thread: weights ------------------------------------------------------------------------------

    async def _switch_adapter_and_norms(
        self, version: ServedWeights, folder: Path, norms: Path, timeout: float
    ) -> float:
        async with self._in_time(version, timeout):
            await self._add_adapter(version, folder)
        overwrite = partial(self._overwrite, version, partial(self._client.set_norms, norms))
        return await self._switch_all(version, overwrite, timeout)

    async def _overwrite(self, version: ServedWeights, write: Callable[[], Awaitable[None]]) -> None:
        await write()
        await self._client.label(version.label)

    async def _reload(self, folder: Path) -> None:
        """Have the server read all weights from a folder."""
        await self._client.reload(folder)
        if self._on_cpu and self._server is not None and any(".experts." in name for name in self._shapes):
            await self._client.pack_experts()

    async def _take_from_memory(self, share: Callable[[], dict[str, Any]]) -> None:
        """Have the server copy all weights from the memory in which this process received them."""
        shared = share()
        tensors = with_head(shared["tensors"], "vLLM") if self._on_cpu else shared["tensors"]
        await self._client.take_weights(shared["handle"], tensors)

    async def _stand_still(self) -> float:
        started = time.monotonic()
        # the norms under the adapters of running requests are about to change
        while self._serves_adapters and self._under_way:
            if self._mode != "drain":
                await self._client.abort(list(self._under_way))
            await asyncio.sleep(ROOM_SECONDS)
        await self._client.pause(wait=self._mode == "drain", clear_cache=self._mode != "inflight")
        # in mode drain the running requests still decode until the pause is there
        return time.monotonic() if self._mode == "drain" else started


async def _within(timeout: float, work: Coroutine[Any, Any, None]) -> None:
    """Do work in so many seconds. Raises TimeoutError: it took longer, and has been cancelled."""
    async with asyncio.timeout(timeout):
        await work
