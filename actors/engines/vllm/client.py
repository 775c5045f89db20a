"""vLLM's HTTP: sampling by token ids, and its developers' endpoints for weights. Use it from one event loop."""

from collections.abc import Sequence
from pathlib import Path

import aiohttp

from actors.engines.labels import UnknownWeightsError
from actors.engines.protocol import EngineStoppedError, RequestError
from actors.engines.upstream import Json, RefusedError, Upstream
from actors.engines.vllm.inside.grpo_actors_door import HEADER

HEALTH_SECONDS = 30.0
"""A server that is busy with long prompts answers late; one that is dead refuses at once."""
REQUEST_ID_PREFIX = "generate-tokens-"
"""That the endpoint puts in front of a request's id."""


class VllmClient:
    """One server."""

    def __init__(self, url: str, api_key: str = "", door_key: str = "") -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}" if api_key else "", HEADER: door_key}
        self._http = Upstream("vLLM", url, {name: value for name, value in headers.items() if value})

    async def generate(self, body: Json) -> Json:
        """Sample completions.

        Raises:
            RequestError: it can't be served, in vLLM's words.
            UnknownWeightsError: the server does not have the adapter that was asked for.
            EngineStoppedError: it did not answer, or failed.
        """
        try:
            answer: Json = await self._http.call("POST", "/inference/v1/generate", body)
            return answer
        except RefusedError as error:
            if error.status == 404 and "model" in body:
                raise UnknownWeightsError(error.words) from None
            if error.status in (400, 422):
                raise RequestError(error.words) from None
            raise EngineStoppedError(str(error)) from None

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their answers come at once, with what was sampled so far."""
        if request_ids:  # the server takes an empty list for all requests
            names = [REQUEST_ID_PREFIX + one for one in request_ids]
            await self._http.call("POST", "/abort_requests", {"request_ids": names})

    async def pause(self, wait: bool, clear_cache: bool) -> None:
        """Stand still: when running requests have ended, or at the next token boundary.

        Args:
            wait: for running requests; else they stop in between and go on after `resume`.
            clear_cache: forget keys and values, so that those of stopped requests are computed again.
        """
        mode, clear = "wait" if wait else "keep", str(clear_cache).lower()
        await self._http.call("POST", f"/pause?mode={mode}&clear_cache={clear}")

    async def resume(self) -> None:
        """Go on."""
        await self._http.call("POST", "/resume")

    async def reload(self, folder: Path) -> None:
        """Overwrite all weights with those of a folder. If that fails, the model is in pieces."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._http.call("POST", "/collective_rpc", body)

    async def set_norms(self, path: Path) -> None:
        """Overwrite norms with those of a file, by code of ours in the server."""
        await self._http.call("POST", "/collective_rpc", {"method": "set_norms", "kwargs": {"path": str(path)}})

    async def label(self, label: str) -> None:
        """Have tokens from here on carry this label."""
        await self._http.call("POST", "/update_weight_version", {"new_version": label})

    async def adapters(self) -> list[str]:
        """Names of those that are loaded."""
        models: Json = await self._http.call("GET", "/v1/models")
        return [card["id"] for card in models["data"] if card["parent"] is not None]

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve an adapter under a name, beside those that are there."""
        await self._http.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away; that there is none is as good."""
        try:
            await self._http.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except RefusedError as error:
            if error.status != 404:
                raise

    async def trouble(self) -> str:
        """Why the server can't serve; empty when it can, or is too busy to say."""
        try:
            async with self._http.session.get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            ) as response:
                return "" if response.status == 200 else f"vLLM at {self.url}: /health answers {response.status}"
        except TimeoutError:
            return ""
        except aiohttp.ClientError as error:
            return f"vLLM at {self.url}: {error}"

    async def version(self) -> str:
        """Of vLLM."""
        return str((await self._http.call("GET", "/version"))["version"])

    async def settings(self) -> Json:
        """The server's configuration, by section."""
        settings: Json = (await self._http.call("GET", "/server_info?config_format=json"))["vllm_config"]
        return settings

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()
