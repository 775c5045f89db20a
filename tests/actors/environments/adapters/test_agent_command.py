"""Agents that are programs: real processes, a server that answers them, and everything that a program can do."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from actors.environments.adapters import agent_command
from actors.environments.adapters.agent_command import Env, problems
from actors.environments.errors import EpisodeError
from actors.environments.pool import WorkerPool
from actors.environments.spec import EnvironmentSpec, Limits
from actors.environments.worker.agents import containers, folders
from actors.environments.worker.agents.errors import (
    AgentExitError,
    AgentRewardError,
    AgentStartError,
    AgentTimeoutError,
)
from tests.actors.environments.test_pool import WAIT, until
from tests.processes import has_ended, look_at

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs.py"
URL, KEY = "http://127.0.0.1:9/s/key/v1", "key-of-a-session"
ROW = {"prompt": "What is 2 + 2?", "answer": "4", "seed": 7}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; no trajectory leaves anything there."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield place
    monkeypatch.setattr(tempfile, "tempdir", None)


def shell(script: str, **options: Any) -> Env:
    """An agent that is a script."""
    options.setdefault("seconds", WAIT)
    return Env(["sh", "-c", script], **options)


async def run(env: Env, row: dict[str, Any] | None = None) -> Any:
    """A trajectory."""
    return await env.run(ROW if row is None else row, URL, KEY)


async def pids(file: Path, count: int) -> list[int]:
    """Ids of processes that a program has written to a file."""
    await until(lambda: file.exists() and len(file.read_text().split()) >= count)
    return [int(word) for word in file.read_text().split()]


# --- what the program gets -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(answer: str) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server of the chat route; its base URL, and the requests: key, body."""
    requests: list[Any] = []

    async def chat(request: web.Request) -> web.Response:
        requests.append((request.headers["Authorization"], await request.json()))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": answer}}]})

    app = web.Application()
    app.router.add_post("/s/{key}/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        [(host, port, *_)] = runner.addresses
        yield f"http://{host}:{port}/s/{KEY}/v1", requests
    finally:
        await runner.cleanup()


CURL = """
set -eu
curl -sSf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" \
    -d '{"model": "any", "messages": [{"role": "user", "content": "'"$AGENT_PROMPT"'"}]}' >answer
grep -q '"4"' answer && echo 1 >"$AGENT_REWARD_FILE" || echo 0 >"$AGENT_REWARD_FILE"
"""


@pytest.mark.parametrize(("answer", "reward"), [("4", 1.0), ("5", 0.0)])
async def test_a_script_with_curl_is_an_agent(folder: Path, answer: str, reward: float) -> None:
    """It finds address, key and prompt in its variables, and leaves its reward in a file."""
    async with served(answer) as (url, requests):
        env = shell(CURL, reward="file", name="right")
        assert await env.run(ROW, url, KEY) == {"right": reward}
    body = {"model": "any", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    assert requests == [(f"Bearer {KEY}", body)]
    assert list(folder.iterdir()) == []


async def test_a_program_gets_the_example_and_no_secret_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only variables that are known to hold none, and those that are named; the home is empty."""
    for name in ("GRPO_INFERENCE_KEY", "HF_TOKEN", "CURVE_SECRET", "TOOL_KEY", "OPENAI_API_KEY", "PYTHONPATH"):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data.txt").write_text("data")
    script = "env -0 >$OUT/env; cp example.json prompt.txt data.txt notes/a $OUT; ls -A ~ >$OUT/home; pwd >$OUT/pwd"
    out = tmp_path / "out"
    out.mkdir()
    env = shell(
        script,
        folder=str(tmp_path / "mine"),
        files={"notes/a": "for {base_url} {other}", "~/.config/tool.json": '{"key": "{api_key}"}'},
        variables={"OUT": str(out), "LLM_URL": "{base_url}/chat", "LITERAL": "{{prompt}}"},
        inherit=["TOOL_KEY"],
        hidden=["answer"],
    )
    assert await run(env) is None
    got = dict(line.split("=", 1) for line in (out / "env").read_text().split("\0") if line)
    assert {name: value for name, value in got.items() if "secret" in value} == {"TOOL_KEY": "secret"}
    own = {
        "OPENAI_BASE_URL": URL,
        "OPENAI_API_BASE": URL,
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9/s/key",
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "AGENT_PROMPT": "What is 2 + 2?",
        "LLM_URL": f"{URL}/chat",
        "LITERAL": "{prompt}",
    }
    assert own.items() <= got.items()
    assert json.loads((out / "example.json").read_text()) == {"prompt": "What is 2 + 2?", "seed": 7}
    assert [(out / name).read_text() for name in ("prompt.txt", "data.txt")] == ["What is 2 + 2?", "data"]
    assert (out / "a").read_text() == f"for {URL} {{other}}"
    assert (out / "home").read_text() == ".config\n"
    assert got["AGENT_EXAMPLE_FILE"] == f"{(out / 'pwd').read_text().strip()}/example.json"


async def test_placeholders_are_whole_arguments_and_are_replaced_once() -> None:
    """No shell sees what is in them, and a placeholder in a column is text."""
    row = {"prompt": [{"role": "user", "content": '$(exit 1); `x` "y" {api_key}'}], "items": [1, "a"]}
    script = 'test "$1" = "$AGENT_PROMPT" && test "$2" = "$expected" && test "${3}" = --url=$OPENAI_BASE_URL'
    variables = {"expected": '[1, "a"] of {{seed}}'}
    words = ["sh", "-c", script, "sh", "{prompt}", "{items} of {{seed}}", "--url={base_url}"]
    assert await run(Env(words, reward="exit_code", variables=variables), row) == {"agent": 1.0}


@pytest.mark.parametrize(
    ("word", "row", "words"),
    [
        ("{promt}", ROW, r"command has \{promt\}, but the example has no column promt; there are answer, api_key"),
        ("{prompt}", {"prompt": "x" * 200_000}, "has 200000 bytes, but at most 120000 are possible; read prompt.txt"),
        ("{prompt}", {"prompt": "a\0b"}, "has a NUL character"),
    ],
)
async def test_an_argument_that_can_not_be_made_is_a_failure(word: str, row: dict[str, Any], words: str) -> None:
    """Before the program runs."""
    with pytest.raises(AgentStartError, match=words):
        await run(Env(["echo", word]), row)


async def test_a_long_prompt_is_in_its_file() -> None:
    """And in no variable, which the kernel would refuse."""
    row = {"prompt": "x" * 300_000 + "\udc80"}
    script = 'test -z "${AGENT_PROMPT+set}" && test $(wc -c <"$AGENT_PROMPT_FILE") = 300001'
    assert await run(shell(script, reward="exit_code"), row) == {"agent": 1.0}


# --- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "rewards"),
    [("0.5", {"agent": 0.5}), ("1", {"agent": 1.0}), ('{"a": 1, "b": null}', {"a": 1.0, "b": None})],
)
async def test_the_reward_file_holds_a_number_or_rewards_by_name(content: str, rewards: Any) -> None:
    """JSON, as the program has written it."""
    assert await run(shell(f"echo '{content}' >reward.json", reward="file")) == rewards


async def test_a_missing_reward_file_is_no_reward_of_its_own() -> None:
    """Which leaves the score to reward functions."""
    assert await run(shell("true", reward="file")) is None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo NaN >reward.json", "must be a finite number"),
        ("echo '{\"a\": -Infinity}' >reward.json", "the reward 'a' must be a finite number"),
        ("echo 1e999 >reward.json", "must be a finite number"),
        ("echo true >reward.json", "must be a finite number"),
        ("echo '[1]' >reward.json", "must be a finite number"),
        (": >reward.json", "reward.json is no JSON: ''"),
        ("echo one >reward.json", r"reward.json is no JSON: 'one\\n'"),
        ("mkfifo reward.json", "reward.json is no file"),
        ("mkdir reward.json", "reward.json is no file"),
        ("ln -s /etc/hostname reward.json", "reward.json can't be read"),
        ("head -c 2000000 /dev/zero >reward.json", "has more than 1048576 bytes"),
    ],
)
async def test_a_reward_file_without_a_reward_is_a_failure(folder: Path, script: str, words: str) -> None:
    """Never the reward 0."""
    with pytest.raises(AgentRewardError, match=words) as raised:
        await run(shell(script, reward="file"))
    assert raised.value.cause == "env_score"
    assert list(folder.iterdir()) == []


async def test_the_exit_code_is_a_reward() -> None:
    """Success and failure alone."""
    assert await run(shell("exit 0", reward="exit_code")) == {"agent": 1.0}
    assert await run(shell("exit 1", reward="exit_code")) == {"agent": 0.0}


@pytest.mark.parametrize(
    ("script", "reward", "words"),
    [
        ("echo out; echo why >&2; exit 2", "exit_code", "ended with status 2; its output ends with:\nout\nwhy\n"),
        ("exit 240", "exit_code", "ended with status 240$"),
        ("exit 1", "none", "ended with status 1$"),
        ("echo 1 >reward.json; exit 1", "file", "ended with status 1$"),
        ("kill -SEGV $$", "exit_code", "killed by signal 11$"),
        ("kill -KILL $$", "exit_code", "killed by signal 9$"),
        ("kill -KILL $PPID; exec sleep 3600", "exit_code", "its guard was killed$"),
        ("kill -TERM $PPID; exec sleep 3600", "exit_code", "its guard was killed$"),
    ],
)
async def test_any_other_end_is_a_failure_with_the_output(script: str, reward: str, words: str) -> None:
    """Also a program that kills its guard."""
    with pytest.raises(AgentExitError, match=words) as raised:
        await run(shell(script, reward=reward))
    assert raised.value.cause == "agent_exit"


# --- limits ----------------------------------------------------------------------------------------------------------

LITTER = """
import os, subprocess, sys, time
def note():
    with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()} ")
note()
for kind in ("child", "session", "twice"):
    if not os.fork():
        if kind != "child": os.setsid()
        if kind == "twice" and os.fork(): os._exit(0)
        note()
        time.sleep(3600)
        os._exit(0)
if sys.argv[2] == "end":
    while len(open(sys.argv[1]).read().split()) < 4: time.sleep(0.01)
    sys.exit()
time.sleep(3600)
"""
"""Four processes: the program, a child, one in a session of its own, one whose parent has ended."""


def litter(mark: Path, way: str, **options: Any) -> dict[str, Any]:
    """Options of a program that leaves processes."""
    return {"command": [sys.executable, "-c", LITTER, str(mark), way], "seconds": WAIT} | options


@pytest.mark.parametrize("stops_guard", [False, True])
async def test_a_program_that_hangs_is_killed_with_all_its_processes(
    folder: Path, tmp_path: Path, stops_guard: bool
) -> None:
    """At the limit of its time, which is a failure of its own kind; a stopped guard kills too."""
    mark = tmp_path / "mark"
    env = Env(**litter(mark, "hang", seconds=3.0))
    if stops_guard:
        script = f'{sys.executable} -c "$0" {mark} hang & kill -STOP $PPID; wait'
        env = Env(["sh", "-c", script, LITTER], seconds=3.0)
    with pytest.raises(AgentTimeoutError, match=r"ran for more than 3 s \(seconds\)") as raised:
        await run(env)
    assert raised.value.cause == "env_timeout"
    assert all(map(has_ended, await pids(mark, 4)))
    assert list(folder.iterdir()) == []


async def test_what_a_program_leaves_ends_with_it(tmp_path: Path) -> None:
    """Nothing goes on to talk to a session that is over."""
    mark = tmp_path / "mark"
    assert await run(Env(**litter(mark, "end", reward="exit_code"))) == {"agent": 1.0}
    assert all(map(has_ended, await pids(mark, 4)))


async def test_a_killed_guard_leaves_no_process(tmp_path: Path) -> None:
    """What it has guarded is found by its variables."""
    mark = tmp_path / "mark"
    wait = f"while test $(wc -w <{mark}) -lt 4; do sleep 0.05; done"
    script = f'{sys.executable} -c "$0" {mark} hang & {wait}; kill -9 $PPID'
    mark.touch()
    with pytest.raises(AgentExitError, match="its guard was killed"):
        await run(Env(["sh", "-c", script, LITTER], seconds=WAIT))
    await until(lambda: all(map(has_ended, map(int, mark.read_text().split()))))


BOMB = """
import os, sys, time
for _ in range(10):
    if not os.fork() and sys.argv[2] == "own": os.setsid()
    with open(sys.argv[1], "a") as file: file.write(".")
time.sleep(3600)
"""


@pytest.mark.parametrize("groups", ["one", "own"])
async def test_a_fork_bomb_ends_at_the_limit_of_processes(tmp_path: Path, groups: str) -> None:
    """It doubles ten times at most; the other trajectories of the worker go on."""
    mark = tmp_path / "mark"
    bomb = Env([sys.executable, "-c", BOMB, str(mark), groups], processes=20, seconds=WAIT)
    other = shell("sleep 2", reward="exit_code")
    rewards, failure = await asyncio.gather(run(other), run(bomb), return_exceptions=True)
    assert rewards == {"agent": 1.0}
    assert isinstance(failure, AgentExitError)
    assert "had more than 20 processes" in str(failure)
    before = mark.stat().st_size
    await asyncio.sleep(0.2)
    assert mark.stat().st_size == before, "one is left"


async def test_output_of_any_length_is_read_and_cut() -> None:
    """Its beginning and its end are kept; a program that prints does not wait."""
    script = "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last >&2"
    env = shell(script, output_bytes=1000, output_column="output")
    assert await run(env) is None
    text = env.columns["output"]
    assert (text[:6], text[-6:]) == ("first\n", "\nlast\n")
    assert "[99999012 bytes left out]" in text
    assert len(text) < 1100


async def test_a_cancelled_trajectory_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """Neither processes nor its folder."""
    mark = tmp_path / "mark"
    task = asyncio.create_task(run(Env(**litter(mark, "hang"))))
    found = await pids(mark, 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(map(has_ended, found))
    assert list(folder.iterdir()) == []


# --- the folder ------------------------------------------------------------------------------------------------------


async def test_files_that_may_not_be_written_are_removed_too(folder: Path, tmp_path: Path) -> None:
    """And what a link leads to stays as it is."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    script = (
        f"mkdir -p a/b; touch a/b/c; ln -s {outside} a/link; ln -s {outside} ~/link; chmod 400 a/b/c; chmod 0 a/b; "
        "chmod 500 a . .. ~; touch $TMPDIR/left"
    )
    assert await run(shell(script)) is None
    assert list(folder.iterdir()) == []
    assert outside.stat().st_mode & 0o777 == 0o500


async def test_a_folder_of_the_user_is_copied_for_each_trajectory(tmp_path: Path) -> None:
    """Also one that may not be written, with a program in it."""
    mine = tmp_path / "mine"
    mine.mkdir()
    script = "test $(ls | wc -l) = 3 && echo >more && chmod u+w agent.sh && echo >agent.sh"
    (mine / "agent.sh").write_text(f"#!/bin/sh\n{script}")
    (mine / "agent.sh").chmod(0o500)
    mine.chmod(0o500)
    env = Env(["./agent.sh"], folder=str(mine), reward="exit_code", seconds=WAIT)
    assert [await run(env), await run(env)] == [{"agent": 1.0}] * 2
    assert [path.name for path in mine.iterdir()] == ["agent.sh"]
    mine.chmod(0o700)


@pytest.mark.parametrize(
    ("keep", "script", "count"),
    [("never", "exit 3", 0), ("failures", "true", 0), ("failures", "exit 3", 1), ("always", "true", 1)],
)
async def test_folders_are_kept_as_told(folder: Path, tmp_path: Path, keep: str, script: str, count: int) -> None:
    """With the output, in a folder of the user's; a failure names the place."""
    kept = tmp_path / "kept"
    kept.mkdir()
    words = ""
    try:
        await run(shell(f"echo said; touch made; {script}", keep=keep, keep_in=str(kept)))
    except AgentExitError as failure:
        words = str(failure)
    assert list(folder.iterdir()) == []
    found = list(kept.iterdir())
    assert len(found) == count
    for place in found:
        assert (place / "output.txt").read_text() == "said\n"
        assert sorted(path.name for path in (place / "shared/work").iterdir()) == ["example.json", "made", "prompt.txt"]
        assert not words or words.endswith(f"Its folder was kept: {place}")


# --- in a worker -----------------------------------------------------------------------------------------------------


def program(**options: Any) -> EnvironmentSpec:
    """An agent in worker processes."""
    limits = Limits(WAIT, WAIT, WAIT, WAIT, WAIT, WAIT)
    root = str(Path(__file__).parents[4])
    return EnvironmentSpec(
        "program", f"{PROGRAMS}:Program", options=options, limits=limits, variables={"PYTHONPATH": root}
    )


async def nothing(row: Any, options: Any) -> Any:
    """No answer of a model: these agents ask nobody."""
    raise AssertionError


async def test_a_worker_plays_trajectories_side_by_side() -> None:
    """And answers a failure with the end of the output."""
    script = ["sh", "-c", "echo asked {prompt}; exit {status}"]
    async with WorkerPool(program(command=script, reward="exit_code", seconds=WAIT)) as pool:
        first, second, third = [await pool.episode(WAIT) for _ in range(3)]
        async with first, second, third:
            runs = [
                one.run({"prompt": "me", "status": status}, 0, nothing)
                for status, one in enumerate((first, second, third))
            ]
            *rewards, failure = await asyncio.gather(*runs, return_exceptions=True)
    assert rewards == [{"agent": 1.0}, {"agent": 0.0}]
    assert isinstance(failure, EpisodeError)
    assert "AgentExitError: the program ended with status 2; its output ends with:\nasked me" in str(failure)


async def test_a_worker_loads_the_adapter_by_its_path() -> None:
    """Without this project in its search path, and refuses wrong options before the first trajectory."""
    right = replace(program(command=["true"]), path=f"{agent_command.__file__}:Env", variables={})
    wrong = replace(right, options={"command": ["no-such-program"]})
    async with WorkerPool(right) as pool, await pool.episode(WAIT):
        assert pool.examples == {"train": None, "eval": None}
    async with WorkerPool(wrong) as pool:
        with pytest.raises(EpisodeError, match="there is no program no-such-program in PATH") as raised:
            await pool.episode(WAIT)
    assert raised.value.cause == "env_load"


async def test_an_episode_that_is_closed_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """While the program runs, and the worker goes on."""
    mark = tmp_path / "mark"
    async with WorkerPool(program(**litter(mark, "hang"))) as pool:
        async with await pool.episode(WAIT) as episode:
            running = asyncio.create_task(episode.run(ROW, 0, nothing))
            found = await pids(mark, 4)
            running.cancel()
        await until(lambda: all(map(has_ended, found)))
        [one] = pool.workers.values()
        await until(lambda: not one.num_episodes)
        assert [path for path in folder.iterdir() if path.name.startswith(folders.PREFIX)] == []


@pytest.mark.parametrize("killed", ["worker", "guard"])
async def test_nothing_outlives_a_worker_that_is_killed(folder: Path, tmp_path: Path, killed: str) -> None:
    """Neither the program nor its guard; its folder is removed when a worker loads."""
    mark = tmp_path / "mark"
    async with WorkerPool(program(**litter(mark, "hang"))) as pool, await pool.episode(WAIT) as episode:
        running = asyncio.create_task(episode.run(ROW, 0, nothing))
        found = await pids(mark, 4)
        [one] = pool.workers.values()
        await until(lambda: set(found) <= one.process.seen.keys())
        pid = one.hello.result()["pid"] if killed == "worker" else one.process.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EpisodeError, match="was killed by signal 9"):
            await running
        await until(lambda: all(map(has_ended, found)))
    [left] = [path for path in folder.iterdir() if path.name.startswith(folders.PREFIX)]
    await Env.examples("train", command=["true"])
    assert left.exists(), "it may belong to a worker that is just making it"
    then = time.time() - 3600
    os.utime(left / folders.LOCK, (then, then))
    await Env.examples("train", command=["true"])
    assert not left.exists()


async def test_a_folder_of_a_living_worker_is_not_removed(tmp_path: Path) -> None:
    """However old it is."""
    mark = tmp_path / "mark"
    old = f"touch -d '1 hour ago' ../../{folders.LOCK}"
    script = f"{old}; echo 1 >{mark}; while test -e {mark}; do sleep 0.05; done"
    running = asyncio.create_task(run(shell(f"{script}; ls example.json", reward="exit_code")))
    await pids(mark, 1)
    await Env.examples("train", command=["true"])
    mark.unlink()
    assert await running == {"agent": 1.0}


ACTOR = """
import asyncio, json, sys
from actors.environments.pool import WorkerPool
from tests.actors.environments.adapters.test_agent_command import ROW, WAIT, nothing, program
async def main():
    async with WorkerPool(program(**json.loads(sys.argv[1]))) as pool, await pool.episode(WAIT) as episode:
        await episode.run(ROW, 0, nothing)
asyncio.run(main())
"""


async def test_nothing_outlives_an_actor_that_is_killed(tmp_path: Path) -> None:
    """Nor the guard of the program, which is below that of the worker."""
    mark = tmp_path / "mark"
    command = [sys.executable, "-c", ACTOR, json.dumps(litter(mark, "hang"))]
    actor = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[4])
    try:
        found = await pids(mark, 4)
        program = look_at(found[0])
        assert program is not None
    finally:
        actor.kill()
        await actor.wait()
    await until(lambda: all(map(has_ended, [*found, program.parent])))


# --- containers ------------------------------------------------------------------------------------------------------

RUNTIME = r"""#!/usr/bin/env python3
# In the role of podman: notes its arguments, and runs a command with the variables that a container would get.
import json, os, sys
note = os.environ["CONTAINER_HOST"]
with open(note, "a") as file: file.write(json.dumps(sys.argv[1:]) + "\n")
if sys.argv[1] == "rm":
    print("Error: no container with ID or name found: no such container", file=sys.stderr)
    sys.exit(1)
words, variables, folder = sys.argv[2:], {}, "/"
while words[0].startswith("--"):
    option = words.pop(0)
    if option in ("--rm",): continue
    value = words.pop(0)
    if option == "--workdir": folder = value
    if option == "--env":
        name, has, given = value.partition("=")
        if has or name in os.environ: variables[name] = given if has else os.environ[name]
image = words.pop(0)
if image == "missing": sys.exit(125)
os.chdir(folder)
os.execvpe(words[0], words, {"PATH": "/usr/bin:/bin", "IMAGE": image} | variables)
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program with the name podman, first in PATH; the file with the arguments of its calls."""
    place = tmp_path / "bin"
    place.mkdir()
    (place / "podman").write_text(RUNTIME)
    (place / "podman").chmod(0o700)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    monkeypatch.setenv("CONTAINER_HOST", str(tmp_path / "calls"))
    return tmp_path / "calls"


def calls(file: Path) -> list[list[str]]:
    """Arguments of the calls of the runtime."""
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_command_runs_in_a_container(runtime: Path, folder: Path) -> None:
    """With its variables by name, the folder mounted, and a name by which it is removed at the end."""
    script = """test $IMAGE = some/image:1 && test "$OPENAI_API_KEY" = "$(cat ~/key)" && test "$PATH" = /usr/bin:/bin &&
        test $EXTRA = x && test -z "$CONTAINER_HOST" && echo 0.25 >$AGENT_REWARD_FILE"""
    env = shell(
        script,
        image="some/image:1",
        reward="file",
        variables={"EXTRA": "x"},
        files={"~/key": "{api_key}"},
        image_options=["--memory", "1g"],
    )
    assert await run(env) == {"agent": 0.25}
    started, removed = calls(runtime)
    name = started[started.index("--name") + 1]
    assert removed == ["rm", "--force", name]
    assert started[:2] == ["run", "--rm"]
    shared = f"{folder.resolve()}/{name}/shared"
    options = {
        ("--network", "host"),
        ("--volume", f"{shared}:{shared}"),
        ("--workdir", f"{shared}/work"),
        ("--pids-limit", "64"),
        ("--env", "OPENAI_API_KEY"),
        ("--env", f"HOME={shared}/home"),
        ("--memory", "1g"),
    }
    assert options <= set(itertools.pairwise(started))
    assert not any(KEY in word for word in started)
    assert started[started.index("some/image:1") + 1 :] == ["sh", "-c", script]
    assert list(folder.iterdir()) == []


async def test_a_container_is_removed_when_its_trajectory_is_cancelled(runtime: Path, tmp_path: Path) -> None:
    """By its name: the processes of docker's containers are not below the worker."""
    mark = tmp_path / "mark"
    task = asyncio.create_task(run(shell(f"echo $$ >{mark}; exec sleep 3600", image="i")))
    found = await pids(mark, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(map(has_ended, found))
    assert [call[0] for call in calls(runtime)] == ["run", "rm"]


async def test_a_failure_of_the_runtime_is_named(runtime: Path) -> None:
    """Its status is not that of the program."""
    with pytest.raises(AgentExitError, match=r"ended with status 125 \(podman itself failed\)"):
        await run(shell("true", image="missing"))


async def test_a_container_that_a_killed_worker_has_left_is_removed(runtime: Path, folder: Path) -> None:
    """With its folder, when the next worker loads."""
    left = folder / f"{folders.PREFIX}left"
    (left / "shared").mkdir(parents=True)
    for name in (folders.LOCK, containers.NAME):
        (left / name).touch()
    os.utime(left / folders.LOCK, (0, 0))
    await Env.examples("train", command=["true"], image="i")
    assert calls(runtime) == [["rm", "--force", left.name]]
    assert not left.exists()


# --- options ---------------------------------------------------------------------------------------------------------


def test_the_options_of_the_page_are_right() -> None:
    """Those of docs/reference/agents.md."""
    page = Path(__file__).parents[4] / "docs/reference/agents.md"
    assert problems(json.loads(page.read_text().partition("```json\n")[2].partition("```")[0])) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": "agent --x"}, "command is 'agent --x', but must be a list of texts"),
        ({"command": []}, "command is empty"),
        ({"command": ["true"], "reward": "exit"}, "reward is 'exit', but must be one of none, file, exit_code"),
        ({"command": ["true"], "seconds": -1}, "seconds is -1, but must be at least 0"),
        ({"command": ["true"], "output_bytes": 1}, "output_bytes is 1, but must be at least 2"),
        ({"command": ["true"], "variables": {"a=b": "c"}}, "variables has the name 'a=b'"),
        ({"command": ["true"], "files": {"../a": ""}}, "files has the path '../a'"),
        ({"command": ["true"], "files": {"reward.json": ""}}, "files has reward.json, a name of the agent's own"),
        ({"command": ["true"], "folder": "/no/such"}, "folder: there is no folder /no/such"),
        ({"command": ["true"], "inherit": ["NO_SUCH_KEY"]}, "inherit names NO_SUCH_KEY, but the worker has no such"),
        ({"command": ["./agent"]}, r"command: ./agent is in the working folder, but neither in folder nor in files"),
        ({"command": ["/no/such"]}, "command: there is no program /no/such; install it"),
        ({"command": ["true"], "keep": "always", "keep_in": "/no/such"}, "keep_in: there is no folder /no/such"),
        ({"command": ["true"], "comand": 1}, "options: got an unexpected keyword argument 'comand'"),
    ],
)
def test_wrong_options_are_told_in_words(options: dict[str, Any], words: str) -> None:
    """Without a worker, for `actors check`."""
    [problem] = problems(options)
    assert words in problem


def test_an_image_needs_a_container_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of both, or the one that is named."""
    monkeypatch.setenv("PATH", str(tmp_path))
    [problem] = problems({"command": ["agent"], "image": "i"})
    assert problem.startswith("image: there is neither podman nor docker on this machine")
    (tmp_path / "docker").touch(0o700)
    assert problems({"command": ["agent"], "image": "i"}) == []
    [problem] = problems({"command": ["agent"], "image": "i", "runtime": "podman"})
    assert problem.startswith("image: there is no podman on this machine")
