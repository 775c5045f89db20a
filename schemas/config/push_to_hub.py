"""Keys of `push_to_hub`: uploads of checkpoints to the Hugging Face hub, with the names of transformers."""

from typing import Literal

from pydantic import Field

from schemas.config.base import Section
from schemas.config.resume_classes import Free

HubStrategy = Literal["end", "every_save", "checkpoint", "all_checkpoints"]
"""Values of transformers' `hub_strategy`."""


class PushToHubConfig(Section):
    """Uploads of checkpoints to a model repository, by a process of its own (`uploader`).

    Training waits for no upload, and no failure of an upload ends the run. The names are those of transformers'
    TrainingArguments.
    """

    hub_model_id: Free[str] = Field("", pattern=r"^$|^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
    """Repository: OWNER/NAME, or NAME below the user or organisation of the token. It is created if needed. Empty: the
    name of the folder `output_dir`."""
    hub_strategy: Free[HubStrategy] = "every_save"
    """Uploads. `end`: the model, once the run is done. `every_save`: the model of each checkpoint. `checkpoint`: also
    the whole checkpoint, with the trainer's state, as `last-checkpoint/`. `all_checkpoints`: also each whole checkpoint
    as `step_N/`. The model is what transformers and peft load: weights or adapter, configuration and tokenizer."""
    hub_private_repo: Free[bool | None] = None
    """Visibility of a repository that is created. Empty: the default of the user or organisation."""
    hub_revision: Free[str | None] = Field(None, min_length=1)
    """Branch of the commits, created if needed. Empty: `main`."""
    hub_always_push: Free[bool] = False
    """True: each checkpoint is pushed, in order. False: while an upload is under way, later checkpoints wait, and only
    the newest of them is pushed, as in transformers. `all_checkpoints` pushes each checkpoint in either case."""
    model_card: Free[bool] = True
    """README.md with base model, objective, data and figures of the run, written with each model. False: the README.md
    of the repository stays as it is."""
    token_env: Free[str] = ""
    """Environment variable with the token of the hub. Empty: HF_TOKEN, else the login of `hf auth login`."""
    max_attempts: Free[int] = Field(5, ge=1)
    """Attempts at a checkpoint while the hub can't be reached or fails. After that the next checkpoint is tried; a
    restart of the run tries again. A refusal, such as 401, is tried once per checkpoint."""
    retry_pause: Free[float] = Field(5.0, gt=0)
    """Seconds before the second attempt. The pause doubles with each attempt, up to 60 times this value."""
    attempt_timeout: Free[float] = Field(3600.0, gt=0)
    """Seconds for one attempt. After that the process of the uploads is replaced, since nothing else ends a connection
    that hangs."""
    end_timeout: Free[float] = Field(600.0, ge=0)
    """Seconds for which the end of a run waits for uploads. What is not pushed by then is said, and pushed when the
    same command is started again."""
