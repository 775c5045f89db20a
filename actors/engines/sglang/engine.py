"""SGLang as an engine, in front of a server that it owns or that exists already (see `external.served`).

A request becomes one call of `/generate` per completion. The server is paused while full weights are overwritten:

    drain       running requests finish first; new ones wait
    interrupt   running requests return to the queue, all keys and values are flushed, and the requests continue under
                the new weights
    inflight    the server stops between two tokens and continues with all keys and values
"""

import asyncio
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from actors.engines.external.images import check_places, check_prompt, check_strays, urls_of
from actors.engines.external.labels import ServedWeights, UnknownWeightsError
from actors.engines.external.owned import END_SECONDS
from actors.engines.external.served import POLL_SECONDS, ROOM_SECONDS, ServedEngine, server_of
from actors.engines.external.staging import check_fit, shapes_of
from actors.engines.external.upstream import RefusedError
from actors.engines.http.access import secret
from actors.engines.protocol import (
    Completion,
    EngineStatus,
    EngineStoppedError,
    RequestError,
    SampleRequest,
    check_token_ids,
)
from actors.engines.sglang.answers import completion_of, generate_body
from actors.engines.sglang.client import SglangClient
from actors.engines.sglang.compat import check_server
from actors.engines.sglang.process import OwnServer
from actors.process.tasks import task
from bus.run_folder import Scratch
from bus.weights import Weights
from bus.weights.filesystem import FILE_NAMES
from schemas.config.model import ModelConfig
from schemas.config.services import UpdateMode
from schemas.config.sglang_engine import SglangEngineConfig
from schemas.errors import ConfigError

log = structlog.get_logger("engine")

WATCH_SECONDS = 1.0
"""Seconds between two checks of the server."""
ABORT_SECONDS = 10.0
"""Seconds to tell the server of a cancelled request."""
GREEDY_BELOW = 1e-6
"""Temperature below which SGLang samples greedily."""
MARGIN_TOKENS = 5
"""Tokens by which SGLang's limits differ from `max_req_input_len` M: a prompt has less than M tokens, and prompt and
completion have at most M + 4."""


class SglangEngine(ServedEngine):
    """Engine in front of an SGLang server, owned or found at a URL; the module describes updates.

    Args:
        model: model of the policy; with `lora` the server serves adapters.
        config: configuration of the server.
        update_mode: treatment of running requests when full weights are overwritten.
        scratch: folder readable for the server, for weights without files from the channel.
        server_index: index of this actor in `inference.engine.urls`.
        log_path: log of an owned server; needed without `urls`.

    Raises:
        ConfigError: the server can't be used; with the reason.
        EngineStoppedError: the server stopped during its start, or does not answer within `startup_timeout` seconds.
    """

    _client: SglangClient
    _key_setting = "inference.engine.admin_api_key_env"

    def __init__(
        self,
        model: ModelConfig,
        config: SglangEngineConfig,
        update_mode: UpdateMode,
        scratch: Scratch,
        server_index: int = 0,
        log_path: Path | None = None,
    ) -> None:
        super().__init__("SGLang", model, update_mode, config.max_loras, scratch)
        self._config = config
        self._server: OwnServer | None = None
        if log_path is None or config.urls:
            url = server_of(config.urls, server_index)
            names = ("api_key_env", "admin_api_key_env")
            keys = [secret(getattr(config, key), f"inference.engine.{key}") for key in names]
        else:
            self._server = OwnServer(model, config, log_path)
            url, keys = self._server.url, [self._server.api_key, self._server.admin_api_key]
            log.info("SGLang starts", url=url, log=str(log_path))
        self._start(lambda: self._connect(url, keys), config.startup_timeout)

    # --- any thread ----------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        """Return a snapshot of the engine's state; without a policy while the server's weights are unknown.

        Raises:
            EngineStoppedError: the server is gone.
        """
        if not self._relay.failure and self._server is not None and (ended := self._server.ended()):
            self._relay.fail(ended)
        return super().status()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close(0.0 if self._relay.failure else END_SECONDS)

    def _switch(self, version: ServedWeights, weights: Weights, timeout: float) -> Coroutine[Any, Any, float]:
        if self._serves_adapters:
            return self._switch_adapter(version, self._staging.adapter(version.name, weights), timeout)
        folder = self._staging.full(version.name, weights, with_head=False)
        check_fit(self._shapes, shapes_of(folder / FILE_NAMES["full"]))
        # a flush is refused while requests are stopped in between; the salt alone then keeps the versions apart
        overwrite = partial(self._client.update, folder, version.label, flush_cache=self._mode != "inflight")
        return self._switch_all(version, overwrite, timeout)

    def _check(self, request: SampleRequest) -> None:
        size, new = len(request.prompt_ids), request.max_tokens or 1
        if size == 0:
            raise RequestError("prompt: is empty")
        check_places(request, self._image_token)
        if request.ignore_eos and request.stop_token_ids:
            raise RequestError("ignore_eos: SGLang ignores stop_token_ids then too; give one of the two")
        check_token_ids("prompt", request.prompt_ids, self._vocab_size)
        check_token_ids("stop_token_ids", request.stop_token_ids, self._vocab_size)
        check_token_ids("logit_bias", request.logit_bias, self._vocab_size)
        # the server would cut the completion short silently
        if size + max(new, MARGIN_TOKENS) > self._longest:
            raise RequestError(
                f"max_tokens: {size} prompt tokens and {new} new ones exceed {self._longest} (the server's "
                "--context-length, the model's own limit, or its memory for keys and values)"
            )

    # --- the loop's thread: the server ---------------------------------------------------------------------------

    async def _connect(self, url: str, keys: list[str]) -> None:
        self._client = SglangClient(url, *keys)
        deadline = time.monotonic() + self._config.startup_timeout
        with task(f"{'start' if self._server else 'wait for'} SGLang") as start:
            while True:
                if self._server is not None and (ended := self._server.ended()):
                    raise EngineStoppedError(ended)
                try:
                    info = await self._client.server_info()
                    break
                except RefusedError as error:
                    # waiting mends no wrong key or address; any other status may come from a starting server
                    if error.status in (401, 403, 404):
                        raise ConfigError(f"inference.engine.urls, inference.engine.api_key_env: {error}") from None
                    trouble = str(error)
                except (EngineStoppedError, TimeoutError) as error:
                    trouble = str(error) or "SGLang takes long to answer"
                if time.monotonic() > deadline:
                    timeout = self._config.startup_timeout
                    words = f"; the last lines of its log:\n{self._server.last_lines()}" if self._server else ""
                    raise EngineStoppedError(f"{trouble} after {timeout:g} s (inference.engine.startup_timeout){words}")
                if self._server is not None:
                    self._server.show_start(start)
                await asyncio.sleep(POLL_SECONDS)
        if self._server is not None:
            self._server.forget_keys()
        check_server(info, self._config, self._serves_adapters, url)
        if not info["enable_deterministic_inference"]:
            log.warning("SGLang ignores seeds; start it with --enable-deterministic-inference to have them", url=url)
        self._longest = int(info["max_req_input_len"]) + MARGIN_TOKENS - 1
        await self._take_over(url, self._config.startup_timeout)
        self._relay.start_background(self._watch())

    async def _watch(self) -> None:
        """Watch the server until its end, then fail everything under way."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self._client.check_there()
            except (EngineStoppedError, RefusedError) as error:
                reason = str(error)
                if self._server is not None:
                    # the guard of a dead server is about to exit, and the end of the log tells more
                    await asyncio.sleep(POLL_SECONDS)
                    reason = self._server.ended() or reason
                log.error("SGLang is gone", reason=reason)
                return self._relay.fail(reason)

    # --- the loop's thread: requests -----------------------------------------------------------------------------

    async def _sample(self, asked: SampleRequest) -> list[Completion]:
        # greedy completions are all equal
        n = 1 if asked.sampling.temperature < GREEDY_BELOW else asked.num_completions

        async def whole(number: int) -> Completion:
            begun = await self._ask(asked, number)
            return await self._continued(asked, number, begun, partial(self._ask, number=0))

        tasks = [asyncio.ensure_future(whole(number)) for number in range(n)]
        try:
            return list(await asyncio.gather(*tasks)) * (asked.num_completions // n)
        finally:
            # after a failure the other completions are of no use
            for task in tasks:
                task.cancel()

    async def _ask(self, asked: SampleRequest, number: int) -> Completion:
        """Send a completion's request until the answer has labels of this engine; return the completion."""
        max_tokens = self._longest - len(asked.prompt_ids) if asked.max_tokens is None else asked.max_tokens
        if asked.images:
            check_strays(asked, self._name)
        urls = await asyncio.to_thread(urls_of, asked, self._pixels) if asked.images else []
        while True:
            await self._gate.wait()
            version = self._serving
            adapter = version if self._serves_adapters else None
            body = generate_body(asked, number, max_tokens, self._eos, version.label, urls)
            if adapter and adapter.policy:
                body["lora_path"] = adapter.adapter
            try:
                with self._call(version) as rid:
                    try:
                        answer = await self._client.generate(body | {"rid": rid})
                    except asyncio.CancelledError:
                        # the server notices closed connections by itself, but late
                        if not self._relay.failure:
                            self._relay.start_background(self._abort(rid))
                        raise
                if asked.images:
                    check_prompt(asked, answer.get("prompt_token_ids"), self._name)
                return completion_of(answer, asked, max_tokens, self._eos, self._labels, adapter)
            except UnknownWeightsError as error:
                self._quarantine(version, str(error))

    async def _abort(self, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._client.abort([rid])
        except (EngineStoppedError, RefusedError, TimeoutError) as error:
            log.warning("request not aborted; SGLang ends it by itself", detail=str(error))

    # --- the loop's thread: weights ------------------------------------------------------------------------------

    async def _stand_still(self) -> float:
        while self._mode == "drain" and self._under_way:
            await asyncio.sleep(ROOM_SECONDS)
        # the time of draining does not count: the server still decodes
        started = time.monotonic()
        await self._client.pause(keep_cache=self._mode == "inflight")
        return started
