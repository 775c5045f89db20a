"""Messages that clients write anew are the recorded ones, and no others are."""

import pytest

from actors.rollout.sessions.history import canonical, restored, same_message
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


def test_answers_are_restored_and_nothing_else_is() -> None:
    """A user's message of the same words stays what it is."""
    turn = _with('{ "a": 1.0 }')
    rewritten, foreign = _with('{"a": 1}'), _with('{"a": 2}')
    user: Message = {"role": "user", "content": "Go."}
    assert restored([user, rewritten, foreign], {canonical(turn): turn}) == [user, turn, foreign]
    assert restored([user], {canonical(user): turn}) == [user]
