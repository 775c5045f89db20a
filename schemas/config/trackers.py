"""Keys of `telemetry.trackers`: services that show the metrics of a run. One class per `type`.

The names of the keys are those of each tracker's own package. Secrets come from environment variables alone.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from schemas.config.base import Section
from schemas.config.resume_classes import Free

MetricNames = Literal["ours", "trl", "prime-rl", "areal"]
"""Systems whose names of metrics a tracker may have."""


class TrackerKeys(Section):
    """Base of all trackers."""

    name: Free[str] = ""
    """Name of the run there. Empty: the run's `name`. After a rewind a new run with `-2`, `-3`, … follows in trackers
    that keep each value (all but TensorBoard)."""


class WandbConfig(TrackerKeys):
    """Weights & Biases. Needs `grpo-actors[wandb]`, and WANDB_API_KEY or the login of `wandb login`."""

    type: Free[Literal["wandb"]] = "wandb"
    project: Free[str] = ""
    """Project. Empty: WANDB_PROJECT, else `grpo-actors`."""
    entity: Free[str] = ""
    """User or team. Empty: WANDB_ENTITY, else the default of the user."""
    group: Free[str] = ""
    """Group of runs. Empty: the run's `name`, so that the runs of a rewound run stand together."""
    tags: Free[list[str]] = []
    """Tags of the run."""
    mode: Free[Literal["online", "offline"] | None] = None
    """`offline`: written below `output_dir/trackers` alone, for `wandb sync`. Empty: WANDB_MODE, else online."""


class TensorboardConfig(TrackerKeys):
    """TensorBoard's event files. Needs `grpo-actors[tensorboard]`."""

    type: Free[Literal["tensorboard"]] = "tensorboard"
    logging_dir: Free[str] = ""
    """Folder of the event files, relative to the current directory; `name` is a folder below it, or `name` with the
    id of the run where another run has that folder. Empty: `output_dir/trackers/tensorboard`."""


class TrackioConfig(TrackerKeys):
    """Trackio: a local database, or a Space of the Hugging Face hub. Needs `grpo-actors[trackio]`."""

    type: Free[Literal["trackio"]] = "trackio"
    project: Free[str] = ""
    """Project. Empty: `grpo-actors`. Databases are in TRACKIO_DIR, else in the cache of the hub."""
    group: Free[str] = ""
    """Group of runs. Empty: the run's `name`."""
    space_id: Free[str] = ""
    """Space, OWNER/NAME; needs HF_TOKEN or the login of `hf auth login`. Empty: TRACKIO_SPACE_ID, else local."""


class MlflowConfig(TrackerKeys):
    """MLflow: a server, or a local database. Needs `grpo-actors[mlflow]`."""

    type: Free[Literal["mlflow"]] = "mlflow"
    tracking_uri: Free[str] = ""
    """Server, or `sqlite:///FILE`. Empty: MLFLOW_TRACKING_URI, else `output_dir/trackers/mlflow/mlflow.db`. Secrets are
    MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""
    experiment: Free[str] = ""
    """Experiment. Empty: MLFLOW_EXPERIMENT_NAME, else `grpo-actors`."""


class SwanlabConfig(TrackerKeys):
    """SwanLab. Needs `grpo-actors[swanlab]`, and SWANLAB_API_KEY or the login of `swanlab login`."""

    type: Free[Literal["swanlab"]] = "swanlab"
    project: Free[str] = ""
    """Project. Empty: SWANLAB_PROJECT, else `grpo-actors`."""
    workspace: Free[str] = ""
    """User or organisation. Empty: SWANLAB_WORKSPACE, else the default of the user."""
    mode: Free[Literal["online", "offline"] | None] = None
    """`offline`: written below `output_dir/trackers` alone, for `swanlab sync`. Empty: SWANLAB_MODE, else online."""


def _by_name(given: Any) -> Any:
    # `trackers: [wandb]` stands for `trackers: [{type: wandb}]`
    return {"type": given} if isinstance(given, str) else given


TrackerConfig = Annotated[
    Annotated[
        WandbConfig | TensorboardConfig | TrackioConfig | MlflowConfig | SwanlabConfig, Field(discriminator="type")
    ],
    BeforeValidator(_by_name),
]
