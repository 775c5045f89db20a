"""The chat of a model, out of its files."""

from collections.abc import Mapping, Sequence
from typing import Any

from actors.models.tokenizer import Tokenizer, eos_ids
from actors.trajectories.bridges import Bridges, Message
from actors.trajectories.chat import Chat
from actors.trajectories.parsing import syntax_of
from schemas.config.model import ModelConfig


def chat_of(model: ModelConfig, template_kwargs: Mapping[str, Any] | None = None) -> Chat:
    """Return template, tokenizer and syntax of a model.

    Args:
        model: the policy.
        template_kwargs: variables of the chat template, such as `enable_thinking`.

    Raises:
        ConfigError: the model has no tokenizer, no chat template or no end of sequence.
    """
    tokenizer, ends = Tokenizer(model), eos_ids(model)
    # the template for tools, where a model has one of its own
    template = tokenizer.chat_template([{}])

    def render(messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        return tokenizer.render(messages, tools, template_kwargs, add_generation_prompt=add_generation_prompt)

    return Chat(
        Bridges(render, tokenizer.encode_text, ends, tokenizer.special_ids),
        tokenizer.encode_text,
        lambda ids: tokenizer.decode(list(ids), skip_special=False),
        tuple(tokenizer.decode([end], skip_special=False) for end in sorted(ends)),
        syntax_of(template),
    )
