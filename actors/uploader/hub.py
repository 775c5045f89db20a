"""Pushes to a repository of the Hugging Face hub, and its failures in words.

A push is a single commit, whose message has the chain of the checkpoint's witness. So after a push with an unknown end,
as when the process was killed, the commits tell whether it is there.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from actors.uploader.files import CARD, Saved, all_files, model_files
from schemas.config.push_to_hub import PushToHubConfig
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = structlog.get_logger("uploader")

REFUSALS = (400, 401, 403, 404, 409, 410, 413, 422)
"""Status codes after which the same request fails again."""


class PushFailedError(Exception):
    """A push has failed; the text has the reason in words.

    Args:
        reason: text.
        refused: True if the same attempt would fail again.
    """

    def __init__(self, reason: str, *, refused: bool) -> None:
        super().__init__(reason)
        self.refused = refused


def token_of(config: PushToHubConfig) -> str | None:
    """Return the token of `token_env`; None leaves the choice to huggingface_hub: HF_TOKEN, else the login.

    Raises:
        ConfigError: the variable is not set.
    """
    if not config.token_env:
        return None
    token = os.environ.get(config.token_env)
    if not token:
        raise ConfigError(f"push_to_hub.token_env: the environment variable {config.token_env} is not set")
    return token


class HubRepository:
    """Repository of a run on the hub.

    Args:
        config: repository, branch and strategy.
        run_name: name of the run, for commit messages.
        default_name: name of the repository if none is configured.
    """

    def __init__(self, config: PushToHubConfig, run_name: str, default_name: str) -> None:
        self._config, self._run_name = config, run_name
        self._name = config.hub_model_id or default_name
        self._is_made = False

    @property
    def name(self) -> str:
        """Repository, with its branch if that is not main."""
        branch = self._config.hub_revision
        return self._name if branch in (None, "main") else f"{self._name}@{branch}"

    def push(
        self, saved: Saved, folder: Path, *, replaces_model: bool, may_be_there: bool, card: Callable[[], str]
    ) -> str:
        """Push a checkpoint; return its commit.

        Args:
            saved: the checkpoint.
            folder: folder with its files.
            replaces_model: True to push the model to the root of the repository.
            may_be_there: True if an earlier attempt may have succeeded; the commits are looked at first.
            card: returns the text of the model card.

        Raises:
            PushFailedError: the checkpoint is not on the hub, as far as known.
        """
        with _in_words(self._name):
            from huggingface_hub import CommitOperationAdd, HfApi

            api = HfApi(token=token_of(self._config), library_name="grpo-actors")
            self._make(api)
            branch = self._config.hub_revision
            if may_be_there and (commit := self._commit_of(api, saved)):
                return commit
            files = list(model_files(folder)) if replaces_model else []
            if self._config.hub_strategy == "checkpoint" and replaces_model:
                files += all_files(folder, "last-checkpoint")
            if self._config.hub_strategy == "all_checkpoints":
                files += all_files(folder, f"step_{saved.step}")
            operations = [CommitOperationAdd(name, str(path)) for path, name in files]
            commit_of = partial(
                api.create_commit,
                self._name,
                commit_message=f"Step {saved.step} of {self._run_name}",
                commit_description=f"checkpoint {saved.chain}",
                revision=branch,
            )
            if not (replaces_model and self._config.model_card):
                return str(commit_of(operations).oid)
            plain = [one for one in operations if one.path_in_repo != CARD]
            try:
                return str(commit_of([*plain, CommitOperationAdd(CARD, card().encode())]).oid)
            except ValueError as error:
                # the hub looks at the metadata of a card first; a model is worth more than its card
                log.warning("the hub refuses the model card; pushed without it", detail=_plain(error))
                return str(commit_of(plain).oid)

    def _make(self, api: "HfApi") -> None:
        """Create repository and branch, once per process."""
        if self._is_made:
            return
        made = api.create_repo(self._name, private=self._config.hub_private_repo, exist_ok=True)
        # a name without an owner becomes one of the user's
        self._name = str(made.repo_id)
        if self._config.hub_revision not in (None, "main"):
            api.create_branch(self._name, branch=self._config.hub_revision, exist_ok=True)
        self._is_made = True

    def _commit_of(self, api: "HfApi", saved: Saved) -> str:
        """Return the commit of a checkpoint; empty if the branch has none."""
        for commit in api.list_repo_commits(self._name, revision=self._config.hub_revision):
            if saved.chain in f"{commit.title}\n{commit.message}":
                return str(commit.commit_id)
        return ""


@contextlib.contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Raise failures of huggingface_hub as PushFailedError."""
    try:
        yield
    except ImportError as error:
        raise PushFailedError(f"needs huggingface_hub: pip install grpo-actors[hub] ({error})", refused=True) from None
    except ConfigError as error:
        raise PushFailedError(str(error), refused=True) from None
    except Exception as error:
        from huggingface_hub import errors

        status = next((code for one in _causes(error) if (code := _status(one))), 0)
        where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        if isinstance(error, errors.HFValidationError):
            words, refused = f"push_to_hub.hub_model_id: {name!r} is no name of a repository", True
        elif status in (401, 404):
            words = (
                f"{where} does not let this token write to {name} ({status}): set HF_TOKEN, or push_to_hub.token_env"
            )
            refused = True
        elif status == 403:
            words, refused = f"the token of {where} may not write to {name} (403): it needs write access", True
        elif status:
            words, refused = f"{where} answers {status} for {name}: {_plain(error)}", status in REFUSALS
        elif isinstance(error, errors.OfflineModeIsEnabled):
            words, refused = "HF_HUB_OFFLINE is set, so nothing can be pushed", True
        elif any("Timeout" in type(one).__name__ for one in _causes(error)):
            words, refused = f"{where} does not answer in time", False
        elif any(isinstance(one, ConnectionError) or "Connect" in type(one).__name__ for one in _causes(error)):
            words, refused = f"{where} can't be reached", False
        else:
            words, refused = f"{type(error).__name__}: {_plain(error)}", False
        raise PushFailedError(words, refused=refused) from error


def _status(error: BaseException) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _plain(error: BaseException) -> str:
    """Return the text of an error on one line, without hints for browsers, and without signed parts of addresses."""
    text = re.sub(r"For more information check: \S+", "", str(error))
    return re.sub(r"\?\S+", "?…", " ".join(text.split()))[:300] or repr(error)
