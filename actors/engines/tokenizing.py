"""The part of an engine that is the model's tokenizer: its answers in text, and prompts that come as text."""

import jinja2

from actors.engines.protocol import RequestError
from actors.environments.prompts import Tokenizer
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError
from schemas.messages import Prompt


class Tokenizing:
    """What engines of a real model inherit."""

    def __init__(self, model: ModelConfig) -> None:
        self._tokenizer = Tokenizer(model)

    def detokenize(self, token_ids: list[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """One token, special ones too."""
        return self._tokenizer.decode([token_id], skip_special=False)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a text or of messages."""
        try:
            return self._tokenizer.encode(prompt)
        except ConfigError as error:
            raise RequestError(f"messages: {error}") from None
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from None
