"""SGLang's HTTP: sampling by token ids, and the endpoints for weights. Use it from one event loop."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.engines.labels import UnknownWeightsError
from actors.engines.protocol import EngineStoppedError, RequestError
from actors.engines.upstream import Json, RefusedError, Upstream

INFO_SECONDS = 30.0
NEVER_LOADED = "adapter that has never been loaded"
"""In SGLang's words for a request under an adapter that it does not have."""


class SglangClient:
    """One server."""

    def __init__(self, url: str, api_key: str = "", admin_api_key: str = "") -> None:
        self.url = url
        self._key, self._admin_key = api_key, admin_api_key or api_key
        self._http = Upstream("SGLang", url, {})

    async def generate(self, body: Json) -> Json:
        """Sample one completion.

        Raises:
            RequestError: it can't be served, in SGLang's words.
            UnknownWeightsError: the server does not have the adapter that was asked for.
            EngineStoppedError: it did not answer, or failed.
        """
        try:
            answer: Json = await self._call("/generate", body, self._key)
            return answer
        except RefusedError as error:
            if error.status == 400 and NEVER_LOADED in error.words:
                raise UnknownWeightsError(error.words) from None
            if error.status in (400, 413, 422):
                raise RequestError(error.words) from None
            raise EngineStoppedError(str(error)) from None

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their answers come at once, with what was sampled so far."""
        for one in request_ids:
            await self._change("/abort_request", {"rid": one})

    async def pause(self, keep_cache: bool) -> None:
        """Stand still at the next token boundary, until `resume`.

        Args:
            keep_cache: of running requests; else they are put back into the queue and computed again afterwards, and
                the caches may be flushed meanwhile.
        """
        await self._change("/pause_generation", {"mode": "in_place" if keep_cache else "retract"})

    async def resume(self) -> None:
        """After a pause; harmless where there was none."""
        await self._change("/continue_generation", {"torch_empty_cache": False})

    async def update(self, folder: Path, label: str, flush_cache: bool) -> None:
        """Overwrite all weights with those of a folder; tokens from here on carry the label.

        If that fails, the model may be in pieces: SGLang says that it rolls back, but reads the new folder for it.
        """
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": flush_cache}
        await self._change("/update_weights_from_disk", body)

    async def label(self, label: str) -> None:
        """Have tokens from here on carry this label."""
        await self._change("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve an adapter under a name, beside those that are there."""
        await self._change("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away, once no request uses it."""
        await self._change("/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> list[str]:
        """Names of those that are loaded."""
        models: Json = await self._call("/v1/models", None, self._key)
        return [card["id"] for card in models["data"] if card["parent"] is not None]

    async def server_info(self) -> Json:
        """How the server was started, and what it can hold."""
        async with asyncio.timeout(INFO_SECONDS):
            info: Json = await self._call("/server_info", None, self._key)
        return info

    async def check_there(self) -> None:
        """Ask for something that needs no GPU: `/health` samples a token, and fails while the server is paused or busy.

        Raises:
            EngineStoppedError: there is no server.
        """
        with contextlib.suppress(TimeoutError):  # too busy to say
            async with asyncio.timeout(INFO_SECONDS):
                await self._call("/model_info", None, self._key)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def _change(self, path: str, body: Json) -> None:
        await self._call(path, body, self._admin_key)

    async def _call(self, path: str, body: Json | None, key: str) -> Any:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self._http.call("GET" if body is None else "POST", path, body, headers)
