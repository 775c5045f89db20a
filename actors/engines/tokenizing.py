"""Tokenizer part of an engine: text of tokens, messages out of them, and token ids of prompts."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jinja2

from actors.engines.protocol import Completion, RequestError
from actors.engines.text import text_of
from actors.models.tokenizer import Tokenizer, eos_ids
from actors.trajectories import forms
from actors.trajectories.forms import AnswerForm, Demand
from actors.trajectories.parsing import OPENING_TOKENS, Parsed, looked_for, opens_thoughts, parse, syntax_of
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

    def tokenize(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = (), template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a text, or of messages through the model's chat template.

        Args:
            tools: functions that the model may call, as OpenAI's API describes them.
            template_kwargs: variables of the chat template, such as `enable_thinking`.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages or has no tool calls.
        """
        try:
            if tools and syntax_of(self._tokenizer.chat_template(tools)) is None:
                raise RequestError(
                    "tools: the model's chat template writes no tool calls in a form that is known here; "
                    "describe the tools in a message, and read the calls from the text"
                )
            return self._tokenizer.encode(prompt, tools, template_kwargs)
        except RequestError:
            raise
        except ConfigError as error:
            # the model has no chat template
            raise RequestError(f"messages: {error}") from None
        except ValueError as error:
            raise RequestError(f"chat_template_kwargs.{error}") from None
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from None

    def form_of(self, prompt_ids: list[int], demand: Demand) -> AnswerForm:
        """Return the form that meets a demand on the answer to this prompt.

        Raises:
            RequestError: the model's chat template can't meet the demand.
        """
        opened = self._tokenizer.decode(prompt_ids[-OPENING_TOKENS:], skip_special=False)
        try:
            syntax = syntax_of(self._tokenizer.chat_template(demand.tools)) if demand.tools else None
            return forms.form_of(demand, syntax, opens_thoughts(opened))
        except ValueError as error:
            raise RequestError(str(error)) from None

    def read_message(
        self, prompt_ids: list[int], completion: Completion, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Parsed:
        """Return thoughts, text and tool calls of a completion; without tools no calls are looked for."""
        syntax = syntax_of(self._tokenizer.chat_template(tools))
        decode = partial(self._tokenizer.decode, skip_special=False)
        return parse(
            text_of(completion, decode),
            looked_for(syntax, tools),
            tools,
            decode(prompt_ids[-OPENING_TOKENS:]),
        )
