"""A stub of SGLang's server: the endpoints that the engine uses, with tokens made up from seed and position.

What it answers is held against SGLang's own types in tests/system/test_sglang_types.py.
"""

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from tests import models

LOOKS = ("/model_info", "/server_info", "/v1/models")


def token(seed: int, position: int) -> int:
    """From 4 to 29: a letter of tests/models.py."""
    return 4 + (seed * 7 + position * 3) % 26


class StubServer:
    """Everything that it has been asked lies in `calls`; what it answers can be bent through its attributes."""

    def __init__(self, port: int = 0, token_seconds: float = 0.0, api_key: str = "", admin_api_key: str = "") -> None:
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "disaggregation_mode": "null",
            "enable_lora": True,
            "dp_size": 1,
            "max_loaded_loras": None,
            "enable_deterministic_inference": True,
            "max_req_input_len": 60,
        }
        self.label, self.adapters = "default", dict[str, str]()
        self.calls: list[tuple[str, Any]] = []
        self.answers: list[tuple[str, Any]] = []
        self.token_seconds = token_seconds
        self.num_sampled = 0
        """Tokens since the start."""
        self.holding = False
        """Requests stop behind two tokens, until they are released or aborted."""
        self.paused = False
        self.shortest = 10**6
        """Tokens after which memory is full."""
        self.refuse: dict[str, tuple[int, Any]] = {}
        """Status and body by path."""
        self.tokens_per_image: int | None = 4
        """Tokens that each image becomes; None: the server does not tell its prompt."""
        self.used_by_others: set[str] = set()
        """Adapters with requests of somebody else."""
        self._keys = api_key, admin_api_key
        self._loop = asyncio.new_event_loop()
        self._ready: Future[int] = Future()
        self._running: dict[str, str | None] = {}
        """Request id: adapter."""
        self._aborted: set[str] = set()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._ready.result(60)}"

    def asked(self, path: str) -> list[Any]:
        """Bodies of the calls of a path, in their order."""
        return [body for called, body in list(self.calls) if called == path]

    def paths(self) -> list[str]:
        """What was called, without what only looks."""
        return [path for path, _ in list(self.calls) if path not in LOOKS]

    def num_running(self) -> int:
        """Requests under way."""
        return len(self._running)

    def close(self) -> None:
        """Stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(60)

    def _run(self, port: int) -> None:
        try:
            self._loop.run_until_complete(self._serve(port))
        except OSError as error:
            self._ready.set_exception(error)

    async def _serve(self, port: int) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self._ready.set_result(runner.addresses[0][1])
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        body = await request.json() if request.can_read_body else None
        self.calls.append((path, body))
        key, admin_key = self._keys
        wanted = admin_key or key if path not in (*LOOKS, "/generate") else key
        if wanted and request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path in self.refuse:
            status, content = self.refuse[path]
            return web.json_response(content, status=status)
        status, content = await self._generate(body) if path == "/generate" else await self._simple(path, body)
        if status == 200:
            self.answers.append((path, content))
        return web.json_response(content, status=status) if content is not None else web.Response(status=status)

    async def _simple(self, path: str, body: Any) -> tuple[int, Any]:
        done = {"success": True, "message": "done"}
        if path == "/update_weights_from_disk":
            if body["flush_cache"] and self._running and not self.paused:
                return 400, {"success": False, "message": "the cache was not flushed", "num_paused_requests": 0}
            self.label = body["weight_version"]
            return 200, done | {"num_paused_requests": 0}
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return 200, done | {"new_version": self.label}
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
            return 200, {"message": "done", "status": "ok"}
        if path == "/abort_request":
            self._aborted |= {rid for rid in self._running if rid.startswith(body["rid"])}
            return 200, None
        if path in ("/load_lora_adapter", "/unload_lora_adapter"):
            return await self._change_adapters(path, body)
        return 200, self._look(path)

    async def _change_adapters(self, path: str, body: Any) -> tuple[int, Any]:
        name = body["lora_name"]
        if (name in self.adapters) == (path == "/load_lora_adapter"):
            return 400, {"success": False, "error_message": f"LoRA with name {name} is there, or is not"}
        if path == "/load_lora_adapter":
            self.adapters[name] = body["lora_path"]
        else:
            del self.adapters[name]
            while name in self._running.values() or name in self.used_by_others:
                await asyncio.sleep(0.005)
        return 200, {"success": True, "error_message": None, "loaded_adapters": dict(self.adapters)}

    def _look(self, path: str) -> Any:
        if path == "/server_info":
            return self.info
        if path == "/model_info":
            return {"model_path": "tiny", "is_generation": True, "weight_version": self.label}
        base = {"id": "tiny", "root": "tiny", "parent": None, "max_model_len": 66}
        cards = [{"id": n, "root": p, "parent": "tiny", "max_model_len": None} for n, p in self.adapters.items()]
        return {"object": "list", "data": [base, *cards]}

    async def _generate(self, body: Any) -> tuple[int, Any]:
        rid, adapter = body["rid"], body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {adapter}"}}
        await self._while_paused()
        self._running[rid] = adapter
        try:
            return 200, await self._sample(body, rid)
        finally:
            del self._running[rid]
            self._aborted.discard(rid)

    async def _sample(self, body: Any, rid: str) -> Any:
        params = body["sampling_params"]
        tokens, spans, finish = list[int](), list[dict[str, Any]](), None
        while finish is None:
            await self._boundary(rid, len(tokens))
            if rid in self._aborted:
                finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            if not spans or spans[-1]["version"] != self.label:
                spans.append({"version": self.label, "start": len(tokens), "end": 0})
            tokens.append(token(params["sampling_seed"], len(tokens)))
            spans[-1]["end"] = len(tokens)
            self.num_sampled += 1
            if tokens[-1] in params["stop_token_ids"]:
                finish = {"type": "stop", "matched": tokens[-1]}
            elif len(tokens) >= min(params["max_new_tokens"], self.shortest):
                finish = {"type": "length", "length": len(tokens)}
        meta = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": self.label,
            "weight_versions": spans or [{"version": self.label, "start": 0, "end": 0}],
            "output_token_logprobs": [(self.logprob(t), t, None) for t in tokens],
        }
        if k := body["top_logprobs_num"]:
            meta["output_top_logprobs"] = [[(self.logprob(t) - i, t + i, None) for i in range(k)] for t in tokens]
        answer = {"text": "", "output_ids": tokens, "meta_info": meta}
        if body.get("return_prompt_token_ids") and self.tokens_per_image is not None:
            answer["prompt_token_ids"] = self._expanded(body["input_ids"])
        return answer

    def _expanded(self, ids: list[int]) -> list[int]:
        """Each placeholder with the tokens of an image."""
        return [one for given in ids for one in [given] * (self.tokens_per_image or 0 if given == models.IMAGE else 1)]

    def logprob(self, token_id: int) -> float:
        """Of a token: other weights, other logprobs."""
        return -token_id / 10 - len(self.label) / 1000 - sum(self.label.encode()) / 1e6

    async def _boundary(self, rid: str, num_tokens: int) -> None:
        """Between two tokens."""
        await asyncio.sleep(self.token_seconds)
        while rid not in self._aborted and (self.paused or (self.holding and num_tokens >= 2)):
            await asyncio.sleep(0.005)

    async def _while_paused(self) -> None:
        while self.paused:
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def serving(**settings: Any) -> Any:
    """A stub that stops with the block."""
    server = StubServer(**settings)
    try:
        yield server
    finally:
        server.close()
