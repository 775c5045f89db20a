"""A stub of vLLM's server: the endpoints that the engine uses, with tokens made up from seed and position."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from tests import models

TOKENS_BEFORE_HOLD = 2


def token(seed: int, position: int) -> int:
    """From 4 to 29: a letter of tests/models.py."""
    return 4 + (seed * 7 + position * 3) % 26


class StubServer:
    """Everything that it has been asked lies in `calls`; what it answers can be bent through its attributes."""

    def __init__(self) -> None:
        self.version, self.logprobs_mode, self.device = "0.32.1", "processed_logprobs", "cuda"
        self.healthy, self.in_parts, self.resets_cache = True, False, True
        self.label, self.adapters = "default", dict[str, str]()
        self.calls: list[tuple[str, Any]] = []
        self.tokens_per_image: int | None = 4
        """Tokens that each image becomes; None: the server does not tell its prompt."""
        self.holding = False
        """Requests stop behind two tokens, until they are released or aborted."""
        self.refuse: dict[str, tuple[int, Any]] = {}
        """Status and body by path."""
        self.before: dict[str, Callable[[], object]] = {}
        """What is done by path, before it is answered."""
        self.silent: set[str] = set()
        """Paths that are not answered as long as they are in here."""
        self._loop = asyncio.new_event_loop()
        self._ready: Future[int] = Future()
        self._aborted: set[str] = set()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._ready.result(60)}"

    def release(self) -> None:
        """Let held requests end."""
        self.holding = False

    def asked(self, path: str) -> list[Any]:
        """Bodies of the calls of a path, in their order."""
        return [body for called, body in self.calls if called == path]

    def paths(self) -> list[str]:
        """What was called, without what only looks."""
        return [path for path, _ in self.calls if path not in ("/health", "/version", "/server_info", "/v1/models")]

    def close(self) -> None:
        """Stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(60)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._ready.set_result(runner.addresses[0][1])
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        body = await request.json() if request.can_read_body else dict(request.query)
        self.calls.append((path, body))
        if path in self.before:
            self.before[path]()
        while path in self.silent:
            await asyncio.sleep(0.005)
        if path in self.refuse:
            status, content = self.refuse[path]
            return web.json_response(content, status=status)
        if path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if path == "/inference/v1/generate":
            return await self._generate(body)
        return web.json_response(self._simple(path, body))

    def _simple(self, path: str, body: Any) -> Any:
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
        if path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"])
        if path == "/abort_requests":
            self._aborted |= set(body["request_ids"])
        if path == "/v1/models":
            return {"data": [{"id": "tiny", "parent": None}] + [{"id": n, "parent": "tiny"} for n in self.adapters]}
        if path == "/reset_prefix_cache":
            return {"success": self.resets_cache}
        if path == "/version":
            return {"version": self.version}
        model = {"max_model_len": 64, "logprobs_mode": self.logprobs_mode}
        config = {
            "model_config": model,
            "device_config": {"device": self.device},
            "scheduler_config": {"enable_chunked_prefill": self.in_parts},
            "lora_config": {},
        }
        return {"vllm_config": config} if path == "/server_info" else {}

    async def _generate(self, body: Any) -> web.Response:
        params, adapter = body["sampling_params"], body.get("model")
        if adapter is not None and adapter not in self.adapters:
            return web.json_response({"error": {"message": f"no {adapter}"}}, status=404)
        name, label = "generate-tokens-" + body["request_id"], self.label
        while self.holding and name not in self._aborted:
            await asyncio.sleep(0.005)
        reason = "abort" if name in self._aborted else "length"
        length = TOKENS_BEFORE_HOLD if reason == "abort" else params["max_tokens"]
        answer = {"choices": [_choice(i, params, length, reason, label) for i in reversed(range(params["n"]))]}
        if body.get("return_token_ids") and self.tokens_per_image is not None:
            answer["prompt_token_ids"] = self._expanded(body["token_ids"], len(body["content_parts"]))
        return web.json_response(answer)

    def _expanded(self, ids: list[int], num_images: int) -> list[int]:
        """The first placeholders with the tokens of the images, as vLLM takes them."""
        expanded: list[int] = []
        for one in ids:
            is_image = one == models.IMAGE and num_images > 0
            num_images -= is_image
            expanded += [one] * ((self.tokens_per_image or 0) if is_image else 1)
        return expanded


def _choice(index: int, params: Any, length: int, reason: str, label: str) -> Any:
    tokens = [token(params["seed"] + index, position) for position in range(length)]
    return {
        "index": index,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": tokens,
        "weight_versions": [{"version": label, "start": 0, "end": length}],
        "logprobs": {"content": [{"token_id": t, "logprob": -t / 10, "top_logprobs": []} for t in tokens]},
    }
