"""A taskset of verifiers 0.4, as its users write them; loaded by id from this folder."""

from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers_v1_tools import AddToolset

__all__ = ["SumsTaskset"]


class SumsData(vf.TaskData):
    """A sum."""

    answer: str


class SumsTask(vf.Task[SumsData]):
    """Reward for the right answer; an answer that says boom fails the reward."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """One tool."""
        return [AddToolset(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        """Compare the last reply."""
        if "boom" in (trace.last_reply or ""):
            raise KeyError("no such key")
        return float((trace.last_reply or "") == self.data.answer)

    @vf.metric
    async def num_letters(self, trace: vf.Trace) -> float:
        """Count letters, for reports."""
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    size: int = 3


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    """Sums from 0 on."""

    def load(self) -> Iterator[SumsTask]:
        """Make them."""
        for n in range(self.config.size):
            data = SumsData(prompt=f"What is {n} + 1?", system_prompt="Add.", answer=str(n + 1))
            yield SumsTask(data, self.config.task)
