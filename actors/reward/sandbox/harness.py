"""Program that runs the tests of functions: `python harness.py`, with a JSON object on the standard input.

Imports nothing of ours. For each test that passes it writes a line `TOKEN NUMBER JSON` to descriptor 3: the value of a
call, which the reader compares, or `null` of an assertion. The token keeps an answer from writing lines of its own by
mistake; an answer that looks for the token in its own process will find it.
"""

import json
import os
import sys


def main() -> None:
    """Define what the answer defines, and run the tests in their order. A failed test does not end the others."""
    job = json.load(sys.stdin)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115 - small, and open until the end
    results = os.fdopen(3, "w", encoding="utf-8")
    names: dict[str, object] = {"__name__": "answer"}
    exec(compile(job["source"], "answer.py", "exec"), names)  # noqa: S102 - that is the purpose
    failed = 0
    for number, test in enumerate(job["tests"]):
        try:
            if "assert" in test:
                exec(compile(test["assert"], "test.py", "exec"), names)  # noqa: S102 - as above
                value = "null"
            else:
                name = test["call"]
                found = names.get(name) or getattr(names["Solution"](), name)  # type: ignore[operator]
                value = json.dumps(found(*test["arguments"]))  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - the last of them is told
            failed += 1
            print(f"test {number + 1}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
            continue
        results.write(f"{job['token']} {number} {value}\n")
        results.flush()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
