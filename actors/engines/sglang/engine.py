"""SGLang as an engine: in front of one server, which this process neither starts nor ends.

A request waits at a gate, which is open while the server's weights are known, becomes one call of `/generate` for each
of its completions, and an answer counts only if all its tokens carry labels of this engine's boot id (P25; see
`labels`). If one does not (somebody else has loaded weights, or the server has been started anew), the answer is
dropped, the gate closes, `status` says `quarantined`, and the actor loads again; the request is sampled anew then.

Adapters are served under a name per version. A new one is loaded beside the old one, without a pause; requests under
way end with the version they began with, and only when more than `max_loras` versions would be in use do those of the
oldest one go on with the current one (update mode drain: are waited for).

All weights are overwritten in place, from files, while the server stands still:

    drain       running requests end first; new ones wait
    interrupt   running requests are put back into the queue, all keys and values are flushed, and they go on under the
                new weights
    inflight    the server stops between two tokens and goes on with the keys and values that it has

Each version has a salt of its own in the prefix cache, so that none is served what another one has computed. If an
update fails in the middle the engine is `dirty`: the server stays paused until a whole version has been loaded.
"""

import asyncio
import threading
import time
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import structlog

from actors.engines.access import secret
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
from actors.engines.sglang.answers import completion_of, generate_body
from actors.engines.sglang.client import SglangClient
from actors.engines.sglang.versions import check_server
from actors.engines.tokenizing import Tokenizing
from actors.engines.upstream import Json, RefusedError
from actors.environments.prompts import eos_ids
from bus.weights import Weights
from bus.weights.filesystem import FILE_NAMES
from schemas.config.model import ModelConfig
from schemas.config.sglang import SglangEngineConfig
from schemas.errors import ConfigError
from schemas.messages import EngineState, Policy

log = structlog.get_logger("engine")

POLL_SECONDS = 0.2
WATCH_SECONDS = 1.0
ROOM_SECONDS = 0.02
"""Between two looks at whether requests that are waited for have ended."""
ABORT_SECONDS = 10.0
GREEDY_BELOW = 1e-6
"""The temperature that SGLang takes for 0."""
MARGIN_TOKENS = 5
"""Of `max_req_input_len`: a prompt is shorter than that, prompt and completion together than four tokens more."""


class SglangEngine(Tokenizing):
    """See the module.

    Args:
        model: the policy; with `lora` the server serves adapters of it.
        config: of the server.
        update_mode: of weights.
        scratch: a folder, in sight of the server, for weights that the channel does not lay out as files.
        ordinal: which of `inference.engine.urls` is this one's.

    Raises:
        ConfigError: the server can't be used, and why.
        EngineStoppedError: it does not answer within `startup_timeout`.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: SglangEngineConfig,
        update_mode: Literal["drain", "interrupt", "inflight"],
        scratch: Path,
        ordinal: int = 0,
    ) -> None:
        if ordinal >= len(config.urls):
            raise ConfigError(f"inference.engine.urls: has none for inference-{ordinal}")
        super().__init__(model)
        self._config, self._mode = config, update_mode
        self.holds_two_versions = model.lora is not None
        self._eos, self._vocab_size = eos_ids(model), vocab_size(model)
        self._folders = Folders(scratch, "SGLang")
        self._shapes = model_shapes(model) if model.lora is None else {}
        self._serving = Version(uuid.uuid4().hex[:12], None, 0)
        self._labels: dict[str, Policy | None] = {}
        self._num_updates = 0
        self._adapters: list[Version] = []
        self._under_way: dict[str, Version] = {}
        self._state: EngineState = "clean"
        self._loading = threading.Lock()
        keys = [secret(getattr(config, key), f"inference.engine.{key}") for key in ("api_key_env", "admin_api_key_env")]
        self._relay = Relay("sglang", self._sample)
        try:
            self._relay.call(self._connect(config.urls[ordinal], keys), config.startup_timeout)
        except BaseException:
            self.close()
            raise

    # --- any thread ----------------------------------------------------------------------------------------------

    def submit(self, request: SampleRequest) -> "Future[list[Completion]]":
        """Send a request on; its pieces are whole completions, told when the answers have proven whose they are."""
        self._check(request)
        return self._relay.submit(request)

    def load(self, policy: Policy, weights: Weights, timeout: float) -> float:
        """Have the server switch; returns the seconds for which it did not decode, at most."""
        self._relay.ensure_alive()
        expected = "adapter" if self.holds_two_versions else "full"
        if weights.content != expected:
            raise ValueError(
                f"the trainer publishes {weights.content} weights, this engine holds {expected}; is model.lora "
                "the same in both?"
            )
        with self._loading:
            self._num_updates += 1
            version = Version(self._serving.boot, policy, self._num_updates)
            switch = self._switch_adapter if self.holds_two_versions else self._switch_all
            try:
                return self._relay.call(switch(version, self._folder(version, weights), timeout), 2 * timeout)
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
        """End all requests; the server goes on."""
        self._relay.close(self._leave)
        self._folders.close()

    def _folder(self, version: Version, weights: Weights) -> Path:
        if self.holds_two_versions:
            return self._folders.adapter(version.name, weights)
        folder = self._folders.full(version.name, weights, with_head=False)
        check_fit(self._shapes, shapes_of(folder / FILE_NAMES["full"]))
        return folder

    def _check(self, request: SampleRequest) -> None:
        size, new = len(request.prompt_ids), request.max_tokens or 1
        if size == 0:
            raise RequestError("prompt: is empty")
        check_token_ids("prompt", request.prompt_ids, self._vocab_size)
        check_token_ids("stop_token_ids", request.stop_token_ids, self._vocab_size)
        check_token_ids("logit_bias", request.logit_bias, self._vocab_size)
        if size + max(new, MARGIN_TOKENS) > self._longest:  # the server would cut the completion short without a word
            raise RequestError(
                f"max_tokens: {size} prompt tokens and {new} new ones exceed {self._longest} (the server's "
                "--context-length, the model's own limit, or its memory for keys and values)"
            )

    # --- the loop's thread: the server ---------------------------------------------------------------------------

    async def _connect(self, url: str, keys: list[str]) -> None:
        self._gate = asyncio.Event()
        self._client = SglangClient(url, *keys)
        info = await self._until_it_serves()
        check_server(info, self._config, self.holds_two_versions, url)
        if not info["enable_deterministic_inference"]:
            log.warning("SGLang ignores seeds; start it with --enable-deterministic-inference to have them", url=url)
        self._longest = int(info["max_req_input_len"]) + MARGIN_TOKENS - 1
        try:
            async with asyncio.timeout(self._config.startup_timeout):
                await self._client.go_on()  # an engine that has ended in the middle of an update has left it paused
                if self.holds_two_versions:
                    await self._forget_other_lives()
                await self._take(self._serving)
        except TimeoutError:
            raise EngineStoppedError(
                f"SGLang at {url} could not be taken over within {self._config.startup_timeout:g} s "
                "(inference.engine.startup_timeout); do requests of others use its adapters?"
            ) from None
        except RefusedError as error:
            raise ConfigError(f"inference.engine.admin_api_key_env: {error}") from None
        self._relay.keep(self._watch())

    async def _until_it_serves(self) -> Json:
        deadline = time.monotonic() + self._config.startup_timeout
        while True:
            try:
                return await self._client.server_info()
            except RefusedError as error:
                if error.status in (401, 403, 404):
                    raise ConfigError(f"inference.engine.urls, inference.engine.api_key_env: {error}") from None
                trouble = str(error)
            except (EngineStoppedError, TimeoutError) as error:
                trouble = str(error) or "SGLang takes long to answer"
            if time.monotonic() > deadline:
                timeout = self._config.startup_timeout
                raise EngineStoppedError(f"{trouble} after {timeout:g} s (inference.engine.startup_timeout)")
            await asyncio.sleep(POLL_SECONDS)

    async def _forget_other_lives(self) -> None:
        """Unload the adapters of an engine before this one: names come again, and room is scarce."""
        for name in await self._client.adapters():
            if name.startswith("policy-"):
                await self._client.unload_adapter(name)

    async def _watch(self) -> None:
        """Until the server is gone."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self._client.check_there()
            except (EngineStoppedError, RefusedError) as error:
                log.error("SGLang is gone", reason=str(error))
                return self._relay.fail(str(error))

    async def _leave(self) -> None:
        if hasattr(self, "_client"):
            await self._client.close()

    # --- the loop's thread: requests -----------------------------------------------------------------------------

    async def _sample(self, asked: SampleRequest) -> list[Completion]:
        # without chance all completions are the same one
        n = 1 if asked.temperature < GREEDY_BELOW else asked.num_completions
        tasks = [asyncio.ensure_future(self._whole(asked, number)) for number in range(n)]
        try:
            return list(await asyncio.gather(*tasks)) * (asked.num_completions // n)
        finally:
            for task in tasks:  # where one has failed, nobody wants the others
                task.cancel()

    async def _whole(self, asked: SampleRequest, number: int) -> Completion:
        """A completion to its end, however often it is interrupted."""
        completion = await self._ask(asked, number)
        if completion.finish_reason != ABORTED:
            return completion
        while completion.finish_reason == ABORTED:
            completion = joined(completion, await self._ask(rest_of(asked, number, completion), 0))
        return cut_at_stop(completion, asked.stop, self.detokenize) if asked.stop else completion

    async def _ask(self, asked: SampleRequest, number: int) -> Completion:
        """One call of the server, again after each answer that was nobody's."""
        max_tokens = self._longest - len(asked.prompt_ids) if asked.max_tokens is None else asked.max_tokens
        while True:
            await self._gate.wait()
            version, rid = self._serving, uuid.uuid4().hex
            body = generate_body(asked, number, max_tokens, self._eos, rid, version.label)
            adapter = version if self.holds_two_versions else None
            if adapter and adapter.policy:
                body["lora_path"] = adapter.adapter
            self._under_way[rid] = version
            try:
                answer = await self._client.generate(body)
                return completion_of(answer, asked, max_tokens, self._eos, self._labels, adapter)
            except UnknownWeightsError as error:
                self._quarantine(version, str(error))
            except asyncio.CancelledError:  # the server finds closed connections out by itself, but late
                if not self._relay.failure:
                    self._relay.keep(self._abort(rid))
                raise
            finally:
                del self._under_way[rid]

    async def _abort(self, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._client.abort(rid)
        except (EngineStoppedError, RefusedError, TimeoutError) as error:
            log.warning("request not aborted; SGLang ends it by itself", detail=str(error))

    def _quarantine(self, version: Version, reason: str) -> None:
        if self._serving is version and self._state == "clean":  # else another answer has said so already
            log.error("weights are not ours", detail=reason)
            self._state = "quarantined"
            self._gate.clear()

    # --- the loop's thread: weights ------------------------------------------------------------------------------

    async def _take(self, version: Version) -> None:
        """Label what the server samples from now on, and let requests through."""
        self._labels[version.label] = version.policy
        await self._client.label(version.label)
        self._open(version)

    def _open(self, version: Version) -> None:
        self._serving, self._state = version, "clean"
        self._gate.set()

    async def _switch_adapter(self, version: Version, folder: Path, timeout: float) -> float:
        try:
            async with asyncio.timeout(timeout):
                await self._make_room()
                started = time.monotonic()
                await self._client.load_adapter(version.adapter, folder)
                seconds = time.monotonic() - started
                self._adapters.append(version)
                await self._take(version)
        except TimeoutError:
            raise TimeoutError(self._too_late(version, timeout)) from None
        return seconds

    async def _make_room(self) -> None:
        """For one more adapter: those that nobody uses go, and if there are still too many, the oldest is given up."""
        while True:
            in_use = {*self._under_way.values(), self._serving}
            for version in [adapter for adapter in self._adapters if adapter not in in_use]:
                self._adapters.remove(version)
                self._folders.forget(version.name)
                await self._client.unload_adapter(version.adapter)
            if len(self._adapters) < self._config.max_loras:
                return
            if self._mode != "drain":
                for rid in [rid for rid, version in self._under_way.items() if version == self._adapters[0]]:
                    await self._client.abort(rid)
            await asyncio.sleep(ROOM_SECONDS)

    async def _switch_all(self, version: Version, folder: Path, timeout: float) -> float:
        was_clean, inflight = self._state == "clean", self._mode == "inflight"
        self._gate.clear()
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                while self._mode == "drain" and self._under_way:
                    await asyncio.sleep(ROOM_SECONDS)
                started = time.monotonic()
                await self._client.pause(keep_cache=inflight)
        except (TimeoutError, RefusedError) as error:  # nothing has been overwritten
            if was_clean:
                self._gate.set()
                await self._client.go_on()
            if isinstance(error, RefusedError):
                raise
            raise TimeoutError(self._too_late(version, timeout)) from None
        self._state = "dirty"
        self._labels[version.label] = version.policy
        try:
            async with asyncio.timeout(timeout):
                # with requests in between a flush would be refused; the salt alone keeps versions apart then
                await self._client.update(folder, version.label, flush_cache=not inflight)
                await self._client.go_on()
        except TimeoutError:
            raise TimeoutError(self._too_late(version, timeout)) from None
        self._open(version)
        return time.monotonic() - started

    def _too_late(self, version: Version, timeout: float) -> str:
        return (
            f"weights {version.policy} were not switched in within {timeout:g} s (weights.timeout, "
            f"weights.update_mode {self._mode})"
        )
