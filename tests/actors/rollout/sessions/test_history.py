"""Messages that clients write anew are the recorded ones, and no others are."""

import pytest

from actors.rollout.sessions.history import History, canonical, same_message
from actors.trajectories.bridges import Message
from tests.actors.rollout.sessions.replies import reply


def _with(arguments: str, **changes: object) -> Message:
    return reply("", calls=[("c1", "add", arguments)]).message | changes


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"a": 1.0}', '{"a": 1}', True),
        ('{"a": -0.0}', '{"a": 0}', True),
        ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}', True),
        ('{"a": "\\u00e4"}', '{"a": "ä"}', True),
        ('{"a": 1, "a": 2}', '{"a": 2}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": null}', "{}", False),
        ("no JSON", "no JSON", True),
        ("no JSON", "no  JSON", False),
        ("9" * 400, "9" * 400, True),
        (DEEP, DEEP, True),
        # the text of a JSON text is none of an object
        ('"{}"', "{}", False),
    ],
)
def test_arguments_count_as_values(first: str, second: str, same: bool) -> None:
    """Numbers as JavaScript has them; the rest as JSON has it."""
    assert same_message(_with(first), _with(second)) is same


def test_what_is_empty_is_absent() -> None:
    """Null, an empty text and an empty list."""
    assert same_message(_with("{}"), _with("{}", content=None, reasoning_content=""))
    assert same_message(reply("Well.").message, reply("Well.").message | {"tool_calls": []})
    assert not same_message(reply("Well.").message, reply("Well").message)
    assert not same_message(reply("Well.", "Hm.").message, reply("Well.").message)


def test_a_list_of_calls_that_is_none_does_not_fail() -> None:
    """A client may send anything."""
    assert canonical({"role": "assistant", "tool_calls": [None, {"function": None}, {"function": {"name": "f"}}]})


USER: Message = {"role": "user", "content": "Go."}


def test_answers_are_restored_and_nothing_else_is() -> None:
    """Other arguments, another conversation and a user's message of the same words stay what they are."""
    history, turn = History(), _with('{ "a": 1.0 }')
    history.add([USER], turn)
    rewritten, foreign = _with('{"a": 1}'), _with('{"a": 2}')
    assert history.restored([USER, rewritten, USER]) == [USER, turn, USER]
    for others in ([USER, foreign], [USER | {"content": "Stop."}, rewritten], [USER, rewritten | {"role": "user"}]):
        assert history.restored(others) == others
    assert history.restored([]) == []


@pytest.mark.parametrize("needed", [False, True])
def test_an_answer_without_its_thoughts_is_the_one_of_its_place(needed: bool) -> None:
    """The same words at two places with other thoughts; a session may also take them for other answers."""
    history, first, second = History(needed), reply("Well.", "A").message, reply("Well.", "B").message
    history.add([USER], first)
    history.add([USER, first, USER], second)
    whole, bare = [USER, first, USER, second, USER], reply("Well.").message
    sent = [USER, bare, USER, bare, USER]
    assert history.restored(sent) == (sent if needed else whole)
    assert history.restored(whole) == whole
    changed = [USER, reply("Well.", "C").message]
    assert history.restored(changed) == changed


def test_of_two_answers_to_the_same_the_newest_counts() -> None:
    """Unless the thoughts or their absence tell which one it is."""
    history, bare = History(), reply("Well.").message
    for thoughts in ("A", "B", "A"):
        history.add([USER], reply("Well.", thoughts).message)
    assert history.restored([USER, bare])[1]["reasoning_content"] == "A"
    assert history.restored([USER, reply("Well.", "B").message])[1]["reasoning_content"] == "B"
    history.add([USER], bare)
    history.add([USER], reply("Well.", "B").message)
    assert history.restored([USER, bare])[1] == bare
