"""`actors samples` shows the conversations of trajectories: who said what, what was earned, and what went wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.telemetry.conversations import cut
from actors.telemetry.reporter import Reporter, read_lines
from actors.telemetry.samples import show_samples
from schemas.messages import ScoredGroup
from tests.actors.packer.test_record import scored

PROMPT = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}]
CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"n": 2}}}
FIRST = [
    {"role": "assistant", "content": "", "reasoning_content": "Is it 2?", "tool_calls": [CALL]},
    {"role": "tool", "content": "3\n4", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "It is 3."},
]
SECOND = [{"role": "assistant", "content": "\x1b[2J\tNo."}]


def played(**changes: Any) -> ScoredGroup:
    """Two trajectories: one of two turns with a tool call; one whose environment failed in its first turn."""
    conversations = [[PROMPT, FIRST, {"invalid_moves": 1, "ratio": float("nan")}], [PROMPT, SECOND, {}]]
    return scored([1.5, np.nan], [0.5, 0.0]).model_copy(
        update={
            "prompt": PROMPT,
            "transcripts": [json.dumps(one) for one in conversations],
            "stop_conditions": ["done", "failed"],
            "failures": ["", "env_step: the board is broken"],
            "counts": np.array([[2, 1, 1], [1, 0, 0]]),
            "turn_rewards": np.array([[0, 1, 0.5]]),
        }
        | changes
    )


def shown(folder: Path, group: ScoredGroup, **arguments: Any) -> list[str]:
    """Lines of `actors samples`."""
    Reporter(folder).report_samples(7, group)
    return show_samples(folder / "samples.jsonl", None, **{"num_completions": 4, **arguments}).splitlines()


def test_conversations_are_shown_by_role_with_tool_calls_rewards_and_failures(tmp_path: Path) -> None:
    """The prompt once; what would steer the terminal is written out."""
    assert shown(tmp_path, played()) == [
        "step 7  train ordinal 0  e  versions [0]",
        "  prompt",
        "    system     Play.",
        "    user       Guess.",
        "",
        "  trajectory 0  reward  1.500  advantage   0.500  done  2 turns  1 tool call, 1 failed",
        "    rewards    f 1.5, g 1.5",
        "    thoughts   Is it 2?",
        '    calls      add({"n": 2})',
        "    tool       3",
        "               4",
        "    assistant  It is 3.",
        "    reward     0.5",
        "    info       invalid_moves 1, ratio None",
        "",
        "  trajectory 1  reward   none  advantage   0.000  failed  1 turn",
        "    rewards    f none, g none",
        "    assistant  \\x1b[2J\\tNo.",
        "    failure    env_step: the board is broken",
    ]
    assert len(shown(tmp_path / "other", played(), num_completions=1)) == 14


def test_a_member_with_a_prompt_of_its_own_is_shown_whole(tmp_path: Path) -> None:
    """As of an environment that drives; contents may be parts, or absent."""
    own = [{"role": "user", "content": [{"type": "text", "text": "Mine"}, {"type": "image"}]}, {"role": "assistant"}]
    transcripts = [json.dumps([PROMPT, SECOND, {}]), json.dumps([own[:1], own[1:], {}])]
    lines = shown(tmp_path, played(transcripts=transcripts, turn_rewards=np.zeros((0, 3)), failures=[]))
    assert lines[-4:] == [
        "  trajectory 1  reward   none  advantage   0.000  failed  1 turn",
        "    rewards    f none, g none",
        "    user       Mine [image]",
        "    assistant",
    ]


@pytest.mark.parametrize(
    ("characters", "text"),
    [(10, "0123456789"), (9, "01234 [1 characters left out] 6789"), (1, "0 [9 characters left out] ")],
)
def test_a_long_message_loses_its_middle(characters: int, text: str) -> None:
    """The end says as much as the start."""
    assert cut("0123456789", characters) == text


def test_messages_are_cut_at_the_width_that_is_asked_for(tmp_path: Path) -> None:
    """By default at 400 characters."""
    long = [{"role": "assistant", "content": "a" * 500}]
    group = played(transcripts=[json.dumps([PROMPT, long, {}])] * 2)
    assert f"    assistant  {'a' * 200} [100 characters left out] {'a' * 200}" in shown(tmp_path, group)
    assert f"    assistant  {'a' * 500}" in shown(tmp_path, group, characters=500)


def test_samples_have_the_info_of_each_trajectory(tmp_path: Path) -> None:
    """Without what JSON can't hold; a group that an earlier build has stored has none."""
    Reporter(tmp_path).report_samples(1, played())
    Reporter(tmp_path).report_samples(2, played(transcripts=[json.dumps([PROMPT, SECOND])] * 2))
    lines = read_lines(tmp_path / "samples.jsonl")
    assert lines[0]["info"] == [{"invalid_moves": 1, "ratio": None}, {}]
    assert lines[1]["info"] == [{}, {}]
    # a line that an earlier build has written
    del lines[1]["info"]
    (tmp_path / "samples.jsonl").write_text(json.dumps(lines[1]) + "\n")
    assert "info" not in show_samples(tmp_path / "samples.jsonl", None, 4)
