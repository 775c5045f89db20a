"""Checks of the places that a run relies on: folders for output, room for weights, keys and certificates."""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from actors.engines.http.access import api_key, server_tls
from actors.process import ledger_file
from actors.process.output_dir import problem_of
from actors.process.packages import is_installed
from actors.uploader.hub import token_of
from bus.run_folder import weights_directory, weights_folder
from schemas.config import RunConfig
from schemas.config.model import DTYPE_BYTES
from schemas.errors import ConfigError


def folder_problems(config: RunConfig) -> Iterator[str]:
    """Check that each folder for output exists or can be created, and is writable."""
    folders = {"output_dir": config.output}
    if config.ledger.path:
        folders["ledger.path"] = config.ledger_path.parent
    weights = weights_directory(config)
    # below output_dir the check of output_dir is enough
    used = config.weights.channel == "filesystem" and not weights.is_relative_to(config.output)
    if config.weights.directory or used:
        folders["weights.directory"] = weights
    for key, folder in folders.items():
        # folders below the nearest existing one are made by the run
        nearest = next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))
        if not nearest.is_dir():
            yield f"{key}: {folder} can't be created, since {nearest} is not a folder"
            continue
        if not os.access(nearest, os.W_OK | os.X_OK):
            yield f"{key}: {folder} can't be written to, since {nearest} is not writable"
            continue
        # a file system may refuse in spite of the rights: nobody can make a folder below /proc, not even root
        try:
            Path(tempfile.mkdtemp(prefix=".grpo-actors-", dir=nearest)).rmdir()
        except OSError as error:
            why = f"{nearest}: {error.strerror}"
            yield f"{key}: {folder} can't be written to: {why}; set a folder that can be"
    yield from filter(None, [problem_of(config), ledger_file.problem_of(config.ledger_path)])
    if config.weights.channel == "filesystem":
        yield from filter(None, [weights_folder(config).problem()])


def room_problems(config: RunConfig) -> Iterator[str]:
    """Warn if the folder for weights has too little free room, if the size of a version is known."""
    size = _published_bytes(config)
    if config.weights.channel != "filesystem" or not size:
        return
    # a version is written before the oldest is removed
    versions = 1 + min(config.weights.keep, config.trainer.max_steps or config.weights.keep)
    folder = weights_folder(config).path
    nearest = next(place for place in folder.parents if place.is_dir())
    # versions left by a killed run count as free, since the start of the run removes these
    ours = sum(path.lstat().st_size for path in folder.rglob("*"))
    free = shutil.disk_usage(nearest).free + ours
    if free < versions * size:
        yield (
            f"weights.directory: {folder.parent} has {free / 1e9:.2f} GB free, and {versions} versions of "
            f"{size / 1e9:.2f} GB each will be stored there (weights.keep + 1); free space, set weights.directory to a "
            "folder with room, or lower weights.keep"
        )


def _published_bytes(config: RunConfig) -> int:
    """Return the bytes of a published version; 0 if the model's files are elsewhere, or adapters are published."""
    folder = Path(config.model.path)
    loads_model = config.inference.engine.loads_model
    if not loads_model or config.model.lora is not None or not (folder.is_absolute() and folder.is_dir()):
        return 0
    # imported here, since it loads numpy
    from actors.engines.external.staging import model_shapes

    try:
        shapes = model_shapes(config.model)
    except (OSError, ValueError, KeyError):  # not a model: another check reports that
        return 0
    return DTYPE_BYTES[config.model.dtype] * sum(math.prod(shape) for shape in shapes.values())


def token_problems(config: RunConfig) -> Iterator[str]:
    """Check that there is a token for uploads to the hub. Whether the hub accepts it is not asked."""
    if config.push_to_hub is None or not is_installed("huggingface_hub"):
        return
    try:
        token = token_of(config.push_to_hub)
    except ConfigError as error:
        yield from error.problems
        return
    if token is None:
        from huggingface_hub import get_token  # imported here, since most runs push nothing

        if get_token() is None:
            yield "push_to_hub: there is no token of the hub; set HF_TOKEN, or run `hf auth login`"


def key_problems(config: RunConfig) -> Iterator[str]:
    """Check that the bus's keys are there and readable by no other user, and that the engine's key is set."""
    looks: list[Callable[[], object]] = [lambda: api_key(config.inference), lambda: server_tls(config.inference)]
    if config.bus.keys:
        from bus.keys import load  # imported here, since it loads zmq

        looks.insert(0, lambda: load(Path(config.bus.keys)))
    for look in looks:
        try:
            look()
        except ConfigError as error:
            yield from error.problems
