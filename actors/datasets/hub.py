"""Data sets of the Hugging Face hub, by the libraries `huggingface_hub` and `datasets`.

The libraries keep downloads in their own cache (`HF_HOME`) and read the token from `HF_TOKEN`. Each request has their
time limits.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from actors.process.tasks import task
from schemas.errors import ConfigError

COMMIT = re.compile(r"[0-9a-f]{40}")


def find_commit(path: str, revision: str | None, key: str) -> str:
    """Return the commit that a branch or tag of a data set means now.

    Args:
        path: name on the hub.
        revision: branch, tag or commit; None: the main branch.
        key: configuration key with the name, for errors.

    Raises:
        ConfigError: the hub can't be reached, or does not give the data set.
    """
    if revision and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi, constants

    with _in_words(path, key):
        commit = HfApi().dataset_info(path, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
    if not commit:
        raise ConfigError(f"environments[].{key}: the hub tells no commit of {path}; set revision to a commit")
    return commit


def fetch(path: str, config: str | None, split: str, commit: str, key: str) -> list[Path]:
    """Download a split and return its files in Arrow's format, in the order of their rows.

    Args:
        path: name on the hub.
        config: configuration of the data set; None: the only or default one.
        split: name of the split.
        commit: commit of the data set.
        key: configuration key with the name, for errors.

    Raises:
        ConfigError: the library is not installed, the hub can't be reached, or the data set can't be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"environments[].{key}: {path} on the hub needs the library datasets: pip install grpo-actors[data] "
            f"({error})"
        ) from None
    # the library's own bars go to the log of this process
    with _in_words(path, key), task(f"download {path}, split {split}"):
        loaded = load_dataset(path, name=config, split=split, revision=commit)
    files = [Path(file["filename"]) for file in loaded.cache_files]
    if not files:
        raise ConfigError(f"environments[].{key}: {path} has no rows in split {split}")
    return files


@contextlib.contextmanager
def _in_words(path: str, key: str) -> Iterator[None]:
    """Raise failures of the hub's libraries as errors of the configuration."""
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:
        where, chain = f"environments[].{key}: {path}", list(_causes(error))
        if any(isinstance(one, errors.GatedRepoError) for one in chain):
            words = "is gated: ask for access on its page, and set the environment variable HF_TOKEN"
        elif any(isinstance(one, errors.RevisionNotFoundError) for one in chain):
            words = "has no such revision (environments[].revision)"
        elif any(isinstance(one, errors.RepositoryNotFoundError) for one in chain):
            words = "is not on the hub, or is private: correct the name, or set the environment variable HF_TOKEN"
        elif any(isinstance(one, errors.OfflineModeIsEnabled) for one in chain):
            words = "is not in the cache, and HF_HUB_OFFLINE is set"
        elif any(isinstance(one, TimeoutError) or "Timeout" in type(one).__name__ for one in chain):
            words = f"the hub ({_endpoint()}) does not answer in time"
        elif any(isinstance(one, ConnectionError) or type(one).__name__ == "ConnectError" for one in chain):
            words = f"the hub ({_endpoint()}) can't be reached"
        else:
            # texts of the libraries have several lines
            reason = " ".join(str(error).split()) or repr(error)
            words = f"can't be loaded (environments[].config, split): {type(error).__name__}: {reason}"
        raise ConfigError(f"{where}: {words}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")
