"""Programs in Python as answers, against tests, in processes with limits."""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

from actors.reward.library.completions import Completion, text_of
from actors.reward.sandbox.client import HARNESS, Box, End, Program, run_programs
from bus.threads import Workers

CODE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
FORMS = (
    'a list of {"input", "output"}, of {"call", "arguments", "expected"}, of assert statements, or '
    '{"inputs", "outputs"}'
)
MOST_AT_ONCE = 8


def code_tests(
    prompts: list[Any],
    completions: list[Completion],
    tests: list[Any],
    *,
    mode: Literal["all", "fraction"] = "all",
    seconds: float = 10.0,
    memory_mb: int = 1024,
    output_kb: int = 1024,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Score a program in Python by its tests: 1 if all pass, else 0; with mode `fraction`, the share that passes.

    The program is the last fenced block of the text, or the whole text. A program that crashes, or passes a limit,
    fails its test. The column `tests` has a list of tests, or its JSON text; score None without tests.

    Raises:
        ValueError: the tests have no known form.
        SandboxError: the machine could not run the programs.
    """
    box = Box(seconds, memory_mb << 20, output_kb << 10)
    if mode not in ("all", "fraction"):
        raise ValueError(f"kwargs.mode: {mode!r} must be all or fraction")
    work = [(program_in(text_of(c)), _parsed(one)) for c, one in zip(completions, tests, strict=True)]
    with Workers(max(1, min(len(work), MOST_AT_ONCE)), "code-tests") as executor:
        found = list(executor.map(lambda pair: _passed(pair[0], pair[1], box, stop_at_first=mode == "all"), work))
    if log_extra is not None:
        log_extra("code_tests", [words for _, words in found])
    shares = [share for share, _ in found]
    return shares if mode == "fraction" else [None if share is None else float(share == 1.0) for share in shares]


def program_in(text: str) -> str:
    """Return the program in an answer: its last fenced block of Python, or the whole text."""
    blocks = CODE.findall(text)
    return blocks[-1] if blocks else text


def _passed(source: str, tests: list[dict[str, Any]], box: Box, *, stop_at_first: bool) -> tuple[float | None, str]:
    """Return the share of tests that a program passes, and words about the first failure."""
    if not tests:
        return None, "no tests"
    printing = [test for test in tests if "output" in test]
    calling = [test for test in tests if "output" not in test]
    num_passed, words = 0, ""
    if calling:
        token = secrets.token_hex(16)
        asked = [{name: test[name] for name in ("assert", "call", "arguments") if name in test} for test in calling]
        stdin = json.dumps({"tests": asked, "token": token})
        (end,) = run_programs([Program(source, HARNESS, stdin)], box, stop_at_first=True)
        num_passed = len(_right(end, calling, token))
        words = "" if num_passed == len(calling) else end.words or "a value is wrong"
    if printing and not (stop_at_first and num_passed < len(calling)):
        programs = [Program(source, "", test["input"], test["output"]) for test in printing]
        ends = run_programs(programs, box, stop_at_first=stop_at_first)
        good = [end.outcome == "ended" and end.code == 0 and bool(end.matches) for end in ends]
        num_passed += sum(good)
        words = words or next(
            (end.words or "the output is wrong" for end, ok in zip(ends, good, strict=True) if not ok), ""
        )
    return num_passed / len(tests), f"{num_passed} of {len(tests)} passed" + (f": {words}" if words else "")


def _right(end: End, tests: list[dict[str, Any]], token: str) -> set[int]:
    """Return the numbers of the tests of functions that passed."""
    right = set()
    for line in end.results.splitlines():
        head, _, value = line.partition(" ")
        number, _, value = value.partition(" ")
        if head != token or not number.isdigit() or int(number) >= len(tests):
            continue
        try:
            found = json.loads(value)
        except ValueError:
            continue
        test = tests[int(number)]
        # compared here and as JSON: an object of the answer could call itself equal to anything
        if "assert" in test or _same(found, test["expected"]):
            right.add(int(number))
    return right


def _same(found: Any, expected: Any) -> bool:
    """Compare values of JSON; numbers to 1e-6 relatively, since 0.1 + 0.2 is a right sum."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return bool(abs(found - expected) <= 1e-6 * max(1.0, abs(expected)))
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_same(found[key], expected[key]) for key in found)
    return bool(found == expected)


def _parsed(tests: Any) -> list[dict[str, Any]]:
    """Return tests in one form: maps with `input` and `output`, `call`, `arguments` and `expected`, or `assert`.

    Raises:
        ValueError: the form is none of those known.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError as error:
            raise ValueError(f"tests: is no JSON: {error}; write {FORMS}") from error
    if tests is None:
        return []
    if isinstance(tests, Mapping):
        tests = _from_lists(tests)
    if not isinstance(tests, list):
        raise ValueError(f"tests: {tests!r:.60} must be {FORMS}")
    return [_one_test(test) for test in tests]


def _from_lists(tests: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tests of APPS, TACO and LiveCodeBench: lists of inputs and outputs, and perhaps a function's name."""
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"tests: inputs and outputs must be lists of the same length; write {FORMS}")
    if name is None:
        return [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    return [
        {"call": name, "arguments": given, "expected": wanted} for given, wanted in zip(inputs, outputs, strict=True)
    ]


def _one_test(test: Any) -> dict[str, Any]:
    if isinstance(test, str):
        return {"assert": test}
    if isinstance(test, Mapping):
        if "output" in test:
            return {"input": _lines(test.get("input", "")), "output": _lines(test["output"])}
        if isinstance(test.get("call"), str) and isinstance(test.get("arguments"), list) and "expected" in test:
            return {name: test[name] for name in ("call", "arguments", "expected")}
        if isinstance(test.get("assert"), str):
            return {"assert": test["assert"]}
    raise ValueError(f"tests: {test!r:.100} is no test; write {FORMS}")


def _lines(text: Any) -> str:
    """Return the text of an input or output, given whole or as a list of lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)
