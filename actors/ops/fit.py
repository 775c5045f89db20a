"""Checks that model, data, functions and machine fit each other, from files alone: no model is loaded.

Each check yields Findings: problems no run survives, and notes on settings that are likely a mistake. `actors up` would
run into the problems only 10 to 20 seconds after its start.
"""

import json
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.models.heads import undividable
from actors.models.kv_size import kv_bytes_per_token
from actors.models.positions import num_positions
from actors.process.packages import is_installed
from actors.reward.lookup import ARGUMENTS
from schemas.config import RunConfig
from schemas.config.data import DatasetBase
from schemas.config.model import DTYPE_BYTES
from schemas.errors import ConfigError
from schemas.limits import MESSAGE_BYTES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from actors.datasets.base import Example
    from actors.datasets.jsonl import Jsonl
    from actors.datasets.table import Preview
    from actors.models.image_tokens import ImageTokens

PROMPT_SECONDS = 2.0
"""Time limit in seconds for the prompts of one file; prompts after it are not looked at."""


@dataclass(frozen=True)
class Finding:
    """Result of a check, in words: `path.to.key: …`. `fatal`: a run would fail because of it."""

    words: str
    fatal: bool = True


def model_findings(config: RunConfig) -> Iterator[Finding]:
    """Check the model's directory: its lengths in tokens, and the module names given for adapters."""
    path, engine = Path(config.model.path), config.inference.engine
    if not engine.loads_model:
        return
    if not path.is_absolute() and "/" not in config.model.path:
        yield Finding(
            f"model.path: there is no folder {config.model.path} next to the configuration file or in the working "
            "directory; it is taken as a name on the Hugging Face Hub",
            fatal=False,
        )
    own = own_length(path)
    for key, length in engine.max_tokens_per_sequence().items():
        if own and length > own:
            yield Finding(f"{key}: {length} is more than the {own} tokens that {path} can attend to", fatal=False)
    if own and config.rollout.max_tokens >= own:
        yield Finding(
            f"rollout.max_tokens: {config.rollout.max_tokens} leaves no room for a prompt in the {own} tokens that "
            f"{path} can attend to",
            fatal=not engine.has_server,  # a server may be configured to go beyond its model
        )
    yield from _codes_findings(config)
    if reason := undividable(_json(Path(config.model.path) / "config.json"), config.trainer, "model.path"):
        yield Finding(reason)
    else:
        yield from _division_findings(config)
    if config.model.lora is None:
        return
    targets, names = config.model.lora.target_modules, module_names(path)
    if isinstance(targets, str):
        if names and targets != "all-linear" and not any(re.fullmatch(targets, name) for name in names):
            yield Finding(f"model.lora.target_modules: no module's name matches {targets}, e.g. {min(names)}")
        return
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    # without local files (a model on the hub) there are no names to compare with
    if names and missing:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
        yield Finding(
            f"model.lora.target_modules: the model has no module {', '.join(missing)}; it has {known}",
            fatal=len(missing) == len(targets),
        )


def _division_findings(config: RunConfig) -> Iterator[Finding]:
    """Check that transformers has plans for dividing the model's weights and experts, and that sizes divide."""
    trainer = config.trainer
    if trainer.tensor_parallel == trainer.expert_parallel == 1 or not is_installed("transformers"):
        return
    # imported here, since they load torch and transformers
    from actors.learner.fsdp import check_plans
    from actors.models.loading import add_lora
    from actors.models.skeleton import skeleton

    try:
        model = skeleton(config.model)
        if config.model.lora is not None and is_installed("peft"):
            model = add_lora(model, config.model)
        check_plans(model, trainer)
    except ConfigError as error:
        yield from map(Finding, error.problems)


def _codes_findings(config: RunConfig) -> Iterator[Finding]:
    """Check that a base model whose files have weights of 8 or 4 bits is one for adapters."""
    described = _json(Path(config.model.path) / "config.json").get("quantization_config")
    if described is None or described.get("quant_method") != "compressed-tensors":
        return
    # imported here, since it loads torch: few models have such files
    from actors.models.quantized.scheme import read_scheme

    scheme = read_scheme(described, "model.path")
    if config.model.lora is None:
        yield Finding("model.lora: empty, and the weights in model.path are quantised, so only adapters train on them")
    if config.trainer.sharding == "fsdp":
        yield Finding("trainer.sharding: fsdp can't spread the quantised weights in model.path; take none")
    if config.up.share_base:
        yield Finding("up.share_base: the weights in model.path are quantised, and each side lays them out; set false")
    if scheme is not None and scheme.rounds_activations and config.inference.engine.has_server:
        yield Finding(
            "model.path: its quantization_config has input_activations, so the server also rounds the inputs of "
            "layers, and the trainer does not; expect a mismatch of about 0.01, or quantise weights alone (actors "
            "quantize)",
            fatal=False,
        )


def cache_findings(config: RunConfig, gpu_bytes: int) -> Iterator[Finding]:
    """Check that the cache of an engine in the inference actor can fit on its GPU.

    Args:
        config: configuration of the run.
        gpu_bytes: memory of the GPU.
    """
    engine, item_bytes = config.inference.engine, DTYPE_BYTES[config.model.dtype]
    cache = engine.cached_tokens * kv_bytes_per_token(_json(Path(config.model.path) / "config.json"), item_bytes)
    if cache > gpu_bytes:
        lengths = " x ".join(f"{key} {length}" for key, length in engine.max_tokens_per_sequence().items())
        yield Finding(
            f"inference.engine.max_sequences: {engine.num_slots} x {lengths} are keys and values of "
            f"{cache / 1e9:.1f} GB when all are in use, and the GPU has {gpu_bytes / 1e9:.1f} GB; lower one of them"
        )


def own_length(model: Path) -> int:
    """Return the number of positions of a model, in tokens; 0 if the directory's config.json does not tell."""
    return num_positions(_json(model / "config.json"))


def module_names(model: Path) -> list[str]:
    """Return the names of all modules with weights, from the headers of a directory's safetensors files."""
    names = set[str]()
    for file in model.glob("*.safetensors"):
        with file.open("rb") as opened:
            # format: 8 bytes with the header's length, then the header as JSON; safetensors writes none above 100 MB
            head = opened.read(8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            try:
                header = json.loads(opened.read(min(size, 100 << 20)))
            except ValueError:  # no safetensors file: loading the model reports that
                continue
        names |= {name.rpartition(".")[0] for name in header if name != "__metadata__"}
    return sorted(names)


def prompt_findings(
    config: RunConfig, rows: "Jsonl | Preview", key: str, environment: DatasetBase | None = None
) -> Iterator[Finding]:
    """Check the prompts of a file, as many as PROMPT_SECONDS allow: chat template, and length in tokens.

    Texts are counted as the engine gets them. Messages are counted without the chat template, which only makes them
    longer: a prompt found too long here is too long in any case.

    Args:
        config: configuration of the run.
        rows: the file.
        key: configuration key of the file.
        environment: owner of the file, with the limit of its prompts.
    """
    model, engine = Path(config.model.path), config.inference.engine
    if not engine.loads_model or not (model / "tokenizer.json").is_file():
        return
    # imported here: a native library, needed only where the model's files are at hand
    from tokenizers import Tokenizer

    tokenizer, own = Tokenizer.from_file(str(model / "tokenizer.json")), own_length(model)
    # a server may be configured to go beyond the model's positions; an engine in the actor refuses more
    hard = prompt_limit(config, 0 if engine.has_server else own)
    # no room at all is what `model_findings` reports, or the configuration's own rules
    if hard < 1:
        return
    limit = max(prompt_limit(config, own), 0) or hard
    own_limit = environment.max_prompt_tokens if environment is not None else None
    if own_limit is not None:
        limit = hard = own_limit
    deadline, longest, shortest, too_long, number = time.monotonic() + PROMPT_SECONDS, 0, hard + 1, 0, 0
    image_tokens = _image_tokens(config, rows)
    for number in range(1, rows.num_read + 1):
        example = rows.example(number - 1)
        prompt = example.prompt
        if not isinstance(prompt, str) and config.model.chat_template is None and not has_chat_template(model):
            yield Finding(
                f"model.path: {model} has no chat template, but the prompt in row {number} of {rows.path} is a list of "
                "messages; use an instruct model, or text prompts (environments[].chat: false)"
            )
            return
        length = _num_tokens(example, tokenizer, image_tokens)
        if not length and isinstance(prompt, str):
            yield Finding(f"{key}: row {number} of {rows.path} has an empty prompt, which has no token to continue")
            return
        longest, shortest, too_long = max(longest, length), min(shortest, length), too_long + (length > limit)
        if time.monotonic() > deadline:
            break
    whole = number == rows.num_examples
    looked_at = number if whole else f"the first {number}"
    if too_long and environment is not None and own_limit is not None:
        drops = environment.long_prompts == "drop"
        yield Finding(
            f"{key}: {too_long} of {looked_at} prompts of {rows.path} have more than "
            f"environments[].max_prompt_tokens {limit} tokens (the longest {longest}) and are "
            f"{'left out' if drops else 'cut'}",
            fatal=drops and whole and too_long == rows.num_examples,
        )
    elif too_long:
        yield Finding(
            f"{key}: {too_long} of {looked_at} prompts of {rows.path} have more than {limit} tokens (the longest "
            f"{longest}), which is what rollout.max_tokens {config.rollout.max_tokens} leaves of packer.sequence_len "
            f"{config.packer.sequence_len} and of the engine's length; they are dropped as poison",
            # fatal only if every prompt was looked at and none fits
            fatal=shortest > hard and whole,
        )


def _num_tokens(example: "Example", tokenizer: "Tokenizer", image_tokens: "ImageTokens | None") -> int:
    """Return the tokens of an example's prompt, those of images included, without a chat template's."""
    text = example.prompt
    if not isinstance(text, str):
        # an image has no text to count
        text = "\n".join(turn["content"] for turn in text if isinstance(turn["content"], str))
    # a chat template writes the special tokens itself
    length = len(tokenizer.encode(text, add_special_tokens=isinstance(example.prompt, str)).ids)
    if image_tokens is None:
        return length
    return length + sum(image_tokens.num_tokens(image.height, image.width) for image in example.images)


def prompt_limit(config: RunConfig, own: int = 0) -> int:
    """Return the largest number of tokens for a prompt; 0 or less: there is no room for any.

    Args:
        config: configuration of the run.
        own: positions of the model; 0 if unknown.
    """
    limits = config.inference.engine.max_tokens_per_sequence().values()
    lengths = [config.packer.sequence_len, *limits, *([own] if own else [])]
    return min(lengths) - config.rollout.max_tokens


def has_chat_template(model: Path) -> bool:
    """Return whether a model's directory has a chat template, as a file or in tokenizer_config.json."""
    files = ("chat_template.jinja", "chat_template.json")
    return any((model / file).is_file() for file in files) or bool(
        _json(model / "tokenizer_config.json").get("chat_template")
    )


def image_findings(config: RunConfig, rows: "Jsonl | Preview", key: str) -> Iterator[Finding]:
    """Check that the run takes the images of a file, that the model has tokens for images, and that a batch holds them.

    Args:
        config: configuration of the run.
        rows: the file.
        key: configuration key of the file.
    """
    if not rows.num_with_images:
        return
    # imported here, since it loads numpy
    from actors.datasets.images import why_not_taken

    have = f"{key}: {rows.num_with_images} of {rows.num_read} rows of {rows.path} have images"
    if why := why_not_taken(config):
        yield Finding(f"{have}; {why}")
        return
    yield from map(Finding, sight_problems(config, have))
    groups = config.packer.groups_per_step
    num_bytes = rows.image_bytes // rows.num_read * groups
    if num_bytes > MESSAGE_BYTES:
        yield Finding(
            f"packer.groups_per_step: the images of {groups} rows of {rows.path} have about {num_bytes >> 20} MiB, and "
            f"{MESSAGE_BYTES >> 20} MiB are the most that travel to a trainer rank; lower it, or take smaller images"
        )


def sight_problems(config: RunConfig, have: str) -> Iterator[str]:
    """Check that this machine reads images and that the model, if it is here, has tokens for them.

    Args:
        config: configuration of the run.
        have: what has the images, in words.
    """
    if not is_installed("PIL"):
        yield f"{have}, and images need Pillow, which is not installed; install grpo-actors[vision]"
    if Path(config.model.path).is_dir():
        try:
            _rule(config)
        except ConfigError as error:
            yield from error.problems


def _image_tokens(config: RunConfig, rows: "Jsonl | Preview") -> "ImageTokens | None":
    """Return the model's rule for tokens of images; None if no row has images, or the model has none."""
    if not rows.num_with_images:
        return None
    try:
        return _rule(config)
    except ConfigError:  # `image_findings` reports it
        return None


def _rule(config: RunConfig) -> "ImageTokens":
    # imported here, since it loads tokenizers
    from actors.models.image_tokens import ImageTokens

    return ImageTokens.of_model(config.model)


def column_findings(config: RunConfig, rows: "Jsonl | Preview", key: str) -> Iterator[Finding]:
    """Check a file for column names that the sampled group needs, and for rows that no message can carry."""
    if rows.num_unsendable:
        yield Finding(
            f"{key}: {rows.num_unsendable} of {rows.num_read} rows of {rows.path} can't be sent and are dropped as "
            f"poison; the first is {rows.first_unsendable} (integers have 64 bits; write a long list as text, or keep "
            "what is large in a file and name the file in a column)",
            # above this share of poison the packer fails the run, perhaps hours after the start
            fatal=rows.num_unsendable > config.packer.max_drop_fraction * rows.num_read
            or rows.num_unsendable == rows.num_examples,
        )
    for column in sorted(rows.columns & set(ARGUMENTS)):
        yield Finding(
            f"{key}: {rows.path} has a column {column!r}, but under that name reward functions receive what was "
            "sampled; rename the column"
        )


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
