"""Reward from a judge model behind OpenAI's chat API. `actors run inference` can serve the judge too."""

import asyncio
import re
from typing import Any

from actors.reward.judge import ChatClient, Endpoint, client_of

QUESTION = """A student was asked:

{prompt}

The student answered:

{answer}

Grade the answer: correct, complete, and no longer than it needs to be. Reply with one line, "Grade: N", N from 0 to 10.
"""


async def graded(
    prompts: list[Any], completions: list[Any], *, judge: dict[str, Any], **columns: Any
) -> list[float | None]:
    """Return the judge's grade of each completion, divided by 10; None (not applicable) for a reply without a grade.

    An unreachable judge raises an error, which fails the attempt at this group. No completion is scored 0 for an error.

    Args:
        prompts: questions, as text or as chat messages.
        completions: answers, as text or as chat messages.
        judge: fields of `Endpoint`: url, model, api_key_env, …
        columns: further columns of the data, not used.
    """
    client = client_of(Endpoint(**judge))
    pairs = zip(prompts, completions, strict=True)
    return list(await asyncio.gather(*(_grade(client, _text(prompt), _text(answer)) for prompt, answer in pairs)))


async def _grade(client: ChatClient, prompt: str, answer: str) -> float | None:
    question = QUESTION.format(prompt=prompt, answer=answer)
    reply = await client.chat([{"role": "user", "content": question}], temperature=0.0, max_tokens=16)
    found = re.search(r"Grade:\s*(\d+)", reply)
    return min(int(found[1]), 10) / 10 if found else None


def _text(messages: Any) -> str:
    """Return the text, or the text of a chat's last message."""
    return messages if isinstance(messages, str) else str(messages[-1]["content"])
