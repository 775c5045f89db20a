"""Environments behind an OpenEnv server: `actors/environments/adapters/openenv_client.py:Env`.

One WebSocket connection is one episode: reset, steps, and calls of tools travel over it as JSON. The class drives,
because the model's text has to become an action of the environment first.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
from typing import Any

import aiohttp

Json = dict[str, Any]
Rewards = dict[str, float | None]

MESSAGE_BYTES = 100 << 20
"""Longest message of the server, as in OpenEnv's own client."""
LONGEST_PAUSE_SECONDS = 10.0
NUMBER = re.compile(r"(?<![\d.])-?\d{1,18}(?!\.?\d)")
FENCED = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)


class ServerError(RuntimeError):
    """Error that the server has answered.

    Args:
        code: OpenEnv's, such as `EXECUTION_ERROR`.
        words: the server's.
    """

    def __init__(self, code: str, words: str) -> None:
        super().__init__(f"the OpenEnv server answered {code}: {words}")
        self.code, self.words = code, words


class CapacityError(ServerError):
    """Error of a server whose sessions are all taken."""


class RefusedAnswerError(ValueError):
    """Error for an answer of the model that is no action; its text is for the model."""


class Session:
    """One connection, which the server gives an environment of its own."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._has_own_actions = False

    async def ask(self, kind: str, data: Json) -> Json:
        """Send a message, and return the data of the answer.

        Raises:
            ServerError: the server answers with an error.
            ConnectionError: it has closed the connection.
        """
        with contextlib.suppress(ConnectionError):
            # a server without room has said so, and closed, before it reads anything
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the OpenEnv server ended the connection during a {kind}")
        answer = json.loads(message.data)
        content: Json = answer.get("data") or {}
        if answer.get("type") == "error":
            code, words = str(content.get("code")), str(content.get("message"))
            if details := content.get("errors"):
                words += f": {json.dumps(details, default=str)}"
            if code == "CAPACITY_REACHED":
                raise CapacityError(code, f"{words} ({content.get('max_sessions')} sessions)")
            raise ServerError(code, words)
        return content

    async def tools(self) -> list[Json]:
        """Return the environment's tools in OpenAI's form."""
        found = (await self._remote("tools/list", {})).get("tools") or []
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or tool.get("inputSchema") or {"type": "object"},
                },
            }
            for tool in found
        ]

    async def call(self, name: str, arguments: Json) -> Json:
        """Call a tool, and return the result as an observation: by a step, which may bring a reward."""
        if not self._has_own_actions:
            try:
                return await self.ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
            except ServerError as error:
                if error.code != "VALIDATION_ERROR":
                    raise
                # its steps take other actions; then tools are beside them, and bring no rewards
                self._has_own_actions = True
        result = await self._remote("tools/call", {"name": name, "arguments": arguments})
        reward, done = (result.get("reward"), result.get("done")) if isinstance(result, dict) else (None, False)
        return {"observation": {"result": result}, "reward": reward, "done": bool(done)}

    async def _remote(self, method: str, params: Json) -> Json:
        """Call a method of MCP."""
        self._number += 1
        request = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        answer = await self.ask("mcp", request)
        if error := answer.get("error"):
            if method == "tools/call":
                return {"error": error.get("message")}
            raise ServerError("MCP", f"{method}: {error.get('message')}; set tools: false if it has none")
        result: Json = answer.get("result") or {}
        return result


class Env:
    """One episode on an OpenEnv server.

    Reward: the sum of the rewards of all steps, under `name`; none if no step has brought one. With `turn_rewards` each
    turn has the rewards of its own steps instead.

    Args:
        url: the server, `http://host:8000` or `ws://host:8000/ws`.
        name: name of the reward.
        action: what a step sends: a map, in which `"{text}"` is the model's text, and `"{number}"` its last whole
            number. Without it the model writes the action as a JSON object.
        tools: true to give the model the environment's tools in place of actions; an answer without a call ends the
            episode.
        observation: text for the model, with the observation's fields in braces, `"{echoed_message}"`. Without it:
            the observation's only text, otherwise all of it as JSON.
        system: system prompt; it is where the model learns what to write.
        reset: further keys of each reset, beside the example's columns.
        tasks: name of the environment in the server's task API, which counts its examples. Without it the examples are
            endless: numbers, from which the seeds are made.
        training_split: name of the examples to train on, for the task API and for resets.
        evaluation_split: name of the examples to evaluate on.
        turn_rewards: true to give each reward to the turn that acted.
        unrewarded: reward of an episode without any reward.
        capacity_seconds: longest wait for a place on a server whose sessions are all taken.
        headers_from: HTTP headers by name, each from an environment variable: `{"Authorization": "HF_BEARER"}`.
    """

    def __init__(
        self,
        url: str,
        name: str = "openenv",
        action: Json | None = None,
        tools: bool = False,
        observation: str = "",
        system: str = "",
        reset: Json | None = None,
        tasks: str = "",
        training_split: str = "train",
        evaluation_split: str = "test",
        turn_rewards: bool = False,
        unrewarded: float | None = None,
        capacity_seconds: float = 600.0,
        headers_from: dict[str, str] | None = None,
    ) -> None:
        if tools and action is not None:
            raise ValueError("action: the model calls tools here (tools: true); leave one of both out")
        self._url, self._headers = _http_url(url), _headers(headers_from)
        self._name, self._action, self._uses_tools, self._template = name, action, tools, observation
        self._system, self._reset, self._unrewarded = system, reset or {}, unrewarded
        self._rewards_turns = turn_rewards
        self._tasks, self._splits = tasks, {"train": training_split, "eval": evaluation_split}
        self._capacity_seconds = capacity_seconds
        self._total: float | None = None
        self._of_turn = 0.0
        """Sum of the rewards of the steps of the present turn."""

    @staticmethod
    async def examples(split: str, **options: Any) -> int | None:
        """Return the number of tasks of the server; None if it has no task API: any number is an example."""
        env = Env(**options)
        if not env._tasks:
            return None
        where = f"{env._url}/{env._tasks}/num_tasks"
        async with aiohttp.ClientSession(headers=env._headers) as client:
            try:
                async with client.post(where, json={"split": env._splits[split]}) as response:
                    text = await response.text()
            except aiohttp.ClientError as error:
                raise ConnectionError(f"no answer from {where}: {error}; start the server, or correct url") from error
        if response.status != 200:
            raise ValueError(f"{where} answered {response.status}: {text[:500]}; correct tasks, or leave it out")
        return int(json.loads(text)["num_tasks"])

    async def run(self, example: Json, policy: Any) -> Rewards:
        """Play an episode; return its reward."""
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None, connect=60))
            )
            session, first = await self._begun(stack, client, self._reset_data(example))
            messages = _opened(example.get("prompt") or "", self._system, self._shown(first))
            if not first.get("done"):
                play = self._with_tools if self._uses_tools else self._with_actions
                await _until_limit(play(session, messages, policy))
        if self._total is None:
            return {self._name: self._unrewarded}
        return {} if self._rewards_turns else {self._name: self._total}

    def _reset_data(self, example: Json) -> Json:
        """Return the keys of a reset: the example's columns, and a seed that all episodes of the example share."""
        row = {key: value for key, value in example.items() if key not in ("prompt", "seed")}
        # that of the episode would give each episode of a group another game
        digest = hashlib.blake2b(json.dumps(row, sort_keys=True, default=str).encode(), digest_size=4).digest()
        if "split" in row:
            row["split"] = self._splits.get(row["split"], row["split"])
        return {"seed": int.from_bytes(digest, "big") >> 1} | row | self._reset

    async def _begun(
        self, stack: contextlib.AsyncExitStack, client: aiohttp.ClientSession, data: Json
    ) -> tuple[Session, Json]:
        """Return a session that has been reset, and its first observation; wait for a place on the server."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._capacity_seconds, 0.1
        while True:
            try:
                socket = await client.ws_connect(f"{self._url}/ws", max_msg_size=MESSAGE_BYTES, heartbeat=20)
            except aiohttp.ClientError as error:
                raise ConnectionError(
                    f"no WebSocket at {self._url}/ws: {error}; start the server, or correct url"
                ) from error
            session = Session(socket)
            try:
                first = await session.ask("reset", data)
            except CapacityError as error:
                await socket.close()
                if loop.time() > deadline:
                    raise TimeoutError(
                        f"no place on {self._url} for {self._capacity_seconds:g} s: {error.words}; raise the server's "
                        "max_concurrent_envs, or lower episodes or workers"
                    ) from error
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            except BaseException:
                await socket.close()
                raise
            else:
                stack.push_async_callback(socket.close)
                return session, first

    async def _with_actions(self, session: Session, messages: list[Json], policy: Any) -> None:
        """Play by actions, until the environment is done."""
        is_done = False
        while not is_done:
            answer = await self._answer(policy, messages)
            try:
                observation = await session.ask("step", _action(self._action, answer.get("content") or ""))
            except RefusedAnswerError as error:
                text = str(error)
            except ServerError as error:
                if error.code != "VALIDATION_ERROR":
                    raise
                text = f"The action was refused. {error.words}"
            else:
                is_done = self._note(observation, policy, answer)
                text = self._shown(observation)
            messages.append({"role": "user", "content": text})

    async def _with_tools(self, session: Session, messages: list[Json], policy: Any) -> None:
        """Play by tools, until the environment is done or an answer calls none."""
        tools = await session.tools()
        is_done = False
        while not is_done:
            answer = await self._answer(policy, messages, tools=tools)
            calls = answer.get("tool_calls") or []
            for call in calls:
                content = ""
                try:
                    arguments = _arguments(call["function"]["arguments"])
                except RefusedAnswerError as error:
                    content = json.dumps({"error": str(error)})
                else:
                    observation = await session.call(call["function"]["name"], arguments)
                    is_done = self._note(observation, policy, answer) or is_done
                    content = _tool_text(observation.get("observation") or {})
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            is_done = is_done or not calls

    async def _answer(self, policy: Any, messages: list[Json], **options: Any) -> Json:
        """Return the model's next message, and append it: a turn begins."""
        answer: Json = await policy.sample(messages, **options)
        messages.append(answer)
        self._of_turn = 0.0
        return answer

    def _note(self, observation: Json, policy: Any, answer: Json) -> bool:
        """Add the reward of a step to that of the episode, and of its turn; return whether the episode is over."""
        if (reward := observation.get("reward")) is not None:
            self._total = (self._total or 0.0) + float(reward)
            self._of_turn += float(reward)
            if self._rewards_turns:
                policy.reward(answer, self._of_turn)
        return bool(observation.get("done"))

    def _shown(self, answer: Json) -> str:
        """Return an observation as the text for the model."""
        whole: Json = answer.get("observation") or {}
        fields: Json = {key: value for key, value in whole.items() if key != "metadata"} or whole
        if self._template:
            try:
                return self._template.format_map(fields)
            except (KeyError, IndexError, AttributeError, ValueError) as error:
                names = ", ".join(fields) or "none"
                raise ValueError(
                    f"observation: {type(error).__name__}: {error}; the fields of this observation are: {names}"
                ) from error
        texts = [value for value in fields.values() if isinstance(value, str)]
        return texts[0] if len(fields) == len(texts) == 1 else json.dumps(fields)


async def _until_limit(play: Any) -> None:
    """Play until the end, or until a limit of the trajectory: what was earned so far counts."""
    try:
        await play
    except RuntimeError as error:
        if not str(error).startswith("TrajectoryOverError"):
            raise


def _action(template: Json | None, text: str) -> Json:
    """Return the action in a text of the model.

    Raises:
        RefusedAnswerError: there is none.
    """
    if template is None:
        return _object(text)
    numbers = NUMBER.findall(text)

    def filled(value: Any) -> Any:
        if value == "{text}":
            return text
        if value == "{number}":
            if not numbers:
                raise RefusedAnswerError("No number was found in the answer. Answer with a number.")
            return int(numbers[-1])
        if isinstance(value, dict):
            return {key: filled(part) for key, part in value.items()}
        return [filled(part) for part in value] if isinstance(value, list) else value

    action: Json = filled(template)
    return action


def _object(text: str) -> Json:
    """Return the last JSON object in a text: the last fenced one, or else what stands between braces."""
    bare = text[text.find("{") : text.rfind("}") + 1]
    for found in [*reversed(FENCED.findall(text)), bare]:
        with contextlib.suppress(ValueError):
            value = json.loads(found)
            if isinstance(value, dict):
                return value
    raise RefusedAnswerError("No action was found in the answer. Answer with the action as a JSON object.")


def _arguments(text: Any) -> Json:
    try:
        arguments = json.loads(text or "{}") if isinstance(text, str) else text
    except ValueError as error:
        raise RefusedAnswerError(f"the arguments are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise RefusedAnswerError("the arguments must be a JSON object")
    return arguments


def _tool_text(observation: Json) -> str:
    """Return the result of a tool as the text for the model."""
    if error := observation.get("error"):
        return json.dumps({"error": error.get("message", error) if isinstance(error, dict) else error})
    result = observation.get("result", {key: value for key, value in observation.items() if key != "metadata"})
    if isinstance(result, dict) and isinstance(blocks := result.get("content"), list):
        # MCP's form
        return "\n".join(str(block.get("text", block)) if isinstance(block, dict) else str(block) for block in blocks)
    return result if isinstance(result, str) else json.dumps(result)


def _opened(prompt: str | list[Json], system: str, text: str) -> list[Json]:
    """Return the first messages: the example's prompt, and the first observation behind it."""
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        messages += [{"role": "user", "content": prompt}] if prompt else []
    else:
        messages += prompt
    if messages and messages[-1].get("role") == "user" and isinstance(before := messages[-1].get("content"), str):
        # most chat templates know no two messages of the user in a row
        return [*messages[:-1], messages[-1] | {"content": f"{before}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]


def _http_url(url: str) -> str:
    """Return the server's address for HTTP, without a path of ours."""
    scheme, separator, rest = url.partition("://")
    schemes = {"ws": "http", "wss": "https", "http": "http", "https": "https"}
    if not separator or scheme not in schemes:
        raise ValueError(f"url: {url!r} must begin with http://, https://, ws:// or wss://")
    return f"{schemes[scheme]}://{rest.rstrip('/').removesuffix('/ws')}"


def _headers(headers_from: dict[str, str] | None) -> dict[str, str]:
    """Return the headers, each with the value of its variable."""
    missing = [variable for variable in (headers_from or {}).values() if variable not in os.environ]
    if missing:
        raise ValueError(f"headers_from: the environment variable {missing[0]} is not set; set it for the run")
    return {name: os.environ[variable] for name, variable in (headers_from or {}).items()}
