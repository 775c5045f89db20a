"""Model of a run's newest checkpoint as files for transformers and peft, in a folder or on the Hugging Face hub."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from actors.api.events import saved_steps
from schemas.errors import ConfigError

OWN = ("trainer", "witness.json", "checksums.json")
"""Names in a checkpoint that only a run reads."""


def save_model(output: Path, folder: Path) -> int:
    """Copy the model of the newest checkpoint to a folder; return its step.

    Raises:
        ConfigError: the run has no checkpoint yet.
    """
    steps = saved_steps(output)
    if not steps:
        raise ConfigError(f"save_model: {output} has no checkpoint; call train() first")
    source = output / "checkpoints" / f"step_{steps[-1]}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name in OWN or path.name.startswith("."):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copy2(path, folder / path.name)
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
