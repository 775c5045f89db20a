"""Recorded trajectories, played again without a model: the same, or words on what differs."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from actors.cli import main
from actors.datasets import Example
from actors.datasets.numbered import Numbered
from actors.telemetry.reporter import read_lines
from schemas.config import RunConfig, dump_config
from tests.ring.harness import ALL, ring, ring_config
from tests.ring.test_agents import AGENTS

pytestmark = pytest.mark.slow


def recorded(folder: Path, environment: dict[str, object]) -> RunConfig:
    """A run of three steps that has ended, as `actors up` leaves it."""
    config = ring_config(
        folder,
        environments=[environment],
        rollout={"group_size": 3, "group_timeout": 120.0},
        reward={"functions": []},
        packer={"sequence_len": 512},
        trainer={"max_steps": 3},
        ledger={"keep_steps": 10},
    )
    with ring(config) as run:
        run.start(*ALL).wait()
    (config.output / "config.resolved.yaml").write_text(dump_config(config), encoding="utf-8")
    return config


def newest(config: RunConfig) -> int:
    """The ordinal of the newest group of training."""
    lines = read_lines(config.output / "samples.jsonl")
    return max(line["ordinal"] for line in lines if line["purpose"] == "train")


def files(config: RunConfig) -> list[Path]:
    """All files of a run, without those that SQLite makes for a reader."""
    return sorted(path for path in config.output.rglob("*") if not path.name.endswith(("-shm", "-wal")))


def replayed(config: RunConfig, trajectory: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """What the command says of the newest group of training, or of one of its completions."""
    before = files(config)
    status = main(["replay", str(config.output), "--trajectory", f"{newest(config)}{trajectory}"])
    assert files(config) == before
    return status, capsys.readouterr().out


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of an agent with two calls, whose file may be changed afterwards."""
    folder = tmp_path_factory.mktemp("agents")
    shutil.copy(AGENTS, folder / "agent.py")
    return recorded(folder, {"type": "agent", "name": "helper", "path": f"{folder}/agent.py:two_calls"})


def changed(config: RunConfig, old: str, new: str) -> None:
    """The agent's file, with one text replaced."""
    text = AGENTS.read_text()
    assert old in text
    Path(config.environments[0].path.rpartition(":")[0]).write_text(text.replace(old, new))


def test_an_unchanged_agent_gives_the_recorded_trajectories(agents: RunConfig, capsys) -> None:
    """All completions of the group, with the calls counted."""
    status, said = replayed(agents, "", capsys)
    assert status == 0
    assert said.count("2 of 2 calls   same") == 3


def test_one_completion_is_played_alone(agents: RunConfig, capsys) -> None:
    """That with the number behind the colon."""
    status, said = replayed(agents, ":2", capsys)
    assert status == 0
    assert "completion 2    2 of 2 calls   same" in said
    assert said.count("completion ") == 1


def test_another_prompt_is_shown_from_its_first_difference(agents: RunConfig, capsys) -> None:
    """With both texts; the agent's own error follows."""
    changed(agents, "And then?", "And whose?")
    status, said = replayed(agents, ":0", capsys)
    changed(agents, "And then?", "And then?")
    assert status == 1
    assert "call 2 is not in the record: from token" in said
    assert "2 of 2 calls   DIFFERENT" in said


def test_another_reward_is_a_difference(agents: RunConfig, capsys) -> None:
    """A reward that is read from the answers in another way is why one plays a trajectory again."""
    changed(agents, "return 1.0 if message", "return 3.0 if True or message")
    status, said = replayed(agents, ":1", capsys)
    changed(agents, "And then?", "And then?")
    assert status == 1
    assert "reward two_calls: 3.0, the record has" in said


def test_a_call_less_and_a_call_more_are_differences(agents: RunConfig, capsys) -> None:
    """Fewer turns, and a call behind the last recorded one."""
    changed(agents, "    chat(base_url, api_key, [*messages", "    0 and chat(base_url, api_key, [*messages")
    status, said = replayed(agents, ":1", capsys)
    assert status == 1
    assert "1 of 2 calls   DIFFERENT" in said
    assert "turns: 1, the record has 2" in said
    changed(agents, "    return 1.0 if message", "    chat(base_url, api_key, messages)\n    return 1.0 if message")
    status, said = replayed(agents, ":1", capsys)
    changed(agents, "And then?", "And then?")
    assert status == 1
    assert "all 2 recorded calls have been asked" in said


def test_groups_that_can_not_be_played_are_refused_in_words(agents: RunConfig, capsys) -> None:
    """No such group, and no such completion."""
    assert main(["replay", str(agents.output), "--trajectory", "4000"]) == 2
    assert "the ledger has no tokens of this group" in capsys.readouterr().err
    assert main(["replay", str(agents.output), "--trajectory", f"{newest(agents)}:9"]) == 2
    assert "the completions 0 to 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["replay", str(agents.output), "--trajectory", "newest"])
    assert "give the ordinal of a group" in capsys.readouterr().err


def test_a_group_whose_row_is_gone_before_its_tokens_is_refused_in_words(agents: RunConfig, capsys) -> None:
    """The packer removes the rows of old groups first, and their tokens slice by slice."""
    ordinal = newest(agents)
    with sqlite3.connect(agents.ledger_path) as ledger:
        kept = ledger.execute("SELECT * FROM groups WHERE ordinal = ?", (ordinal,)).fetchone()
        ledger.execute("DELETE FROM groups WHERE ordinal = ?", (ordinal,))
    try:
        assert main(["replay", str(agents.output), "--trajectory", str(ordinal)]) == 2
        assert "the ledger has no tokens of this group" in capsys.readouterr().err
    finally:
        with sqlite3.connect(agents.ledger_path) as ledger:
            ledger.execute(f"INSERT INTO groups VALUES ({', '.join('?' * len(kept))})", kept)


def test_data_that_have_changed_are_named(agents: RunConfig, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another example would be played with the answers to the recorded one."""
    monkeypatch.setattr(
        Numbered, "example", lambda self, index: Example("", {"index": index + 1}, is_known_by_columns=True)
    )
    assert main(["replay", str(agents.output), "--trajectory", str(newest(agents))]) == 2
    assert "is not the one that the run has read; bring its data back" in capsys.readouterr().err


def test_an_external_agent_is_not_waited_for(agents: RunConfig, capsys) -> None:
    """No service knows of the replay."""
    path = agents.output / "config.resolved.yaml"
    before = path.read_text(encoding="utf-8")
    one = agents.environments[0].model_copy(update={"path": "", "external": True})
    path.write_text(dump_config(agents.model_copy(update={"environments": [one]})), encoding="utf-8")
    try:
        assert main(["replay", str(agents.output), "--trajectory", str(newest(agents))]) == 2
        assert "is an external agent" in capsys.readouterr().err
    finally:
        path.write_text(before, encoding="utf-8")


ECHO = """
class Echo:
    def reset(self, index, **row):
        self.turns = 0
        return f"Number {index}."

    def step(self, answer):
        self.turns += 1
        return f"You said {answer}.", float(len(answer)), self.turns == 2


class Ranked(Echo):
    @staticmethod
    def score_group(episodes):
        return [{"rank": float(number)} for number, _ in enumerate(episodes)]
"""


@pytest.mark.parametrize(("name", "calls"), [("Echo", 2), ("Ranked", 2), ("PerCall", 3)])
def test_other_shapes_are_played_again(tmp_path: Path, name: str, calls: int, capsys) -> None:
    """A stepped environment, one that scores whole groups, and calls that are samples of their own."""
    (tmp_path / "env.py").write_text(ECHO)
    place = f"{tmp_path}/env.py" if name in ECHO else AGENTS
    kind = "python" if name in ECHO else "agent"
    config = recorded(tmp_path, {"type": kind, "name": "other", "path": f"{place}:{name}"})
    for trajectory, count in (("", 3), (":1", 1)):
        status, said = replayed(config, trajectory, capsys)
        assert status == 0, said
        assert said.count(f"{calls} of {calls} calls   same") == count
