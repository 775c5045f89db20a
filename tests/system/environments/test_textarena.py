"""Games of textarena through their adapter: whole games, seeds, opponents, and what is refused."""

import asyncio
import re
from typing import Any

import pytest

from actors.environments.errors import EpisodeError
from actors.environments.pool import EpisodeCalls, WorkerPool, describe
from actors.trajectories.recorder import TurnLimits
from tests.system.environments.playing import WAIT, adapter, contents, play_one

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

HANOI = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]
LISTED = re.compile(r"(?:Available Moves|Valid moves|Valid actions|available actions are): *(.*)")


def first_listed(seen: str, columns: dict[str, Any]) -> str:
    """The first move of the newest list."""
    return re.findall(r"\[[^\]]+\]", LISTED.findall(seen)[-1])[0]


async def test_a_game_that_is_won_is_worth_its_reward() -> None:
    """Seven moves; the game's words come once, without those of the model."""
    async with WorkerPool(adapter("textarena", game="TowerOfHanoi-v0")) as pool:
        trajectory, columns = await play_one(pool, HANOI, {"index": 0, "split": "train"})
        assert (trajectory.stop, trajectory.rewards) == ("done", {"textarena": 1.0})
        assert columns["game"] == "TowerOfHanoi-v0"
        said = contents(trajectory)
        assert said[0].startswith("[GAME] You are")
        assert sum("You are playing" in text for text in said) <= 1
        assert not any("[Player" in text for text in said), "moves of the model are not repeated"
        assert pool.examples == {"train": None, "eval": 100}


async def test_invalid_moves_are_counted_and_the_second_ends_the_game() -> None:
    """With what the game gives for it; a game that has not ended has no reward."""
    async with WorkerPool(adapter("textarena", game="TowerOfHanoi-v0")) as pool:
        async with await pool.episode(WAIT) as episode:
            await episode.reset({"index": 0, "split": "train"}, 0)
            infos = []
            for text in ("[A B]", "[A B]", "up", "[A B]"):
                turn = await episode.step({"role": "assistant", "content": text})
                infos.append(turn["info"]["invalid_moves"])
                assert turn["reward"] is None
            assert (infos[:3], turn["done"]) == ([0, 1, 2], True)
            assert await episode.score() == {"textarena": 0.0}
        cut, _ = await play_one(pool, HANOI, {"index": 0, "split": "train"}, limits=TurnLimits(100_000, 1000, 3))
        assert (cut.stop, cut.rewards) == ("max_turns", {"textarena": None})


async def test_a_game_whose_reward_has_the_wrong_place_has_its_reward() -> None:
    """Three games of the package give reason and reward in the wrong order."""
    async with WorkerPool(adapter("textarena", game="Countdown-v0")) as pool:
        trajectory, _ = await play_one(pool, ["[a]", "[b]"], {"index": 0, "split": "train"})
    reward = trajectory.rewards["textarena"]
    assert trajectory.stop == "done"
    assert reward is not None
    assert 0 <= reward < 1


async def moved(episode: EpisodeCalls, moves: list[str]) -> list[str]:
    """What a game says to some moves."""
    said = []
    for move in moves:
        turn = await episode.step({"role": "assistant", "content": move})
        said += [message["content"] for message in turn["messages"]]
        await asyncio.sleep(0)
    return said


async def test_a_game_draws_its_own_random_numbers() -> None:
    """Tiles of 2048 fall while it is played: the same for the same seed, also beside other games and elsewhere."""
    spec = adapter("textarena", game="2048-v0")
    moves = 5 * ["[left]", "[down]", "[right]", "[up]"]
    rows = [{"index": 0, "split": "train"}, {"index": 1, "split": "train"}, {"index": 0, "split": "eval"}]

    async def game(pool: WorkerPool, row: dict[str, Any], seed: int) -> list[str]:
        async with await pool.episode(WAIT) as episode:
            opening = await episode.reset(row, seed)
            return [opening["messages"][0]["content"], *await moved(episode, moves)]

    async with WorkerPool(spec) as pool:
        alone = [await game(pool, row, 1) for row in rows]
        together = await asyncio.gather(*(game(pool, row, seed) for seed in (2, 3) for row in rows))
        assert together == alone + alone
        assert len({tuple(said) for said in alone}) == 3
        without_index = [await game(pool, {}, seed) for seed in (4, 4, 5)]
        assert without_index[0] == without_index[1] != without_index[2]
    async with WorkerPool(spec) as pool:
        assert await game(pool, rows[0], 9) == alone[0]


@pytest.mark.parametrize("opponent", ["random", "first"])
@pytest.mark.parametrize("player", [0, 1])
@pytest.mark.parametrize("game", ["TicTacToe-v0", "KuhnPoker-v0", "Othello-v0-tiny", "SimpleTak-v0"])
async def test_a_fixed_opponent_plays_the_listed_moves(game: str, player: int, opponent: str) -> None:
    """Whole games, each the same for the same example."""
    options = {"game": game, "num_players": 2, "opponent": opponent, "player": player}
    async with WorkerPool(adapter("textarena", **options)) as pool:
        rewards = []
        for index in (0, 1, 0):
            row = {"index": index, "split": "train"}
            trajectory, _ = await play_one(pool, first_listed, row, seed=len(rewards))
            assert trajectory.stop == "done"
            assert trajectory.rewards["textarena"] in (-1.0, 0.0, 1.0)
            rewards.append((contents(trajectory), trajectory.rewards))
        assert rewards[0] == rewards[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"game": "Riddles-v0"}, "textarena has no game 'Riddles-v0'"),
        ({"game": "TicTacToe-v0"}, "number of players has to be 2, received 1; set num_players, and opponent"),
        ({"game": "QuantumTicTacToe-v0"}, "QuantumTicTacToe-v0 has 2 players; set num_players to 2, and opponent"),
        ({"game": "TicTacToe-v0", "num_players": 2}, "opponent is ''; who plays the other players"),
        ({"game": "TicTacToe-v0", "num_players": 2, "opponent": "first", "player": 2}, "player is 2, but must be from"),
        ({"game": "ConnectFour-v0", "num_players": 2, "opponent": "first"}, "ConnectFour-v0 lists no legal moves"),
        ({"game": "Surround-v0", "num_players": 2, "opponent": "first"}, "Surround-v0 lists no legal moves"),
        ({"game": "Sudoku-v0", "levels": 3}, "unexpected keyword argument 'levels'"),
    ],
)
async def test_what_can_not_be_played_is_told_before_the_first_episode(options: dict[str, Any], words: str) -> None:
    """The environment can't be loaded."""
    with pytest.raises(EpisodeError, match=words) as failure:
        await describe(adapter("textarena", **options))
    assert failure.value.cause == "env_load"
