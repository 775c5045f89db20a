"""A reward from a judge: any model behind OpenAI's chat API, also one that `actors run inference` serves."""

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
    """The judge's grade of each completion, as a share of 10; None where it gives none, which counts as not applicable.

    A judge that can't be reached raises, which fails the attempt at this group by name; nothing is scored 0 for that.

    Args:
        judge: an `Endpoint` as a map: url, model, api_key_env.
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
    """Of a text, or of the last message of a chat."""
    return messages if isinstance(messages, str) else str(messages[-1]["content"])
