"""The progress of a run in words, and how it is drawn."""

import io

import pytest

from actors.screen import Screen, describe
from tests.ring.harness import ring_config

PROGRESS = {
    "phase": "running", "step": 1, "max_steps": 9, "reward": None, "issued": 4, "settled": 0, "composed": 0,
    "peers": {},
}  # fmt: skip


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def test_progress_line_says_what_is_known_and_leaves_out_what_is_not():
    """Before the first step there is no reward to show; a restarted actor is named."""
    progress = PROGRESS | {"phase": "starting", "step": 0, "peers": {"rollout": 1}, "restarts": {"rollout-0": 2}}
    assert describe(progress, 65.0) == (
        "01:05  starting  step 0/9  groups sampling 4 settled 0 packed 0  peers rollout 1  restarted rollout-0 ×2"
    )
    assert describe({}, 1.0) == "00:01  waiting for the packer"


def test_progress_line_shows_trouble_when_there_is_any():
    """Failed attempts, dropped groups by reason, and what went wrong last, cut to a readable length."""
    assert describe(PROGRESS | {"dropped": {}, "failed_attempts": 0, "last_failure": ""}, 0.0).endswith("packed 0")
    progress = PROGRESS | {"failed_attempts": 7, "dropped": {"poison": 2, "stale": 1}, "last_failure": "judge " * 99}
    line = describe(progress, 0.0)
    assert "  failed attempts 7  dropped 3 (2 poison, 1 stale)  last failure: judge judge" in line
    assert line.endswith("judge…")
    assert len(line) < 250
    assert "dropped 1 (1 stale)" in describe(PROGRESS | {"dropped": {"stale": 1}}, 0.0)


def test_progress_line_names_who_is_waited_for():
    """Which rank of a gang is not there, until the run has no use for it any more."""
    progress = PROGRESS | {"missing": ["trainer-1", "reward"]}
    assert describe(progress, 0.0).endswith("packed 0  waits for trainer-1, reward")
    assert describe(progress | {"phase": "done"}, 0.0).endswith("packed 0")


def test_line_on_a_terminal_is_drawn_over_however_many_rows_it_fills(tmp_path, monkeypatch):
    """At 30 columns the line of 65 fills three rows: the cursor goes up two; a line that stays is written above it."""
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    screen = Screen(stream, ring_config(tmp_path))
    text = describe(PROGRESS, 0.0)
    assert 60 < len(text) <= 90
    screen.show(PROGRESS)
    screen.say("rollout-0 ended by SIGKILL, started again")
    screen.show(PROGRESS)
    screen.close(PROGRESS)
    drawn = f"\r\x1b[J{text}"
    assert stream.getvalue().partition("\n")[2] == (
        f"{drawn}\r\x1b[2A\x1b[Jrollout-0 ended by SIGKILL, started again\n{drawn}\r\x1b[2A\x1b[J{text}\n"
    )


def test_output_that_can_not_be_written_ends_no_run(tmp_path):
    """A full disk behind a redirection, or a pipe whose reader has gone."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    screen = Screen(Full(), ring_config(tmp_path))
    screen.show(PROGRESS)
    screen.close({})


@pytest.mark.parametrize("text", ["", "done"])
def test_no_terminal_codes_where_there_is_no_terminal(tmp_path, text):
    """Lines alone."""
    stream = io.StringIO()
    screen = Screen(stream, ring_config(tmp_path))
    screen.say(text)
    screen.show(PROGRESS)
    assert stream.getvalue().splitlines()[1:] == [text, describe(PROGRESS, 0.0)]
