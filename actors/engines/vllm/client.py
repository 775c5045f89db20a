"""vLLM's HTTP: sampling by token ids, and its developers' endpoints for weights. Use it from one event loop."""

import json
from pathlib import Path
from typing import Any

import aiohttp

from actors.engines.protocol import EngineStoppedError, RequestError
from actors.engines.vllm.answers import UnknownWeightsError
from actors.engines.vllm.inside.grpo_actors_door import HEADER

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 1.0
"""That a connection is kept without use. vLLM closes it after 5; a request that is sent at that moment is lost."""
HEALTH_SECONDS = 30.0
"""A server that is busy with long prompts answers late; one that is dead refuses at once."""
REQUEST_ID_PREFIX = "generate-tokens-"
"""That the endpoint puts in front of a request's id."""

Json = dict[str, Any]


class RefusedError(ValueError):
    """An answer other than 200, in vLLM's words."""

    def __init__(self, path: str, status: int, words: str) -> None:
        super().__init__(f"vLLM answers {status} to {path}: {words}")
        self.status, self.words = status, words


class VllmClient:
    """One HTTP session to one server.

    A wait for completions has no end of its own: whoever waits gives up, or the engine finds the server dead.
    """

    def __init__(self, url: str, api_key: str = "", door_key: str = "") -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}" if api_key else "", HEADER: door_key}
        self._session = aiohttp.ClientSession(
            headers={name: value for name, value in headers.items() if value},
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
        )

    async def generate(self, body: Json) -> Json:
        """Sample completions.

        Raises:
            RequestError: it can't be served, in vLLM's words.
            UnknownWeightsError: the server does not have the adapter that was asked for.
            EngineStoppedError: it did not answer, or failed.
        """
        try:
            answer: Json = await self._call("POST", "/inference/v1/generate", body)
            return answer
        except RefusedError as error:
            if error.status == 404 and "model" in body:
                raise UnknownWeightsError(error.words) from None
            if error.status in (400, 422):
                raise RequestError(error.words) from None
            raise EngineStoppedError(str(error)) from None

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; their answers come at once, with what was sampled so far."""
        if request_ids:  # the server takes an empty list for all requests
            names = [REQUEST_ID_PREFIX + one for one in request_ids]
            await self._call("POST", "/abort_requests", {"request_ids": names})

    async def pause(self, wait: bool, clear_cache: bool) -> None:
        """Stand still: when running requests have ended, or at the next token boundary.

        Args:
            wait: for running requests; else they stop in between and go on after `resume`.
            clear_cache: forget keys and values, so that those of stopped requests are computed again.
        """
        mode, clear = "wait" if wait else "keep", str(clear_cache).lower()
        await self._call("POST", f"/pause?mode={mode}&clear_cache={clear}")

    async def resume(self) -> None:
        """Go on."""
        await self._call("POST", "/resume")

    async def reload(self, folder: Path) -> None:
        """Overwrite all weights with those of a folder. If that fails, the model is in pieces."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._call("POST", "/collective_rpc", body)

    async def label(self, label: str) -> None:
        """Have tokens from here on carry this label."""
        await self._call("POST", "/update_weight_version", {"new_version": label})

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve an adapter under a name, beside those that are there."""
        await self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away; that there is none is as good."""
        try:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except RefusedError as error:
            if error.status != 404:
                raise

    async def trouble(self) -> str:
        """Why the server can't serve; empty when it can, or is too busy to say."""
        try:
            async with self._session.get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            ) as response:
                return "" if response.status == 200 else f"vLLM at {self.url}: /health answers {response.status}"
        except TimeoutError:
            return ""
        except aiohttp.ClientError as error:
            return f"vLLM at {self.url}: {error}"

    async def version(self) -> str:
        """Of vLLM."""
        return str((await self._call("GET", "/version"))["version"])

    async def settings(self) -> Json:
        """The server's configuration, by section."""
        settings: Json = (await self._call("GET", "/server_info?config_format=json"))["vllm_config"]
        return settings

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _call(self, method: str, path: str, body: Json | None = None) -> Any:
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise RefusedError(path.partition("?")[0], response.status, words_of(text))
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineStoppedError(f"vLLM at {self.url}: {type(error).__name__}: {error}") from error
        return json.loads(text) if response.content_type == "application/json" else text


def words_of(body: str) -> str:
    """What an error's body says."""
    try:
        content = json.loads(body)
        error = content.get("error", content.get("detail", body))
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, AttributeError, KeyError):
        return body[:300]
