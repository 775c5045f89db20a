"""Keys of environments that answer: code of the user, in worker processes."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from schemas.config.base import FunctionPath, Section
from schemas.config.data import ArithmeticConfig, DatasetBase, DatasetConfig, JsonlConfig, ReverseTextConfig, Split
from schemas.config.images import ImageLimitsConfig
from schemas.config.texts import Text


def _is_address(address: str) -> str:
    found = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})", address)
    if not (found and 0 < int(found[2]) < 65536):
        raise ValueError("must be tcp://HOST:PORT")
    return address


HostAddress = Annotated[str, AfterValidator(_is_address)]
"""Address of an environment host."""


class EnvironmentLimitsConfig(Section):
    """Limits of an environment's workers. A worker that passes a limit is killed and replaced."""

    load: float = Field(120.0, gt=0)
    """Seconds to import the environment."""
    reset: float = Field(60.0, gt=0)
    """Seconds of a reset."""
    step: float = Field(60.0, gt=0)
    """Seconds of a step, with all tool calls of a message."""
    score: float = Field(60.0, gt=0)
    """Seconds of scoring an episode, or the episodes of a group."""
    silence: float = Field(30.0, gt=2)
    """Seconds without a sign of life: the process is stopped, or an async function blocks its event loop."""
    processes: int = Field(64, ge=1)
    """Processes of a worker, itself included."""


class EnvironmentBase(DatasetBase):
    """Base of environments with turns: workers, limits of a trajectory, rewards."""

    python: str = ""
    """Python interpreter of the workers, with packages of its own; it needs pyzmq and msgpack. Empty: that of the
    actors."""
    workers: int = Field(1, ge=1)
    """Worker processes of each rollout actor."""
    hosts: list[HostAddress] = []
    """Addresses `tcp://HOST:PORT` of environment hosts (`actors run environment`), which hold the workers in turn.
    Empty: each rollout actor holds its own."""
    episodes_per_worker: int = Field(32, ge=1)
    """Episodes that a worker holds at the same time."""
    directory: str = ""
    """Working directory of the workers. Empty: that of the rollout actor."""
    variables: dict[str, str] = {}
    """Further environment variables of the workers."""
    max_turns: int = Field(10, ge=1)
    """Turns of a trajectory: the model's answers (TRL: max_tool_calling_iterations + 1; verifiers: max_turns)."""
    max_total_tokens: int = Field(0, ge=0)
    """Sampled tokens of all turns of a trajectory; each turn has at most `rollout.max_tokens`. 0: any number that
    `packer.sequence_len` holds."""
    max_message_tokens: int = Field(0, ge=0)
    """Tokens of a message from the environment; a longer one loses its middle. 0: any number."""
    trajectory_timeout: float | None = Field(None, gt=0)
    """Seconds of a trajectory. Later it ends as truncated, with the turns that it has, and its group goes on. Empty:
    three quarters of `rollout.group_timeout`."""
    train_cut_turns: bool = True
    """Loss on a turn that was cut off at `rollout.max_tokens`. Such a turn ends the trajectory in any case."""
    train_forced_turns: bool = False
    """Loss on a turn whose form the environment has demanded (`response_format`, a forced `tool_choice`). The engine's
    logprobs of such a turn are of the distribution without the forbidden tokens, which biases the importance ratio."""
    on_failure: Literal["retry", "unscorable"] = "retry"
    """Reaction to a failing environment, in training. `retry`: the attempt fails and the group is sampled again.
    `unscorable`: the trajectory has no reward and no advantage, and the group goes on; a trajectory that fails before
    its first turn is retried. A failure is never a reward."""
    rewards: dict[str, float] = {}
    """Weights of the environment's own rewards, by name; `turns` is the sum of the rewards of turns. Empty: weight 1
    for all. If given, names that are not listed are measured only."""
    images: ImageLimitsConfig = ImageLimitsConfig()
    """Limits of the images in messages of the environment."""
    limits: EnvironmentLimitsConfig = EnvironmentLimitsConfig()
    """Limits of the workers."""

    @model_validator(mode="after")
    def _has_no_prompts_to_measure(self) -> "EnvironmentBase":
        if self.max_prompt_tokens is not None:
            raise ValueError(
                "max_prompt_tokens: an environment makes its prompts itself; set max_message_tokens, or remove the key"
            )
        return self

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weights of rewards by name; empty: 1 for all."""
        return self.rewards


class PythonConfig(EnvironmentBase):
    """Environment in Python of one's own: a class, a list of tools, or a coroutine (docs/reference/environments.md)."""

    type: Literal["python"] = "python"
    path: FunctionPath
    """Class, function or list of tools, `package.module:Name` or `file.py:Name`, looked up like `rows`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class or function."""
    rows: str | None = None
    """JSON Lines file with one training example per row: a prompt, which may be absent, and columns for `reset`. A
    relative path is looked up next to the configuration file first, then in the current directory. Empty: examples are
    numbers and seeds."""
    eval_rows: str | None = None
    """File with held-out examples, for evaluation. Empty: with `rows` no evaluation, else other numbers and seeds."""
    prompt_column: str = "prompt"
    """Column of the prompt in `rows`."""
    system_prompt: Text | None = None
    """System message in front of each prompt, as a text or as `{file: PATH}`. Empty: none."""
    num_examples: int | None = Field(None, ge=1)
    """Number of training examples without `rows`. Empty: as many as the environment says, else without end."""

    @property
    def files(self) -> dict[Split, tuple[str, str]]:
        """Files with rows by split: the key, and the path."""
        found: dict[Split, tuple[str, str]] = {"train": ("rows", self.rows)} if self.rows else {}
        return found | ({"eval": ("eval_rows", self.eval_rows)} if self.eval_rows else {})

    def as_jsonl(self, rows: str) -> JsonlConfig:
        """Return the configuration of the files with rows."""
        return JsonlConfig(
            path=rows,
            eval_path=self.eval_rows,
            prompt_column=self.prompt_column,
            system_prompt=self.system_prompt,
            chat=True,
        )

    @model_validator(mode="after")
    def _one_source_of_examples(self) -> "PythonConfig":
        if self.rows is not None and self.num_examples is not None:
            raise ValueError("num_examples: rows has the examples; set only one of the two")
        if self.rows is None and self.eval_rows is not None:
            raise ValueError("eval_rows: set rows too")
        return self


class AgentConfig(PythonConfig):
    """Agent: a program that talks to an LLM's API and is recorded as it does (docs/reference/agents.md).

    Give one of `path`, `command` and `external`.
    """

    type: Literal["agent"] = "agent"  # type: ignore[assignment]  # another tag of the union
    path: FunctionPath | Literal[""] = ""
    """Function `run(data, base_url, api_key)`, `package.module:name` or `file.py:name`, async or not, or a class or
    object with this method. It returns a reward, rewards by name, or nothing."""
    command: list[str] = []
    """Program and arguments. `{prompt}`, `{base_url}`, `{api_key}` and columns of the example in braces are filled
    in."""
    image: str = ""
    """Container image in which `command` runs, by podman or docker. Empty: on this machine."""
    external: bool = False
    """True: services take the trajectories over HTTP, at `/rl/start_session` of each rollout actor."""
    samples: Literal["tree", "calls"] = "tree"
    """Samples of a trajectory. `tree`: calls that continue each other are one sample (AReaL: concat). `calls`: each
    call is a sample by itself (AReaL: individual)."""
    max_turns: int = Field(50, ge=1)
    """Calls of a trajectory; later ones are refused with status 429."""

    @model_validator(mode="after")
    def _one_kind_of_agent(self) -> "AgentConfig":
        given = [name for name in ("path", "command", "external") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"path, command, external: give exactly one of these, not {found}")
        if self.image and not self.command:
            raise ValueError("image: runs a command; set command too")
        if self.external and self.hosts:
            raise ValueError("hosts: hold workers, and an external agent has none; remove the key")
        return self


class PackageConfig(EnvironmentBase):
    """Base of the environments of a package, played by an adapter (docs/reference/environments.md)."""

    adapter: ClassVar[str]
    """File of the adapter in actors/environments/adapters."""

    options: dict[str, Any]
    """Options of the adapter, such as the id of an environment; docs/reference/environments.md has them all."""

    @property
    def num_examples(self) -> None:
        """Number of training examples: as many as the package says."""
        return None

    @property
    def worker_options(self) -> dict[str, Any]:
        """Options as the adapter gets them."""
        return self.options


class CurriculumConfig(Section):
    """Level of the examples that moves with the model's success.

    The mean reward of the newest groups of the present level decides. The index of an example says its level, so a run
    that continues, and a replay, have the same examples.
    """

    levels: int = Field(ge=2, le=64)
    """Number of levels. Level 0 is the easiest."""
    start: int = Field(0, ge=0)
    """First level of a run."""
    raise_at: float = 0.8
    """Mean reward at and above which the level rises by 1."""
    lower_at: float | None = None
    """Mean reward at and below which the level falls by 1; below `raise_at`. Empty: the level never falls."""
    window: int = Field(16, ge=1, le=1000)
    """Number of groups whose rewards decide, all of the present level. A level lasts at least so many groups."""

    @model_validator(mode="after")
    def _levels_in_order(self) -> "CurriculumConfig":
        if self.start >= self.levels:
            raise ValueError(f"start: {self.start} is no level; the levels are 0 to {self.levels - 1}")
        if self.lower_at is not None and self.lower_at >= self.raise_at:
            raise ValueError(f"lower_at: {self.lower_at:g} must be below raise_at {self.raise_at:g}")
        return self


class ReasoningGymConfig(PackageConfig):
    """Tasks of reasoning-gym: questions with one answer each."""

    adapter: ClassVar[str] = "reasoning_gym"
    type: Literal["reasoning_gym"] = "reasoning_gym"
    curriculum: CurriculumConfig | None = None
    """Level of the tasks that moves with the model's success. Empty: `options` decides the level."""

    @property
    def worker_options(self) -> dict[str, Any]:
        """Options as the adapter gets them, with the number of levels."""
        return self.options if self.curriculum is None else self.options | {"moving_levels": self.curriculum.levels}

    @model_validator(mode="after")
    def _levels_have_one_key(self) -> "ReasoningGymConfig":
        if "moving_levels" in self.options:
            raise ValueError("options.moving_levels: is made of curriculum.levels; set that")
        return self


class TextArenaConfig(PackageConfig):
    """Games of textarena."""

    adapter: ClassVar[str] = "textarena"
    type: Literal["textarena"] = "textarena"


class GymnasiumConfig(PackageConfig):
    """Environments of gymnasium with discrete actions."""

    adapter: ClassVar[str] = "gymnasium"
    type: Literal["gymnasium"] = "gymnasium"


class VerifiersConfig(PackageConfig):
    """Environments of verifiers 0.1 to 0.3, by `load_environment`."""

    adapter: ClassVar[str] = "verifiers_v0"
    type: Literal["verifiers"] = "verifiers"

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weights of rewards by name: by default that of the rubric alone, and no metric."""
        return self.rewards or {str(self.options.get("id")): 1.0}


class VerifiersV1Config(VerifiersConfig):
    """Tasksets of verifiers 0.4."""

    adapter: ClassVar[str] = "verifiers_v1"
    type: Literal["verifiers_v1"] = "verifiers_v1"  # type: ignore[assignment]  # another tag of the union


class OpenEnvConfig(PackageConfig):
    """Environments of an OpenEnv server."""

    adapter: ClassVar[str] = "openenv_client"
    type: Literal["openenv"] = "openenv"


class OrsConfig(PackageConfig):
    """Environments of a server of the Open Reward Standard."""

    adapter: ClassVar[str] = "ors_client"
    type: Literal["ors"] = "ors"


EnvironmentConfig = Annotated[
    ReverseTextConfig
    | ArithmeticConfig
    | JsonlConfig
    | DatasetConfig
    | PythonConfig
    | AgentConfig
    | ReasoningGymConfig
    | TextArenaConfig
    | GymnasiumConfig
    | VerifiersConfig
    | VerifiersV1Config
    | OpenEnvConfig
    | OrsConfig,
    Field(discriminator="type"),
]
