"""Conversion between prompts and token ids.

Text only needs the `tokenizers` library, so a rollout actor starts without torch. The chat template of messages needs
transformers, imported with the first messages. Actors exchange only token ids, so no second tokenization can differ.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from actors.process.library_bars import bars_for
from actors.process.tasks import task
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import Prompt


class Tokenizer:
    """Tokenizer of a model, by directory or by name on the hub.

    Raises:
        ConfigError: the model has no tokenizer.json.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._raw = RawTokenizer.from_file(str(model_file(model, "tokenizer.json")))

    def encode(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return token ids of a text with the model's special tokens, or of messages through the chat template.

        Args:
            tools: functions that the model may call, as OpenAI's API describes them. For messages.
            template_kwargs: variables of the chat template, such as `enable_thinking`.

        Raises:
            ConfigError: messages, but the model has no chat template; or a text with `template_kwargs`.
            ValueError: a name in `template_kwargs` is a parameter of transformers; names it.
            TypeError, jinja2.TemplateError: the chat template refuses the messages.
        """
        if isinstance(prompt, str):
            if template_kwargs:
                raise ConfigError(
                    f"environments[].chat_template_kwargs: {min(template_kwargs)!r} has no effect on a prompt of plain "
                    "text; set environments[].chat, or remove chat_template_kwargs"
                )
            return list(self._raw.encode(prompt).ids)
        return self.encode_text(self.render(prompt, tools, template_kwargs))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text that the chat template makes of messages; arguments and errors as for `encode`."""
        options = dict(template_kwargs or {})
        if options and (taken := sorted(options.keys() & self._template_parameters)):
            raise ValueError(f"{taken[0]}: is set here, and is no variable of the chat template")
        if tools:
            options["tools"] = list(tools)
        options["add_generation_prompt"] = add_generation_prompt
        plain = [dict(message) for message in messages]
        try:
            return self._rendered(plain, **options)
        except TypeError:
            # DeepSeek's templates want the arguments of tool calls as text, the others as an object
            return self._rendered(_with_written_arguments(plain), **options)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Special tokens, which no text contains."""
        return frozenset(i for i, token in self._raw.get_added_tokens_decoder().items() if token.special)

    def chat_template(self, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the chat template: the one for tools, if the model has two.

        Raises:
            ConfigError: the model has no chat template.
        """
        return str(self._with_template.get_chat_template(tools=list(tools) or None))

    def encode_completion(self, prompt: Prompt, completion: str | dict[str, Any]) -> list[int]:
        """Return the token ids that should follow a prompt, including an end of sequence.

        Args:
            prompt: text or messages.
            completion: text; or, after messages, the assistant's message for the chat template.

        Raises:
            ConfigError: the chat template renders the prompt differently when the completion follows.
        """
        if isinstance(prompt, str):
            following = str(completion)
        else:
            answer = {"role": "assistant", "content": completion} if isinstance(completion, str) else completion
            opened, whole = self._rendered(prompt, add_generation_prompt=True), self._rendered([*prompt, answer])
            if not whole.startswith(opened):  # a template may drop the thoughts of an earlier turn, say
                raise ConfigError(
                    f"model.path: the chat template of {self._model.path} renders a prompt differently when an "
                    f"answer follows, so the answer's start is unknown: {whole[-80:]!r} and {opened[-80:]!r}"
                )
            following = whole[len(opened) :]
        ids, ends = self.encode_text(following), eos_ids(self._model)
        # cut behind the first end of sequence, or append one
        length = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        return [*ids[:length], ids[length] if length < len(ids) else min(ends)]

    def _rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(self._with_template.apply_chat_template(messages, tokenize=False, **options))

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text without special tokens in front; special tokens written out are recognised."""
        return list(self._raw.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int], skip_special: bool = True) -> str:
        """Return the text of tokens, without special tokens or with them."""
        return str(self._raw.decode(token_ids, skip_special_tokens=skip_special))

    @cached_property
    def _template_parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._with_template.apply_chat_template).parameters)

    @cached_property
    def _with_template(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._model.path, trust_remote_code=self._model.trust_remote_code)
        if self._model.chat_template is not None:
            tokenizer.chat_template = self._model.chat_template
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"model.path: {self._model.path} has no chat template, but a prompt is a list of messages; "
                "use an instruct model, set model.chat_template, or use text prompts (environments[].chat: false)"
            )
        return tokenizer


def _with_written_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose tool calls have their arguments as JSON text."""

    def written(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return call | {"function": call["function"] | {"arguments": arguments}}

    return [
        message | ({"tool_calls": [written(call) for call in message["tool_calls"]]} if "tool_calls" in message else {})
        for message in messages
    ]


def eos_ids(model: ModelConfig) -> frozenset[int]:
    """Return the tokens that end a completion, from generation_config.json, otherwise from config.json.

    Raises:
        ConfigError: neither file names an `eos_token_id`.
    """
    for name in ("generation_config.json", "config.json"):
        try:
            values = json.loads(model_file(model, name).read_text(encoding="utf-8")).get("eos_token_id")
        except ConfigError:  # a model may have no generation_config.json
            continue
        if values is not None:
            return frozenset(values if isinstance(values, list) else [values])
    raise ConfigError(f"model.path: {model.path} names no eos_token_id, in generation_config.json or config.json")


def vocabulary(model: ModelConfig, key: str = "model.path") -> dict[str, int]:
    """Return every token of a model's tokenizer with its id.

    Args:
        key: configuration key of the model, for errors.

    Raises:
        ConfigError: the model has no tokenizer.json.
    """
    raw = RawTokenizer.from_file(str(model_file(model, "tokenizer.json", key)))
    return dict(raw.get_vocab(with_added_tokens=True))


def model_file(model: ModelConfig, name: str, key: str = "model.path") -> Path:
    """Return the path of a model's file, from its directory or from the hub's cache (downloaded if absent).

    Args:
        key: configuration key of the model, for errors.

    Raises:
        ConfigError: the model has no such file, or the hub can't be reached.
    """
    local = Path(model.path)
    if local.is_dir():
        if (local / name).is_file():
            return local / name
        raise ConfigError(f"{key}: {local} has no {name}")
    from huggingface_hub import hf_hub_download  # imported here: a model in a directory needs no hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        with task(f"download {name} of {model.path}") as download:
            return Path(hf_hub_download(model.path, name, tqdm_class=bars_for(download)))
    except (EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            f"{key}: {model.path} is no directory, and {name} can't be had from the hub: {str(error).splitlines()[0]}"
        ) from error
