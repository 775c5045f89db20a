"""Games of textarena, played by the model against nobody or against a fixed opponent.

Works with textarena 0.7.4. Options are in docs/reference/environments.md.
"""

import hashlib
import random
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import textarena
from textarena.core import GAME_ID, ObservationType, Wrapper

Json = dict[str, Any]

LISTED = re.compile(r"\b(?:available|valid|legal|possible) (?:moves|actions)(?: are)?:[ \t]*(.*)", re.IGNORECASE)
"""A game's list of legal moves, in a message to the player whose turn it is."""
MOVE = re.compile(r"\[(?![^\]]*\bX\])[^\[\]]+\]")
"""A move of the list; `[bet X]` is none, for the game does not say what X may be."""
OPPONENTS = ("random", "first")
MOST_MOVES = 1000
"""Moves of opponents in a row, beyond which a game would never come back to the model."""
LOCK = threading.Lock()
"""Held while a game runs: games draw from the random numbers of the process."""


class Env:
    """One game.

    Args:
        game: an id of textarena, `TowerOfHanoi-v0`.
        num_players: players of the game, the model included.
        opponent: `random` or `first`: which of the listed legal moves the other players take.
        player: number of the model's player.
        seed: decides the games of examples, with their index and split.
        eval_size: number of examples for evaluation.
        options: options of the game.
    """

    def __init__(
        self,
        game: str,
        num_players: int = 1,
        opponent: str = "",
        player: int = 0,
        seed: int = 0,
        eval_size: int = 100,
        **options: Any,
    ) -> None:
        if game not in textarena.envs.registration.ENV_REGISTRY:
            raise ValueError(f"textarena has no game {game!r}; its ids are like TowerOfHanoi-v0")
        if num_players > 1 and opponent not in OPPONENTS:
            raise ValueError(f"{game}: opponent is {opponent!r}; who plays the other players? random or first")
        if not 0 <= player < num_players:
            raise ValueError(f"{game}: player is {player}, but must be from 0 to {num_players - 1}")
        self._game, self._options, self._seed, self._eval_size = game, options, seed, eval_size
        self._num_players, self._opponent, self._player = num_players, opponent, player
        self._reward: float | None = None
        self._num_invalid = 0
        self.columns: Json = {}

    @classmethod
    def examples(cls, split: str, **options: Any) -> int | None:
        """Return the number of examples, None for no end; begin a game, so that wrong options are told at once."""
        env = cls(**options)
        env.reset(index=0, split=split)
        return env._eval_size if split == "eval" else None

    def reset(self, index: int | None = None, split: str = "train", seed: int = 0) -> str:
        """Begin the game that the example's index and split decide, or the seed where there is no index."""
        words = f"seed {seed}" if index is None else f"{self._seed} {split} {index}"
        game_seed = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest(), "big") >> 1
        self._draw = random.Random(f"opponent {game_seed}")
        self._states = _seeded(game_seed)
        with self._own_random_numbers():
            try:
                self._env = textarena.make(self._game, **self._options)
            except SyntaxError as error:
                version = ".".join(map(str, sys.version_info[:2]))
                raise ValueError(
                    f"{self._game} can't be read by Python {version} ({error}); some games need Python 3.12"
                ) from error
            self._base = self._env
            while isinstance(self._base, Wrapper):
                self._base = self._base.env
            try:
                self._env.reset(num_players=self._num_players, seed=game_seed)
            except AssertionError as error:
                raise ValueError(f"{self._game}: {error}; set num_players, and opponent if they are several") from error
            # some games overlook the number
            if (players := self._base.state.num_players) != self._num_players:
                raise ValueError(f"{self._game} has {players} players; set num_players to {players}, and opponent")
            if self._num_players > 1 and not any(map(_listed, self._base.state.observations.values())):
                raise ValueError(
                    f"{self._game} lists no legal moves, so that no opponent can be played here; choose a game that "
                    "lists them, such as TicTacToe-v0, or one of one player"
                )
            self._play_opponents()
        self.columns = {"game": self._game, "game_seed": game_seed}
        return self._said()

    def step(self, answer: str) -> tuple[str, None, bool, Json]:
        """Play the model's move, and then those of the other players."""
        state = self._base.state
        with self._own_random_numbers():
            before = getattr(state, "error_count", 0)
            done, _ = self._env.step(answer)
            eliminated = done and state.game_info[self._player].get("invalid_move")
            self._num_invalid += bool(eliminated or getattr(state, "error_count", 0) > before)
            if not done:
                done = self._play_opponents()
            if done:
                self._reward = self._final_reward()
        said = self._said()
        return said, None, bool(done), {"invalid_moves": self._num_invalid}

    def get_reward(self) -> dict[str, float | None]:
        """Return the model's reward at the end of the game; None if the game has not ended."""
        return {"textarena": self._reward}

    def _final_reward(self) -> float:
        """Return the model's reward of a game that is over."""
        rewards, infos = self._env.close()
        reward = rewards[self._player]
        if isinstance(reward, str):
            # Countdown, Cryptarithm and Slitherlink give reason and reward in the wrong order
            reward = str(infos[self._player]["reason"]).removeprefix("Invalid Move: ")
        return float(reward)

    def _play_opponents(self) -> bool:
        """Play until it is the model's turn; return whether the game is over."""
        state = self._base.state
        for _ in range(MOST_MOVES):
            mover = state.current_player_id
            if state.done or mover == self._player:
                return bool(state.done)
            _, messages = self._base.get_observation()
            moves = _listed(messages)
            if not moves:
                raise RuntimeError(f"{self._game} lists no legal moves for player {mover}, as it did before")
            before = getattr(state, "error_count", 0)
            move = moves[0] if self._opponent == "first" else self._draw.choice(moves)
            self._env.step(move)
            # never the model's gain
            if state.game_info[mover].get("invalid_move") or (
                state.current_player_id == mover and not state.done and getattr(state, "error_count", 0) > before
            ):
                raise RuntimeError(f"{self._game} refused the move {move}, which it lists as legal for player {mover}")
        raise RuntimeError(f"{self._game}: {MOST_MOVES} moves of other players in a row")

    def _said(self) -> str:
        """Return what the game has told the model's player since the last time, but not the model's own moves."""
        state = self._base.state
        if state.done:
            messages, state.observations[self._player] = state.observations[self._player], []
        else:
            _, messages = self._base.get_observation()
        lines = []
        for sender, text, kind in messages or []:
            if sender == self._player and kind == ObservationType.PLAYER_ACTION:
                continue
            name = "GAME" if sender == GAME_ID else state.role_mapping.get(sender, f"Player {sender}")
            lines.append(f"[{name}] {text}")
        if state.done and (reason := state.game_info[self._player].get("reason")):
            lines.append(f"[GAME] {reason}")
        return "\n".join(lines)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Give this game the process's random numbers where it left them, and nobody else meanwhile."""
        with LOCK:
            others, self._states = _exchanged(self._states), None
            try:
                yield
            finally:
                self._states = _exchanged(others)


def _listed(messages: Any) -> list[str]:
    """Return the moves in the last list of legal moves."""
    found: list[str] = []
    for _, text, kind in messages or []:
        if kind in (ObservationType.PLAYER_ACTION, ObservationType.PROMPT):
            # of a player, who may write anything; or of the rules, which list all moves of the game
            continue
        for line in LISTED.findall(text):
            found = MOVE.findall(line) or found
    return found


def _seeded(seed: int) -> Any:
    """Return the states of both generators for a seed."""
    numpy = sys.modules.get("numpy")
    return random.Random(seed).getstate(), numpy and numpy.random.RandomState(seed).get_state()


def _exchanged(states: Any) -> Any:
    """Set the states of the process's generators, Python's and numpy's; return those before."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    random.setstate(states[0])
    if numpy and states[1]:
        numpy.random.set_state(states[1])
    return before
