"""An environment of verifiers 0.1 to 0.3, as their users write them; loaded by id from this folder."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    if a == 13:
        raise vf.InfraError("the sandbox is gone")
    return a + b


def right(completion: list[Any], answer: str) -> float:
    """Reward the right answer; fail at one that says boom."""
    text = str(completion[-1]["content"])
    if "boom" in text:
        raise KeyError("no such key")
    return float(text == answer)


async def length(completion: list[Any]) -> int:
    """Count letters, for reports."""
    return len(str(completion[-1]["content"]))


def longest(completions: list[list[Any]]) -> list[float]:
    """Reward the longest answer of a group."""
    lengths = [len(str(completion[-1]["content"])) for completion in completions]
    if 1 in lengths:
        raise KeyError("too short")
    return [float(one == max(lengths)) for one in lengths]


class Guess(vf.MultiTurnEnv):
    """A game in plain text, as most are: hints, a last word, and an end of its own."""

    async def env_response(self, messages: list[Any], state: dict[str, Any], **more: Any) -> list[dict[str, str]]:
        """Compare the guess."""
        guess, target = int(messages[-1]["content"]), state["info"]["target"]
        state["guesses"] = state.get("guesses", 0) + 1
        if guess == target:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "Higher." if guess < target else "Lower."}]

    @vf.stop
    async def has_given_up(self, state: dict[str, Any]) -> bool:
        """End after three hints, and the answer to the last."""
        return state.get("guesses", 0) >= 3


class PaidGuess(Guess):
    """Pays for each guess but the last: in the step, as environments for step rewards do."""

    async def env_response(self, messages: list[Any], state: dict[str, Any], **more: Any) -> list[dict[str, str]]:
        """Pay by the distance."""
        state["trajectory"][-1]["reward"] = -abs(int(messages[-1]["content"]) - state["info"]["target"]) / 4
        return await super().env_response(messages, state, **more)


def bonus(state: dict[str, Any], **more: Any) -> float:
    """Pay the first step again, as rubrics may."""
    state["trajectory"][0]["reward"] = 0.75
    return 2.0


def most(states: list[dict[str, Any]], **more: Any) -> list[float]:
    """Need the whole group, at whose end verifiers gives each step without a reward that of the whole."""
    return [float(state["guesses"]) for state in states]


def quick(state: dict[str, Any], **more: Any) -> float:
    """Reward few guesses."""
    return 1 / state["guesses"] if state.get("final_env_response") else 0.0


def load_environment(kind: str = "tools") -> vf.Environment:
    """Return the environment of a kind."""
    # `task` as a plain text is what versions from 0.1.14 on refuse
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "task": "sums"} for n in range(3)]
    data = {"dataset": Dataset.from_list(rows), "eval_dataset": Dataset.from_list(rows[:1])}
    if kind == "group":
        return vf.SingleTurnEnv(**data, rubric=vf.Rubric(funcs=[longest, length], weights=[2.0, 0.0]))
    if kind == "unrewarded":
        return vf.SingleTurnEnv(**data, rubric=vf.Rubric())
    if kind.startswith(("guess", "paid")):
        games = [{"question": "Guess a number from 1 to 9.", "info": {"target": n}} for n in (3, 8)]
        functions = {"guess": [quick], "paid": [bonus], "paid group": [bonus, most]}[kind]
        world = Guess if kind == "guess" else PaidGuess
        return world(dataset=Dataset.from_list(games), rubric=vf.Rubric(funcs=functions))
    rubric = vf.Rubric(funcs=[right, length], weights=[0.5, 0.0])
    return vf.ToolEnv(
        **data, tools=[add], rubric=rubric, max_turns=6, system_prompt="Add.", stop_errors=[vf.InfraError]
    )
