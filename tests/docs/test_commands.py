"""docs/reference/commands.md has every command with its options and exit codes."""

import argparse

from actors.cli import ACTORS, _parser
from tests.docs.pages import page

TEXT = page("docs/reference/commands.md").text


def _commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(choices)


def test_every_command_and_option_is_on_the_page() -> None:
    """A row begins with the command; an option is named somewhere in a row of the command."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| `actors ")]
    for name, command in _commands().items():
        about = "\n".join(row for row in rows if row.startswith((f"| `actors {name} ", f"| `actors {name}`")))
        assert about, name
        options = [
            option for action in command._actions for option in action.option_strings if action.help != "==SUPPRESS=="
        ]
        assert [option for option in options if option not in ("-h", "--help") and option not in about] == [], name


def test_no_row_is_about_a_command_that_is_gone() -> None:
    """Renamed commands leave no row behind."""
    named = [
        line.removeprefix("| `actors ").split("`")[0].split()[0]
        for line in TEXT.splitlines()
        if line.startswith("| `actors ")
    ]
    assert set(named) == {*_commands(), "--version"}


def test_every_kind_of_actor_is_named() -> None:
    """`actors run KIND`."""
    assert [kind for kind in ACTORS if f"`{kind}`" not in TEXT] == []
