"""Images in later turns: exact places from an environment's message to the trainer's batch, and limits in words."""

import base64
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.algorithms.batches import build_batches
from actors.datasets.prepared import digest_of
from actors.engines.http.client import RequestRefusedError
from actors.environments.errors import EpisodeError
from actors.models.image_tokens import ImageTokens
from actors.rollout.episode import Trajectory, play
from actors.rollout.held import AttemptError
from actors.rollout.trajectory_group import build_trajectory_group
from actors.rollout.turn_images import TurnImages
from actors.trajectories.bridges import Bridges, Message
from actors.trajectories.chat import Chat
from actors.trajectories.images import ImagesError
from actors.trajectories.recorder import Recorder, TurnAnswer, TurnLimits, TurnRequest
from bus import codec
from schemas import limits
from schemas.config.images import ImageLimitsConfig
from schemas.messages import RolloutGroup, ScoredGroup, drop_fields
from tests.actors.datasets import pictures
from tests.actors.rollout.doubles import ticket
from tests.images import png

PAD, END = 900, 1
"""Token ids of an image's patch, and of the end of a message; a letter is its own code point."""
WORDS = {"<|image_pad|>": PAD, "</s>": END}
RULE = ImageTokens(PAD, patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
SMALL, WIDE, OTHER = png(8, 8), png(16, 40, seed=1), png(16, 40, seed=2)
"""One token, and two images of ten tokens each."""


def encode(text: str) -> list[int]:
    """A token for a letter, and for each special word."""
    for word, token in WORDS.items():
        text = text.replace(word, chr(token))
    return [ord(letter) for letter in text]


def decode(ids: Sequence[int]) -> str:
    """The text of tokens."""
    named = {token: word for word, token in WORDS.items()}
    return "".join(named.get(token, chr(token)) for token in ids)


def render(messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str:
    """Each message with an end; a placeholder for an image."""
    text = ""
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text += message["role"][0] + ":"
        text += "".join("<|image_pad|>" if part["type"] == "image" else part["text"] for part in parts) + "</s>"
    return text + ("a:" if add_generation_prompt else "")


CHAT = Chat(Bridges(render, encode, [END], [END, PAD]), encode, decode, ("</s>",))


def images_of(group_size: int = 2, groups_per_step: int = 1, **keys: int) -> TurnImages:
    """Images of a trajectory."""
    return TurnImages(ImageLimitsConfig(**keys), groups_per_step, group_size, RULE.expand)


def recorder_of(requests: list[TurnRequest], images: TurnImages | None = None, most: int = 1000) -> Recorder:
    """A recorder whose model answers `x0`, `x1` and so on."""

    async def sample(request: TurnRequest) -> TurnAnswer:
        ids = encode(f"x{len(requests)}</s>")
        requests.append(request)
        return TurnAnswer(ids, [-0.5] * len(ids), [(0, 1, 0)], "stop")

    return Recorder(CHAT, sample, TurnLimits(most, 50), 7, images=images or images_of())


def user(*parts: str | bytes, form: str = "bytes") -> Message:
    """A message of texts and of image files."""

    def part(one: str | bytes) -> dict[str, Any]:
        if isinstance(one, str):
            return {"type": "text", "text": one}
        if form == "bytes":
            return {"type": "image", "bytes": one}
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(one).decode()}"},
        }

    return {"role": "user", "content": [part(one) for one in parts]}


class Episode:
    """An environment that shows these messages in turn."""

    is_driving = is_abandoned = False

    def __init__(self, *shown: Message) -> None:
        self._left = list(shown)
        self.turn_rewards: list[tuple[int, float]] = []

    def _turn(self) -> dict[str, Any]:
        messages = [self._left.pop(0)]
        return {"messages": messages, "tools": [], "reward": 1.0, "tool_failures": [], "done": not self._left}

    async def reset(self, row: Any, seed: int) -> dict[str, Any]:
        """The first message."""
        return self._turn()

    async def step(self, message: Message) -> dict[str, Any]:
        """The next one."""
        return self._turn() | {"truncated": False}

    async def score(self) -> dict[str, float | None]:
        """No reward of its own."""
        return {}

    async def run(self, *given: Any) -> dict[str, float | None]:
        """Never: it is stepped."""
        raise AssertionError


LAST: Message = {"role": "user", "content": "enough"}


async def played(
    *shown: Message, images: TurnImages | None = None, **keys: Any
) -> tuple[Trajectory, list[TurnRequest]]:
    """The trajectory of an environment that shows these messages, and the requests of its turns."""
    requests: list[TurnRequest] = []
    recorder = recorder_of(requests, images)
    return await play(Episode(*shown, LAST), recorder, "Look: ", {}, **keys), requests


def seen(ids: Sequence[int], images: Sequence[Any]) -> list[Any]:
    """Tokens with the digest of each image in the place of its tokens."""
    found: list[Any] = list(ids)
    for image in reversed(images):
        assert found[image.start : image.start + image.length] == [PAD] * image.length
        found[image.start : image.start + image.length] = [image.digest]
    return found


def expected(*pieces: str | bytes) -> list[Any]:
    """Tokens of texts, and digests of images."""
    return [
        *itertools.chain.from_iterable([digest_of(one)] if isinstance(one, bytes) else encode(one) for one in pieces)
    ]


@pytest.mark.parametrize("form", ["bytes", "url"])
async def test_each_request_has_the_images_of_all_turns_at_their_places(form: str) -> None:
    """Images in turns 2 and 3, one of them shown twice; the tokens before a turn are never made again."""
    trajectory, requests = await played(
        {"role": "user", "content": "no image"},
        user("b", WIDE, form=form),
        user(SMALL, WIDE, "c", OTHER, form=form),
    )
    first = ("u:Look: no image</s>a:",)
    second = (*first, "x0</s>u:b", WIDE, "</s>a:")
    third = (*second, "x1</s>u:", SMALL, WIDE, "c", OTHER, "</s>a:")
    for request, pieces in zip(requests, (first, second, third), strict=True):
        assert seen(request.prompt_ids, request.images) == expected(*pieces)
    [sample] = trajectory.tree.samples()
    assert seen([*sample.prompt_ids, *sample.token_ids], sample.images) == expected(*third, "x2</s>")
    assert sum(sample.loss_mask) == 3 * len(encode("x0</s>"))
    # records and rewards see digests alone
    assert trajectory.messages[2]["content"] == [
        {"type": "text", "text": "b"},
        {"type": "image", "digest": digest_of(WIDE)},
    ]


def scored(group: RolloutGroup) -> ScoredGroup:
    """The group as the packer gets it."""
    size = group.num_completions
    more: dict[str, Any] = {
        "scorer": "reward-0",
        "reward_names": ["r"],
        "rewards_FG": np.ones((1, size)),
        "rewards_G": np.ones(size),
        "advantages_G": np.ones(size, np.float32),
    }
    received = codec.decode([bytes(frame) for frame in codec.encode(ScoredGroup(**group.__dict__ | more))])
    assert isinstance(received, ScoredGroup)
    return received


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_group_carries_each_image_once_and_batches_show_each_sample_its_own(num_ranks: int) -> None:
    """Trajectories with equal token ids differ by their images, in the first message and behind it."""
    turns = [(SMALL, WIDE), (SMALL, OTHER), (SMALL, WIDE), (WIDE, SMALL), (OTHER, SMALL)]
    trajectories = [(await played(user(one), user("b", other)))[0] for one, other in turns]
    group = build_trajectory_group("r", "rollout-0", ticket(0), {}, trajectories)
    group.check()
    assert sorted(group.images) == sorted([SMALL, WIDE, OTHER])
    assert group.prompt_offsets.size - 1 == 3
    header = {"run": "run", "term": 1, "incarnation": 1, "step": 5, **drop_fields([])}
    for once in (False, True):
        batches = build_batches([scored(group)], num_ranks, 200, digests=["d"], prompts_count_once=once, **header)
        found = []
        for batch in batches:
            batch.check()
            assert len(set(batch.images)) == len(batch.images)
            for b, places in enumerate(batch.places_of_samples()):
                ids: list[Any] = batch.token_ids[slice(*batch.sample_offsets[b : b + 2].tolist())].tolist()
                for place in reversed(places):
                    assert ids[place.start : place.start + place.length] == [PAD] * place.length
                    ids[place.start : place.start + place.length] = [digest_of(batch.images[place.image])]
                found.append(ids)
        wanted = [expected("u:Look: ", one, "</s>a:x0</s>u:b", other, "</s>a:x1</s>") for one, other in turns]
        assert sorted(found, key=str) == sorted(wanted, key=str)


async def test_another_image_in_the_past_starts_a_branch() -> None:
    """Though its tokens are the same; the same image again continues."""
    requests: list[TurnRequest] = []
    recorder = recorder_of(requests)

    def known(*messages: Message) -> list[Message]:
        return [recorder.images.known(message) for message in messages]

    answer = await recorder.ask(known(user(WIDE)))
    await recorder.ask(known(user(WIDE), answer, LAST))
    assert recorder.tree.num_branches == 0
    await recorder.ask(known(user(OTHER), answer, LAST))
    assert recorder.tree.num_branches == 1
    assert requests[1].prompt_ids == requests[2].prompt_ids
    assert [seen(one.prompt_ids, one.images)[2] for one in requests] == [digest_of(WIDE)] * 2 + [digest_of(OTHER)]
    with pytest.raises(ValueError, match="a trajectory with images takes messages, and no token ids"):
        await recorder.turn([], prompt_ids=requests[0].prompt_ids)


async def test_tokens_of_images_count_in_the_sequence() -> None:
    """The turn in which an image leaves no room ends the trajectory, as a long text does."""
    requests: list[TurnRequest] = []
    room = len(encode("u:Look: hm</s>a:x0</s>u:</s>a:"))
    recorder = recorder_of(requests, most=room + 10)
    trajectory = await play(Episode({"role": "user", "content": "hm"}, user(WIDE), LAST), recorder, "Look: ", {})
    assert (trajectory.stop, len(requests)) == ("context_full", 1)
    recorder = recorder_of(requests, most=room + 11)
    trajectory = await play(Episode({"role": "user", "content": "hm"}, user(WIDE), LAST), recorder, "Look: ", {})
    assert [one.max_tokens for one in requests[2:]] == [1]


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"type": "image", "bytes": b"GIF89a"}, "has an image that is no JPEG, PNG or WebP image"),
    ({"type": "image", "bytes": pictures.png(60_000, 60_000)}, r"environments\[\].images.max_pixels is"),
    ({"type": "image", "path": "/etc/passwd"}, "there is no folder of files here; it must have bytes"),
    ({"type": "image", "digest": "0" * 32}, "is an object without bytes, path or url"),
    ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "images are not loaded from elsewhere"),
    ({"type": "input_audio", "input_audio": {}}, "has a part of type 'input_audio'; text and images"),
]


@pytest.mark.parametrize(("part", "words"), HOSTILE)
@pytest.mark.parametrize("turn", [1, 2])
async def test_a_hostile_image_ends_its_trajectory_in_words(part: dict[str, Any], words: str, turn: int) -> None:
    """As a failure of the environment: `on_failure` says whether the turns before it are kept."""
    shown = [LAST] * turn + [{"role": "user", "content": [part]}]
    with pytest.raises(EpisodeError, match=words) as failed:
        await played(*shown)
    assert failed.value.cause == "env_step"
    trajectory, requests = await played(*shown, keeps_failed=True)
    assert (trajectory.stop, len(requests), trajectory.tree.num_turns) == ("failed", turn, turn)
    assert trajectory.failure.startswith("env_step: a message of the role user has a")
    build_trajectory_group("r", "rollout-0", ticket(0), {}, [trajectory, (await played(user(WIDE)))[0]]).check()


async def test_damaged_pixels_cost_their_trajectory_alone() -> None:
    """The engine is the first to decode an image; a refusal for another reason is none of the environment's."""
    for words, error in (("HTTP 400: images: image 0: no image", EpisodeError), ("HTTP 400: max_tokens", AttemptError)):
        requests: list[TurnRequest] = []
        recorder = recorder_of(requests)
        answered = recorder.sample

        async def refusing(request: TurnRequest, words: str = words, answered: Any = answered) -> TurnAnswer:
            if request.images:
                raise AttemptError("engine", words) from RequestRefusedError(words)
            answer: TurnAnswer = await answered(request)
            return answer

        recorder.sample = refusing
        with pytest.raises(error, match=words):
            await play(Episode(LAST, user(WIDE), LAST), recorder, "", {})


async def test_limits_are_told_in_words_with_their_keys() -> None:
    """Number, bytes and places: each trajectory has its own share of what travels in a step."""
    with pytest.raises(EpisodeError, match=r"one more image than the 2 of environments\[\].images.max_images"):
        await played(user(SMALL), user(WIDE), user(OTHER), images=images_of(max_images=2))
    trajectory, _ = await played(user(SMALL), user(WIDE), user(WIDE, SMALL), images=images_of(max_images=2))
    assert trajectory.stop == "done"
    with pytest.raises(EpisodeError, match=r"its share .* is \d+; return smaller .* lower packer.groups_per_step"):
        await played(LAST, user(png(200, 200)), images=images_of(groups_per_step=limits.LIST_ITEMS // 2))
    share = limits.GROUP_IMAGES // 256
    with pytest.raises(EpisodeError, match=f"shows images {share + 1} times, and its share .* is {share}"):
        await played(user(*[SMALL] * share), user(SMALL), images=images_of(group_size=256))


async def test_a_run_that_takes_no_images_says_why() -> None:
    """With the engine or the key to change."""
    images = TurnImages(ImageLimitsConfig(), 1, 2, None, "inference.engine.type fake takes no images")
    with pytest.raises(EpisodeError, match=r"has an image; inference\.engine\.type fake takes no images"):
        await played(LAST, user(WIDE), images=images)


async def test_a_text_with_a_placeholder_is_told() -> None:
    """A placeholder that no image has would shift the places of others."""
    with pytest.raises(EpisodeError, match="written 2 placeholders for 1 images"):
        await played(LAST, user("<|image_pad|>", WIDE))
    with pytest.raises(ImagesError):
        images_of().known({"role": "user", "content": [{"type": "image"}]})
