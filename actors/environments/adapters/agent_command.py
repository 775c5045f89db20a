"""Agents that are programs: `actors/environments/adapters/agent_command.py:Env`.

A trajectory is a run of a command that talks to an LLM API. The session of the trajectory gives the address and the
key; the command finds them in the variables that clients of OpenAI and Anthropic read. Options are in
docs/reference/agents.md.
"""

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "grpo_environment_worker" not in sys.modules:
    from actors.environments.worker.agents import containers, texts
    from actors.environments.worker.agents.commands import Command, Ended
    from actors.environments.worker.agents.errors import AgentError, AgentExitError, AgentStartError, AgentTimeoutError
    from actors.environments.worker.agents.folders import Folder, remove_tree, stale_folders
    from actors.environments.worker.agents.rewards import Rewards, rewards_in
else:
    # under the name that the program of a worker gives its package, in an interpreter without ours
    from grpo_environment_worker.agents import containers, texts
    from grpo_environment_worker.agents.commands import Command, Ended
    from grpo_environment_worker.agents.errors import AgentError, AgentExitError, AgentStartError, AgentTimeoutError
    from grpo_environment_worker.agents.folders import Folder, remove_tree, stale_folders
    from grpo_environment_worker.agents.rewards import Rewards, rewards_in

Json = dict[str, Any]

REWARDS, KEEPS = ("none", "file", "exit_code"), ("never", "failures", "always")
INHERITED = (
    *("PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME", "SHELL"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Variables of the worker that a program gets without being named: none of them is a secret."""
EXAMPLE, PROMPT, REWARD = "example.json", "prompt.txt", "reward.json"
"""Files in the working folder."""
MARK = "AGENT_EXAMPLE_FILE"
"""Variable with a value that no other trajectory has."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TOLD_CHARACTERS = 2500
"""Characters of the output in the text of a failure."""

_UNDER_WAY: set["asyncio.Future[Any]"] = set()
"""Trajectories that have not ended: asyncio itself holds only weak references."""


@dataclass(frozen=True)
class Trajectory:
    """One run of the program: its folder, its example, and its session."""

    folder: Folder
    data: Json
    base_url: str
    api_key: str

    @property
    def prompt(self) -> str:
        """Prompt of the example as a text."""
        return texts.prompt_text(self.data.get("prompt"))

    @property
    def own_values(self) -> dict[str, str]:
        """Values of placeholders that no column has."""
        work = self.folder.work
        return {
            "prompt": self.prompt,
            "base_url": self.base_url,
            "api_key": self.api_key,
            "folder": str(work),
            "example_file": str(work / EXAMPLE),
            "prompt_file": str(work / PROMPT),
            "reward_file": str(work / REWARD),
        }

    @property
    def values(self) -> Json:
        """Values of all placeholders."""
        return self.data | self.own_values

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the session and of the folder."""
        work = self.folder.work
        found = {
            "HOME": str(self.folder.home),
            "TMPDIR": str(self.folder.temporary),
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            MARK: str(work / EXAMPLE),
            "AGENT_PROMPT_FILE": str(work / PROMPT),
            "AGENT_REWARD_FILE": str(work / REWARD),
        }
        # the kernel takes no longer one, and no NUL
        if "\0" not in self.prompt and len(texts.as_bytes(self.prompt)) <= texts.MOST_BYTES:
            found["AGENT_PROMPT"] = texts.as_bytes(self.prompt).decode()
        return found


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
        self._image, self._runtime_name, self._image_options = image, runtime, image_options
        self._runtime = containers.found_runtime(runtime)
        self.columns: Json = {}
        if problems := [*self._wrong_options(), *self._missing()]:
            raise ValueError("; ".join(problems))

    @staticmethod
    async def examples(split: str, **options: Any) -> int | None:
        """Return None: each number is an example. Refuse wrong options; remove what killed workers have left."""
        env = Env(**options)
        for root in await asyncio.to_thread(lambda: list(stale_folders())):
            # another worker may remove it at the same time
            with contextlib.suppress(OSError):
                await containers.remove_container(env._runtime, root)
                await asyncio.to_thread(remove_tree, root)
        return None

    async def run(self, data: Json, base_url: str, api_key: str) -> Rewards | None:
        """Run the command for an example; return its rewards.

        Raises:
            AgentError: the program has failed, so there is no reward.
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
        folder = await asyncio.to_thread(Folder)
        one = Trajectory(folder, data, base_url, api_key)
        output, keeps = "", self._keep != "never"
        try:
            await asyncio.to_thread(self._fill, one)
            ended = await self._ended(one, stop)
            output = ended.output.text()
            rewards = await asyncio.to_thread(self._rewards, ended, folder)
            if self._output_column:
                self.columns = {self._output_column: output}
            keeps = self._keep == "always"
            return rewards
        except AgentError as failure:
            told = f"; its output ends with:\n{output[-TOLD_CHARACTERS:]}" if output.strip() else ""
            kept = f"\nIts folder was kept: {self._kept(folder)}" if keeps else ""
            raise type(failure)(f"{failure}{told}{kept}") from None
        finally:
            # nobody waits for a stopped one, so it is no failure
            await self._over(folder, output, self._keep == "always" if stop.is_set() else keeps)

    # --- before --------------------------------------------------------------------------------------------------

    def _wrong_options(self) -> Iterator[str]:
        """Yield what is wrong with the options, whatever the machine has."""
        lists = {"command": self._command, "inherit": self._inherit, "hidden": self._hidden}
        for key, value in {**lists, "image_options": self._image_options}.items():
            if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
                yield f"{key} is {value!r}, but must be a list of texts"
        if not self._command:
            yield "command is empty, but must be a program and its arguments"
        for key, choice, choices in (("reward", self._reward, REWARDS), ("keep", self._keep, KEEPS)):
            if choice not in choices:
                yield f"{key} is {choice!r}, but must be one of {', '.join(choices)}"
        least = {
            "seconds": (self._seconds, 0),
            "processes": (self._processes, 0),
            "output_bytes": (self._output_bytes, 2),
        }
        yield from (f"{key} is {one}, but must be at least {low}" for key, (one, low) in least.items() if one < low)
        for name in self._variables:
            if not VARIABLE.fullmatch(name):
                yield f"variables has the name {name!r}, but a name has letters, digits and underscores"
        for path, text in self._files.items():
            if not isinstance(text, str):
                yield f"files has {text!r} as {path}, but must have its text"
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or path in ("", "~/"):
                yield f"files has the path {path!r}; it must lie in the working folder, or start with ~/"

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
        if self._image and not self._runtime:
            sought = f"no {self._runtime_name}" if self._runtime_name else "neither podman nor docker"
            yield f"image: there is {sought} on this machine; install one, or leave image out"
        if self._command and not self._image:
            yield from self._missing_program(str(self._command[0]))
        if self._keep_in and not Path(self._keep_in).is_dir():
            yield f"keep_in: there is no folder {Path(self._keep_in).absolute()}; make it"

    def _missing_program(self, program: str) -> Iterator[str]:
        """Yield words on a program that is not there, as far as it is known before the example."""
        path = self._variables.get("PATH", os.environ.get("PATH", os.defpath))
        if texts.has_placeholder(program) or texts.has_placeholder(path):
            return
        if "/" in program and not program.startswith("/"):
            # in the working folder, which is made of these
            is_file = str(PurePosixPath(program)) in {str(PurePosixPath(file)) for file in self._files}
            if not is_file and not (self._folder and Path(self._folder, program).is_file()):
                yield f"command: {program} is in the working folder, but neither in folder nor in files"
        elif shutil.which(program, path=path) is None:
            where = "" if "/" in program else f" in PATH ({path})"
            yield f"command: there is no program {program}{where}; install it, or give its whole path"

    def _fill(self, one: Trajectory) -> None:
        """Fill the working folder.

        Raises:
            AgentStartError: a file can't be copied or written.
        """
        work = one.folder.work
        try:
            if self._folder:
                shutil.copytree(self._folder, work, symlinks=True, dirs_exist_ok=True)
                work.chmod(0o700)
            for path, text in self._files.items():
                file = one.folder.home / path[2:] if path.startswith("~/") else work / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(texts.as_bytes(texts.filled_file(text, one.own_values)))
                if text.startswith("#!"):
                    file.chmod(0o700)
            shown = {name: value for name, value in one.data.items() if name not in self._hidden}
            (work / EXAMPLE).write_text(texts.as_json(shown), "ascii")
            (work / PROMPT).write_bytes(texts.as_bytes(one.prompt))
        except (OSError, shutil.Error) as error:
            raise AgentStartError(f"the working folder can't be filled: {error}") from error

    def _environment(self, one: Trajectory) -> dict[str, str]:
        """Return the variables of the program."""
        inherited = {name: os.environ[name] for name in (*INHERITED, *self._inherit) if name in os.environ}
        own, values = one.variables, one.values
        # the session's come before inherited ones, except for the folders
        found = own | inherited | {name: value for name, value in own.items() if name not in ("HOME", "TMPDIR")}
        found |= {name: texts.filled(str(text), values, f"variable {name}") for name, text in self._variables.items()}
        return found | {MARK: own[MARK]}

    # --- the program ---------------------------------------------------------------------------------------------

    async def _ended(self, one: Trajectory, stop: asyncio.Event) -> Ended:
        """Run the command; return how it has ended."""
        values = one.values
        words = [texts.filled(word, values, "command") for word in self._command]
        variables, folder, processes = self._environment(one), one.folder.work, self._processes
        if self._image:
            (one.folder.root / containers.NAME).touch()
            named = (*self._variables, *self._inherit)
            container = containers.Container(self._runtime, self._image, self._image_options, processes)
            words = container.arguments(one.folder, words, variables, named)
            # the container has the limit; the guard would also count the processes of the runtime
            variables, folder, processes = containers.environment(variables), one.folder.root, 0
        command = Command(words, variables, folder, MARK, processes, self._output_bytes)
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: command.stop())
        if stop.is_set():
            command.stop()
        try:
            return await command.run(self._seconds)
        finally:
            stopping.cancel()

    def _rewards(self, ended: Ended, folder: Folder) -> Rewards | None:
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
            is_runtimes = self._image and ended.status == containers.FAILED
            whose = f" ({Path(self._runtime).name} itself failed)" if is_runtimes else ""
            raise AgentExitError(f"the program ended with status {ended.status}{whose}")
        return rewards_in(folder.work / REWARD, self._name) if self._reward == "file" else None

    # --- after ---------------------------------------------------------------------------------------------------

    def _kept(self, folder: Folder) -> Path:
        """Return where a folder is kept."""
        return Path(self._keep_in or folder.root.parent, folder.root.name).absolute()

    async def _over(self, folder: Folder, output: str, keeps: bool) -> None:
        """Remove the container and the folder of a trajectory, or keep the folder. Failures are only printed."""
        try:
            if words := await containers.remove_container(self._runtime, folder.root):
                print(words, file=sys.stderr)
            if keeps:
                await asyncio.to_thread(folder.keep, self._kept(folder), output)
            else:
                await asyncio.to_thread(remove_tree, folder.root)
        except Exception as error:  # noqa: BLE001 - the trajectory has its result
            print(f"the folder {folder.root} of an agent stays: {error}", file=sys.stderr)
        finally:
            folder.unlock()


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
