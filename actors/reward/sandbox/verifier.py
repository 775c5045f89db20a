"""Server of math-verify: `python -m actors.reward.sandbox.verifier`, a JSON object per line in, lines out.

For a request {"solution": …, "answer": …, "way": "trl", "seconds": …} it writes {"gold": true} once the solution is
parsed, so that the reader knows whose fault a later end is, and then {"reward": …, "gold": …, "answer": …}. The reward
is null if the solution can't be parsed. A process of its own, since a formula may compute without end, or take all
memory; math-verify's own limits also work in the main thread only. It ends with the process that has started it: at the
end of its input, and while it computes as soon as `watch_parent` looks.
"""

import importlib
import json
import os
import re
import sys
import threading
import time
from typing import Any

from actors.reward.sandbox import confine
from actors.reward.sandbox.places import readable_places

MEMORY_BYTES = 2 << 30
LOAD_SECONDS = 60.0
LOOK_SECONDS = 0.2
"""Interval at which a process looks whether its parent still lives."""
WORDS_CHARACTERS = 500
"""Limit of the texts of what was parsed, which are for people."""


def watch_parent(parent: int) -> None:
    """End this process once its parent has ended.

    A look and no PR_SET_PDEATHSIG, which is sent at the end of the thread that has started this process.
    """
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def serve(parent: int) -> None:
    """Answer requests until the input ends.

    Args:
        parent: id of the process that reads the answers.
    """
    threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()
    # before anything of an answer is read; imports write nothing
    library = importlib.import_module("math_verify")
    normalization = importlib.import_module("latex2sympy2_extended").NormalizationConfig
    limits = confine.Limits(memory_bytes=MEMORY_BYTES, cpu_seconds=int(LOAD_SECONDS))
    confine.apply(limits, None, readable_places())
    trl = library.LatexExtractionConfig(
        normalization_config=normalization(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    swift = library.LatexExtractionConfig(
        normalization_config=normalization(nits=False, malformed_operators=False, basic_latex=True, boxed=True,
                                                 units=True),
        boxed_match_priority=0, try_extract_without_anchor=False,
    )  # fmt: skip
    _tell({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        confine.limit_cpu(request["seconds"])
        solution, answer = request["solution"], request["answer"]
        if request["way"] == "trl":
            # TRL 1.16: accuracy_reward, in its main thread
            gold = library.parse(solution, parsing_timeout=10)
            options: dict[str, Any] = {"extraction_config": [trl], "parsing_timeout": 10}
        else:
            # ms-swift 4.6: MathAccuracy
            inside, solution = _answer_tag(answer), _answer_tag(solution) or solution
            gold = library.parse(solution, extraction_mode="first_match")
            options = {"extraction_config": [swift]} if inside is None else {}
            answer = answer if inside is None else inside
        _tell({"gold": bool(gold)})
        if not gold:
            _tell({"reward": None, "gold": "[unparseable]", "answer": "[skipped]"})
            continue
        try:
            found = library.parse(answer, extraction_mode="first_match", **options)
            reward = float(library.verify(gold, found, timeout_seconds=5))
            words = str(found)[:WORDS_CHARACTERS] if found else "[unparseable]"
        except (Exception, RecursionError) as error:  # noqa: BLE001 - of the answer: whatever sympy makes of it
            reward, words = 0.0, f"[{type(error).__name__}]"
        _tell({"reward": reward, "gold": str(gold)[:WORDS_CHARACTERS], "answer": words})


def _answer_tag(text: str) -> str | None:
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found.group(1).strip() if found else None


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
