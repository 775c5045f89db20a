"""HTTP client of SGLang: sampling by token ids, and the endpoints for weights. For use from a single event loop."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.engines.external.labels import UnknownWeightsError
from actors.engines.external.upstream import Json, RefusedError, Upstream
from actors.engines.protocol import EngineStoppedError, RequestError

INFO_SECONDS = 30.0
"""Seconds for the answer to a small request."""
NEVER_LOADED = "adapter that has never been loaded"
"""Part of SGLang's message for a request with an unknown adapter."""


class SglangClient:
    """Client of a server.

    Args:
        admin_api_key: key of the endpoints for changes of the server; empty uses `api_key`.
    """

    def __init__(self, url: str, api_key: str = "", admin_api_key: str = "") -> None:
        self.url = url
        self._key, self._admin_key = api_key, admin_api_key or api_key
        self._http = Upstream("SGLang", url, {})

    async def generate(self, body: Json) -> Json:
        """Sample one completion and return the server's answer.

        Raises:
            RequestError: the request can't be served; with SGLang's message.
            UnknownWeightsError: the server does not have the requested adapter.
            EngineStoppedError: the server did not answer, or failed.
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
        """Abort requests. The answers come at once, with the tokens sampled so far."""
        # the endpoint takes a single id
        for one in request_ids:
            await self._change("/abort_request", {"rid": one})

    async def pause(self, keep_cache: bool) -> None:
        """Pause at the next token boundary, until `resume`.

        Args:
            keep_cache: keep keys and values of running requests. Otherwise these requests return to the queue and are
                computed again afterwards, and the caches may be flushed in between.
        """
        await self._change("/pause_generation", {"mode": "in_place" if keep_cache else "retract"})

    async def resume(self) -> None:
        """Resume after a pause. Has no effect on a running server."""
        await self._change("/continue_generation", {"torch_empty_cache": False})

    async def update(self, folder: Path, label: str, flush_cache: bool) -> None:
        """Overwrite all weights from a folder, and set the label of the tokens sampled from now on.

        After a failure the model may hold pieces of two versions: SGLang reports a rollback, but reads the new folder
        for it.
        """
        body = {"model_path": str(folder), "weight_version": label, "flush_cache": flush_cache}
        await self._change("/update_weights_from_disk", body)

    async def label(self, label: str) -> None:
        """Set the label of the tokens sampled from now on."""
        # running requests continue, under the new label
        await self._change("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder and serve the adapter under a name, next to others."""
        await self._change("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, once no request uses it."""
        await self._change("/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> list[str]:
        """Return the names of all loaded adapters."""
        models: Json = await self._call("/v1/models", None, self._key)
        # the model itself has no parent
        return [card["id"] for card in models["data"] if card["parent"] is not None]

    async def server_info(self) -> Json:
        """Return the options with which the server was started, and its capacity.

        Raises:
            RefusedError: an HTTP status other than 200.
            EngineStoppedError: no connection.
            TimeoutError: no answer within INFO_SECONDS.
        """
        async with asyncio.timeout(INFO_SECONDS):
            info: Json = await self._call("/server_info", None, self._key)
        return info

    async def check_there(self) -> None:
        """Check if the server is there, by a request without the GPU. A server too busy to answer counts as there.

        `/health` is of no use: the server samples a token for it, and fails while the server is paused or busy.

        Raises:
            EngineStoppedError: no server answers.
        """
        # too busy to say
        with contextlib.suppress(TimeoutError):
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
