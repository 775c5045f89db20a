"""Agents that are programs: `actors/environments/adapters/agent_command.py:Env`.

A trajectory is a run of a command that talks to an LLM API. The session of the trajectory gives the address and the
key; the command finds them in the variables that clients of OpenAI and Anthropic read. Uses the standard library alone.
Options are in docs/reference/agents.md.
"""

import asyncio
import base64
import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING or "grpo_environment_worker" not in sys.modules:
    from actors.environments.worker.commands import Command, Ended
else:
    # as the program of a worker has loaded it, for any interpreter
    from grpo_environment_worker.commands import Command, Ended

Json = dict[str, Any]
Rewards = dict[str, float | None]

REWARDS, KEEPS = ("none", "file", "exit_code"), ("never", "failures", "always")
RUNTIMES = ("podman", "docker")
INHERITED = (
    *("PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME", "SHELL"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables of the worker that a program gets without being named: none of them is a secret."""
OF_THE_MACHINE = ("PATH", "LD_LIBRARY_PATH", "USER", "LOGNAME", "SHELL", "SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR")
"""Variables that mean something else in a container."""
OF_THE_RUNTIME = (
    *("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "USER", "LOGNAME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"),
    *("XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT"),
    *("DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "CONTAINER_HOST", "CONTAINERS_CONF", "REGISTRY_AUTH_FILE"),
)
"""Variables that podman and docker themselves read; of these names a container gets values by the command line."""
EXAMPLE, PROMPT, REWARD = "example.json", "prompt.txt", "reward.json"
"""Files in the working folder."""
PREFIX, LOCK, CONTAINER, OUTPUT = "grpo-agent-", "grpo-agent.lock", "container", "output.txt"
PLACEHOLDER = re.compile(r"\$\{\w+\}|\{\{([^\W\d]\w*)\}\}|\{([^\W\d]\w*)\}")
"""A variable of a shell, `{{name}}` for the text `{name}`, or a placeholder."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLE_BYTES = 120_000
"""Longest value of an argument or variable; the kernel takes 131 071 bytes, with the name."""
REWARD_BYTES = 1 << 20
TOLD_CHARACTERS = 2500
"""Characters of the output in the text of a failure."""
STALE_SECONDS = 60.0
"""Age from which a folder is removed whose worker has ended."""
REMOVE_SECONDS = 60.0
"""Limit of the removal of a container."""


_UNDER_WAY: set["asyncio.Future[Any]"] = set()
"""Trajectories that have not ended: asyncio itself holds only weak references."""


class AgentError(RuntimeError):
    """Failure of an agent; its text has the end of what the program has printed."""

    cause: ClassVar[str] = "env_step"
    """Cause under which the failure is counted."""


class AgentStartError(AgentError):
    """Failure before the program runs: a file that can't be copied, a placeholder without a column."""

    cause = "env_reset"


class AgentExitError(AgentError):
    """End of the program that is no result: a status, a signal, too many processes."""

    cause = "agent_exit"


class AgentTimeoutError(AgentError):
    """Program that was killed at its limit of time."""

    cause = "env_timeout"


class AgentRewardError(AgentError):
    """Reward file that holds no reward."""

    cause = "env_score"


class Env:
    """One trajectory: a command in a folder of its own.

    Args:
        command: program and arguments. No shell reads them; `["bash", "-c", "…"]` names one. `{prompt}`, `{base_url}`,
            `{api_key}`, `{folder}`, `{example_file}`, `{prompt_file}`, `{reward_file}` and `{COLUMN}` are replaced.
        folder: folder that is copied into each working folder; a relative path starts at the worker's directory.
        files: further files by path, with their text. A path is relative to the working folder, or starts with `~/`.
        variables: further environment variables, with placeholders as in `command`.
        inherit: names of variables that the program gets from the worker, such as an API key for a tool.
        hidden: columns that example.json leaves out, such as the answer.
        reward: source of the reward. `none`: elsewhere; `file`: reward.json; `exit_code`: 1 for the status 0, 0 for 1.
        name: name of the reward, where the program gives only a number.
        seconds: limit of the program's time; 0 leaves it to the limits of the trajectory.
        processes: most processes of the program, itself included; 0: any number.
        output_bytes: bytes of the output that are kept, half of them from its beginning and half from its end.
        output_column: name of a column with the output, for reward functions; empty: none.
        keep: which folders stay, with the output: `never`, `failures` or `always`.
        keep_in: folder for them; empty: they stay in the folder for temporary files.
        image: container image to run the command in; empty: it runs on the machine itself.
        runtime: `podman` or `docker`, or a path of one; empty: the first of them that is installed.
        image_options: further options of `podman run` or `docker run`.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: str = "",
        files: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        inherit: Sequence[str] = (),
        hidden: Sequence[str] = (),
        reward: str = "none",
        name: str = "agent",
        seconds: float = 600.0,
        processes: int = 64,
        output_bytes: int = 20_000,
        output_column: str = "",
        keep: str = "never",
        keep_in: str = "",
        image: str = "",
        runtime: str = "",
        image_options: Sequence[str] = (),
    ) -> None:
        self._command, self._folder, self._files = command, folder, dict(files or {})
        self._variables, self._inherit, self._hidden = dict(variables or {}), inherit, hidden
        self._reward, self._name, self._seconds, self._processes = reward, name, seconds, processes
        self._output_bytes, self._output_column = output_bytes, output_column
        self._keep, self._keep_in = keep, keep_in
        self._image, self._image_options = image, image_options
        self._runtime = _found_runtime(runtime) if image else ""
        self._runtime_name = runtime
        if problems := [*self._wrong_options(), *self._missing()]:
            raise ValueError("; ".join(problems))
        self.columns: Json = {}

    @staticmethod
    async def examples(split: str, **options: Any) -> int | None:
        """Return None: each number is an example. Refuse wrong options; remove what killed workers have left."""
        env = Env(**options)
        for root in await asyncio.to_thread(lambda: list(_stale_places())):
            # another worker may remove it at the same time
            with contextlib.suppress(OSError):
                await env._remove(root)
        return None

    async def run(self, data: Json, base_url: str, api_key: str) -> Rewards | None:
        """Run the command for an example; return its rewards.

        Raises:
            AgentError: no reward, because the program has failed.
        """
        stop = asyncio.Event()
        # in a task of its own: a cancellation ends the program, and leaves neither its processes nor its folder
        playing = asyncio.ensure_future(self._play(data, base_url, api_key, stop))
        _UNDER_WAY.add(playing)
        playing.add_done_callback(_forget)
        try:
            return await asyncio.shield(playing)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([playing])
            raise

    async def _play(self, data: Json, base_url: str, api_key: str, stop: asyncio.Event) -> Rewards | None:
        """Make a folder, run the command there, read the reward, remove the folder."""
        place = await asyncio.to_thread(_Place)
        output, keeps = "", self._keep != "never"
        try:
            await asyncio.to_thread(self._fill, place, data, base_url, api_key)
            ended = await self._ended(place, data, base_url, api_key, stop)
            output = ended.output.text()
            rewards = await asyncio.to_thread(self._rewards, ended, place)
            if self._output_column:
                self.columns = {self._output_column: output}
            keeps = self._keep == "always"
            return rewards
        except AgentError as failure:
            kept = f"\nIts folder was kept: {self._kept(place)}" if keeps else ""
            told = f"; its output ends with:\n{output[-TOLD_CHARACTERS:]}" if output.strip() else ""
            raise type(failure)(f"{failure}{told}{kept}") from None
        finally:
            # nobody waits for a stopped one, so it is no failure
            await self._over(place, output, self._keep == "always" if stop.is_set() else keeps)

    # --- before --------------------------------------------------------------------------------------------------

    def _wrong_options(self) -> Iterator[str]:
        """Yield what is wrong with the options, whatever the machine has."""
        lists = {"command": self._command, "inherit": self._inherit, "hidden": self._hidden}
        for key, value in {**lists, "image_options": self._image_options}.items():
            if isinstance(value, str) or not all(isinstance(word, str) for word in value):
                yield f"{key} is {value!r}, but must be a list of texts"
        if not self._command:
            yield "command is empty, but must be a program and its arguments"
        for key, choice, choices in (("reward", self._reward, REWARDS), ("keep", self._keep, KEEPS)):
            if choice not in choices:
                yield f"{key} is {choice!r}, but must be one of {', '.join(choices)}"
        numbers = {"seconds": self._seconds, "processes": self._processes, "output_bytes": self._output_bytes - 2}
        for key, number in numbers.items():
            if number < 0:
                bound = 2 if key == "output_bytes" else 0
                yield f"{key} is {number + bound}, but must be at least {bound}"
        yield from (f"variables has the name {name!r}" for name in self._variables if not NAME.fullmatch(name))
        yield from _wrong_files(self._files)

    def _missing(self) -> Iterator[str]:
        """Yield what this machine lacks."""
        folder = Path(self._folder)
        if self._folder and not folder.is_dir():
            yield f"folder: there is no folder {folder.absolute()}"
        for name in (EXAMPLE, PROMPT, REWARD):
            if name in self._files or (self._folder and (folder / name).exists()):
                yield f"{'files' if name in self._files else 'folder'} has {name}, a name of the agent's own; rename it"
        for name in self._inherit:
            if name not in os.environ:
                yield f"inherit names {name}, but the worker has no such variable; set it, or leave the name out"
        if self._image:
            if not self._runtime:
                sought = f"no {self._runtime_name}" if self._runtime_name else "neither podman nor docker"
                yield f"image: there is {sought} on this machine; install one, or leave image out"
        elif self._command and isinstance(program := self._command[0], str):
            yield from self._missing_program(program)
        if self._keep_in and not Path(self._keep_in).is_dir():
            yield f"keep_in: there is no folder {Path(self._keep_in).absolute()}; make it"

    def _missing_program(self, program: str) -> Iterator[str]:
        """Yield words on a program that is not there, as far as it is known before the example."""
        if PLACEHOLDER.search(program):
            return
        path = self._variables.get("PATH", os.environ.get("PATH"))
        is_path = "/" in program
        if is_path and not program.startswith("/"):
            # in the working folder, which is made of these
            name = str(PurePosixPath(program))
            if name not in map(_normal, self._files) and not (self._folder and Path(self._folder, name).is_file()):
                yield f"command: {program} is in the working folder, but neither in folder nor in files"
        elif not PLACEHOLDER.search(path or "") and shutil.which(program, path=path) is None:
            where = "" if is_path else f" in PATH ({path})"
            yield f"command: there is no program {program}{where}; install it, or give its whole path"

    def _fill(self, place: "_Place", data: Json, base_url: str, api_key: str) -> None:
        """Fill the working folder.

        Raises:
            AgentStartError: a file can't be copied or written.
        """
        try:
            if self._folder:
                shutil.copytree(self._folder, place.work, symlinks=True, dirs_exist_ok=True)
                place.work.chmod(0o700)
            known = _of_the_session(place, data, base_url, api_key)
            for path, text in self._files.items():
                file = place.home / path[2:] if path.startswith("~/") else place.work / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(_bytes(PLACEHOLDER.sub(lambda match: _replaced(match, known), text)))
                if text.startswith("#!"):
                    file.chmod(0o700)
            shown = {name: value for name, value in data.items() if name not in self._hidden}
            (place.work / EXAMPLE).write_text(json.dumps(shown, default=_plain), "ascii")
            (place.work / PROMPT).write_bytes(_bytes(known["prompt"]))
        except (OSError, shutil.Error) as error:
            raise AgentStartError(f"the working folder can't be filled: {error}") from error

    def _environment(self, place: "_Place", data: Json, base_url: str, api_key: str) -> dict[str, str]:
        """Return the variables of the program."""
        inherited = {name: os.environ[name] for name in (*INHERITED, *self._inherit) if name in os.environ}
        own = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            "ANTHROPIC_AUTH_TOKEN": api_key,
            "AGENT_EXAMPLE_FILE": str(place.work / EXAMPLE),
            "AGENT_PROMPT_FILE": str(place.work / PROMPT),
            "AGENT_REWARD_FILE": str(place.work / REWARD),
        }
        prompt = _prompt_text(data)
        if "\0" not in prompt and len(_bytes(prompt)) <= VARIABLE_BYTES:
            own["AGENT_PROMPT"] = prompt
        folders = {"HOME": str(place.home), "TMPDIR": str(place.temporary)}
        known = _of_the_session(place, data, base_url, api_key)
        further = {
            name: _filled(str(value), known, data, f"the variable {name}") for name, value in self._variables.items()
        }
        mark = {"AGENT_EXAMPLE_FILE": own["AGENT_EXAMPLE_FILE"]}
        return folders | inherited | own | further | mark

    # --- the program ---------------------------------------------------------------------------------------------

    async def _ended(self, place: "_Place", data: Json, base_url: str, api_key: str, stop: asyncio.Event) -> Ended:
        """Run the command; return how it has ended."""
        known = _of_the_session(place, data, base_url, api_key)
        words = [_filled(word, known, data, "command") for word in self._command]
        variables = self._environment(place, data, base_url, api_key)
        folder = place.work
        if self._image:
            (place.root / CONTAINER).write_text(place.root.name)
            words = self._in_container(place, words, variables)
            variables, folder = (
                _runtime_environment()
                | {name: value for name, value in variables.items() if name not in OF_THE_RUNTIME},
                place.root,
            )
        command = Command(words, variables, folder, "AGENT_EXAMPLE_FILE", self._processes, self._output_bytes)
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: command.stop())
        if stop.is_set():
            command.stop()
        try:
            return await command.run(self._seconds)
        finally:
            stopping.cancel()

    def _in_container(self, place: "_Place", words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """Return the command that runs a command in a container. No value of a session is an argument of it."""
        options = ["--rm", "--name", place.root.name, "--network", "host", "--workdir", str(place.work)]
        options += ["--volume", f"{place.shared}:{place.shared}"]
        if self._processes:
            options += ["--pids-limit", str(self._processes)]
        if "docker" in Path(self._runtime).name:
            # files of another user could not be removed
            options += ["--user", f"{os.getuid()}:{os.getgid()}"]
        for name, value in variables.items():
            if name in OF_THE_MACHINE and name not in self._variables and name not in self._inherit:
                continue
            options += ["--env", f"{name}={value}" if name in OF_THE_RUNTIME else name]
        return [self._runtime, "run", *options, *self._image_options, self._image, *words]

    def _rewards(self, ended: Ended, place: "_Place") -> Rewards | None:
        """Return the rewards of a program that has ended; raise if it has failed."""
        if ended.reason == "late":
            raise AgentTimeoutError(f"the program ran for more than {self._seconds:g} s (seconds), and was killed")
        if ended.reason == "processes":
            raise AgentExitError(f"the program had more than {self._processes} processes (processes), and was killed")
        if ended.reason == "unstartable":
            raise AgentExitError(f"{self._command[0]} can't be started: {ended.words}")
        if ended.reason != "ended":
            how = "its guard was killed" if ended.reason == "lost" else "it was stopped"
            raise AgentExitError(f"the program was killed: {how}")
        if ended.status < 0:
            raise AgentExitError(f"the program was killed by signal {-ended.status}")
        if self._reward == "exit_code" and ended.status in (0, 1):
            return {self._name: 1.0 - ended.status}
        if ended.status:
            whose = f" ({Path(self._runtime).name} itself failed)" if self._image and ended.status == 125 else ""
            raise AgentExitError(f"the program ended with status {ended.status}{whose}")
        return _rewards_in(place.work / REWARD, self._name) if self._reward == "file" else None

    # --- after ---------------------------------------------------------------------------------------------------

    def _kept(self, place: "_Place") -> Path:
        """Return where a folder is kept."""
        return Path(self._keep_in or place.root.parent, place.root.name).absolute()

    async def _over(self, place: "_Place", output: str, keeps: bool) -> None:
        """Remove the folder of a trajectory, or keep it. No failure of that is one of the trajectory."""
        try:
            if not keeps:
                await self._remove(place.root)
                return
            await self._remove_container(place.root)
            await asyncio.to_thread(place.keep, self._kept(place), output)
        except Exception as error:  # noqa: BLE001 - see above
            print(f"the folder {place.root} of an agent stays: {error}", file=sys.stderr)
        finally:
            place.unlock()

    async def _remove(self, root: Path) -> None:
        """Remove a folder, and the container that a trajectory may have left."""
        await self._remove_container(root)
        await asyncio.to_thread(_remove_tree, root)

    async def _remove_container(self, root: Path) -> None:
        """Remove the container of a trajectory. It is the daemon's with docker, and ends with no process of ours."""
        if not (root / CONTAINER).exists():
            return
        runtime = self._runtime or _found_runtime("")
        if not runtime:
            return
        mark = {"AGENT_EXAMPLE_FILE": f"{root}/removed"}
        command = Command(
            [runtime, "rm", "--force", root.name], _runtime_environment() | mark, Path("/"), "AGENT_EXAMPLE_FILE"
        )
        ended = await command.run(REMOVE_SECONDS)
        text = ended.output.text().strip()
        # it has removed itself (--rm), unless it was killed
        if (ended.reason != "ended" or ended.status) and "no such container" not in text.lower():
            print(f"the container {root.name} of an agent may be left: {text[-500:]}", file=sys.stderr)


class _Place:
    """Folder of a trajectory. A worker that is killed leaves it; the next one finds that nobody holds the lock."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        self.shared = self.root / "shared"
        """What the program may write; nothing that this process trusts lies there."""
        self.work, self.home, self.temporary = (self.shared / name for name in ("work", "home", "tmp"))
        self.shared.mkdir()
        for folder in (self.work, self.home, self.temporary):
            folder.mkdir()
        self._lock = (self.root / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def unlock(self) -> None:
        """Let go of the folder."""
        self._lock.close()

    def keep(self, target: Path, output: str) -> None:
        """Keep the folder, with the output."""
        (self.root / OUTPUT).write_bytes(_bytes(output))
        # without it, it is no folder of a trajectory any more
        (self.root / LOCK).unlink()
        if target != self.root:
            shutil.move(self.root, target)


def _wrong_files(files: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the paths and texts of files."""
    for path, text in files.items():
        if not isinstance(text, str):
            yield f"files has {text!r} as {path}, but must have its text"
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path in ("", "~/"):
            yield f"files has the path {path!r}; it must lie in the working folder, or start with ~/"


def problems(options: Json) -> list[str]:
    """Return what is wrong with options on this machine, in words; for `actors check`, which starts no worker."""
    try:
        Env(**options)
    except (TypeError, ValueError) as error:
        return [str(error).replace("Env.__init__()", "options:")]
    return []


def _forget(playing: "asyncio.Future[Any]") -> None:
    """Forget a trajectory that has ended; nobody may be left to hear of its failure."""
    _UNDER_WAY.discard(playing)
    if not playing.cancelled():
        playing.exception()


def _found_runtime(name: str) -> str:
    """Return the path of a container runtime; empty if there is none."""
    return next((path for one in ([name] if name else RUNTIMES) if (path := shutil.which(one))), "")


def _runtime_environment() -> dict[str, str]:
    """Return the variables that podman and docker read, as this process has them."""
    return {name: os.environ[name] for name in OF_THE_RUNTIME if name in os.environ}


def _of_the_session(place: _Place, data: Json, base_url: str, api_key: str) -> dict[str, str]:
    """Return the placeholders that do not depend on the columns."""
    return {
        "prompt": _prompt_text(data),
        "base_url": base_url,
        "api_key": api_key,
        "folder": str(place.work),
        "example_file": str(place.work / EXAMPLE),
        "prompt_file": str(place.work / PROMPT),
        "reward_file": str(place.work / REWARD),
    }


def _filled(text: str, known: Mapping[str, str], data: Json, where: str) -> str:
    """Return a text with its placeholders replaced, each once: a value is not searched.

    Raises:
        AgentStartError: a placeholder is no column, or the text is no argument.
    """
    values = {name: one if isinstance(one, str) else json.dumps(one, default=_plain) for name, one in data.items()}
    values |= known
    for match in PLACEHOLDER.finditer(text):
        if (name := match[2]) and name not in values:
            raise AgentStartError(
                f"{where} has {{{name}}}, but the example has no column {name}; it has {', '.join(sorted(data))}. "
                f"Write {{{{{name}}}}} for the text {{{name}}} itself"
            )
    # no argument of a program has half a surrogate pair
    filled = _bytes(PLACEHOLDER.sub(lambda match: _replaced(match, values), text)).decode()
    if "\0" in filled:
        raise AgentStartError(f"{where} has a NUL character, which no argument can have; read {EXAMPLE} instead")
    if len(filled.encode()) > VARIABLE_BYTES:
        raise AgentStartError(
            f"{where} has {len(filled.encode())} bytes, but at most {VARIABLE_BYTES} are possible; read {PROMPT} or "
            f"{EXAMPLE} instead of a placeholder"
        )
    return filled


def _replaced(match: "re.Match[str]", values: Mapping[str, str]) -> str:
    """Return the text in place of a placeholder; an unknown one stays."""
    return f"{{{match[1]}}}" if match[1] else values.get(match[2], match[0])


def _prompt_text(data: Json) -> str:
    """Return the prompt of an example as a text: the texts of its messages, with an empty line between them."""
    prompt = data.get("prompt") or ""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") or "" for message in prompt]
    texts = [
        content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
        for content in contents
    ]
    return "\n\n".join(text for text in texts if text)


def _rewards_in(file: Path, name: str) -> Rewards | None:
    """Return the rewards in a file; None if the program has written none.

    Raises:
        AgentRewardError: the file holds no reward.
    """
    try:
        # the program may have put anything in its place
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgentRewardError(f"{file.name} can't be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise AgentRewardError(f"{file.name} is no file")
        with os.fdopen(descriptor, "rb", closefd=False) as opened:
            content = opened.read(REWARD_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > REWARD_BYTES:
        raise AgentRewardError(f"{file.name} has more than {REWARD_BYTES} bytes")
    shown = content[:200].decode(errors="replace")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AgentRewardError(f"{file.name} is no JSON: {shown!r}") from error
    rewards = value if isinstance(value, dict) else {name: value}
    for key, one in rewards.items():
        if one is not None and (isinstance(one, bool) or not isinstance(one, int | float)):
            raise AgentRewardError(f"{file.name} has {shown!r}, but the reward {key!r} must be a number")
        if one is not None and not _is_finite(one):
            raise AgentRewardError(f"{file.name} has {shown!r}, but the reward {key!r} must be a finite number")
    return {key: None if one is None else float(one) for key, one in rewards.items()}


def _is_finite(number: float) -> bool:
    """Return whether a number of JSON is finite as a float."""
    try:
        return math.isfinite(float(number))
    except OverflowError:  # an integer of any length
        return False


def _stale_places() -> Iterator[Path]:
    """Yield the folders of trajectories whose workers were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        # another user's, or one that is just being removed
        with contextlib.suppress(OSError):
            facts = lock.lstat()
            is_ours = facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and not lock.parent.is_symlink()
            if not is_ours or time.time() - facts.st_mtime < STALE_SECONDS:
                continue
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield lock.parent


def _remove_tree(root: Path) -> None:
    """Remove a folder with everything in it, also what its owner may not write."""
    for parent, folders, _ in os.walk(root):
        for folder in folders:
            path = Path(parent, folder)
            # of a link it would change the target
            with contextlib.suppress(OSError):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(root)


def _normal(path: str) -> str:
    """Return a relative path without dots."""
    return str(PurePosixPath(path))


def _plain(value: Any) -> Any:
    """Return what JSON has for a value: bytes as base64, anything else as its text."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _bytes(text: str) -> bytes:
    """Return a text as UTF-8; half a surrogate pair becomes a question mark."""
    return text.encode(errors="replace")
