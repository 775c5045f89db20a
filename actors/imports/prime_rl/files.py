"""Reading of prime-rl's files: TOML with `toml_files`, three files of three processes, words of its command line."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

Tree = dict[str, Any]

SHARED = {
    "trainer", "orchestrator", "inference", "deployment", "slurm", "monitors", "trainer_gpu_ids", "inference_gpu_ids",
    "run", "clean_output_dir", "clean", "dry_run",
}  # fmt: skip
"""Keys that only the file of all processes has."""
MARKS = {
    "orchestrator": {
        "batch_size", "rollouts_per_example", "group_size", "env", "sampling", "train", "eval", "buffer", "algo",
        "advantage", "filters", "seq_len", "max_off_policy_steps", "oversampling_factor", "concurrency", "renderer",
    },
    "trainer": {"optim", "loss", "scheduler", "data", "matmul_precision", "dist_timeout_seconds", "gc"},
    "inference": {
        "server", "parallel", "vllm", "vllm_extra", "gpu_memory_utilization", "enable_lora", "max_lora_rank",
        "max_loras", "enable_prefix_caching", "api_server_count", "router",
    },
}  # fmt: skip
"""Keys that only the file of one process has."""
STEMS = {"train": "trainer", "rl_train": "trainer", "orch": "orchestrator", "infer": "inference"}
"""Starts of usual file names, for files whose keys do not tell."""


def read_tree(files: Sequence[Path], arguments: Sequence[str]) -> tuple[Tree, bool]:
    """Return the tree of the program `rl`, and whether any file or word is for all processes.

    Later files and words take precedence. A file of one process becomes the section of that process.

    Raises:
        ConfigError: a file can't be read, is not TOML, includes itself, or a word has no place.
    """
    tree: Tree = {}
    is_whole = not files
    for file in files:
        content = _load(file, ())
        process = process_of(content, file.stem)
        is_whole |= not process
        tree = merged(tree, {process: content} if process else content)
    return _with_words(tree, arguments), is_whole


def process_of(content: Mapping[str, Any], stem: str) -> str:
    """Return the process that a file is for, or an empty text if it is for all."""
    if SHARED & content.keys():
        return ""
    found = [process for process, marks in MARKS.items() if marks & content.keys()]
    if len(found) == 1:
        return found[0]
    by_name = [process for start, process in STEMS.items() if stem.startswith(start)]
    return by_name[0] if by_name and (not found or by_name[0] in found) else ""


def merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> Tree:
    """Return two trees as one. Maps are joined; other values of `top` take the place of those of `base`."""
    tree = dict(base)
    for key, value in top.items():
        earlier = tree.get(key)
        tree[key] = merged(earlier, value) if isinstance(earlier, dict) and isinstance(value, dict) else value
    return tree


def _load(file: Path, includers: tuple[Path, ...]) -> Tree:
    if file.resolve() in includers:
        raise ConfigError(f"{file}: includes itself through toml_files; remove one of the includes")
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: is not UTF-8 text; save it in that encoding") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: is not TOML: {error}") from None
    bases = content.pop("toml_files", [])
    if not (isinstance(bases, list) and all(isinstance(base, str) for base in bases)):
        raise ConfigError(f"{file}: toml_files must be a list of file names")
    tree: Tree = {}
    for base in bases:
        tree = merged(tree, _load(file.parent / base, (*includers, file.resolve())))
    return merged(tree, content)


def _with_words(tree: Tree, words: Sequence[str]) -> Tree:
    """Return the tree with the words `--a.b-c VALUE…` and `--section @ file.toml` of the command line."""
    position = 0
    while position < len(words):
        flag = words[position]
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"{flag}: is no file and no --key of prime-rl")
        name, equals, inline = flag.removeprefix("--").partition("=")
        end = position + 1
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        values = [inline] if equals else list(words[position + 1 : end])
        parts = [part.replace("-", "_") for part in name.split(".")]
        _put(tree, parts, _file_or_value(values), flag)
        position = end
    return tree


def _file_or_value(values: list[str]) -> Any:
    if values and values[0].startswith("@"):
        names = [word for word in (values[0].removeprefix("@"), *values[1:]) if word not in ("", "@")]
        tree: Tree = {}
        for name in names:
            tree = merged(tree, _load(Path(name), ()))
        return tree
    if not values:
        return True
    found = [value_of(text) for text in values]
    return found[0] if len(found) == 1 else found


def value_of(text: str) -> Any:
    """Return the value of a word: a number, true, false, None, JSON, or the text itself."""
    if text in ("None", "none"):
        return None
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except (ValueError, RecursionError):
        return text


def _put(tree: Tree, parts: list[str], value: Any, flag: str) -> None:
    node: Any = tree
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise ConfigError(f"{flag}: {part!r} is no item of the list; it has {len(node)}")
            index: Any = int(part)
        elif isinstance(node, dict):
            index = part
        else:
            raise ConfigError(f"{flag}: there is a value where it needs a section")
        if following is None:
            earlier = node[index] if isinstance(node, list) or index in node else None
            both = isinstance(value, dict) and isinstance(earlier, dict)
            node[index] = merged(earlier or {}, value) if both else value
        elif isinstance(node, dict):
            node = node.setdefault(index, {})
        else:
            node = node[index]
