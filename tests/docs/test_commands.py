"""docs/reference/commands.md has every command with its options and exit codes."""

import re

import pytest

from actors.cli import main
from actors.cli.parser import ACTORS
from tests.docs.pages import page

TEXT = page("docs/reference/commands.md").text
ROWS = [line for line in TEXT.splitlines() if line.startswith("| `actors ")]


def _help(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Return the help of a command, or of `actors` itself."""
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    return capsys.readouterr().out


def test_every_command_and_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """A row begins with the command, options are in a row of their command, and no row is of a command that is gone."""
    commands = re.findall(r"^    (\w+)(?: |$)", _help(capsys), re.MULTILINE)
    assert len(commands) > 8
    for name in commands:
        about = "\n".join(row for row in ROWS if re.match(rf"\| `actors {name}\b", row))
        options = set(re.findall(r"--[a-z][\w-]+", _help(capsys, name).partition("options:")[2])) - {"--help"}
        assert about, name
        assert [option for option in sorted(options) if option not in about] == [], name
    named = {row.removeprefix("| `actors ").split("`")[0].split()[0] for row in ROWS}
    assert named == {*commands, "--version"}


def test_every_kind_of_actor_is_named() -> None:
    """`actors run KIND`."""
    assert [kind for kind in ACTORS if f"`{kind}`" not in TEXT] == []
