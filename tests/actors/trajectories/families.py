"""Chat templates of real models, over a tokenizer of bytes with the special tokens of the family."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.trajectories.bridges import Bridges

FOLDER = Path(__file__).parent / "templates"
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
    *(f"<｜tool▁{part}｜>" for part in ("outputs▁begin", "output▁begin", "output▁end", "outputs▁end")),
)
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
THOUGHTS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own, but not special: a decoded text shows them."""


@dataclass(frozen=True)
class Family:
    """What a model's folder says."""

    name: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    """Tokens that end a completion, as in generation_config.json."""
    marks: tuple[str, ...] = ()
    """Further tokens that are not special."""
    bos: str = ""

    @property
    def template(self) -> str:
        """The chat template."""
        return (FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_5", CHATML, ("<|im_end|>", "<|endoftext|>"), THOUGHTS[2:]),
        Family("qwen3", CHATML, ("<|im_end|>", "<|endoftext|>"), THOUGHTS),
        Family("qwen3_instruct_2507", CHATML, ("<|im_end|>", "<|endoftext|>"), THOUGHTS),
        Family("qwen3_5_think", CHATML, ("<|im_end|>", "<|endoftext|>"), THOUGHTS),
        Family("llama3_1", LLAMA, ("<|eot_id|>", "<|eom_id|>"), bos="<|begin_of_text|>"),
        Family("glm4moe", GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"), THOUGHTS),
        Family("gptoss", HARMONY, ("<|return|>", "<|call|>")),
        Family("mistral_v3_tekken", MISTRAL, ("</s>",), bos="<s>"),
        Family("deepseekv3", DEEPSEEK, ("<｜end▁of▁sentence｜>",), THOUGHTS[:2], bos="<｜begin▁of▁sentence｜>"),
    )
}


@cache
def tokenizer_of(name: str) -> Any:
    """A tokenizer of single bytes with the family's tokens and template."""
    family = FAMILIES[name]
    raw = Tokenizer(
        models.BPE(vocab={byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    raw.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.marks])
    named = {"bos_token": family.bos, "eos_token": family.ends[0]} if family.bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=family.template, **named)


class Chat:
    """A family's template and tokenizer."""

    def __init__(self, name: str, **options: Any) -> None:
        self.family, self.tokenizer, self._options = FAMILIES[name], tokenizer_of(name), options
        ends = [self.token(end) for end in self.family.ends]
        special = [self.token(one) for one in self.family.special]
        self.bridges = Bridges(self.render, self.encode, ends, special)

    def token(self, text: str) -> int:
        """The id of a token."""
        return int(self.tokenizer.convert_tokens_to_ids(text))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, as it stands."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text with all special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        """The chat template's text."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        )
