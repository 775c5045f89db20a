"""Conversations of trajectories as text, for `actors samples`: each message under its role, long ones cut."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MESSAGE_CHARACTERS = 400
"""Characters shown of a message unless the user asks for more; a longer one loses its middle."""
LABEL_CHARACTERS = 9
"""Width of the column of roles: `assistant`, the longest of the usual ones."""

DIGEST_CHARACTERS = 6
"""Characters shown of an image's digest."""

Images = Mapping[str, Sequence[int]]
"""Height and width of images in pixels, by digest."""
Record = Mapping[str, Any]
Message = Mapping[str, Any]


def conversation_lines(record: Record, num_completions: int, characters: int = MESSAGE_CHARACTERS) -> list[str]:
    """Return the lines for a group of trajectories: the prompt once, then each trajectory with its turns.

    Args:
        record: line of samples.jsonl with `messages`.
        num_completions: trajectories shown.
        characters: most characters of a message.
    """
    prompt, images = record["prompt"], record.get("images", {})
    lines = ["  prompt", *_shown(_of_messages(prompt, images), characters)]
    for number in range(min(num_completions, len(record["messages"]))):
        lines += ["", _heading(record, number), *_shown(_of_trajectory(record, number), characters)]
    return lines


def cut(text: str, characters: int) -> str:
    """Return a text of at most so many characters, besides the note about its middle that was left out."""
    if len(text) <= characters:
        return text
    head, tail = (characters + 1) // 2, characters // 2
    return f"{text[:head]} [{len(text) - head - tail} characters left out] {text[len(text) - tail :]}"


def _heading(record: Record, number: int) -> str:
    reward, turns, calls, failed = (record[key][number] for key in ("reward", "turns", "tool_calls", "tool_failures"))
    parts = [
        f"  trajectory {number}",
        "reward   none" if reward is None else f"reward {reward:6.3f}",
        f"advantage {record['advantages'][number]:7.3f}",
        record["stop_conditions"][number],
        _counted(turns, "turn"),
        *([_counted(calls, "tool call") + (f", {failed} failed" if failed else "")] if calls or failed else []),
    ]
    return "  ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _of_trajectory(record: Record, number: int) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of a trajectory: its rewards by name, its messages behind the prompt, what went wrong."""
    rewards = {name: values[number] for name, values in record["rewards"].items()}
    yield "rewards", ", ".join(f"{name} {'none' if value is None else f'{value:g}'}" for name, value in rewards.items())
    messages, prompt, images = record["messages"][number], record["prompt"], record.get("images", {})
    # an environment that drives may show each member another prompt
    has_prompt = messages[: len(prompt)] == prompt
    of_turns = {turn: reward for member, turn, reward in record["turn_rewards"] if member == number}
    yield from _of_messages(messages[len(prompt) :] if has_prompt else messages, images, of_turns)
    if record["failures"] and record["failures"][number]:
        yield "failure", record["failures"][number]
    # runs of earlier builds have no info
    if info := record.get("info", {}) and record["info"][number]:
        yield "info", ", ".join(f"{name} {value}" for name, value in info.items())


def _of_messages(
    messages: Sequence[Message], images: Images, rewards: Mapping[int, float] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of messages.

    Args:
        messages: those behind the prompt, if there are rewards.
        images: sizes of images.
        rewards: rewards by number of the turn, shown behind the turn.
    """
    turn = 0
    for message in messages:
        calls, content = message.get("tool_calls") or [], content_text(message.get("content"), images)
        if message.get("reasoning_content"):
            yield "thoughts", str(message["reasoning_content"])
        if content or not calls:
            yield str(message.get("role", "?")), content
        for call in calls:
            yield "calls", _called(call)
        if message.get("role") == "assistant":
            if rewards and turn in rewards:
                yield "reward", f"{rewards[turn]:g}"
            turn += 1


def content_text(content: Any, images: Images = {}) -> str:  # noqa: B006 - never changed
    """Return the text of a message's content, which may be in parts; an image is `[image 64x48 ab12cd]`.

    Args:
        content: content of a message.
        images: sizes of images; one that is not there is `[image ab12cd]`.
    """
    if isinstance(content, list):
        return " ".join(
            part["text"] if isinstance(part, dict) and "text" in part else part_words(part, images) for part in content
        )
    return "" if content is None else str(content)


def part_words(part: Any, images: Images) -> str:
    """Return words for a part without a text: its type, of an image also width, height and the start of its digest."""
    if not isinstance(part, dict):
        return "[part]"
    words, digest = [str(part.get("type", "part"))], image_digest(part)
    if digest in images:
        height, width = images[digest]
        words.append(f"{width}x{height}")
    return f"[{' '.join([*words, *([digest[:DIGEST_CHARACTERS]] if digest else [])])}]"


def image_parts(content: Any) -> list[Any]:
    """Return the parts of a message's content that are images."""
    return [part for part in content if image_digest(part)] if isinstance(content, list) else []


def image_digest(part: Any) -> str:
    """Return the digest of a part that is an image; empty for another part."""
    if isinstance(part, dict) and part.get("type") == "image" and isinstance(part.get("digest"), str):
        return str(part["digest"])
    return ""


def _called(call: Any) -> str:
    """Return a tool call as `name(arguments)`."""
    function = call.get("function", call)
    arguments = function.get("arguments", "")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name', '?')}({written})"


def _shown(parts: Iterator[tuple[str, str]], characters: int) -> Iterator[str]:
    """Yield the lines of labels and texts; further lines of a text stand below its first."""
    for label, text in parts:
        first, *rest = _printable(cut(text, characters)).split("\n")
        yield f"    {label:{LABEL_CHARACTERS}}  {first}".rstrip()
        yield from (f"    {'':{LABEL_CHARACTERS}}  {line}".rstrip() for line in rest)


def _printable(text: str) -> str:
    """Return a text in which what would steer the terminal is written out, except for line breaks."""
    return "".join(one if one == "\n" or one.isprintable() else repr(one)[1:-1] for one in text)
