"""Data sets that TRL's files name: on the hub, in a folder of `save_to_disk`, or in files, read here as they are.

`datasets` is not imported. A data set that a script maps or filters is none of these: only a run of the script has the
rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from actors.imports.job import Import, Unreadable
from actors.imports.syntax import ITEM, Call, Imported, Method
from actors.imports.trl.inputs import Inputs
from schemas.config.data import DATA_SUFFIX

_FORMATS = ("json", "csv", "parquet", "arrow")
_POSITIONS = ("path", "name")
_OF_ROWS = ("path", "name", "split", "revision", "data_files")
_OF_LOADING = ("num_proc", "cache_dir", "token", "trust_remote_code", "verification_mode", "download_mode")


@dataclass(frozen=True)
class DataSet:
    """Data set by its place."""

    path: str
    """Name on the hub, folder, file or pattern of files."""
    config: str | None = None
    """Configuration of a data set on the hub."""
    split: str | None = None
    """Rows; None: the data set has several splits, and none is chosen yet."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns by their new name."""
    limit: int | None = None
    """Number of rows at the start that are taken."""
    is_shuffled: bool = False
    """Whether the script shuffles the rows, so that the first ones are others. A run shuffles in any case."""

    @property
    def targets(self) -> dict[str, Any]:
        """Keys of an environment with their values."""
        values = {
            "path": self.path,
            "config": self.config,
            "split": self.split,
            "revision": self.revision,
            "columns": dict(self.columns) or None,
            "limit": self.limit,
        }
        return {"type": "dataset"} | {key: value for key, value in values.items() if value is not None}


def training_rows(job: Import, inputs: Inputs) -> DataSet | None:
    """Return the data set with the rows of training; None: no data set that can be read here as it is."""
    found = _of_inputs(job, inputs, "train_dataset", "dataset_train_split", 3)
    return None if found is None or found.split is None else found


def held_out_rows(job: Import, inputs: Inputs, training: DataSet) -> dict[str, Any] | None:
    """Return keys of an environment for held-out rows; None: they can't be read beside the rows of training."""
    found = _of_inputs(job, inputs, "eval_dataset", "dataset_test_split", 4)
    # an environment has one configuration and one set of names of columns
    if found is None or found.split is None or found.limit is not None or found.columns != training.columns:
        return None
    if found.path == training.path and (found.config, found.revision) == (training.config, training.revision):
        return {"eval_split": found.split}
    if found.config or training.config or found.revision or training.revision:
        return None
    return {"eval_path": found.path, "eval_split": found.split}


def _of_inputs(job: Import, inputs: Inputs, argument: str, split_key: str, position: int) -> DataSet | None:
    call = inputs.trainer_call
    if inputs.script is not None:
        if call is None:
            return None
        return read(call.args[position] if len(call.args) > position else call.kwargs.get(argument))
    keys = ["dataset_name", "dataset_config", split_key]
    name = job.given.get("dataset_name")
    if not isinstance(name, str) or job.unreadable(keys):
        return None
    config, split = (job.given.get(key, job.defaults.get(key)) for key in keys[1:])
    return DataSet(name, None if config is None else str(config), str(split))


def read(value: Any) -> DataSet | None:
    """Return the data set that a value of a script is; None: only a run of the script would tell."""
    if not isinstance(value, Call) or value.is_partial:
        return None
    match value.function:
        case Imported("datasets.load_dataset"):
            return _loaded(dict(zip(_POSITIONS, value.args, strict=False)) | value.kwargs, len(value.args))
        case Imported("datasets.load_from_disk") if len(value.args) == 1 and isinstance(value.args[0], str):
            return None if value.kwargs else DataSet(value.args[0])
        case Method(base, name):
            parent = read(base)
            return None if parent is None else _changed(parent, name, value)
    return None


def _loaded(given: dict[str, Any], num_positional: int) -> DataSet | None:
    """Return the data set of the arguments of `load_dataset`."""
    path, name, split, revision, files = (given.pop(key, None) for key in _OF_ROWS)
    is_known = set(given) <= set(_OF_LOADING) and num_positional <= len(_POSITIONS)
    if not is_known or not isinstance(path, str) or not _are_texts(name, split, revision):
        return None
    if files is None:
        return DataSet(path, name, split, revision) if path not in _FORMATS else None
    if isinstance(files, dict) and split is not None:
        # a split named here has all rows of its file
        files, split = files.get(split), "train"
    is_file = isinstance(files, str) and DATA_SUFFIX.search(files) is not None and "://" not in files
    if path not in _FORMATS or not is_file or name is not None:
        return None
    return DataSet(files, split=split)


def _changed(parent: DataSet, method: str, call: Call) -> DataSet | None:
    """Return a data set after a method of it, if the method has a counterpart here."""
    arguments = [*call.args, *call.kwargs.values()]
    match method, arguments:
        case "shuffle", _ if not call.args:
            return replace(parent, is_shuffled=True)
        case str() as name, [str(split)] if name == ITEM and parent.split is None:
            return replace(parent, split=split)
        case "rename_column", [str(old), str(new)]:
            kept = {name: source for name, source in parent.columns.items() if name != old}
            return replace(parent, columns=kept | {new: parent.columns.get(old, old)})
        case "select", [Call(function=Unreadable("range"), args=[int(count)])] if count > 0:
            can_cut = parent.split is not None and parent.limit is None and not parent.is_shuffled
            return replace(parent, limit=count) if can_cut else None
    return None


def _are_texts(*values: Any) -> bool:
    return all(value is None or isinstance(value, str) for value in values)
