"""Programs against tests of all forms, the program's place in an answer, and errors of the data."""

import json
from typing import Any

import pytest

from actors.reward.library.programs import code_tests, program_in
from actors.reward.sandbox import client
from actors.reward.sandbox.client import SandboxError

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
REVERSE = "```\nprint(input()[::-1])\n```"


def scored(text: str, tests: Any, **kwargs: Any) -> tuple[float | None, str]:
    """The value of one answer, with the reason logged."""
    logged: dict[str, list[Any]] = {}
    (value,) = code_tests(["p"], [text], [tests], log_extra=logged.__setitem__, **kwargs)
    return value, logged["code_tests"][0]


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]),
        (ADD, [{"call": "add", "arguments": [1, 2], "expected": 3}, {"assert": "assert add(0, 0) == 0"}]),
        (ADD, {"inputs": [[1, 2], [0.1, 0.2]], "outputs": [3, 0.3], "fn_name": "add"}),
        (
            "class Solution:\n  def f(self, x): return (x, [x])",
            {"inputs": [[1]], "outputs": [[1, [1]]], "fn_name": "f"},
        ),
        (REVERSE, [{"input": "abc\n", "output": "cba\n"}]),
        (REVERSE, {"inputs": ["abc", "x"], "outputs": ["cba", "x"]}),
        (REVERSE, [{"input": ["abc"], "output": ["cba"]}]),
        (REVERSE, json.dumps([{"input": "abc", "output": "cba"}])),
    ],
)
def test_tests_of_all_forms_pass(text: str, tests: Any) -> None:
    """Assertions, calls, inputs with outputs, and the lists of APPS."""
    assert scored(text, tests)[0] == 1.0


def test_a_failed_test_has_a_reason_and_a_share() -> None:
    """One of three fails: 0, or two thirds."""
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(0, 0) == 0"]
    value, words = scored(ADD, tests)
    assert (value, words) == (0.0, "2 of 3 passed: test 2: AssertionError:")
    assert scored(ADD, tests, mode="fraction")[0] == pytest.approx(2 / 3)
    printing = [{"input": "ab", "output": "ba"}, {"input": "ab", "output": "ab"}]
    assert scored(REVERSE, printing, mode="fraction") == (0.5, "1 of 2 passed: the output is wrong")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os\nos._exit(0)", "0 of 1 passed: a value is wrong"),
        ("raise SystemExit(0)", "0 of 1 passed: a value is wrong"),
        (
            "class Same:\n  def __eq__(self, other): return True\ndef f(x): return Same()",
            "0 of 1 passed: test 1: TypeError",
        ),
        ("def f(x):\n  while True: pass", "0 of 1 passed: time"),
        ("def f(x): return 10**5000", "0 of 1 passed: "),
        ("import os\nos.write(3, b'0 0 1\\n')", "0 of 1 passed: "),
        ("", "0 of 1 passed: test 1: KeyError: 'Solution'"),
    ],
)
def test_a_program_that_evades_its_test_fails(code: str, words: str) -> None:
    """The value of a call is compared outside of the program, as JSON."""
    value, said = scored(code, [{"call": "f", "arguments": [1], "expected": 1}], seconds=1.0)
    assert value == 0.0
    assert said.startswith(words)


def test_a_hostile_answer_leaves_the_others_of_its_group_alone() -> None:
    """Three answers of a group, of which the second never ends."""
    texts = [ADD, "while True: pass", ADD]
    assert code_tests(texts, texts, [["assert add(1, 2) == 3"]] * 3, seconds=1.0) == [1.0, 0.0, 1.0]


def test_the_last_block_of_an_answer_is_its_program() -> None:
    """An unclosed block was cut off; without a block the text itself is the program."""
    assert program_in("```python\na\n```\n```py\nb\n```") == "b\n"
    assert program_in("```python\na = 1") == "a = 1"
    assert program_in("a = 1") == "a = 1"


def test_without_tests_the_function_does_not_apply() -> None:
    """None, not 0 and not 1."""
    assert scored(ADD, [])[0] is None
    assert scored(ADD, None)[0] is None


@pytest.mark.parametrize("tests", ["{", 3, [{"input": "a"}], {"inputs": [1], "outputs": []}, [{"call": "f"}]])
def test_tests_of_an_unknown_form_are_an_error_of_the_data(tests: Any) -> None:
    """The error has the forms to choose from."""
    with pytest.raises(ValueError, match=r'tests: .*"inputs", "outputs"|tests: inputs and outputs must be lists'):
        scored(ADD, tests)


def test_an_unknown_mode_is_named() -> None:
    """With the two that exist."""
    with pytest.raises(ValueError, match=r"kwargs.mode: 'some' must be all or fraction"):
        scored(ADD, [], mode="some")


def test_a_machine_that_cant_run_programs_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reaches the caller, whose group is tried again."""
    monkeypatch.setattr(client.sys, "executable", "/bin/false")
    with pytest.raises(SandboxError):
        scored(ADD, ["assert add(1, 2) == 3"])
