"""Logprobs of a teacher that is served elsewhere, by the completions API of OpenAI with vLLM's `prompt_logprobs`.

A request has all tokens of a sample as its prompt, and the answer the logprob of each of them. A sample with images
goes to vLLM's endpoint for token ids, with one placeholder for each image (`actors.models.served_images`).

Requests that fail for a passing reason (no connection, time limit, 408, 409, 425, 429, 5xx) are sent again after a
pause, which doubles, until `trainer.teacher_server.timeout`. A refused request, or an answer without these logprobs,
ends the run at once. No failure is ever a number in the loss.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import structlog
import torch
from torch import Tensor

from actors.datasets.prepared import digest_of
from actors.learner.micro_batches import non_empty
from actors.models.served_images import Pixels, check_prompt, with_placeholders
from schemas.config.model import ModelConfig
from schemas.config.trainer import TeacherServerConfig
from schemas.errors import RunFailedError
from schemas.messages import ImagePlace, StepBatch

log = structlog.get_logger("learner")

KEY = "trainer.teacher_server"
"""Configuration key, for errors."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""Pause before the first retry, and the limit of its doubling."""
COMPLETIONS, TOKENS = "/v1/completions", "/inference/v1/generate"
"""Endpoints of samples without and with images."""
PASSING = (408, 409, 425, 429)
"""HTTP statuses below 500 that may pass."""


class _PassingError(Exception):
    """Failure that may pass, with its words."""


def token_logprobs(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the logprob of each token of a prompt but the first, from an answer of vLLM.

    Raises:
        ValueError: the answer has no such logprobs.
    """
    try:
        # of the prompt of a completion, or of the one prompt of a request in tokens
        found = answer["prompt_logprobs"] if "prompt_logprobs" in answer else answer["choices"][0]["prompt_logprobs"]
        if len(found) != len(token_ids):
            raise ValueError(f"prompt_logprobs has {len(found)} entries for {len(token_ids)} tokens")
        # at each place the likeliest tokens and the given one, by id; at the first nothing
        pairs = zip(found[1:], token_ids[1:], strict=True)
        return [float(entry[str(token)]["logprob"]) for entry, token in pairs]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"no prompt_logprobs of the given tokens ({error!r})") from None


@dataclass(frozen=True)
class _Asked:
    """Sample to ask for."""

    ids: list[int]
    """Token ids of prompt and completion."""
    starts: Sequence[int] = ()
    """Place of the first token of each image."""
    parts: Sequence[dict[str, str]] = ()
    """Images in vLLM's form."""

    @property
    def path(self) -> str:
        """Endpoint."""
        return TOKENS if self.starts else COMPLETIONS

    def body(self) -> dict[str, Any]:
        """Return the request without the model's name: logprobs of the prompt, and one token, since none can't be."""
        params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        if not self.starts:
            return {"prompt": self.ids, **params}
        return {
            "token_ids": with_placeholders(self.ids, self.starts),
            "content_parts": list(self.parts),
            "return_token_ids": True,
            "sampling_params": params,
        }

    def logprobs_of(self, answer: Any) -> list[float]:
        """Return the logprob of each token but the first.

        Raises:
            ValueError: the answer has no such logprobs, or is of another prompt.
        """
        if self.starts:
            found = answer.get("prompt_token_ids") if isinstance(answer, dict) else None
            check_prompt(self.ids, self.starts, found, "vLLM")
        return token_logprobs(answer, self.ids)


class TeacherServer:
    """Client of the teacher's server.

    Args:
        config: address and limits.
        teacher: the teacher, whose files say how images become tokens.
    """

    def __init__(self, config: TeacherServerConfig, teacher: ModelConfig) -> None:
        self._config, self._model = config, config.model or teacher.path
        self._pixels = Pixels(teacher)

    def logprobs(self, batch: StepBatch, device: torch.device) -> dict[int, Tensor]:
        """Return (T,) logprobs of the completion tokens of each micro-batch; 0 outside the loss mask.

        Raises:
            RunFailedError: the server refuses, gives no logprobs, or does not answer in time.
        """
        sampled = batch.loss_mask > 0
        if (batch.temperatures[sampled] != 1.0).any():
            # a server's logprobs are of the distribution at temperature 1
            raise RunFailedError(f"{KEY}: step {batch.step} has tokens sampled at another temperature than 1")
        of_samples = asyncio.run(self._of_samples(batch))
        found = {}
        for number in non_empty(batch):
            first, last = (int(i) for i in batch.micro_batch_offsets[number : number + 2])
            values = np.concatenate(of_samples[first:last])
            found[number] = torch.from_numpy(values.astype(np.float32)).to(device)
        return found

    async def _of_samples(self, batch: StepBatch) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
        """Return the logprobs of the completion tokens of each sample."""
        places = batch.places_of_samples() if batch.images else []
        digests = [digest_of(image) for image in batch.images]
        limit, deadline = asyncio.Semaphore(self._config.max_concurrent), time.monotonic() + self._config.timeout
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout)

        async def of_sample(session: aiohttp.ClientSession, number: int) -> np.ndarray[Any, np.dtype[np.float64]]:
            start, end = (int(i) for i in batch.sample_offsets[number : number + 2])
            prompt, ids = int(batch.prompt_lengths[number]), batch.token_ids[start:end].tolist()
            mask = batch.loss_mask[start + prompt : end] > 0
            if not mask.any():
                return np.zeros(mask.size)
            async with limit:
                asked = _Asked(ids)
                if places and (shown := places[number]):
                    # in a thread: images are decoded
                    asked = await asyncio.to_thread(self._with_images, ids, shown, batch, digests)
                values = await self._ask_until(session, asked, deadline)
            # the first token has no logprob, and is one of the prompt
            return np.where(mask, np.array(values[prompt - 1 :]), 0.0)

        async with aiohttp.ClientSession(headers=self._headers(), timeout=timeout) as session:
            tasks = [asyncio.ensure_future(of_sample(session, n)) for n in range(batch.prompt_lengths.size)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    def _with_images(
        self, ids: list[int], places: Sequence[ImagePlace], batch: StepBatch, digests: Sequence[str]
    ) -> "_Asked":
        try:
            urls = [self._pixels.url(digests[place.image], batch.images[place.image]) for place in places]
        except ValueError as error:
            raise RunFailedError(f"{KEY}: step {batch.step}: {error}") from error
        parts = [
            {"type": "image_url", "url": url, "uuid": digests[place.image]}
            for url, place in zip(urls, places, strict=True)
        ]
        return _Asked(ids, [place.start for place in places], parts)

    async def _ask_until(self, session: aiohttp.ClientSession, asked: "_Asked", deadline: float) -> list[float]:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._ask(session, asked)
            except _PassingError as error:
                if time.monotonic() + pause > deadline:
                    raise RunFailedError(
                        f"{KEY}: {self._model} at {self._config.url} gave no logprobs within "
                        f"{self._config.timeout:g} s ({KEY}.timeout): {error}"
                    ) from None
                log.warning("teacher asked again", url=self._config.url, pause_seconds=pause, detail=str(error))
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)

    async def _ask(self, session: aiohttp.ClientSession, asked: "_Asked") -> list[float]:
        try:
            url = f"{self._config.url.rstrip('/')}{asked.path}"
            async with session.post(url, json={"model": self._model, **asked.body()}) as response:
                if response.status == 200:
                    return asked.logprobs_of(await response.json())
                words = f"HTTP {response.status}: {(await response.text())[:300]}"
        except TimeoutError:
            limit = self._config.request_timeout
            raise _PassingError(f"no answer within {limit:g} s ({KEY}.request_timeout)") from None
        except aiohttp.ClientError as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from None
        except ValueError as error:
            raise RunFailedError(
                f"{KEY}: {self._model} at {self._config.url}: {error}; the server must be vLLM's, or know its field "
                "prompt_logprobs"
            ) from None
        if response.status >= 500 or response.status in PASSING:
            raise _PassingError(words)
        if response.status in (401, 403):
            words += f" ({KEY}.api_key_env {self._config.api_key_env or 'is not set'})"
        if response.status == 404 and asked.starts:
            words += f"; samples with images need {TOKENS}: start vLLM with --enable-scale-out"
        raise RunFailedError(f"{KEY}: {self._model} at {self._config.url} refuses {len(asked.ids)} tokens: {words}")

    def _headers(self) -> dict[str, str]:
        variable = self._config.api_key_env
        if not variable:
            return {}
        key = os.environ.get(variable, "")
        if not key:
            raise RunFailedError(f"{KEY}.api_key_env: the environment of the trainer has no {variable}")
        return {"Authorization": f"Bearer {key}"}
