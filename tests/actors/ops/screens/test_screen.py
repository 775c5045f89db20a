"""How progress is drawn: on a terminal, and where there is none."""

import io

import pytest

from actors.ops.screens.render import View, describe, render
from actors.ops.screens.screen import Screen, rows_of
from tests.actors.ops.screens.progresses import PROGRESS
from tests.ring.harness import ring_config


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def screen_of(folder, columns=80, rows=24, seconds=0.0):
    """The lines that a screen draws of PROGRESS."""
    config = ring_config(folder)
    return render(View("ring", str(config.output), PROGRESS, 0.0, seconds), columns)[: rows - 1]


@pytest.fixture
def terminal(monkeypatch):
    """Sets the size that the terminal says it has."""

    def resize(columns: int, rows: int = 24) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(rows))

    resize(80)
    return resize


def test_screen_is_drawn_over_in_place_and_other_lines_stay_above_it(tmp_path, terminal):
    """The cursor goes up by the rows drawn less one; a line that stays is written there; the last drawing stays."""
    stream = Terminal()
    screen = Screen(stream, ring_config(tmp_path))
    lines = screen_of(tmp_path)
    screen.show(PROGRESS)
    screen.say("rollout-0 ended by SIGKILL, started again")
    screen.show(PROGRESS)
    screen.close(PROGRESS)
    drawn, up = "\n".join(lines), f"\r\x1b[{len(lines) - 1}A\x1b[J"
    assert stream.getvalue().partition("\n")[2] == (
        f"\r\x1b[J{drawn}{up}rollout-0 ended by SIGKILL, started again\n\r\x1b[J{drawn}{up}{drawn}\n"
    )


def test_a_terminal_that_became_narrower_is_cleared_of_all_the_rows_that_it_wrapped(tmp_path, terminal):
    """80 columns, then 30: the old lines fill more rows than there are lines, and the cursor goes up all of them."""
    stream = Terminal()
    screen = Screen(stream, ring_config(tmp_path))
    screen.show(PROGRESS)
    old = screen_of(tmp_path, 80)
    stream.truncate(stream.seek(0))
    terminal(30)
    screen.say("")
    wrapped = sum(max(1, (len(line) + 29) // 30) for line in old)
    assert wrapped > len(old)
    assert stream.getvalue() == f"\r\x1b[{wrapped - 1}A\x1b[J\n"


def test_a_low_terminal_shows_the_head_of_the_screen_and_never_scrolls(tmp_path, terminal):
    """6 rows: 5 lines, so that the cursor's row is there too."""
    terminal(80, 6)
    stream = Terminal()
    Screen(stream, ring_config(tmp_path)).show(PROGRESS)
    assert stream.getvalue().partition("\x1b[J")[2].partition("\x1b[J")[2].splitlines() == screen_of(tmp_path, rows=6)


def test_rows_are_those_of_wrapped_lines():
    """An empty line fills one; 10 characters in 4 columns three."""
    assert rows_of(["", "x" * 10, "x" * 8], 4) == 1 + 3 + 2
    assert rows_of(["x"], 0) == 1


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
    """A line per 10 s and nothing else."""
    stream = io.StringIO()
    screen = Screen(stream, ring_config(tmp_path))
    screen.say(text)
    screen.show(PROGRESS)
    screen.show(PROGRESS)
    assert stream.getvalue().splitlines()[1:] == [text, describe(PROGRESS, 0.0)]


HOSTILE = "words example 3: \x1b[2J\x1b[31mboom\x07 \u2028 and \x9b1m"


def test_control_characters_of_a_failure_reach_no_terminal():
    """A prompt or an error text may hold escape sequences: a screen shows them as text."""
    progress = PROGRESS | {"last_failure": HOSTILE}
    for text in [*render(View("ring", "outputs/run", progress), 300), describe(progress, 1.0)]:
        assert text.isprintable(), repr(text)
    assert any("\\x1b[31mboom" in text for text in render(View("ring", "outputs/run", progress), 300))


def test_a_stream_that_is_not_utf_8_is_written_to_all_the_same(tmp_path):
    """A character that the stream's encoding lacks is shown as its number, and the run goes on."""
    raw = io.BytesIO()
    screen = Screen(io.TextIOWrapper(raw, encoding="ascii"), ring_config(tmp_path))
    screen.say("reward-0: Größe ≥ 1")
    screen.show(PROGRESS | {"last_failure": "naïve"})
    assert b"reward-0: Gr\\xf6\\xdfe \\u2265 1\n" in raw.getvalue()


def test_who_only_watches_shows_the_runs_time_and_not_its_own(tmp_path):
    """`actors top` may have begun long after the run."""
    stream = io.StringIO()
    Screen(stream, ring_config(tmp_path), own_clock=False).show(PROGRESS | {"seconds": 3_599.0})
    assert "\n59:59  " in stream.getvalue()
