"""Images in the calls of agents: exact places in the record, known again by their bytes, and limits in words."""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actors.rollout.agents import Agents
from actors.rollout.episode import Trajectory, play
from actors.rollout.sessions.dialects import chat, messages, responses
from actors.rollout.sessions.dialects.calls import CallError
from actors.rollout.turn_images import TurnImages
from actors.trajectories.bridges import Message
from actors.trajectories.recorder import TurnRequest
from schemas.config import RunConfig
from schemas.config.images import ImageLimitsConfig
from tests.actors.datasets import pictures
from tests.actors.rollout.test_turn_images import (
    CHAT,
    LAST,
    OTHER,
    SMALL,
    WIDE,
    Episode,
    expected,
    images_of,
    recorder_of,
    seen,
    user,
)
from tests.ring.harness import ring_config

FIRST = ("u:", SMALL, "a</s>a:")
SECOND = (*FIRST, "x0</s>u:b", WIDE, SMALL, "</s>a:")


class Client:
    """Client of one session, by HTTP."""

    def __init__(self, http: aiohttp.ClientSession, access: dict[str, Any]) -> None:
        self._http, self._access = http, access

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer of a request."""
        async with self._http.post(self._access["base_url"] + path, json=body) as answer:
            return answer.status, await answer.json()

    async def chat(self, *shown: Message, **body: Any) -> Message:
        """The model's message."""
        status, answer = await self.post("/chat/completions", {"messages": list(shown)} | body)
        assert status == 200, answer
        return dict(answer["choices"][0]["message"])

    async def refused(self, *shown: Message, path: str = "/chat/completions", **body: Any) -> str:
        """Words of a refused call."""
        status, answer = await self.post(path, {"messages": list(shown)} | body)
        assert status == 400, answer
        return str(answer["error"]["message"])


Use = Callable[[Client], Awaitable[None]]


class Driver(Episode):
    """An agent."""

    is_driving = True

    def __init__(self, use: Use) -> None:
        super().__init__()
        self._use = use

    async def run(self, *given: Any) -> dict[str, float | None]:
        """Call the model over HTTP."""
        async with aiohttp.ClientSession() as http:
            await self._use(Client(http, given[-1]))
        return {"helper": 1.0}


def config_of(folder: Path, **images: int) -> RunConfig:
    """A run of an external agent; the model's files are not read."""
    return ring_config(
        folder,
        environments=[{"type": "agent", "name": "helper", "external": True, "images": images}],
        reward={"functions": []},
        packer={"groups_per_step": 1, "sequence_len": 512},
        inference={"engine": {"type": "embedded"}},
    )


async def played(
    use: Use, folder: Path, images: TurnImages | None = None, **keys: int
) -> tuple[Trajectory, list[TurnRequest]]:
    """The trajectory of an agent, and the requests to the model."""
    config, requests = config_of(folder, **keys), list[TurnRequest]()
    async with Agents(config, {"helper": CHAT}, 512, lambda environment, outcome: None) as agents:
        sessions = agents.opener(config.environments[0], CHAT)  # type: ignore[arg-type]
        recorder = recorder_of(requests, images or images_of(**keys))
        return await play(Driver(use), recorder, "", {}, sessions=sessions), requests


async def test_calls_with_images_continue_each_other_with_exact_places(tmp_path: Path) -> None:
    """Images of the history come back as data URLs, with another name of their kind; one is shown twice."""

    async def use(client: Client) -> None:
        first = user(SMALL, "a", form="url")
        answer = await client.chat(first)
        second = user("b", WIDE, SMALL, form="url")
        again = {"type": "image_url", "image_url": {"url": _url(SMALL, "image/webp"), "detail": "low"}}
        first["content"][0] = again
        answer_2 = await client.chat(first, answer, second)
        await client.chat(first, answer, second, answer_2, LAST)

    trajectory, requests = await played(use, tmp_path)
    third = (*SECOND, "x1</s>u:enough</s>a:")
    for request, pieces in zip(requests, (FIRST, SECOND, third), strict=True):
        assert seen(request.prompt_ids, request.images) == expected(*pieces)
    [sample] = trajectory.tree.samples()
    assert seen([*sample.prompt_ids, *sample.token_ids], sample.images) == expected(*third, "x2</s>")
    # records and rewards see digests alone
    kinds = [part for one in trajectory.messages if isinstance(one["content"], list) for part in one["content"]]
    assert {frozenset(part) for part in kinds if part["type"] == "image"} == {frozenset({"type", "digest"})}


async def test_another_image_in_the_history_starts_a_branch(tmp_path: Path) -> None:
    """Its tokens have equal ids."""

    async def use(client: Client) -> None:
        answer = await client.chat(user(WIDE, form="url"))
        await client.chat(user(OTHER, form="url"), answer, LAST)
        await client.chat(user(WIDE, form="url"), answer, LAST)

    trajectory, requests = await played(use, tmp_path)
    assert trajectory.tree.num_branches == 1
    first, branch, last = (seen(one.prompt_ids, one.images) for one in requests)
    assert first == expected("u:", WIDE, "</s>a:")
    assert branch == expected("u:", OTHER, "</s>a:x0</s>u:enough</s>a:")
    assert last == expected("u:", WIDE, "</s>a:x0</s>u:enough</s>a:")


async def test_calls_with_images_at_the_same_time_have_their_own(tmp_path: Path) -> None:
    """Images are decoded in a thread."""

    async def use(client: Client) -> None:
        await asyncio.gather(*(client.chat(user(one, "?", form="url")) for one in (SMALL, WIDE, OTHER) * 3))

    _, requests = await played(use, tmp_path)
    found = sorted(seen(one.prompt_ids, one.images)[2] for one in requests)
    assert found == sorted(expected(SMALL, WIDE, OTHER) * 3)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("https://example.com/a.png", "messages.0.content.0.image_url: must be a data URL"),
        ("file:///etc/passwd", "messages.0.content.0.image_url: must be a data URL"),
        ("pictures/a.png", "messages.0.content.0.image_url: must be a data URL"),
        ("data:image/png;base64,%%%", "messages: a message of the role user has an image that is a data URL whose"),
        ("data:image/png,abc", "messages: a message of the role user has an image that is a data URL without base64"),
        ("data:image/gif;base64,R0lGODlh", "messages: .* that is no JPEG, PNG or WebP image"),
        (None, "messages.0.content.0.image_url: must be a data URL"),
        ({"type": "image", "digest": "0" * 32}, "messages.0.content: must be a text, or parts of text and images"),
        ({"type": "input_audio"}, "messages.0.content: must be a text, or parts of text and images"),
    ],
)
async def test_an_image_that_can_not_be_used_is_refused_in_words_and_the_session_goes_on(
    tmp_path: Path, content: Any, words: str
) -> None:
    """No other machine is asked, and no file is read."""
    part = content if isinstance(content, dict) else {"type": "image_url", "image_url": {"url": content}}
    told: list[str] = []

    async def use(client: Client) -> None:
        told.append(await client.refused({"role": "user", "content": [part]}))
        await client.chat(user(SMALL, "a", form="url"))

    trajectory, requests = await played(use, tmp_path)
    assert trajectory.stop == "done"
    assert seen(requests[0].prompt_ids, requests[0].images) == expected(*FIRST)
    assert re.match(words, told[0])


async def test_limits_are_those_of_environments(tmp_path: Path) -> None:
    """Number of all turns, bytes and pixels, each with its key."""
    told: list[str] = []

    async def use(client: Client) -> None:
        answer = await client.chat(user(SMALL, form="url"))
        told.append(await client.refused(user(SMALL, form="url"), answer, user(WIDE, form="url")))
        told.append(await client.refused(user(pictures.png(20, 20), form="url")))

    await played(use, tmp_path, images_of(max_images=1, max_pixels=200))
    assert "has 40 × 16 pixels, and environments[].images.max_pixels is 200" in told[0]
    assert "environments[].images.max_pixels is 200" in told[1]

    async def more(client: Client) -> None:
        await client.chat(user(SMALL, form="url"))
        told.append(await client.refused(user(WIDE, form="url")))

    await played(more, tmp_path, images_of(max_images=1))
    assert "has one more image than the 1 of environments[].images.max_images" in told[2]


async def test_a_run_without_images_refuses_them_in_words(tmp_path: Path) -> None:
    """The words name the engine."""
    told: list[str] = []
    why = "inference.engine.type fake takes no images"

    async def use(client: Client) -> None:
        told.append(await client.refused(user(SMALL, form="url")))
        await client.chat(LAST)

    await played(use, tmp_path, TurnImages(ImageLimitsConfig(), 1, 2, None, why))
    assert told == [f"messages: a message of the role user has an image; {why}"]


async def test_token_ids_and_counts_take_no_images(tmp_path: Path) -> None:
    """Places of images in a client's own tokens are not known."""
    told: list[str] = []

    async def use(client: Client) -> None:
        shown = user(SMALL, "a", form="url")
        told.append(await client.refused(shown, path="/chat/completions/tokens", tokens=[97, 98]))
        told.append(await client.refused(shown, path="/tokenize"))
        told.append(await client.refused(shown, path="/messages/count_tokens"))
        await client.chat(shown)

    await played(use, tmp_path)
    assert told[0] == "prompt: a trajectory with images takes messages, and no token ids"
    assert told[1].startswith("messages: have images, whose tokens are counted in the usage of an answer")


async def test_bodies_have_room_for_the_images_of_the_limits(tmp_path: Path) -> None:
    """One of 2 MiB travels where two of 2 MiB are allowed, and is refused as a body where they are not."""
    big = pictures.png(8, 8, pictures.part(b"prVt", bytes((2 << 20) - 100)))
    told: list[str] = []

    async def show(client: Client) -> None:
        await client.chat(user(big, form="url"))

    async def fail(client: Client) -> None:
        told.append(await client.refused(user(big, form="url")))
        await client.chat(LAST)

    _, [request] = await played(show, tmp_path, max_images=2, max_bytes=2 << 20)
    assert seen(request.prompt_ids, request.images) == expected("u:", big, "</s>a:")
    await played(fail, tmp_path, max_images=1, max_bytes=1 << 10)
    assert "body: more than the" in told[0]
    assert "1024 bytes of images (packer.sequence_len, environments[].images)" in told[0]


async def test_the_room_of_images_is_none_for_other_json(tmp_path: Path) -> None:
    """Lists take a hundred times their bytes in memory."""
    told: list[str] = []

    async def use(client: Client) -> None:
        told.append(await client.refused(LAST, stop=[[]] * 500_000))
        told.append(await client.refused(LAST | {"content": "a b " * 300_000}))
        await client.chat(LAST)

    await played(use, tmp_path, max_images=2, max_bytes=2 << 20)
    words = "body: more than the 1048576 bytes of any conversation with 512 tokens (packer.sequence_len)"
    assert told == [words, words]


def _url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


PART = {"type": "image_url", "image_url": {"url": _url(SMALL)}}


def test_each_api_has_its_own_form_of_an_image() -> None:
    """All become parts of the chat API, in messages and in results of tools."""
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(SMALL).decode()}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block, {"type": "text", "text": "b"}]}
    content = [result, block, {"type": "text", "text": "a"}]
    [tool, own] = messages.call({"messages": [{"role": "user", "content": content}]}).messages
    text_a, text_b = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    assert tool == {"role": "tool", "content": [PART, text_b], "tool_call_id": "t"}
    assert own == {"role": "user", "content": [PART, text_a]}
    [failed] = messages.call({"messages": [{"role": "user", "content": [result | {"is_error": True}]}]}).messages
    assert failed["content"] == [{"type": "text", "text": "Error: "}, PART, text_b]

    shown = [{"type": "input_image", "image_url": _url(SMALL)}, {"type": "input_text", "text": "a"}]
    output = {"type": "function_call_output", "call_id": "t", "output": shown[:1]}
    call = responses.call({"input": [{"role": "user", "content": shown}, output]})
    assert call.messages == [
        {"role": "user", "content": [PART, text_a]},
        {"role": "tool", "content": [PART], "tool_call_id": "t"},
    ]

    with pytest.raises(CallError, match=r"messages\.0\.content: must be a text, or parts of text; the policy"):
        chat.call({"messages": [{"role": "assistant", "content": [PART]}]})
    with pytest.raises(CallError, match=r"messages\.0\.content.1: must be a text, or parts of text"):
        chat.call({"messages": [{"role": "user", "content": [PART, {"type": "input_audio"}]}]})
