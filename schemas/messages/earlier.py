"""Messages of earlier builds, as far as a ledger may hold them."""

from typing import Any, ClassVar

from schemas import arrays
from schemas.messages.base import Listed, Message, Name
from schemas.messages.groups import Prompt, Purpose, ScoredGroup, single_turn


class ScoredGroup1(Message):
    """Version 1 of a scored group: completions of a single turn, with one prompt."""

    kind: ClassVar[str] = "scored_group"
    texts: ClassVar[tuple[str, ...]] = ("prompt", "completions")

    sender: Name
    ordinal: int
    attempt: int
    purpose: Purpose
    environment: str
    example_key: str
    prompt: Prompt
    columns: dict[str, Any]
    completions: Listed[str]
    finish_reasons: Listed[str]
    prompt_ids: arrays.Int32_P
    completion_offsets: arrays.Offsets_G
    token_ids: arrays.Int32_N
    loss_mask: arrays.UInt8_N
    logprobs: arrays.Float32_N
    segments: arrays.Segments1_S
    segment_temperatures: arrays.Float32_S
    scorer: Name
    reward_names: Listed[str]
    rewards_FG: arrays.Float64_FG
    rewards_G: arrays.Float64_G
    advantages_G: arrays.Float32_G
    token_advantages: arrays.Float32_A

    def upgraded(self) -> ScoredGroup:
        """Return the group in the present version."""
        same = {name: self.__dict__[name] for name in ScoredGroup.model_fields if name in self.__dict__}
        fields = single_turn(self.prompt_ids, self.completion_offsets, self.segments)
        return ScoredGroup(**same | fields, stop_conditions=self.finish_reasons)
