"""Keys of the data: environments, reward functions, evaluation."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from schemas.config.base import FunctionPath, Section
from schemas.config.images import ImagesConfig
from schemas.config.resume_classes import Free
from schemas.config.sampling import SamplingParams
from schemas.config.splits import parse_split
from schemas.config.texts import Text

Split = Literal["train", "eval"]
DATA_SUFFIX = re.compile(r"\.(?:(parquet|arrow)|(csv|json|jsonl|ndjson)(?:\.(gz|bz2|xz|zst))?)$")
"""End of the name of a data file: a table, or a text that may be compressed."""


class DatasetBase(Section):
    """Base of all environments: name and weights."""

    name: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """Name in metrics and files, unique within the run: letters, digits, `_`, `.` and `-`. Empty: the type."""
    weight: float | None = Field(None, gt=0)
    """Relative share of the training prompts (prime-rl, Surogate: env_ratios). Set it for all environments or for none.
    Empty: in proportion to the number of examples; a generated environment counts as much as the largest file. With
    `packer.order: arrival` also the share of the sampling slots that the environment may fill."""
    train: bool = True
    """Training on this environment. `false`: it is evaluated only, on its held-out examples; of a data file without
    held-out rows, on all rows. Such environments may be added, changed and removed when a run continues."""
    rl_weight: float = Field(1.0, ge=0)
    """Factor of the policy loss on tokens of this environment. 0: these tokens are also left out of the loss's
    denominator (prime-rl)."""
    ref_kl_weight: float = Field(0.0, ge=0)
    """Factor of distillation towards `trainer.teacher` on tokens of this environment (prime-rl's ref_kl). The
    distillation loss is averaged over the step's tokens with a factor above 0, and added to the policy loss."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """Most tokens of a prompt. Empty: as many as `rollout.max_tokens` leaves of `packer.sequence_len`; a longer prompt
    then fails as `prompt_too_long`."""
    long_prompts: Literal["drop", "truncate_left", "truncate_right"] = "drop"
    """Treatment of prompts with more than `max_prompt_tokens` tokens. `drop`: the example is left out, in evaluations
    too; the packer's log and `grpo_packer_long_prompts` say how many. `truncate_left`: the first tokens are cut off,
    `truncate_right`: the last ones; `grpo_rollout_cut_prompts_total` counts. A cut takes no account of messages, and
    reward functions see the whole prompt."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking`, for prompts that are messages."""

    @property
    def label(self) -> str:
        """Name of the environment in metrics and errors: `name`, or the type if `name` is empty."""
        return self.name or str(self.__dict__["type"])

    @property
    def files(self) -> dict[Split, tuple[str, str]]:
        """Files with rows by split: the key, and the path."""
        return {}

    @property
    def evaluated_split(self) -> Split:
        """Split with the examples of evaluations."""
        return "train" if not self.train and self.files.keys() == {"train"} else "eval"


class PlainTextBase(DatasetBase):
    """Base of generated tasks, whose prompts are plain text."""

    @model_validator(mode="after")
    def _has_no_messages(self) -> "PlainTextBase":
        if self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs: the prompts of this environment are plain text; remove the key")
        return self


class ReverseTextConfig(PlainTextBase):
    """Task: reverse a random word, letter by letter.

    Words are generated without end. Words for evaluation never occur in training.
    """

    type: Literal["reverse_text"] = "reverse_text"
    min_letters: int = Field(4, ge=1)
    """Letters of the shortest word."""
    max_letters: int = Field(8, ge=1)
    """Letters of the longest word."""

    @model_validator(mode="after")
    def _lengths_in_order(self) -> "ReverseTextConfig":
        if self.min_letters > self.max_letters:
            raise ValueError(f"min_letters {self.min_letters} must not exceed max_letters {self.max_letters}")
        return self


class ArithmeticConfig(PlainTextBase):
    """Task: integer sums, differences and products.

    Problems are generated without end. Problems for evaluation never occur in training.
    """

    type: Literal["arithmetic"] = "arithmetic"
    operations: list[Literal["+", "-", "*"]] = Field(["+", "-"], min_length=1)
    """Operations drawn from, each equally likely."""
    max_operand: int = Field(99, ge=1)
    """Largest operand; the smallest is 0."""


class JsonlConfig(DatasetBase):
    """Examples from a JSON Lines file: one prompt (text or messages) per row; all other columns go to the rewards."""

    type: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1)
    """File with one training example per row. A relative path is looked up next to the configuration file first, then
    in the current directory."""
    eval_path: str | None = None
    """File with one held-out example per row, for evaluation; looked up like `path`. Empty: no evaluation of this
    environment."""
    prompt_column: str = "prompt"
    """Column of the prompt, e.g. `question` for GSM8K."""
    system_prompt: Text | None = None
    """System message in front of each prompt, as a text or as `{file: PATH}`; a text prompt then becomes a user
    message. Empty: none."""
    chat: bool = False
    """Conversion of text prompts to a user message, so that the model's chat template applies."""
    images: ImagesConfig = ImagesConfig()
    """Images of prompts: their column, and limits."""

    @property
    def files(self) -> dict[Split, tuple[str, str]]:
        """Files with rows by split: the key, and the path."""
        found: dict[Split, tuple[str, str]] = {"train": ("path", self.path)}
        return found | ({"eval": ("eval_path", self.eval_path)} if self.eval_path else {})


class DatasetConfig(DatasetBase):
    """Examples from a data set: on the Hugging Face hub, a folder written by `save_to_disk`, or files.

    Files are parquet, arrow, csv, json and jsonl; the last three also compressed (`.gz`, `.bz2`, `.xz`, `.zst`). Rows
    are read when they are needed, so a data set may be larger than memory (docs/reference/data.md).
    """

    type: Literal["dataset"] = "dataset"
    path: str = Field(min_length=1)
    """Data set on the hub (`owner/name`), file, folder, or pattern of files (`data/*.parquet`). A relative path is
    looked up next to the configuration file first, then in the current directory."""
    config: str | None = None
    """Configuration of a data set on the hub, e.g. `main` of `openai/gsm8k` (TRL: dataset_config). Empty: the only or
    default one."""
    split: str = "train"
    """Rows for training: `train`, `train[:1000]`, `train[:90%]`, `train+validation`. A file or a pattern of files has
    the split `train` alone."""
    revision: str | None = None
    """Branch, tag or commit of a data set on the hub. Its commit is looked up once and kept with the run. Empty: the
    main branch."""
    eval_path: str | None = None
    """Data set of held-out examples, written like `path`. Empty: `path`."""
    eval_split: str | None = None
    """Rows for evaluation, written like `split`. Empty: all rows of `eval_path`; without both keys no evaluation of
    this environment."""
    columns: dict[str, str | None] = {}
    """Columns by their new name: `{prompt: question, answer: solution}` renames two columns; a name with null leaves
    that column out. Columns that are not named stay. The prompt is the column `prompt`."""
    filter: FunctionPath | None = None
    """Function of a row, a dict with the new names of columns, that returns True to keep the row: `package.module:f`
    or `file.py:f`, looked up like `path`. Rows are judged once, before training; the result is kept with the run."""
    limit: int | None = Field(None, ge=1)
    """Greatest number of training examples; the first ones of the filtered rows are taken. Empty: all."""
    shuffle: bool = True
    """Another order of the rows in each epoch. False: the order of the data set (TRL: shuffle_dataset)."""
    system_prompt: Text | None = None
    """System message in front of each prompt, as a text or as `{file: PATH}`; a text prompt then becomes a user
    message. Empty: none."""
    chat: bool = False
    """Conversion of text prompts to a user message, so that the model's chat template applies."""
    cut_answer: bool = False
    """Removal of the assistant's messages at the end of a prompt, for data with complete conversations (ms-swift)."""
    images: ImagesConfig = ImagesConfig()
    """Images of prompts: their column, by its new name, and limits."""

    @field_validator("split", "eval_split")
    @classmethod
    def _is_a_split(cls, split: str | None) -> str | None:
        if split is not None:
            parse_split(split)
        return split

    @model_validator(mode="after")
    def _columns_have_a_prompt(self) -> "DatasetConfig":
        if self.columns.get("prompt", "prompt") is None:
            raise ValueError("columns.prompt: must name a column, since every example has a prompt")
        return self

    @property
    def sources(self) -> dict[Split, tuple[str, str, str]]:
        """Data set by split: the key, the path, and the rows in the notation of splits."""
        found: dict[Split, tuple[str, str, str]] = {"train": ("path", self.path, self.split)}
        if self.eval_path:
            found["eval"] = ("eval_path", self.eval_path, self.eval_split or "train")
        elif self.eval_split:
            found["eval"] = ("path", self.path, self.eval_split)
        return found

    @property
    def evaluated_split(self) -> Split:
        """Split with the examples of evaluations."""
        return "train" if not self.train and "eval" not in self.sources else "eval"

    @property
    def local_places(self) -> dict[Split, tuple[str, str]]:
        """Local file or folder by split: the key, and the path. A pattern is named by the folder before it."""
        places = {split: (key, path) for split, (key, path, _) in self.sources.items() if path.startswith("/")}
        return {split: (key, re.split(r"/[^/]*[*?[]", path)[0] or "/") for split, (key, path) in places.items()}

    @property
    def packages(self) -> list[tuple[str, str]]:
        """Packages that the data set needs: the key, and the name of the package."""
        found = []
        for key, path, _ in self.sources.values():
            if not path.startswith("/"):
                found.append((f"environments[].{key}", "datasets"))
            elif path.endswith((".parquet", ".arrow", ".zst")):
                found.append((f"environments[].{key}", "pyarrow"))
        return found


class ShapingConfig(Section):
    """Transformation of a reward: (reward + bias) · scale, then clipped (AReaL)."""

    bias: float = 0.0
    """Number added to the reward first (AReaL: reward_bias)."""
    scale: float = 1.0
    """Factor applied after the bias (AReaL: reward_scaling)."""
    clip: float | None = Field(None, gt=0)
    """Bound of the result: values are clipped to −clip and clip (AReaL: reward_clip, 20). Empty: no clipping."""


class WorkerProcessConfig(Section):
    """Worker processes of a user's function, apart from the actor's own process and packages."""

    python: str = ""
    """Python interpreter of the function's worker processes, with packages of its own; it needs pyzmq and msgpack.
    `same`: the actors' interpreter. Empty: no worker processes, the function runs inside the reward actor."""
    workers: int = Field(1, ge=1)
    """Worker processes of each reward actor for this function, with `python`. A worker runs many calls at the same
    time; more workers help functions that compute in Python itself."""
    load_timeout: float = Field(120.0, gt=0)
    """Seconds for a worker to start and to import the function, with `python`."""

    @property
    def other_python(self) -> str:
        """Interpreter of the workers, if it is not the actors' own; else empty."""
        return "" if self.python == "same" else self.python


class RewardModelConfig(Section):
    """Keys of a reward model: a sequence classifier of transformers with one label, in a worker process of its own."""

    model: str = ""
    """Reward model in place of a function: a folder with a sequence classifier of transformers with one label, or its
    name on the Hugging Face hub. The reward is the classifier's logit. Empty: `path` names a function."""
    revision: str = ""
    """Revision of `model` on the hub. Empty: the newest."""
    device: str = "auto"
    """Device of `model`, as torch names it. `auto`: the first GPU, or the CPU without one."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Type of the weights of `model`. `auto`: that of its files."""
    batch_size: int = Field(16, ge=1)
    """Completions in a forward pass of `model`."""
    max_length: int = Field(0, ge=0)
    """Largest number of tokens of prompt and completion for `model`. A longer text loses tokens at its start. 0:
    max_position_embeddings of the model's configuration."""

    @property
    def model_options(self) -> dict[str, Any]:
        """Arguments of the class RewardModel."""
        return {key: getattr(self, key) for key in RewardModelConfig.model_fields}


class RewardFunctionConfig(ShapingConfig, WorkerProcessConfig, RewardModelConfig):
    """A reward function `f(prompts, completions, **columns) -> list[float | None]`, or a reward model.

    The function is sync or async, with TRL's signature. All arguments are lists with one item per completion. A
    completion is text; for a chat prompt (a list of messages) a completion is a list of messages too, as in TRL:
    `[{"role": "assistant", "content": TEXT}]`. None means that the function does not apply to the completion.

    `metrics.jsonl` and `samples.jsonl` show the returned values. Bias, scale and clip are applied before the weight.
    """

    path: str = ""
    """Name of a built-in function (docs/reference/rewards.md), `package.module:function` or `path/to/file.py:function`.
    A relative file is looked up next to the configuration file first, then in the current directory. Required without
    `model`."""
    weight: float = 1.0
    """Factor in the weighted sum of rewards. 0: the function's values are only logged."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of each call. They take precedence over columns of the same name."""

    @property
    def title(self) -> str:
        """Name of the reward in metrics and files: the last part of `model` or `path`."""
        return self.model.rstrip("/").rpartition("/")[2] or self.path.rpartition(":")[2]

    @property
    def has_workers(self) -> bool:
        """True if worker processes call the function, or hold the model."""
        return bool(self.python or self.model)

    @model_validator(mode="after")
    def _function_or_model(self) -> "RewardFunctionConfig":
        if bool(self.path) == bool(self.model):
            raise ValueError("needs either path (a function) or model (a reward model)")
        if self.model and (self.python or self.kwargs):
            raise ValueError("model: a reward model takes no python and no kwargs; remove them")
        if self.python and ":" not in self.path:
            raise ValueError(f"python: {self.path} is built in and runs inside the reward actor; remove python")
        return self


class StepRewardConfig(WorkerProcessConfig):
    """Rewards inside completions: of a function, or of the turns of environments.

    The function is `f(prompts, completions, completion_ids, **columns) -> list[list[tuple[int, float]]]`, sync or
    async. It returns for each completion a list of steps (end, reward). `end` is the position after the step's last
    token, from 1 to the number of tokens; `reward` is a finite number. Without steps, or with None, the completion is
    unscorable.
    """

    path: FunctionPath | None = None
    """Path to the function, `package.module:function` or `path/to/file.py:function`, looked up like
    `reward.functions[].path`. Empty: each turn that the environment rewarded is a step."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of each call. They take precedence over columns of the same name."""


class EvalSourceConfig(Section):
    """Evaluation of an environment with keys of its own; empty keys are as in `eval`.

    A source without a name takes the place of the environment's evaluation by the keys of `eval`. A source with a name
    is a further evaluation, with results of its own under this name.
    """

    environment: Free[str]
    """Name of an entry of `environments`, or its type if it has no name."""
    name: Free[str] = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """Name of the results in metrics and files, unlike those of all environments and other sources. Empty: the
    environment's."""
    every_steps: Free[int | None] = Field(None, ge=0)
    """Steps between two evaluations. 0: only `at_start` and `at_end`."""
    at_start: Free[bool | None] = None
    """Evaluation of the initial model."""
    at_end: Free[bool | None] = None
    """Evaluation of the final policy."""
    num_prompts: Free[int | None] = Field(None, ge=0)
    """Prompts, the first ones of the environment. 0: no evaluation."""
    completions_per_prompt: Free[int | None] = Field(None, ge=1)
    """Completions of each prompt."""
    temperature: Free[float | None] = Field(None, ge=0)
    """Sampling temperature. 0: greedy."""
    top_p: Free[float | None] = Field(None, gt=0, le=1)
    """Nucleus sampling: only the most probable tokens with this total probability. 1: all."""
    top_k: Free[int | None] = Field(None, ge=0)
    """Number of most probable tokens to sample from. 0: all."""
    max_tokens: Free[int | None] = Field(None, ge=1)
    """Maximum number of new tokens per completion, of each turn with an environment."""


class EvalConfig(Section):
    """Evaluation on held-out prompts: before training, every `every_steps` steps, and after training."""

    every_steps: Free[int] = Field(0, ge=0)
    """Steps between two evaluations. 0: only `at_start` and `at_end`."""
    at_start: Free[bool] = True
    """Evaluation of the initial model."""
    at_end: Free[bool] = True
    """Evaluation of the final policy."""
    num_prompts: Free[int] = Field(200, ge=0)
    """Prompts per environment. An environment with fewer held-out prompts gives all of them. 0: no evaluation."""
    completions_per_prompt: Free[int] = Field(1, ge=1)
    """Completions of each prompt."""
    temperature: Free[float] = Field(0.0, ge=0)
    """Sampling temperature of evaluations. 0: greedy."""
    top_p: Free[float] = Field(1.0, gt=0, le=1)
    """Nucleus sampling: only the most probable tokens with this total probability. 1: all."""
    top_k: Free[int] = Field(0, ge=0)
    """Number of most probable tokens to sample from. 0: all."""
    max_tokens: Free[int | None] = Field(None, ge=1)
    """Maximum number of new tokens per completion, of each turn with an environment. Empty: `rollout.max_tokens`."""
    sources: Free[list[EvalSourceConfig]] = []
    """Evaluations with keys of their own. Each environment without a source is evaluated by the keys above."""
    exact_match: Free[str | None] = Field("exact_match", min_length=1)
    """Reward function whose value 1.0 counts as an exact match, named like `reward.functions[].path`. Empty: not
    measured."""
    metric_for_best_model: Free[str] = "eval_reward"
    """Metric by which callbacks know the best evaluation, as in transformers: `eval_reward`, or with several
    evaluations `eval_NAME_reward`. `eval_` may be left out. No checkpoint is kept for it."""
    greater_is_better: Free[bool] = True
    """Whether a larger value of `metric_for_best_model` is better."""

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of evaluations."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def of_source(self, source: EvalSourceConfig) -> "EvalConfig":
        """Return the keys of a source; empty keys are those of this section."""
        given = {name: value for name, value in source if name in EvalConfig.model_fields and value is not None}
        return self.model_copy(update=given)
