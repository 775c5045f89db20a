"""Agents of the examples with a model that writes given texts, in workers with the agents' interpreter."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast

from actors.assembly import make_rollout_datasets
from actors.engines.http.client import SampledCompletion
from actors.rollout.engine_choice import EngineChoice
from actors.rollout.environments import EnvironmentPlayer
from actors.rollout.episode import Trajectory
from actors.telemetry.metrics import Metrics
from actors.trajectories.chat import Chat as Language
from schemas.config import RunConfig, load_config
from tests.actors.rollout.doubles import ticket
from tests.actors.trajectories.families import Chat
from tests.actors.trajectories.writer import language
from tests.system.environments.scripted import python_of

EXAMPLES = Path(__file__).parents[3] / "examples/agents"
SEQUENCE_LEN = 400_000
"""Tokens are bytes here."""
LIMITS = ", ".join(f"{name}: 240" for name in ("load", "reset", "step", "score", "silence"))
"""Imports take up to a minute on a busy machine."""
Script = Callable[[str], str]
"""The model's next text, of all that it has seen."""


QWEN = language(Chat("qwen2_5"))


class Engines:
    """Engines whose answers are those of a script, in the language of a model.

    Args:
        finish_reason: `length` for answers that are cut off.
    """

    def __init__(
        self, script: Script, chat: Language = QWEN, finish_reason: Literal["stop", "length"] = "stop"
    ) -> None:
        self.script, self._chat, self._finish_reason = script, chat, finish_reason
        self.prompts: list[str] = []

    async def ask(
        self, one: Any, prompt_ids: list[int], stop: Any = (), affinity: Any = None, form: Any = None, images: Any = ()
    ) -> list[SampledCompletion]:
        """The next text, with the end of a turn."""
        prompt = self._chat.decode(prompt_ids)
        self.prompts.append(prompt)
        text = self.script(prompt)
        ids = self._chat.encode(text + self._chat.ends[0] * (self._finish_reason == "stop"))
        return [SampledCompletion(ids, [-1.0] * len(ids), [(0, 1, 3)], self._finish_reason, text=text)]


def config_of(folder: Path, file: str, *overrides: str) -> RunConfig:
    """The configuration of an example, with room for tokens that are bytes."""
    own = (f"output_dir={folder}", f"packer.sequence_len={SEQUENCE_LEN}", "rollout.max_tokens=1500")
    workers = (f"environments.0.python={python_of('agents')}", f"environments.0.limits={{{LIMITS}, processes: 64}}")
    return load_config(EXAMPLES / file, [*own, *workers, "environments.0.max_total_tokens=0", *overrides])


@asynccontextmanager
async def player(config: RunConfig, engines: Engines, chat: Language = QWEN) -> AsyncIterator[Callable[[int], Any]]:
    """A function that plays two trajectories of an example, by its number."""
    [environment] = config.environments
    chats = {environment.label: chat}
    data = make_rollout_datasets(config)["train", environment.label]
    metrics = Metrics("rollout")

    async def play(index: int) -> list[Trajectory]:
        asked = ticket(0, environment=environment.label, index=index, max_tokens=config.rollout.max_tokens)
        trajectories, _ = await one.play(asked, data.example(index))
        return trajectories

    one = EnvironmentPlayer(config, "rollout-0", chats, cast(EngineChoice, engines), metrics, SEQUENCE_LEN)
    async with one:
        yield play
