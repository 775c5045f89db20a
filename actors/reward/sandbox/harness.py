"""Program that runs the tests of functions: `python harness.py`, with a JSON object on the standard input.

Imports nothing of ours. For each test that passes it writes a line `TOKEN NUMBER JSON` to descriptor 3: the value of a
call, which the reader compares, or `null` of an assertion. The token keeps an answer from writing lines of its own by
mistake; an answer that looks for the token in its own process will find it.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Define what the answer defines, and run the tests in their order. A failed test does not end the others."""
    job = json.load(sys.stdin)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115 - small, and open until the end
    results = os.fdopen(3, "w", encoding="utf-8")
    names = run("answer", {})
    failed = 0
    for number, test in enumerate(job["tests"]):
        try:
            if "assert" in test:
                Path(f"test_{number}.py").write_text(test["assert"], encoding="utf-8")
                run(f"test_{number}", names)
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


def run(name: str, names: dict[str, object]) -> dict[str, object]:
    """Run a file of the working directory as a module, and return its names.

    Args:
        name: name of the module, and of the file without `.py`.
        names: names that the module has at its start.
    """
    spec = importlib.util.spec_from_file_location(name, f"{name}.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018 - for the type checker
    module = importlib.util.module_from_spec(spec)
    vars(module).update({key: value for key, value in names.items() if not key.startswith("__")})
    # as Python does: dataclasses look up the module of their class
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return vars(module)


if __name__ == "__main__":
    main()
