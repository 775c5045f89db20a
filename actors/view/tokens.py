"""A completion token by token, as the ledger's payload has it: text, origin, version, logprob, mask and advantage.

`token_values` has the trainer's values of the same tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from actors.view.plain import number
from schemas.config import RunConfig
from schemas.errors import ConfigError
from schemas.messages import SEGMENT_LINEAGE, SEGMENT_ORIGIN, SEGMENT_TURN, SEGMENT_VERSION, ScoredGroup

MAX_TOKENS = 4000
"""Largest number of tokens in an answer; the page asks for the following ones."""
CONTEXT = 8
"""Tokens before a token with which its text is decoded: no character is spread over more of them."""
ORIGINS = ("model", "environment", "boundary")
"""Names of `Origin` in the order of its values."""
Decode = Callable[[Sequence[int]], str]


def decoder(config: RunConfig) -> tuple[Decode | None, str]:
    """Return a function from token ids to text, and an empty text; or None, and the reason why there is none.

    The tokenizer is that of model.path if this is a folder, else of the newest checkpoint. Nothing is downloaded.
    """
    places = [Path(config.model.path), *_checkpoints(config.output)]
    for place in places:
        if (place / "tokenizer.json").is_file():
            try:
                return _loaded(str(place / "tokenizer.json")), ""
            except Exception as error:  # noqa: BLE001 - the library raises its own kinds for a file that it can't read
                return None, f"{place / 'tokenizer.json'} can't be read: {error}"
    reason = f"neither model.path ({config.model.path}) nor a checkpoint of the run is a folder with a tokenizer.json"
    return None, f"{reason}, so tokens are shown by their numbers"


def _checkpoints(output: Path) -> list[Path]:
    folders = [folder for folder in (output / "checkpoints").glob("step_*") if folder.name[5:].isdecimal()]
    return sorted(folders, key=lambda folder: -int(folder.name[5:]))


@lru_cache(maxsize=4)
def _loaded(path: str) -> Decode:
    # imported here: lists and overviews need no tokenizer
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(path)
    return lambda ids: str(raw.decode(list(ids), skip_special_tokens=False))


def pieces(ids: Sequence[int], decode: Decode | None, before: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds; empty for a token that does not complete a character.

    Args:
        ids: tokens.
        decode: function from tokens to text; None: texts are the numbers.
        before: tokens before the first one.
    """
    if decode is None:
        return [f"‹{token}›" for token in ids]
    return list(_pieces([*before, *ids], len(before), decode))


def _pieces(ids: Sequence[int], first: int, decode: Decode) -> Iterator[str]:
    shown = max(0, first - CONTEXT)
    """Tokens before this place are decoded no more."""
    for end in range(first + 1, len(ids) + 1):
        shown = max(shown, end - CONTEXT)
        known, now = decode(ids[shown : end - 1]), decode(ids[shown:end])
        # a token that ends within a character decodes to U+FFFD until the next one completes it
        known, now = known.rstrip("�"), now.rstrip("�") if end < len(ids) else now
        yield now[len(known) :] if now.startswith(known) else decode(ids[end - 1 : end])


def samples_of(group: ScoredGroup, completion: int) -> list[dict[str, Any]]:
    """Return the samples of a completion: number, prompt tokens, tokens behind the prompt. Several are its branches."""
    found = []
    for sample in np.flatnonzero(group.sample_completions == completion).tolist():
        start, end = group.sample_offsets[sample : sample + 2].tolist()
        prompt = int(group.sample_prompts[sample])
        first, last = group.prompt_offsets[prompt : prompt + 2].tolist()
        found.append({"sample": sample, "prompt_tokens": last - first, "tokens": end - start})
    return found


def token_rows(
    group: ScoredGroup, sample: int, config: RunConfig, decode: Decode | None, start: int = 0, count: int = MAX_TOKENS
) -> dict[str, Any]:
    """Return tokens of a sample as columns of equal length, with the text of its prompt.

    Args:
        group: the stored group, with the advantages of its step.
        sample: number of the sample in the group.
        config: configuration of the run.
        decode: function from tokens to text; None: texts are the numbers.
        start, count: tokens that are returned.

    Raises:
        ConfigError: there is no such sample.
    """
    if not 0 <= sample < len(group.sample_prompts):
        raise ConfigError(f"sample {sample}: the group has {len(group.sample_prompts)}")
    first, end = group.sample_offsets[sample : sample + 2].tolist()
    prompt_start, prompt_end = group.prompt_offsets[group.sample_prompts[sample] :][:2].tolist()
    prompt = group.prompt_ids[prompt_start:prompt_end].tolist()
    low = min(max(first + start, first), end)
    chosen = slice(low, min(end, low + min(max(count, 0), MAX_TOKENS)))
    ids = group.token_ids[chosen].tolist()
    before = [*prompt, *group.token_ids[max(first, low - CONTEXT) : low].tolist()]
    segments = {
        name: group.per_token(group.segments[:, column])[chosen].tolist()
        for name, column in (
            ("lineage", SEGMENT_LINEAGE),
            ("version", SEGMENT_VERSION),
            ("origin", SEGMENT_ORIGIN),
            ("turn", SEGMENT_TURN),
        )
    }
    mask, advantages = group.loss_mask[chosen], group.advantages_N[chosen]
    # tokens that packing takes out of the loss, as `batches_of_step` does
    left = mask * (advantages != 0) if config.packer.filter_zero_advantages else mask
    return {
        "start": low - first,
        "total": end - first,
        "prompt": "".join(pieces(prompt, decode)) if not start else "",
        "prompt_tokens": len(prompt),
        "id": ids,
        "text": pieces(ids, decode, before),
        "mask": mask.tolist(),
        "in_loss": left.tolist(),
        "logprob": [number(value) for value in group.logprobs[chosen].tolist()],
        "advantage": [number(value) for value in advantages.tolist()],
        "temperature": group.per_token(group.segment_temperatures)[chosen].tolist(),
        "origins": list(ORIGINS),
    } | segments
