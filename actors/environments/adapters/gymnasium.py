"""Environments of gymnasium with a discrete space of actions, played by text.

Works with gymnasium 1.4.0. Options are in docs/reference/environments.md.
"""

import hashlib
import re
from typing import Any

import gymnasium

Json = dict[str, Any]

COLOURED = re.compile(r"\x1b\[(?:1;)?(\d+)(?:;1)?m(.*?)\x1b\[0m", re.DOTALL)
COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")
"""gymnasium's colours of letters from 30, and of their grounds from 40."""
NUMBER = re.compile(r"(?<![\d.])-?\d{1,18}(?!\.?\d)")
"""A whole number: neither a part of a decimal fraction, nor of more digits than an action has."""


class Env:
    """One episode.

    Args:
        id: as in `gymnasium.make`, `FrozenLake-v1`.
        options: further arguments of `gymnasium.make`.
        max_steps: turns of the model, those without an action included; 0 for the environment's own limit alone.
        actions: names of the actions in the order of their numbers, which the model may then give instead.
        instructions: first words to the model; by default what the answers are.
        seed: decides the episodes of examples, with their index and split.
        eval_size: number of examples for evaluation.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 - as gymnasium calls it
        options: Json | None = None,
        max_steps: int = 0,
        actions: list[str] | None = None,
        instructions: str | None = None,
        seed: int = 0,
        eval_size: int = 100,
    ) -> None:
        spec = gymnasium.spec(id)
        arguments = dict(options or {})
        if "ansi" in _render_modes(spec):
            arguments.setdefault("render_mode", "ansi")
        self._env = gymnasium.make(id, **arguments)
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{id}: its actions are {space}; only discrete ones can be given as text here")
        self._first, self._count = int(space.start), int(space.n)
        if actions is not None and len(actions) != self._count:
            raise ValueError(f"{id}: actions has {len(actions)} names, but there are {self._count} actions")
        self._names = [name.lower() for name in actions or []]
        self._max_steps, self._seed, self._eval_size = max_steps, seed, eval_size
        self._answers = f"a number from {self._first} to {self._first + self._count - 1}"
        if actions:
            self._answers += f", or one of {', '.join(actions)}"
        given = f"This is {id}. Answer each turn with an action: {self._answers}."
        self._instructions = given if instructions is None else instructions
        self._num_steps = self._num_invalid = 0
        self.columns: Json = {}

    @classmethod
    def examples(cls, split: str, **options: Any) -> int | None:
        """Return the number of examples, None for no end; wrong options are told at once."""
        env = cls(**options)
        env.close()
        return env._eval_size if split == "eval" else None

    def reset(self, index: int | None = None, split: str = "train", seed: int = 0, options: Json | None = None) -> str:
        """Begin the episode that the example's index and split decide, or the seed where there is no index."""
        words = f"seed {seed}" if index is None else f"{self._seed} {split} {index}"
        reset_seed = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "big") >> 1
        observation, _ = self._env.reset(seed=reset_seed, options=options)
        # spaces draw too, for environments that take a random action of their own
        self._env.action_space.seed(reset_seed)
        self.columns = {"reset_seed": reset_seed}
        return "\n\n".join(part for part in (self._instructions, self._shown(observation)) if part)

    def step(self, answer: str) -> tuple[str, float | None, bool, bool, Json]:
        """Act. An answer without an action costs a turn, and is told what the actions are."""
        self._num_steps += 1
        over = bool(self._max_steps) and self._num_steps >= self._max_steps
        action = self._action(answer)
        if action is None:
            self._num_invalid += 1
            return f"No action was found. Answer with {self._answers}.", None, False, over, self._info()
        observation, reward, terminated, truncated, _ = self._env.step(action)
        truncated = bool(truncated) or (over and not terminated)
        return self._shown(observation), float(reward), bool(terminated), truncated, self._info()

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _info(self) -> Json:
        return {"invalid_moves": self._num_invalid}

    def _action(self, text: str) -> int | None:
        """Return the last action that a text names, by its number or its name."""
        found = [(match.start(), int(match[0])) for match in NUMBER.finditer(text)]
        for number, name in enumerate(self._names):
            named = re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text.lower())
            found += [(match.start(), self._first + number) for match in named]
        if not found:
            return None
        action = max(found)[1]
        return action if self._first <= action < self._first + self._count else None

    def _shown(self, observation: Any) -> str:
        """Return the picture in letters where the environment draws one, otherwise the observation."""
        if self._env.render_mode != "ansi":
            return str(observation)
        return COLOURED.sub(_in_words, str(self._env.render()))


def _render_modes(spec: Any) -> list[str]:
    """Return the ways in which an environment can be shown."""
    point = spec.entry_point
    loaded = gymnasium.envs.registration.load_env_creator(point) if isinstance(point, str) else point
    return list(getattr(loaded, "metadata", {}).get("render_modes", []))


def _in_words(match: "re.Match[str]") -> str:
    """Return coloured letters as `<red>…</red>`: only the colour shows where the player is."""
    number = int(match[1])
    colour = COLOURS[number % 10] if number // 10 in (3, 4) and number % 10 < len(COLOURS) else ""
    return f"<{colour}>{match[2]}</{colour}>" if colour else match[2]
