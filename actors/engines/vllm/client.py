"""HTTP client of vLLM: sampling by token ids, and development endpoints for weights. For use from one event loop."""

from collections.abc import Sequence
from pathlib import Path

import aiohttp

from actors.engines.external.labels import UnknownWeightsError
from actors.engines.external.upstream import Json, RefusedError, Upstream
from actors.engines.protocol import EngineStoppedError, RequestError
from actors.engines.vllm.inside.grpo_actors_owner_key import HEADER
from bus.weights.inside.grpo_actors_handles import TensorPlace

HEALTH_SECONDS = 30.0
"""Seconds for a health check. A server busy with long prompts answers late; a dead server refuses at once."""
REQUEST_ID_PREFIX = "generate-tokens-"
"""Prefix added by the endpoint to a request's id."""


class VllmClient:
    """Client of a server.

    Args:
        owner_key: key of the owner of an owned server; empty for another server.
    """

    def __init__(self, url: str, api_key: str = "", owner_key: str = "") -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}" if api_key else "", HEADER: owner_key}
        self._http = Upstream("vLLM", url, {name: value for name, value in headers.items() if value})

    async def generate(self, body: Json) -> Json:
        """Sample completions and return the server's answer.

        Raises:
            RequestError: the request can't be served; with vLLM's message.
            UnknownWeightsError: the server does not have the requested adapter.
            EngineStoppedError: the server did not answer, or failed.
        """
        try:
            answer: Json = await self._http.call("POST", "/inference/v1/generate", body)
            return answer
        except RefusedError as error:
            # the adapter is gone: another process has unloaded it, or the server has restarted
            if error.status == 404 and "model" in body:
                raise UnknownWeightsError(error.words) from None
            if error.status in (400, 422):
                raise RequestError(error.words) from None
            raise EngineStoppedError(str(error)) from None

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests. The answers come at once, with the tokens sampled so far."""
        # the server reads an empty list as all requests
        if request_ids:
            names = [REQUEST_ID_PREFIX + one for one in request_ids]
            await self._http.call("POST", "/abort_requests", {"request_ids": names})

    async def pause(self, wait: bool, clear_cache: bool) -> None:
        """Pause once running requests have finished, or at the next token boundary.

        Args:
            wait: let running requests finish; otherwise running requests stop in between and continue after `resume`.
            clear_cache: drop keys and values; stopped requests compute theirs again.

        Raises:
            RefusedError: the server does not pause, or keeps its keys and values.
        """
        mode, clear = "wait" if wait else "keep", str(clear_cache).lower()
        await self._http.call("POST", f"/pause?mode={mode}&clear_cache={clear}")
        if clear_cache:
            # vLLM 0.32 still obeys clear_cache, though its documentation says that mode keep ignores it. A release that
            # does ignore it would serve new weights with old keys and values, and nobody would notice
            path = "/reset_prefix_cache"
            answer: Json = await self._http.call("POST", f"{path}?reset_running_requests=true")
            if not answer["success"]:
                raise RefusedError(f"vLLM at {self.url}", path, 200, "the keys and values of old weights stay")

    async def resume(self) -> None:
        """Resume after a pause. Has no effect on a running server."""
        await self._http.call("POST", "/resume")

    async def release_cache(self) -> None:
        """Give the memory of keys and values back, on a paused server. Stopped requests compute theirs again."""
        await self._http.call("POST", "/release_kv_cache_memory")

    async def take_cache(self) -> None:
        """Take the memory of keys and values again, before `resume`."""
        await self._http.call("POST", "/wake_up?tags=kv_cache")

    async def reload(self, folder: Path) -> None:
        """Overwrite all weights from a folder. After a failure the model may hold pieces of two versions."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._http.call("POST", "/collective_rpc", body)

    async def take_weights(self, handle: Json, tensors: Sequence[TensorPlace]) -> None:
        """Overwrite all weights from memory, through our extension of the server's workers. Fails as `reload` does."""
        body = {"method": "take_weights", "kwargs": {"handle": handle, "tensors": tensors}}
        await self._http.call("POST", "/collective_rpc", body)

    async def mapped_bytes(self) -> int:
        """Return the bytes of weights that are the trainer's memory (`up.share_base`), of the first worker."""
        found: Json = await self._http.call("POST", "/collective_rpc", {"method": "mapped_bytes"})
        return int(found["results"][0])

    async def pack_experts(self) -> None:
        """Finish a reload of weights of experts on a CPU, through our extension of the server's workers."""
        await self._http.call("POST", "/collective_rpc", {"method": "pack_experts"})

    async def set_norms(self, path: Path) -> None:
        """Overwrite norms from a file, through our extension of the server's workers."""
        await self._http.call("POST", "/collective_rpc", {"method": "set_norms", "kwargs": {"path": str(path)}})

    async def label(self, label: str) -> None:
        """Set the label of the tokens sampled from now on."""
        await self._http.call("POST", "/update_weight_version", {"new_version": label})

    async def adapters(self) -> list[str]:
        """Return the names of all loaded adapters."""
        models: Json = await self._http.call("GET", "/v1/models")
        # the model itself has no parent
        return [card["id"] for card in models["data"] if card["parent"] is not None]

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder and serve the adapter under a name, next to others."""
        await self._http.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; no error for an unknown adapter."""
        try:
            await self._http.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except RefusedError as error:
            if error.status != 404:
                raise

    async def trouble(self) -> str:
        """Return the reason why the server can't serve; empty if it can, or is too busy to answer."""
        try:
            async with self._http.session.get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            ) as response:
                return "" if response.status == 200 else f"vLLM at {self.url}: /health answers {response.status}"
        except TimeoutError:
            # busy with long prompts, not dead
            return ""
        except aiohttp.ClientError as error:
            return f"vLLM at {self.url}: {error}"

    async def version(self) -> str:
        """Return the server's version of vLLM."""
        return str((await self._http.call("GET", "/version"))["version"])

    async def settings(self) -> Json:
        """Return the server's configuration, by section."""
        settings: Json = (await self._http.call("GET", "/server_info?config_format=json"))["vllm_config"]
        return settings

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()
