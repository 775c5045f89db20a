"""One group: its example, its prompt, its message."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from actors.datasets import Example
from actors.datasets.images import Image
from actors.datasets.prompts import Prompts, UncutPromptError
from actors.engines.http.client import SampledCompletion
from actors.models.image_tokens import ImageTokens
from actors.rollout.engine_choice import EngineChoice
from actors.rollout.group import GroupSampler, build_group
from actors.rollout.held import AttemptError
from actors.telemetry.metrics import Metrics
from bus import codec
from schemas import limits
from schemas.config.data import JsonlConfig
from schemas.config.embedded_engine import EmbeddedEngineConfig
from schemas.config.fake_engine import FakeEngineConfig
from schemas.config.vllm_engine import VllmEngineConfig
from schemas.errors import ConfigError
from schemas.messages import ImagePlace
from schemas.routed import UNKNOWN
from tests.actors.rollout.doubles import EXAMPLE, Client, completion, ticket
from tests.ring.harness import ring_config


@pytest.fixture
def make_sampler(tmp_path):
    """Makes a sampler whose data set has this example alone."""

    def make(example=EXAMPLE, encode=lambda prompt: list(map(ord, prompt)), client=None, engine=None):
        config = ring_config(tmp_path)
        if engine is not None:
            config = config.model_copy(update={"inference": config.inference.model_copy(update={"engine": engine})})
        datasets = {("train", "reverse_text"): type("E", (), {"example": lambda self, index: example})()}
        engines = EngineChoice(config, Metrics("rollout"), lambda: client or Client({}))
        return GroupSampler(config, "rollout-0", datasets, encode, engines)

    return make


def test_group_joins_completions_with_offsets_and_segments():
    """Two completions of 3 and 1 tokens, the first one interrupted after 2: segments start at 0, 2 and 3."""
    group = build_group(
        "r",
        "rollout-0",
        ticket(),
        EXAMPLE,
        [1, 2],
        [completion([5, 6, 7], [(0, 1, 3), (2, 1, 4)]), completion([8], [(0, 1, 4)])],
    )
    assert group.completion_offsets.tolist() == [0, 3, 4]
    assert group.token_ids.tolist() == [5, 6, 7, 8]
    assert group.segments[:, :3].tolist() == [[0, 1, 3], [2, 1, 4], [3, 1, 4]]
    assert not group.segments[:, 3:].any()  # by the model, in turn 0
    assert group.segment_temperatures.tolist() == [0.5, 0.5, 0.5]
    assert group.oldest_version == 3
    assert group.loss_mask.tolist() == [1, 1, 1, 1]


def test_experts_of_a_prompt_are_those_of_its_first_completion():
    """Behind each completion's tokens there is one more of which nothing is known; evaluations bring none."""

    def told(ids: list[int], value: int) -> SampledCompletion:
        experts = np.full((2 + len(ids) - 1, 2, 2), value, np.int8)
        return replace(completion(ids, [(0, 1, 3)]), routed_experts=experts)

    both = [told([5, 6, 7], 1), told([8], 2)]
    group = build_group("r", "rollout-0", ticket(), EXAMPLE, [1, 2], both)
    assert group.experts is not None
    assert group.experts[:, 0, 0].tolist() == [1, 1, 1, 1, UNKNOWN, UNKNOWN]
    assert build_group("r", "x", ticket(), EXAMPLE, [1, 2], [both[0], completion([8], [(0, 1, 4)])]).experts is None
    evaluated = ticket().model_copy(update={"purpose": "eval"})
    assert build_group("r", "x", evaluated, EXAMPLE, [1, 2], both).experts is None


SEEN = Example(
    prompt=[{"role": "user", "content": [{"type": "image", "digest": "d"}] * 3}],
    columns={},
    images=(Image(b"red", 30, 40), Image(b"blue", 20, 20), Image(b"red", 30, 40)),
)
"""An example that shows an image twice."""


def test_images_travel_once_with_all_their_places():
    """Numbers of images are those of the group; the bytes are the file's."""
    places = [ImagePlace(image=image, start=start, length=2) for image, start in enumerate((1, 4, 7))]
    group = build_group("r", "rollout-0", ticket(), SEEN, list(range(10)), [completion([5], [(0, 1, 3)])] * 2, places)
    assert group.images == [b"red", b"blue"]
    assert [(place.image, place.start, place.length) for place in group.image_places] == [
        (0, 1, 2),
        (1, 4, 2),
        (0, 7, 2),
    ]
    assert codec.decode(codec.encode(group)).equals(group)


async def test_an_example_with_images_ends_the_run_in_words(make_sampler):
    """A data set whose rows were not looked at before the start: nothing is sampled without its images."""
    sampler = make_sampler(SEEN)
    with pytest.raises(ConfigError, match=r"has images; inference.engine.type fake takes no images; take embedded"):
        await sampler.sample("r", ticket(example_key=SEEN.key("reverse_text")))


@pytest.mark.parametrize(("limit", "kind"), [(9, "drop"), (8, "drop"), (9, "truncate_left"), (8, "truncate_left")])
def test_tokens_of_images_count_in_the_limit_of_a_prompt(limit, kind):
    """Three placeholders with two tokens each, and three others: nine tokens; a prompt with images is never cut."""
    rule = ImageTokens(placeholder=0, patch_size=10, merge_size=1, min_pixels=1, max_pixels=200)
    config = JsonlConfig(path="rows.jsonl", name="e", max_prompt_tokens=limit, long_prompts=kind)
    cut = []
    prompts = Prompts({"e": config}, lambda prompt: [7, 0, 7, 0, 7, 0], cut.append, rule.expand)
    wide = dataclasses.replace(SEEN, images=(Image(b"wide", 10, 20),) * 3)
    assert prompts.is_left_out("e", wide) == (limit == 8 and kind == "drop")
    if limit == 8 and kind != "drop":
        with pytest.raises(UncutPromptError, match=r"9 prompt tokens exceed environments\[\].max_prompt_tokens 8"):
            prompts.encode("e", wide)
    else:
        tokens = prompts.encode("e", wide)
        assert tokens.ids == [7, 0, 0, 7, 0, 0, 7, 0, 0]
        assert [place.start for place in tokens.image_places] == [1, 4, 7]
    assert not cut


async def test_example_that_differs_from_the_packers_fails_the_attempt(make_sampler):
    """Another file on this machine: the key tells, before anything is sampled."""
    with pytest.raises(AttemptError, match="do both read the same file"):
        await make_sampler().sample("r", ticket(example_key="0123456789abcdef"))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (FakeEngineConfig(), "packer.sequence_len 64"),
        (EmbeddedEngineConfig(max_sequence_len=50), "inference.engine.max_sequence_len 50"),
        (VllmEngineConfig(max_model_len=50), "inference.engine.max_model_len 50"),
    ],
)
async def test_prompt_that_leaves_no_room_fails_the_attempt_by_name(make_sampler, engine, words):
    """60 prompt tokens and 8 new ones exceed packer.sequence_len, or what the engine takes where that is less."""
    sampler = make_sampler(encode=lambda prompt: [1] * 60, engine=engine)
    with pytest.raises(AttemptError, match=f"60 prompt tokens and rollout.max_tokens 8 exceed {words}") as caught:
        await sampler.sample("r", ticket())
    assert caught.value.reason == "prompt_too_long"


async def test_columns_that_no_reward_actor_would_take_fail_the_attempt_before_it_is_sampled(make_sampler):
    """A list longer than a header may have: an engine is not even asked."""
    example = Example(prompt="abc=", columns={"numbers": [0] * (limits.LIST_ITEMS + 1)})
    client = Client({})
    sampler = make_sampler(example, client=client)
    with pytest.raises(AttemptError, match="keep what is large in a file") as caught:
        await sampler.sample("r", ticket())
    assert caught.value.reason == "environment"
    assert client.asked == []
