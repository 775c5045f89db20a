"""Sampling of a group: example of the ticket, prompt in tokens, completions of an engine, message."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from actors.datasets import Dataset, Example
from actors.datasets.base import why_not_sendable
from actors.datasets.images import why_not_taken
from actors.datasets.prompts import Encode, Expand, Prompts, UncutPromptError
from actors.engines.http.client import SampledCompletion
from actors.engines.protocol import PromptImage
from actors.rollout.engine_choice import EngineChoice
from actors.rollout.environments import EnvironmentPlayer
from actors.rollout.held import AttemptError
from actors.rollout.trajectory_group import build_trajectory_group, head_of
from schemas import routed
from schemas.config import RunConfig
from schemas.messages import ImagePlace, Purpose, RolloutGroup, Ticket, single_turn


class GroupSampler:
    """Sampler of groups.

    Args:
        config: configuration of the run.
        name: name of the actor, the sender of its groups.
        datasets: data sets by purpose and label.
        encode: function from a prompt to token ids.
        engines: asker of engines; public, since the actor's loop passes each directive on to the engines.
        player: player of environments; None if the run has none.
        note_cut: called with the label of each prompt that is cut (`environments[].long_prompts`).
        expand: function that gives images their tokens; None: prompts with images are refused.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        datasets: Mapping[tuple[Purpose, str], Dataset],
        encode: Encode,
        engines: EngineChoice,
        player: EnvironmentPlayer | None = None,
        note_cut: Callable[[str], object] = lambda label: None,
        expand: Expand | None = None,
    ) -> None:
        self._name, self._datasets, self.engines = name, datasets, engines
        self._prompts = Prompts(config.environments_by_label, encode, note_cut, expand, why_not_taken(config))
        self._player = player
        self._limit_key, self._limit = longest_sample(config)

    async def __aenter__(self) -> Self:
        """Open connections to engines, and start the workers of environments."""
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self.engines)
        if self._player is not None:
            await self._stack.enter_async_context(self._player)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def note_workers(self) -> None:
        """Show how many workers of environments are ready."""
        if self._player is not None:
            self._player.note_workers()

    async def sample(self, run: str, ticket: Ticket) -> RolloutGroup:
        """Return the sampled group of a ticket.

        Raises:
            AttemptError: the example can't be sampled, or the engines have failed.
            ConfigError: no prompt can be encoded with this configuration.
        """
        where = f"{ticket.environment} example {ticket.index}"
        try:
            example = self._datasets[ticket.purpose, ticket.environment].example(ticket.index)
        except Exception as error:
            # user code: whatever it raises costs this attempt alone
            raise AttemptError("environment", f"{where}: {type(error).__name__}: {error}") from error
        if example.key(ticket.environment) != ticket.example_key:
            raise AttemptError(
                "environment", f"{where} has another key here than at the packer: do both read the same file?"
            )
        # before an engine is asked: the group could never be sent, however well it is sampled
        if why := why_not_sendable(example):
            raise AttemptError(
                "environment",
                f"{where} can't be sent: {why} (integers have 64 bits; keep what is large in a file and name the file "
                "in a column)",
            )
        if self._player is not None and self._player.plays(ticket.environment):
            trajectories, columns = await self._player.play(ticket, example)
            return build_trajectory_group(run, self._name, ticket, columns, trajectories)
        try:
            prompt = self._prompts.encode(ticket.environment, example)
        except UncutPromptError as error:
            raise AttemptError("prompt_too_long", str(error)) from None
        if len(prompt.ids) + ticket.max_tokens > self._limit:
            raise AttemptError(
                "prompt_too_long",
                f"{len(prompt.ids)} prompt tokens and rollout.max_tokens {ticket.max_tokens} exceed "
                f"{self._limit_key} {self._limit}",
            )
        shown = [(place.start, example.images[place.image]) for place in prompt.image_places]
        images = [PromptImage(start, image.digest, image.data) for start, image in shown]
        completions = await self.engines.ask(ticket, prompt.ids, images=images)
        return build_group(run, self._name, ticket, example, prompt.ids, completions, prompt.image_places)


def longest_sample(config: RunConfig) -> tuple[str, int]:
    """Return the key with the limit of prompt and completion together, and the limit in tokens.

    The limit of the model itself is known to the engine alone, which refuses longer requests.
    """
    limits = {"packer.sequence_len": config.packer.sequence_len}
    limits |= config.inference.engine.max_tokens_per_sequence()
    return min(limits.items(), key=lambda item: item[1])


def _experts(num_prompt_tokens: int, completions: Sequence[SampledCompletion]) -> dict[str, Any]:
    """Return the fields on experts: of the prompt, as the first completion's engine chose, and of each completion."""
    found = [c.routed_experts for c in completions if c.routed_experts is not None]
    if len(found) < len(completions):
        return {}
    # the last token of a completion has not been computed
    parts = [part for experts in found for part in (experts[num_prompt_tokens:], routed.unknown(1, experts))]
    pieces, layout = routed.packed(np.concatenate([found[0][:num_prompt_tokens], *parts]))
    return {"routed_experts": pieces, "expert_layout": layout}


def build_group(
    run: str,
    sender: str,
    ticket: Ticket,
    example: Example,
    prompt_ids: list[int],
    completions: list[SampledCompletion],
    image_places: Sequence[ImagePlace] = (),
) -> RolloutGroup:
    """Return the message of a sampled group. Offsets and segments count tokens over all completions, joined.

    An image that the prompt shows several times travels once.

    Example: completions of 3 and 1 tokens, the first one interrupted after 2 by version 4, make offsets [0, 3, 4] and
    segments that start at 0, 2 and 3.
    """
    offsets = np.cumsum([0, *(len(c.token_ids) for c in completions)])
    segments = [
        (start + offset, lineage, version)
        for c, offset in zip(completions, offsets.tolist(), strict=False)
        for start, lineage, version in c.segments
        # an engine may name a policy for a position behind the last token, which no token of the group has
        if start < len(c.token_ids)
    ]
    numbers: dict[str, int] = {}
    of_example = [numbers.setdefault(image.digest, len(numbers)) for image in example.images]
    files = {image.digest: image.data for image in example.images}
    tokens = np.concatenate([np.asarray(c.token_ids, np.int32) for c in completions])
    return RolloutGroup(
        **head_of(run, sender, ticket),
        prompt=example.prompt,
        columns=example.columns,
        images=[files[digest] for digest in numbers],
        image_places=[place.model_copy(update={"image": of_example[place.image]}) for place in image_places],
        completions=[c.text for c in completions],
        stop_conditions=[c.finish_reason for c in completions],
        token_ids=tokens,
        # every sampled token may be trained; shaping masks tokens later, in the reward actor
        loss_mask=np.ones(tokens.size, np.uint8),
        logprobs=np.concatenate([np.asarray(c.logprobs, np.float32) for c in completions]),
        segment_temperatures=np.full(len(segments), ticket.sampling.temperature, np.float32),
        **(_experts(len(prompt_ids), completions) if ticket.purpose == "train" else {}),
        **single_turn(np.asarray(prompt_ids, np.int32), offsets, np.array(segments, np.int64).reshape(-1, 3)),
    )
