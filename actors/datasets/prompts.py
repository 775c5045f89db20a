"""Token ids of prompts, by the keys of their environments: variables of the chat template, and the greatest length."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from actors.datasets.base import Example
from schemas.config.data import DatasetBase
from schemas.errors import ConfigError
from schemas.messages import ImagePlace

Encode = Callable[..., list[int]]
"""Function of a prompt, and of tools and variables of the chat template if there are any (`Tokenizer.encode`)."""
Expand = Callable[[Sequence[int], Sequence[tuple[int, int]]], tuple[list[int], list[ImagePlace]]]
"""Function of token ids and of the sizes of images, that gives each image its tokens (`ImageTokens.expand`)."""


class PromptTokens(NamedTuple):
    """Prompt in tokens."""

    ids: list[int]
    image_places: Sequence[ImagePlace] = ()
    """Places of the example's images, with the numbers that these have in the example."""


class UncutPromptError(Exception):
    """Prompt with images that is longer than its environment allows; a cut could go through an image."""


class Prompts:
    """Encoder of prompts.

    Args:
        environments: configurations of all environments of the run, by label and by the names of evaluations.
        encode: function from a prompt to token ids.
        note_cut: called with the label of each prompt that is cut.
        expand: gives images their tokens; None: prompts with images are refused.
        why_not: why they are refused.
    """

    def __init__(
        self,
        environments: Mapping[str, DatasetBase],
        encode: Encode,
        note_cut: Callable[[str], object] = lambda label: None,
        expand: Expand | None = None,
        why_not: str = "",
    ) -> None:
        self._configs, self._encode_whole, self._note_cut = environments, encode, note_cut
        self._expand, self._why_not = expand, why_not

    def encode(self, label: str, example: Example) -> PromptTokens:
        """Return the tokens of an example's prompt, those of images included, cut if its environment says so.

        Raises:
            ConfigError: no prompt can be encoded with this configuration.
            UncutPromptError: a prompt with images is too long, where others are cut.
        """
        config, tokens = self._configs[label], self._whole(label, example)
        limit = config.max_prompt_tokens
        if limit is None or len(tokens.ids) <= limit or config.long_prompts == "drop":
            return tokens
        if tokens.image_places:
            raise UncutPromptError(
                f"{len(tokens.ids)} prompt tokens exceed environments[].max_prompt_tokens {limit}, and a prompt with "
                "images is not cut; raise it, or set long_prompts: drop"
            )
        self._note_cut(label)
        return PromptTokens(tokens.ids[-limit:] if config.long_prompts == "truncate_left" else tokens.ids[:limit])

    def is_left_out(self, label: str, example: Example) -> bool:
        """Return whether a prompt is longer than its environment allows and is to be left out.

        Raises:
            ConfigError: as `encode`.
        """
        config = self._configs[label]
        if config.max_prompt_tokens is None or config.long_prompts != "drop":
            return False
        return len(self._whole(label, example).ids) > config.max_prompt_tokens

    def _whole(self, label: str, example: Example) -> PromptTokens:
        if example.images and self._expand is None:
            raise ConfigError(f"environments[]: an example of {label} has images; {self._why_not}")
        variables: dict[str, Any] = self._configs[label].chat_template_kwargs
        prompt = example.prompt
        ids = self._encode_whole(prompt, (), variables) if variables else self._encode_whole(prompt)
        if not example.images or self._expand is None:
            return PromptTokens(ids)
        try:
            return PromptTokens(*self._expand(ids, [(image.height, image.width) for image in example.images]))
        except ValueError as error:
            raise ConfigError(f"environments[]: the images of an example of {label} have no tokens: {error}") from None
