"""Tasksets of verifiers 0.4 and later, by id: `actors/environments/adapters/verifiers_v1.py:Env`.

The environment drives: verifiers plays an episode in this process, with a harness of our own, because those that ship
with it install programs while they run. verifiers asks an OpenAI endpoint for each message of the model. That endpoint
is here as well, on the loopback interface: it knows an episode by the id of its trace, and asks its `policy`.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import default_harness_id, env_config_type

__all__ = ["ChatHarness", "Env"]

Json = dict[str, Any]
Rewards = dict[str, float | None]

MODEL = "policy"
"""Name of the model in requests; there is only one."""
LIMIT_CODE = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long: harnesses know it, and end without a failure."""
REQUEST_BYTES = 64 << 20


class ChatConfig(vf.HarnessConfig):  # type: ignore[misc]
    """Settings of the harness."""


class ChatHarness(vf.Harness[ChatConfig]):  # type: ignore[misc]
    """Harness that asks the model and calls the task's tools, until an answer calls none; in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Play until an answer without calls, or until the model or a stop of the task ends the rollout."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Json] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            # no limit of time here: that of a run counts
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"Authorization": f"Bearer {secret}"}, timeout=aiohttp.ClientTimeout(total=None)
                )
            )
            while (message := await _asked(session, endpoint, messages, tools)) is not None:
                messages.append(message)
                calls = message.get("tool_calls") or []
                for call in calls:
                    content = await _result(call, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                if not calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _asked(session: aiohttp.ClientSession, endpoint: str, messages: list[Json], tools: list[Json]) -> Json | None:
    """Return the model's next message; None if a limit, or a stop of the task, forbids one."""
    body: Json = {"model": MODEL, "messages": messages} | ({"tools": tools} if tools else {})
    async with session.post(f"{endpoint}/chat/completions", json=body) as response:
        text = await response.text()
    if response.status == 200:
        message: Json = json.loads(text)["choices"][0]["message"]
        return message
    if LIMIT_CODE in text or "rollout stopped" in text:
        return None
    raise RuntimeError(f"the model call failed with status {response.status}: {text[:2000]}")


async def _result(call: Json, dispatch: Json, connections: Json) -> Any:
    """Return the result of a tool call, or words for the model on a call that is none."""
    name = call["function"]["name"]
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    if name not in dispatch:
        return f"error: there is no tool {name!r}; the tools are {', '.join(dispatch)}"
    return await call_mcp(connections, dispatch, name, arguments)


@dataclass
class Session:
    """Model of one trace."""

    policy: Any
    failure: Exception | None = None
    """First sample that failed for another reason than a limit of the trajectory."""


class Endpoint:
    """OpenAI endpoint on the loopback interface. The id of a trace is the key: nobody else knows it."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """Answer with the policy's message. Failures have statuses that no client tries again."""
        session = self.sessions.get(request.headers.get("X-Session-ID", ""))
        if session is None:
            words = "this agent is not trained; give it a client and a model of its own in environment"
            return _refused(404, words, "not_found")
        body = await request.json()
        options: Json = {"tools": body["tools"]} if body.get("tools") else {}
        if stop := body.get("stop"):
            options["stop"] = stop
        options |= {key: body[key] for key in ("response_format", "tool_choice") if body.get(key)}
        if limit := body.get("max_completion_tokens") or body.get("max_tokens"):
            options["max_tokens"] = limit
        try:
            message = await session.policy.sample(body["messages"], **options)
        except Exception as error:  # noqa: BLE001 - kept for the episode, which raises it
            if str(error).startswith("TrajectoryOverError"):
                return _refused(400, str(error), LIMIT_CODE)
            session.failure = session.failure or error
            return _refused(422, f"{type(error).__name__}: {error}", "sample_failed")
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        completion = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": 0, "model": MODEL}
        if body.get("stream"):
            return _streamed(completion, message, reason)
        choice = {"index": 0, "finish_reason": reason, "message": message}
        return web.json_response(completion | {"object": "chat.completion", "choices": [choice]})


def _refused(status: int, words: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": words, "code": code}}, status=status)


def _streamed(completion: Json, message: Json, reason: str) -> web.Response:
    """Return a whole message as the events of a stream."""
    calls = [{"index": number} | call for number, call in enumerate(message.get("tool_calls") or [])]
    delta = message | ({"tool_calls": calls} if calls else {})
    chunks = [{"index": 0, "delta": delta, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": reason}]
    events = [json.dumps(completion | {"object": "chat.completion.chunk", "choices": [chunk]}) for chunk in chunks]
    text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return web.Response(text=text, content_type="text/event-stream")


class Tasks:
    """Tasks of a taskset by index. Those of an endless one are made in their order, and kept."""

    def __init__(self, taskset: Any) -> None:
        self.is_endless = not taskset.bounded
        self._rest: Iterator[Any] = iter(taskset)
        self._made: list[Any] = []
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            self._made += itertools.islice(self._rest, max(0, index + 1 - len(self._made)))
            return self._made[index]

    def __len__(self) -> int:
        with self._lock:
            self._made += self._rest
            return len(self._made)


class Played:
    """Environment of one split in this process, with its tasks and what it serves."""

    def __init__(self, config: Json) -> None:
        self.environment = vf.load_environment(vf.resolve_env_config(config))
        self.tasks = Tasks(self.environment.taskset)
        self._serving: asyncio.Task[None] | None = None
        self._is_ready: asyncio.Future[None] | None = None

    async def serve(self) -> None:
        """Start what all episodes share, the first time; return once it is there."""
        if self._serving is None or self._serving.done():
            self._is_ready = asyncio.get_running_loop().create_future()
            # in a task of its own: what is opened there is bound to its task, and stays open
            self._serving = asyncio.create_task(self._serve(self._is_ready))
        assert self._is_ready is not None
        await asyncio.shield(self._is_ready)

    async def _serve(self, is_ready: "asyncio.Future[None]") -> None:
        try:
            async with self.environment.serving():
                is_ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            if not is_ready.done():
                is_ready.set_exception(error)


class Process:
    """State that all episodes of this process share."""

    def __init__(self) -> None:
        self.endpoint = Endpoint()
        self.by_split: dict[str, Played] = {}
        self.loading = threading.Lock()
        self.starting = asyncio.Lock()


_process = Process()


class Env:
    """One episode of a taskset of verifiers.

    Rewards: the trace's reward under the taskset's id, and each of its rewards (unweighted) and metrics under its name.

    Args:
        id: taskset, as in `env.taskset.id`; its package is installed, or is found in `path`.
        taskset: further keys of the taskset.
        evaluation: keys of the taskset that differ for examples to evaluate on, `{"split": "test"}` say; without any,
            these are the same tasks.
        environment: further keys of the environment (`env.*` in verifiers): `{"agent": {"max_turns": 4}}` for a role.
        path: folder to search for modules.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 - verifiers' word
        taskset: Json | None = None,
        evaluation: Json | None = None,
        environment: Json | None = None,
        path: str = "",
    ) -> None:
        self._id = id
        self._options = (id, taskset or {}, evaluation or {}, environment or {}, path)
        self.columns: Json = {}

    @staticmethod
    def examples(split: str, **options: Any) -> int | None:
        """Return the number of tasks; None if they have no end."""
        tasks = _played(split, *Env(**options)._options).tasks
        return None if tasks.is_endless else len(tasks)

    async def run(self, example: Json, policy: Any) -> Rewards:
        """Play a task, and return its rewards."""
        played = _played(example.get("split", "train"), *self._options)
        endpoint = _process.endpoint
        async with _process.starting:
            if not endpoint.url:
                await endpoint.start()
            await played.serve()
        # in a thread: an endless taskset makes all tasks up to this one
        task = await asyncio.to_thread(played.tasks.__getitem__, example["index"])
        self.columns = task.data.model_dump(mode="json", exclude={"prompt", "system_prompt"}, exclude_defaults=True)
        session, traces = Session(policy), []

        def minted(trace: Any) -> None:
            traces.append(trace)
            if trace.agent.trainable:
                endpoint.sessions[trace.id] = session

        # no key is sent: the endpoint knows the trace
        client = vf.EvalClientConfig(base_url=endpoint.url, api_key_var="NO_KEY")
        try:
            [slot] = played.environment.slots(task)
            episode = await played.environment.run_slot(
                slot, vf.ModelContext(model=MODEL, client=client), on_trace=minted
            )
        finally:
            for trace in traces:
                endpoint.sessions.pop(trace.id, None)
        if session.failure is not None:
            raise session.failure
        return self._rewards(episode)

    def _rewards(self, episode: Any) -> Rewards:
        """Return the rewards of an episode.

        Raises:
            RuntimeError: it has failed.
            ValueError: several agents of it are trained.
        """
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or errors:
            told = [f"{error.type}: {error.message}" for error in errors]
            stops = [str(trace.stop_condition) for trace in episode.traces]
            raise RuntimeError(f"the episode failed: {'; '.join(told) or 'it stopped by ' + ', '.join(stops)}")
        if late := [str(trace.stop_condition) for trace in episode.traces if trace.is_timeout]:
            # waits for an engine count in these limits, so that this is no act of the model
            raise TimeoutError(f"{late[0]}: a limit of the taskset passed; raise environment.<role>.timeout")
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1:
            raise ValueError(
                f"{len(trained)} agents of this environment are trained; one is supported: its setup must set "
                "trainable = False for the others, and environment give each of them a client and a model"
            )
        [trace] = trained
        if unscored := sorted(name for name, reward in trace.rewards.items() if reward is None):
            raise RuntimeError(f"{', '.join(unscored)}: no reward was recorded")
        single = {name: _finite(reward.score) for name, reward in trace.rewards.items()}
        metrics = {name: _finite(value) for name, value in trace.metrics.items()}
        # the total is what is trained on: nothing of the same name may stand in its place
        return {**metrics, **single, self._id: trace.reward}


def _finite(value: Any) -> float | None:
    """Return a number for reports; None if it is none."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _played(split: str, id: str, taskset: Json, evaluation: Json, environment: Json, path: str) -> Played:  # noqa: A002
    """Return this process's environment of a split; load it the first time."""
    by_split = _process.by_split
    key = split if evaluation else "train"
    with _process.loading:
        if path and not by_split:
            folder = Path(path).expanduser().resolve()
            if not folder.is_dir():
                raise ValueError(f"path: {folder} is no folder; it must hold the taskset's module")
            sys.path.insert(0, str(folder))
            # servers of tools are processes that import the module again
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        if key not in by_split:
            named = taskset | (evaluation if split == "eval" else {}) | {"id": id}
            by_split[key] = Played({**environment, "taskset": named, **_roles(id, environment)})
        return by_split[key]


def _roles(id: str, environment: Json) -> Json:  # noqa: A002
    """Return the settings of each agent: those given, with our harness and this machine in place of the cloud."""
    config = env_config_type(id, environment.get("id", ""))
    # a harness that comes with the taskset is part of the task
    own = {} if default_harness_id(id) == id else {"harness": {"id": __name__}}
    return {
        name: {"runtime": {"type": "subprocess"}} | own | environment.get(name, {})
        for name, field in config.model_fields.items()
        if isinstance(field.default, vf.AgentConfig)
    }
