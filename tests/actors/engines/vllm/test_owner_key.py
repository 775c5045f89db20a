"""Who may post what to an owned server."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.engines.vllm.inside.grpo_actors_owner_key import HEADER, KEY_VARIABLE, MIDDLEWARE, OwnerKeyMiddleware
from actors.engines.vllm.inside.grpo_actors_worker import EXTENSION
from actors.engines.vllm.process import command, environment
from tests.actors.engines.vllm.test_process import engine, model


class App:
    """Counts who comes through."""

    def __init__(self) -> None:
        self.served = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One more."""
        self.served += 1


async def knock(method: str, path: str, key: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[Any]]:
    """Requests that came through, and what was answered instead."""
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    app, answers = App(), []

    async def send(message: Any) -> None:
        answers.append(message)

    headers = [] if key is None else [(HEADER.encode(), key.encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    await OwnerKeyMiddleware(app)(scope, None, send)
    return app.served, answers


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")],
)
async def test_whoever_only_samples_or_looks_needs_no_key(
    method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without the middleware."""
    assert await knock(method, path, None, monkeypatch) == (1, [])


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/update_weight_version", "/v1/load_lora_adapter", "/pause", "/new"]
)
async def test_what_changes_the_server_is_the_owners_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what no version of vLLM has yet; the answer says why."""
    assert await knock("POST", path, "secret", monkeypatch) == (1, [])
    for key in (None, "", "other"):
        served, [start, body] = await knock("POST", path, key, monkeypatch)
        assert (served, start["status"]) == (0, 401)
        assert path in json.loads(body["body"])["error"]["message"]


def test_an_owned_server_has_the_door_whatever_environment_it_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of modules that it loads are put before the user's path; the key is not on the command line."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    words = command(model(), engine(), on_cpu=False, port=8001)
    assert words[words.index("--middleware") + 1] == MIDDLEWARE
    given = environment(model(), engine(), "secret")
    *folders, rest = given["PYTHONPATH"].split(":")
    found = {file.stem for folder in folders for file in Path(folder).glob("*.py")}
    assert found == {
        "__init__",
        MIDDLEWARE.partition(".")[0],
        EXTENSION.partition(".")[0],
        "grpo_actors_handles",
        "grpo_actors_base",
    }
    assert rest == "/mine"
    assert given[KEY_VARIABLE] == "secret"
    assert "secret" not in words
