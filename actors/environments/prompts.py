"""From prompts to token ids and back.

Text goes through the `tokenizers` library alone, so a rollout actor starts without torch; the chat template of messages
needs transformers, which is loaded with the first of them. Token ids travel everywhere else, so there is no second
tokenization that could differ.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import Prompt


class Tokenizer:
    """The tokenizer of a model, by directory or by name."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._raw = RawTokenizer.from_file(str(model_file(model, "tokenizer.json")))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text with the model's special tokens, or of messages through its chat template."""
        if isinstance(prompt, str):
            return list(self._raw.encode(prompt).ids)
        rendered = self._with_template.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return list(self._raw.encode(rendered, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Text without special tokens."""
        return str(self._raw.decode(token_ids, skip_special_tokens=True))

    @cached_property
    def _with_template(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._model.path, trust_remote_code=self._model.trust_remote_code)
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"model.path: {self._model.path} has no chat template, but a prompt is a list of messages; "
                "use an instruct model, or text prompts (environments[].chat: false)"
            )
        return tokenizer


def eos_ids(model: ModelConfig) -> frozenset[int]:
    """The tokens that end a completion: generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        try:
            values = json.loads(model_file(model, name).read_text(encoding="utf-8")).get("eos_token_id")
        except ConfigError:
            continue
        if values is not None:
            return frozenset(values if isinstance(values, list) else [values])
    raise ConfigError(f"model.path: {model.path} names no eos_token_id, in generation_config.json or config.json")


def model_file(model: ModelConfig, name: str) -> Path:
    """A file of the model, from its directory or the hub's cache (downloaded when it is not there).

    Raises:
        ConfigError: it has no such file.
    """
    local = Path(model.path)
    if local.is_dir():
        if (local / name).is_file():
            return local / name
        raise ConfigError(f"model.path: {local} has no {name}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model.path, name))
    except (EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            f"model.path: {model.path} is no directory, and {name} can't be had from the hub: "
            f"{str(error).splitlines()[0]}"
        ) from error
