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
        return self._as_it_stands(self._rendered(prompt, add_generation_prompt=True))

    def encode_completion(self, prompt: Prompt, completion: str | dict[str, Any]) -> list[int]:
        """Token ids that should follow a prompt, up to and with an end of sequence.

        Args:
            prompt: text or messages.
            completion: text, or behind messages the assistant's message, which the chat template renders.

        Raises:
            ConfigError: the chat template does not render prompt and completion as the prompt, then more.
        """
        if isinstance(prompt, str):
            following = str(completion)
        else:
            answer = {"role": "assistant", "content": completion} if isinstance(completion, str) else completion
            opened, whole = self._rendered(prompt, add_generation_prompt=True), self._rendered([*prompt, answer])
            if not whole.startswith(opened):
                raise ConfigError(
                    f"model.path: the chat template of {self._model.path} renders a prompt in another way when an "
                    f"answer follows, so where that begins can't be told: {whole[-80:]!r} and {opened[-80:]!r}"
                )
            following = whole[len(opened) :]
        ids, ends = self._as_it_stands(following), eos_ids(self._model)
        length = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return [*ids[:length], ids[length] if length < len(ids) else min(ends)]

    def _rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(self._with_template.apply_chat_template(messages, tokenize=False, **options))

    def _as_it_stands(self, text: str) -> list[int]:
        return list(self._raw.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int], skip_special: bool = True) -> str:
        """Text without special tokens, or with them."""
        return str(self._raw.decode(token_ids, skip_special_tokens=skip_special))

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


def vocabulary(model: ModelConfig, key: str = "model.path") -> dict[str, int]:
    """Every token of a model's tokenizer, with its id; `key` is where the configuration names the model.

    Raises:
        ConfigError: it has no tokenizer.json.
    """
    raw = RawTokenizer.from_file(str(model_file(model, "tokenizer.json", key)))
    return dict(raw.get_vocab(with_added_tokens=True))


def model_file(model: ModelConfig, name: str, key: str = "model.path") -> Path:
    """A file of the model, from its directory or the hub's cache (downloaded when it is not there).

    Raises:
        ConfigError: it has no such file.
    """
    local = Path(model.path)
    if local.is_dir():
        if (local / name).is_file():
            return local / name
        raise ConfigError(f"{key}: {local} has no {name}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model.path, name))
    except (EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            f"{key}: {model.path} is no directory, and {name} can't be had from the hub: {str(error).splitlines()[0]}"
        ) from error
