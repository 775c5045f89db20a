"""Token ids of prompts, by the keys of their environments: variables of the chat template, and the greatest length."""

from collections.abc import Callable, Mapping
from typing import Any

from schemas.config.data import DatasetBase
from schemas.messages import Prompt

Encode = Callable[..., list[int]]
"""Function of a prompt, and of tools and variables of the chat template if there are any (`Tokenizer.encode`)."""


class Prompts:
    """Encoder of prompts.

    Args:
        environments: configurations of all environments of the run, by label and by the names of evaluations.
        encode: function from a prompt to token ids.
        note_cut: called with the label of each prompt that is cut.
    """

    def __init__(
        self,
        environments: Mapping[str, DatasetBase],
        encode: Encode,
        note_cut: Callable[[str], object] = lambda label: None,
    ) -> None:
        self._configs, self._encode_whole, self._note_cut = environments, encode, note_cut

    def encode(self, label: str, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, cut if its environment says so.

        Raises:
            ConfigError: no prompt can be encoded with this configuration.
        """
        config, ids = self._configs[label], self._whole(label, prompt)
        limit = config.max_prompt_tokens
        if limit is None or len(ids) <= limit or config.long_prompts == "drop":
            return ids
        self._note_cut(label)
        return ids[-limit:] if config.long_prompts == "truncate_left" else ids[:limit]

    def is_left_out(self, label: str, prompt: Prompt) -> bool:
        """Return whether a prompt is longer than its environment allows and is to be left out.

        Raises:
            ConfigError: as `encode`.
        """
        config = self._configs[label]
        if config.max_prompt_tokens is None or config.long_prompts != "drop":
            return False
        return len(self._whole(label, prompt)) > config.max_prompt_tokens

    def _whole(self, label: str, prompt: Prompt) -> list[int]:
        variables: dict[str, Any] = self._configs[label].chat_template_kwargs
        return self._encode_whole(prompt, (), variables) if variables else self._encode_whole(prompt)
