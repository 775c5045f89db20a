"""What is sampled from, how it is scored, when it is evaluated."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from schemas.config.base import FunctionPath, Section

Split = Literal["train", "eval"]


class EnvironmentBase(Section):
    """What all environments have."""

    name: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """Name in metrics and files; the type where empty."""
    weight: float | None = Field(None, gt=0)
    """Share of the train groups, relative to the others; by number of examples where nobody sets one."""

    @property
    def label(self) -> str:
        """The name, or the type."""
        return self.name or str(self.__dict__["type"])


class ReverseTextConfig(EnvironmentBase):
    """Reverse a random word, letter by letter (generated, never repeats; eval words never occur in train)."""

    type: Literal["reverse_text"] = "reverse_text"
    min_letters: int = Field(4, ge=1)
    """Shortest word."""
    max_letters: int = Field(8, ge=1)
    """Longest word."""

    @model_validator(mode="after")
    def _lengths_in_order(self) -> "ReverseTextConfig":
        if self.min_letters > self.max_letters:
            raise ValueError(f"min_letters {self.min_letters} must not exceed max_letters {self.max_letters}")
        return self


class ArithmeticConfig(EnvironmentBase):
    """Integer sums, differences and products (generated; eval problems never occur in train)."""

    type: Literal["arithmetic"] = "arithmetic"
    operations: list[Literal["+", "-", "*"]] = Field(["+", "-"], min_length=1)
    """Operations to draw from."""
    max_operand: int = Field(99, ge=1)
    """Operands are drawn from 0 to this."""


class JsonlConfig(EnvironmentBase):
    """A JSON Lines file: a row has `prompt` (text or messages) and any further columns, which rewards receive."""

    type: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1)
    """The file with the train rows: beside the configuration file, else where the command is given."""
    eval_path: str | None = None
    """The file with the held-out rows; looked for like `path`."""
    prompt_column: str = "prompt"
    """Column with the prompt, e.g. `question` for GSM8K."""
    system_prompt: str | None = None
    """Put before the prompt as a system message; a text prompt then becomes a user message."""
    chat: bool = False
    """A text prompt becomes a user message, so the model's chat template applies."""


EnvironmentConfig = Annotated[ReverseTextConfig | ArithmeticConfig | JsonlConfig, Field(discriminator="type")]


class ShapingConfig(Section):
    """What becomes of a reward before it is used: (reward + bias) · scale, then clipped (AReaL)."""

    bias: float = 0.0
    """Added first (AReaL: reward_bias)."""
    scale: float = 1.0
    """Factor after that (AReaL: reward_scaling)."""
    clip: float | None = Field(None, gt=0)
    """Then held between −clip and clip (AReaL: reward_clip, 20); empty: not."""


class RewardFunctionConfig(ShapingConfig):
    """A function `f(prompts, completions, **columns) -> list[float | None]`, sync or async (TRL's signature).

    `metrics.jsonl` and `samples.jsonl` tell what it returned; bias, scale and clip are applied before the weight.
    """

    path: str = Field(min_length=1)
    """A built-in name, `package.module:function`, or `path/to/file.py:function`; the file is looked for beside the
    configuration file, else where the command is given."""
    weight: float = 1.0
    """Factor in the sum; 0 only measures."""
    kwargs: dict[str, Any] = {}
    """Passed to each call; they win over columns of the same name."""


class StepRewardConfig(Section):
    """A function `f(prompts, completions, completion_ids, **columns) -> list[list[tuple[int, float]]]`, sync or async.

    For each completion its steps, each (end, reward): the place behind the step's last token, from 1 to the number of
    tokens, and a finite number. No steps, or None: the completion is unscorable.
    """

    path: FunctionPath
    """`package.module:function` or `path/to/file.py:function`, looked for like `reward.functions[].path`."""
    kwargs: dict[str, Any] = {}
    """Passed to each call; they win over columns of the same name."""


class EvalConfig(Section):
    """Held-out evaluation: before training, every so many steps, and after (P26)."""

    every_steps: int = Field(0, ge=0)
    """Evaluate after each multiple of this many steps; 0: only before and after."""
    at_start: bool = True
    """Evaluate the model as it comes."""
    at_end: bool = True
    """Evaluate the last policy."""
    num_prompts: int = Field(200, ge=0)
    """Prompts per environment; 0 turns evaluation off; an environment with fewer gives all it has."""
    completions_per_prompt: int = Field(1, ge=1)
    """Completions of each prompt."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    exact_match: str | None = Field("exact_match", min_length=1)
    """Reward function whose value 1.0 counts as an exact match, named as in `reward.functions`; null measures none."""
