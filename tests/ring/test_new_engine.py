"""An engine that the project does not know: its configuration class and a line in the table of makers are enough."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, ValidationError, create_model

from actors.assembly import ENGINES
from actors.engines.fake import FakeEngine
from actors.ops.preflight import preflight
from schemas.config import RunConfig, warnings
from schemas.config.engine_base import EngineBase, WeightChannel
from schemas.config.engines import EngineConfig
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.inference import InferenceConfig
from schemas.config.resume_classes import Free
from tests.ring.harness import check_promise, ring, ring_config

MakeConfig = Callable[..., RunConfig]


class NewEngineConfig(EngineBase):
    """An engine without a model that has limits of its own, and does not take part in broadcasts."""

    loads_model: ClassVar[bool] = False
    channels: ClassVar[frozenset[WeightChannel]] = frozenset({"filesystem"})

    type: Free[Literal["new"]] = "new"
    letters: Free[int] = 30
    context: Free[int] = 40

    @property
    def own_vocab_size(self) -> int:
        """Value of `letters`."""
        return self.letters

    def max_tokens_per_sequence(self) -> dict[str, int]:
        """Return `context`."""
        return {"inference.engine.context": self.context}

    def packages(self) -> Iterator[tuple[str, str]]:
        """Yield a package that nobody has."""
        if self.letters == 31:
            yield "no_such_package", "no-such-package"

    def problems(self, config: RunConfig) -> Iterator[str]:
        """Yield an error for groups that are too large."""
        if config.rollout.group_size > 8:
            yield f"rollout.group_size: {config.rollout.group_size} is too large for inference.engine.type new"

    def warnings(self, config: RunConfig) -> Iterator[str]:
        """Yield a warning for few letters."""
        if self.letters < 10:
            yield f"inference.engine.letters: {self.letters} is little"


class NewEngine(FakeEngine):
    """Made of letters."""


@pytest.fixture
def make_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeConfig:
    """A small run with the new engine; `sections` are merged into it."""
    engines = Annotated[EngineConfig | NewEngineConfig, Field(discriminator="type")]
    inference = create_model("InferenceConfig", __base__=InferenceConfig, engine=(engines, NewEngineConfig()))
    run: type[RunConfig] = create_model("RunConfig", __base__=RunConfig, inference=(inference, inference()))

    def make(config: RunConfig, engine: NewEngineConfig, name: str, server_index: int) -> NewEngine:
        assert (name, server_index) in (("inference-0", 0), ("inference-1", 1), ("rollout-0", 0))
        return NewEngine(FakeEngineConfig(vocab_size=engine.letters))

    monkeypatch.setitem(ENGINES, "new", make)

    def config(engine: Any = None, **sections: Any) -> RunConfig:
        tree = ring_config(tmp_path).model_dump(exclude_unset=True)
        sections = {"inference": {}, **sections}
        sections["inference"] = {**sections["inference"], "engine": {"type": "new", **(engine or {})}}
        return run.model_validate({**tree, **{name: {**tree.get(name, {}), **of} for name, of in sections.items()}})

    return config


@pytest.mark.slow
def test_a_new_engine_is_checked_and_serves_a_run(make_config: MakeConfig) -> None:
    """Without a model, a tokenizer or a warning; every server_index is trained once."""
    config = make_config(trainer={"max_steps": 4})
    assert preflight(config) == warnings(config) == []
    with ring(config) as run:
        run.start("packer-0", "trainer-0", "inference-0", "inference-1", "reward-0", "rollout-0").wait()
        engines = [run[name].value("grpo_inference_generated_tokens_total") for name in ("inference-0", "inference-1")]
    assert check_promise(config).dropped == {}
    assert sum(engines) > 0


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"rollout": {"group_size": 9}}, "rollout.group_size: 9 is too large for inference.engine.type new"),
        ({"engine": {"context": 12}}, "rollout.max_tokens: 12 leaves no room for a prompt in inference.engine.context"),
        ({"weights": {"channel": "rendezvous"}}, "weights.channel: rendezvous, but engine new takes weights by"),
        ({"inference": {"noise": {}}}, "inference.noise: engine new can't add noise; .* to embedded or vllm"),
        (
            {"inference": {"pool": {"urls": ["http://one:1"]}}},
            "inference.pool: engine new runs in its actor .* to vllm or sglang",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_new_engine_cannot_do_is_refused(make_config: MakeConfig, sections: Any, problem: str) -> None:
    """By the rules for all engines, and by its own."""
    with pytest.raises(ValidationError, match=problem):
        make_config(**sections)


def test_warnings_and_packages_of_a_new_engine_are_told(make_config: MakeConfig) -> None:
    """Before a run starts."""
    assert warnings(make_config({"letters": 9})) == ["inference.engine.letters: 9 is little"]
    [missing] = preflight(make_config({"letters": 31}), starts=False)
    assert missing.startswith("inference.engine.type: no_such_package is not installed here")
