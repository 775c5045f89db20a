"""`actors samples RUN`: samples.jsonl as text."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.telemetry.conversations import (
    MESSAGE_CHARACTERS,
    Images,
    conversation_lines,
    image_digest,
    part_words,
)
from actors.telemetry.reporter import OLDER_SAMPLES, SAMPLES, lines_from_the_end, record_of

STEP = re.compile(rb'\{"step": (\d+),')
"""Start of each line: lines of other steps need not be parsed."""
FAR_LINES = 64
"""Largest distance between lines of the same step: evaluations come later than the step of their version."""

AS_MESSAGES = "[{'role': 'assistant', 'content': TEXT}]"
"""Form in which reward functions receive completions of chat prompts, as in TRL."""


def show_samples(path: Path, step: int | None, num_completions: int, characters: int = MESSAGE_CHARACTERS) -> str:
    """Show the groups of a step, each with some completions and their rewards, or with some conversations.

    Args:
        path: samples.jsonl; the older file is expected next to it.
        step: the step; None: the last one.
        num_completions: completions shown per group.
        characters: most characters shown of a message of a conversation.
    """
    chosen = _newest_step(path) if step is None else step
    found, steps = _groups_of(path, chosen)
    if not found:
        return (
            f"no samples of step {chosen}; there are some of {len(steps)} steps, from {min(steps)} to {max(steps)}"
            if steps
            else "none"
        )
    return "\n\n".join(group_text(record, num_completions, characters) for record in found)


def newest_groups(output: Path) -> list[dict[str, Any]]:
    """Return the recorded groups of a run's last step, in order; empty without any."""
    path = output / SAMPLES
    return _groups_of(path, _newest_step(path))[0]


def _newest_step(path: Path) -> int:
    # the newest lines may be of an evaluation of an earlier version, so the last step is the largest among some
    return max((number for number, _ in itertools.islice(_lines(path), FAR_LINES)), default=0)


def _groups_of(path: Path, step: int) -> tuple[list[dict[str, Any]], set[int]]:
    """Return the groups of a step, in order, and the steps whose lines were read.

    Files are read from the end, as far as needed, and only lines of this step are kept in memory.
    """
    found: list[dict[str, Any]] = []
    steps: set[int] = set()
    others = 0
    for number, raw in _lines(path):
        steps.add(number)
        others = 0 if number == step else others + 1
        record = record_of(raw) if number == step else None
        if record is not None:
            found.append(record)
        # behind so many other lines no line of this step comes any more
        if found and others >= FAR_LINES:
            break
    return found[::-1], steps


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (step, line) from newest to oldest, lines of the older file last."""
    for file in (path, path.with_name(OLDER_SAMPLES)):
        if file.is_file():
            for _, raw in lines_from_the_end(file):
                match = STEP.match(raw)
                if match:
                    yield int(match[1]), raw


def group_text(record: dict[str, Any], num_completions: int, characters: int) -> str:
    """Return a group as text: a line on the group, then its completions or conversations.

    Args:
        record: line of samples.jsonl.
        num_completions: completions shown.
        characters: most characters shown of a message of a conversation.
    """
    heading = (
        f"step {record['step']}  {record['purpose']} ordinal {record['ordinal']}  {record['environment']}  "
        f"versions {record['versions']}"
    )
    # only groups of an environment have conversations
    lines = (
        conversation_lines(record, num_completions, characters)
        if "messages" in record
        else _completion_lines(record, num_completions)
    )
    return "\n".join([heading, *lines])


def _with_words(prompt: list[dict[str, Any]], images: Images) -> list[dict[str, Any]]:
    """Return messages with words in the place of each image."""
    return [
        message | {"content": [part_words(part, images) if image_digest(part) else part for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]


def _completion_lines(record: dict[str, Any], num_completions: int) -> list[str]:
    """Return the lines for a group of single turns: the prompt, then a line for each completion."""
    prompt = record["prompt"]
    if not isinstance(prompt, str):
        prompt = json.dumps(_with_words(prompt, record.get("images", {})), ensure_ascii=False)
    lines = [f"  prompt      {prompt!r}"]
    if not isinstance(record["prompt"], str):
        lines.append(f"  completion  of a chat prompt: reward functions receive {AS_MESSAGES} for each text below")
    rows = zip(record["completions"], record["reward"], record["advantages"], record["stop_conditions"], strict=True)
    for text, reward, advantage, reason in list(rows)[:num_completions]:
        shown = "  none" if reward is None else f"{reward:6.3f}"
        lines.append(f"  reward {shown}  advantage {advantage:7.3f}  {reason:6}  {text!r}")
    return lines
