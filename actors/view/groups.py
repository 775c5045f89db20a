"""A group in one form, whether it was read from samples.jsonl or from the ledger: plain values, ready for JSON.

A line of samples.jsonl has texts, rewards and advantages. A payload of the ledger also has every token; the ledger
keeps the payload from the group's settlement until its step is compacted.
"""

from collections.abc import Mapping
from typing import Any

from actors.view.plain import message_text, number, numbers, prompt_text
from schemas.messages import ScoredGroup

Value = dict[str, Any]


def of_line(line: Mapping[str, Any]) -> Value:
    """Return the group of a line of samples.jsonl."""
    completions = []
    for index, text in enumerate(line["completions"]):
        one: Value = {
            "index": index,
            "text": text,
            "reward": line["reward"][index],
            "rewards": {name: values[index] for name, values in line["rewards"].items()},
            "advantage": line["advantages"][index],
            "stop": line["stop_conditions"][index],
            "tokens": None,
        }
        completions.append(one | _of_turns(line, index) | _of_lists(line, index))
    names = ("ordinal", "step", "purpose", "environment", "prompt", "columns", "versions")
    shared = {name: line[name] for name in names}
    return shared | {"source": "samples.jsonl", "completions": completions}


def _of_lists(line: Mapping[str, Any], index: int) -> Value:
    """Return what a line lists per completion, as far as the line has it."""
    logged = {name: values[index] for name, values in line.get("logged", {}).items()}
    return {
        "logged": logged,
        "failure": line["failures"][index] if line.get("failures") else "",
        "info": line["info"][index] if line.get("info") else {},
    }


def _of_turns(line: Mapping[str, Any], index: int) -> Value:
    """Return the conversation of a completion and its counts; empty for a completion of a single turn."""
    if "messages" not in line:
        return {}
    messages, prompt = line["messages"][index], line["prompt"]
    # an environment that drives may show each member another prompt
    behind = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    return {
        "messages": behind,
        "turns": line["turns"][index],
        "tool_calls": line["tool_calls"][index],
        "tool_failures": line["tool_failures"][index],
        "turn_rewards": [[turn, reward] for member, turn, reward in line["turn_rewards"] if member == index],
    }


def of_payload(group: ScoredGroup, step: int | None) -> Value:
    """Return the group of a payload.

    Args:
        group: the stored group.
        step: step that the group is in, or the version that it evaluates; None if there is none yet.
    """
    rewards = [numbers(values) for values in group.rewards_FG.tolist()]
    tokens = group.lengths_G.tolist()
    completions = []
    for index, text in enumerate(group.completions):
        one: Value = {
            "index": index,
            "text": text,
            "reward": number(group.rewards_G[index]),
            "rewards": {name: values[index] for name, values in zip(group.reward_names, rewards, strict=True)},
            "advantage": number(group.advantages_G[index]),
            "stop": group.stop_conditions[index],
            "tokens": tokens[index],
            "logged": {name: values[index] for name, values in group.logged_columns.items()},
            "failure": group.failures[index] if group.failures else "",
            "info": group.info(index) if group.transcripts else {},
        }
        completions.append(one | _played(group, index))
    return {
        "ordinal": group.ordinal,
        "step": step,
        "purpose": group.purpose,
        "environment": group.environment,
        "prompt": group.prompt,
        "columns": group.columns,
        "versions": sorted({version for _, version in group.policies}),
        "source": "ledger",
        "completions": completions,
        "scorer": group.scorer,
        "sender": group.sender,
        "attempt": group.attempt,
        "logged_metrics": {name: number(value) for name, value in group.logged_metrics.items()},
    }


def _played(group: ScoredGroup, index: int) -> Value:
    if not group.transcripts:
        return {}
    _, behind = group.transcript(index)
    turns, tool_calls, tool_failures = group.counts[index].tolist()
    rewarded = [[int(turn), reward] for member, turn, reward in group.turn_rewards.tolist() if member == index]
    return {
        "messages": behind,
        "turns": turns,
        "tool_calls": tool_calls,
        "tool_failures": tool_failures,
        "turn_rewards": rewarded,
    }


def texts_of(group: Mapping[str, Any]) -> list[str]:
    """Return the text of the prompt, then the text of each completion with all its turns."""
    return [prompt_text(group["prompt"]), *(_written(one) for one in group["completions"])]


def characters_of(completion: Mapping[str, Any]) -> int:
    """Return the number of characters that the model wrote in a completion, in all its turns."""
    if "messages" not in completion:
        return len(completion["text"])
    return sum(len(message_text(one)) for one in completion["messages"] if one.get("role") == "assistant")


def _written(completion: Mapping[str, Any]) -> str:
    if "messages" not in completion:
        return str(completion["text"])
    return "\n".join(message_text(one) for one in completion["messages"])
