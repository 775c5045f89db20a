"""Environments behind an Open Reward Standard server: `actors/environments/adapters/ors_client.py:Env`.

A session over HTTP is one episode: the server gives the prompt and the tools, each call of a tool may bring a reward,
and one of them finishes the episode. The class drives, because the tools are those of the session.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

Json = dict[str, Any]
Rewards = dict[str, float | None]

PING_SECONDS = 60.0
"""Pause between two signs of life: a server forgets a session after 900 seconds without any."""
SILENCE_SECONDS = 60.0
"""Longest silence of a call under way, in which the server sends a ping each 10 seconds."""
TRIES = 5
"""Connections for one call of a tool: a later one asks for the result of the same call."""
PAUSE_SECONDS = 0.5
TYPES = {"train": ("train",), "eval": ("test", "validation")}
"""Types of the server's splits for our own, the best first."""


class Server:
    """Requests to one environment of a server.

    Args:
        client: with the server's address and headers.
        url: the address, for messages.
        environment: name; empty for the server's first.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str, environment: str) -> None:
        self._client, self._url, self.environment = client, url, environment
        self.session = ""

    async def ask(self, method: str, path: str, body: Json | None = None) -> Any:
        """Return the answer to a request.

        Raises:
            ConnectionError: there is no server.
            RuntimeError: it refuses, with its words.
        """
        headers = {"X-Session-ID": self.session} if self.session else {}
        try:
            async with self._client.request(method, self._url + path, json=body, headers=headers) as response:
                text = await response.text()
        except aiohttp.ClientError as error:
            raise ConnectionError(f"no answer from {self._url}: {error}; start the server, or correct url") from error
        if response.status != 200:
            raise RuntimeError(f"{self._url}{path} answered {response.status}: {text[:2000]}")
        return json.loads(text) if text else None

    async def named(self) -> str:
        """Return the path of the environment: the given name, or the first of the server's."""
        if not self.environment:
            self.environment = (await self.ask("GET", "/list_environments"))[0]
        return f"/{self.environment.lower()}"

    async def split(self, ours: str, given: str) -> str:
        """Return the name of the server's split for one of ours; empty if it has none."""
        if given:
            return given
        splits = await self.ask("GET", f"{await self.named()}/splits")
        names = [one["name"] for kind in TYPES[ours] for one in splits if one["type"] == kind]
        return names[0] if names else ""

    async def begin(self, task: Json) -> None:
        """Open a session for a task, and wait until it is ready."""
        self.session = "".join(
            [data async for event, data in self._events("/create_session", {}) if event == "task_id"]
        )
        await self.ask("POST", "/create", {"env_name": (await self.named())[1:], **task})

    async def call(self, name: str, arguments: Json) -> Json:
        """Call a tool, and return the server's answer.

        Raises:
            RuntimeError: the environment has failed.
            ConnectionError: the connection was lost, and the result with it.
        """
        path, body = f"{await self.named()}/call", {"name": name, "input": arguments}
        for attempt in range(TRIES):
            parts: list[str] = []
            try:
                async for event, data in self._events(path, body):
                    if event == "task_id":
                        # a connection that is lost does not lose the call: it goes on under this name
                        body["task_id"] = data
                    elif event == "error":
                        raise RuntimeError(f"the ORS server failed in the tool {name}: {data}")
                    else:
                        parts.append(data)
                    if event == "end":
                        answer: Json = json.loads("".join(parts))
                        return answer
            except (aiohttp.ClientError, TimeoutError) as error:
                if "task_id" not in body:
                    # called again, it might act twice
                    raise ConnectionError(f"no answer from {self._url}{path}: {error!r}") from error
            await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
        raise ConnectionError(f"{self._url}{path}: the connection was lost {TRIES} times")

    async def ping(self) -> None:
        """Keep the session, until cancelled."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            with contextlib.suppress(ConnectionError, RuntimeError):
                # a server that is gone is seen by the next call
                await self.ask("POST", "/ping")

    async def _events(self, path: str, body: Json) -> AsyncIterator[tuple[str, str]]:
        """Yield the events of a stream: name and data."""
        headers = {"Accept": "text/event-stream"} | ({"X-Session-ID": self.session} if self.session else {})
        silence = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS)
        async with self._client.post(self._url + path, json=body, headers=headers, timeout=silence) as response:
            if response.status != 200:
                raise RuntimeError(f"{self._url}{path} answered {response.status}: {(await response.text())[:2000]}")
            event, lines = "", list[str]()
            async for raw in response.content:
                line = raw.decode().rstrip("\r\n")
                field, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if field == "event":
                    event = value
                elif field == "data":
                    lines.append(value)
                elif not line:
                    if event:
                        yield event, "\n".join(lines)
                    event, lines = "", []


class Env:
    """One episode on an ORS server.

    Reward: the sum of the rewards of all calls, under `name`. With `turn_rewards` each turn has the rewards of its own
    calls instead.

    Args:
        url: the server.
        environment: name of the environment there; empty for the first.
        name: name of the reward; empty for the environment's.
        training_split: the server's split to train on; empty for the first of type `train`.
        evaluation_split: the server's split to evaluate on; empty for the first of type `test`, else `validation`.
        system: system prompt.
        turn_rewards: true to give each reward to the turn that called.
        unrewarded: reward of an episode in which no call has brought one; null for none.
        key_from: environment variable with the key of the server.
        secrets_from: secrets of the environment by name, each from an environment variable.
    """

    def __init__(
        self,
        url: str,
        environment: str = "",
        name: str = "",
        training_split: str = "",
        evaluation_split: str = "",
        system: str = "",
        turn_rewards: bool = False,
        unrewarded: float | None = 0.0,
        key_from: str = "",
        secrets_from: dict[str, str] | None = None,
    ) -> None:
        self._url, self._environment, self._name, self._system = url.rstrip("/"), environment, name, system
        self._splits = {"train": training_split, "eval": evaluation_split}
        self._rewards_turns = turn_rewards
        self._unrewarded, self._headers = unrewarded, _headers(key_from)
        self._secrets = {name: _variable("secrets_from", place) for name, place in (secrets_from or {}).items()}
        self._total: float | None = None
        self.columns: Json = {}

    @staticmethod
    async def examples(split: str, **options: Any) -> int:
        """Return the number of tasks of a split."""
        env = Env(**options)
        async with aiohttp.ClientSession(headers=env._headers) as client:
            server = Server(client, env._url, env._environment)
            if not (name := await server.split(split, env._splits[split])):
                return 0
            return int((await server.ask("POST", f"{await server.named()}/num_tasks", {"split": name}))["num_tasks"])

    async def run(self, example: Json, policy: Any) -> Rewards:
        """Play an episode; return its reward."""
        timeout = aiohttp.ClientTimeout(total=None, connect=60)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as client:
            server = Server(client, self._url, self._environment)
            await server.begin(await self._task(server, example))
            ping = asyncio.create_task(server.ping())
            try:
                await self._play(server, example.get("prompt") or "", policy)
            finally:
                ping.cancel()
                with contextlib.suppress(ConnectionError, RuntimeError):
                    # its end changes nothing for the episode; the server also ends it by itself
                    await server.ask("POST", "/delete")
            name = self._name or (await server.named())[1:]
        if self._total is None:
            return {name: self._unrewarded}
        return {} if self._rewards_turns else {name: self._total}

    async def _task(self, server: Server, example: Json) -> Json:
        """Return what names the task of an example: its own column `task_spec`, or its place in a split."""
        secrets = {"secrets": self._secrets} if self._secrets else {}
        if "task_spec" in example:
            return {"task_spec": example["task_spec"], **secrets}
        if "index" not in example:
            raise ValueError("the row has neither task_spec nor index; leave the data set out, or give it task_spec")
        ours = example.get("split", "train")
        split = await server.split(ours, self._splits[ours])
        return {"split": split, "index": example["index"], **secrets}

    async def _play(self, server: Server, prompt: str | list[Json], policy: Any) -> None:
        """Ask and call, until a call finishes the episode, or an answer calls nothing."""
        path = await server.named()
        messages: list[Json] = [{"role": "system", "content": self._system}] if self._system else []
        if isinstance(prompt, str):
            messages += [{"role": "user", "content": prompt}] if prompt else []
        else:
            messages += prompt
        messages.append({"role": "user", "content": _content(await server.ask("GET", f"{path}/prompt"))})
        tools = [_tool(spec) for spec in (await server.ask("GET", f"{path}/task_tools"))["tools"]]
        is_finished = False
        while not is_finished:
            try:
                answer = await policy.sample(messages, tools=tools)
            except RuntimeError as error:
                if str(error).startswith("TrajectoryOverError"):
                    # a limit of the trajectory: what was earned so far counts
                    return
                raise
            messages.append(answer)
            calls = answer.get("tool_calls") or []
            rewards: list[float] = []
            for call in calls:
                content, reward, finishes = await self._called(server, call)
                rewards += [] if reward is None else [reward]
                is_finished = is_finished or finishes
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            if rewards:
                self._total = (self._total or 0.0) + sum(rewards)
                if self._rewards_turns:
                    policy.reward(answer, sum(rewards))
            is_finished = is_finished or not calls

    async def _called(self, server: Server, call: Json) -> tuple[Any, float | None, bool]:
        """Call a tool; return the content for the model, the reward or None, and whether the episode is finished."""
        text = call["function"]["arguments"]
        try:
            arguments = json.loads(text or "{}") if isinstance(text, str) else text
        except ValueError as error:
            return f"error: the arguments are no JSON: {error}", None, False
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object", None, False
        answer = await server.call(call["function"]["name"], arguments)
        if not answer.get("ok"):
            # an unknown tool, or arguments that it does not take: the model's to learn from
            return f"error: {answer.get('error')}", None, False
        output = answer["output"]
        reward = output.get("reward")
        return _content(output["blocks"]), None if reward is None else float(reward), bool(output.get("finished"))


def _tool(spec: Json) -> Json:
    """Return a tool in OpenAI's form."""
    parameters = spec.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": spec["name"], "description": spec.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _content(blocks: list[Json]) -> Any:
    """Return blocks as the content of a message: a text, or parts where there is an image."""
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    return [
        {"type": "text", "text": block["text"]}
        if block["type"] == "text"
        else {"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}
        for block in blocks
    ]


def _headers(key_from: str) -> dict[str, str]:
    """Return the headers of each request."""
    return {"X-API-Key": _variable("key_from", key_from)} if key_from else {}


def _variable(option: str, name: str) -> str:
    if name not in os.environ:
        raise ValueError(f"{option}: the environment variable {name} is not set; set it for the run")
    return os.environ[name]
