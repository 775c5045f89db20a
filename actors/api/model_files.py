"""Model of a run's newest checkpoint as files for transformers and peft, in a folder or on the Hugging Face hub."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from actors.callbacks.events import saved_steps
from actors.uploader.files import model_files
from actors.uploader.model_card import write_card
from schemas.config import load_config
from schemas.config.resolved import RESOLVED
from schemas.errors import ConfigError


def save_model(output: Path, folder: Path) -> int:
    """Copy the model of the newest checkpoint to a folder, and write its model card; return its step.

    A README.md of somebody's own stays as it is.

    Raises:
        ConfigError: the run has no checkpoint yet.
    """
    steps = saved_steps(output)
    if not steps:
        raise ConfigError(f"save_model: {output} has no checkpoint; call train() first")
    source = output / "checkpoints" / f"step_{steps[-1]}"
    folder.mkdir(parents=True, exist_ok=True)
    for path, name in model_files(source):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, folder / name)
    if (output / RESOLVED).is_file():
        write_card(load_config(output / RESOLVED), steps[-1], folder)
    return steps[-1]


def push(output: Path, name: str, message: str, *, token: str | None, private: bool | None) -> Any:
    """Upload the model of the newest checkpoint to the hub; return huggingface_hub's information on the commit.

    Raises:
        ConfigError: the run has no checkpoint yet.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        save_model(output, Path(folder))
        api = HfApi(token=token)
        # a name without an owner becomes one of the user's
        name = api.create_repo(name, private=private, exist_ok=True).repo_id
        return api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
