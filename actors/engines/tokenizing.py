"""Tokenizer part of an engine: text of tokens, and token ids of prompts given as text or messages."""

import jinja2

from actors.engines.protocol import RequestError
from actors.models.tokenizer import Tokenizer, eos_ids
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import Prompt


class Tokenizing:
    """Base class of the engines with a real model: the methods of `Engine` for which a tokenizer is enough."""

    def __init__(self, model: ModelConfig) -> None:
        self._tokenizer = Tokenizer(model)
        self._eos = eos_ids(model)
        """Ids of the tokens that end a completion."""

    def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self._tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, also of a special token."""
        return self._tokenizer.decode([token_id], skip_special=False)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a text, or of messages through the model's chat template.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        try:
            return self._tokenizer.encode(prompt)
        except ConfigError as error:
            # the model has no chat template
            raise RequestError(f"messages: {error}") from None
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from None
