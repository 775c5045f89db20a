r"""Comparison of formulas: values of TRL 1.16 and ms-swift 4.6, computed by their own functions; hostile formulas."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.reward.builtin import BUILTIN
from actors.reward.sandbox import verifiers as module
from actors.reward.sandbox.client import SandboxError
from actors.reward.sandbox.verifiers import Verifiers, verifiers
from tests.processes import has_ended

pytest.importorskip("math_verify")

ANSWERS = [
    r"\boxed{\frac{1}{3}}", "so $x = 0.5$", r"The answer is \boxed{12} and \boxed{13}",
    r"<think>\boxed{2}</think>\boxed{3}", "5", r"\boxed{5\text{ cm}}", r"\boxed{\{1,2\}}", r"\boxed{x+1}",
    "<answer>7</answer>", r"\boxed{1,234}", "a</think>b</think>$4$",
]  # fmt: skip
SOLUTIONS = [r"\frac{1}{3}", r"$\frac12$", "12", "3", "$5$", "5", r"$\{2,1\}$", "$1+x$", "7", "1234", "4"]
IDS = [[1] * (10 * i) for i in range(len(ANSWERS))]
HOSTILE = [
    r"\boxed{9^{9^{9^{9^{9}}}}}",
    r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    r"\boxed{100000000!!!}",
    r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n!}}",
    r"\boxed{\frac{" * 500 + "1",
    "\ud800\\boxed{1}\0",
    r"\boxed{__import__('os').system('true')}",
    "",
]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No process outlives a test."""
    yield
    verifiers().close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kwargs", "values"),
    [
        ("accuracy", {}, [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]),
        ("reasoning_accuracy", {}, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ("accuracy_swift", {}, [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_formulas_are_compared_as_by_the_origins(name: str, kwargs: dict, values: list[float]) -> None:
    """Texts and chats alike."""
    chats = [[{"role": "assistant", "content": text}] for text in ANSWERS]
    assert BUILTIN[name](ANSWERS, ANSWERS, SOLUTIONS, **kwargs) == values
    assert BUILTIN[name](ANSWERS, chats, SOLUTIONS, **kwargs) == values


def test_rewards_by_length_are_those_of_the_origins() -> None:
    """TRL's cosine stays at its end beyond the length; ms-swift's turns back."""
    trl = [1.0, -0.9665063509461097, -0.875, -0.75, -0.625, 0.5334936490538903, 0.5, 0.5, -0.5, 0.5, -0.5]
    swift = [1.0, -0.4665063509461097, -0.375, -0.25, -0.125, 0.5334936490538903, 0.5, 0.5334936490538903, 0.625, 0.75,
             -0.375]  # fmt: skip
    assert BUILTIN["cosine_scaled"](ANSWERS, ANSWERS, SOLUTIONS, IDS, max_len=60) == pytest.approx(trl, abs=1e-12)
    assert BUILTIN["cosine_swift"](ANSWERS, ANSWERS, SOLUTIONS, IDS, cosine_max_len=60) == pytest.approx(
        swift, abs=1e-12
    )


def test_a_solution_that_is_no_formula_does_not_apply() -> None:
    """None as in TRL; 0 as in ms-swift. Unfinished reasoning is 0 first."""
    answers, solutions = [r"\boxed{1}", r"</think>\boxed{1}"], ["", "no formula"]
    assert BUILTIN["accuracy"](answers, answers, solutions) == [None, None]
    assert BUILTIN["reasoning_accuracy"](answers, answers, solutions) == [0.0, None]
    assert BUILTIN["accuracy_swift"](answers, answers, solutions) == [0.0, 0.0]
    assert BUILTIN["cosine_scaled"](answers, answers, solutions, [[1], [1]], max_len=9) == [None, None]


def test_a_delimiter_of_ones_own_ends_the_reasoning() -> None:
    """The text after its last place counts."""
    answers = [r"\boxed{1} DONE \boxed{2} DONE \boxed{3}"]
    found = BUILTIN["reasoning_accuracy"](answers, answers, ["3"], reasoning_delimiters=["</think>", "DONE"])
    assert found == [1.0]


@pytest.mark.slow
def test_hostile_formulas_score_0_and_the_others_are_untouched() -> None:
    """Each has a limit of its own, whether math-verify, the clock or the kernel ends it."""
    logged = {}
    answers = [*HOSTILE, r"\boxed{1}"]
    values = BUILTIN["accuracy"](answers, answers, ["1"] * len(answers), seconds=4.0, log_extra=logged.__setitem__)
    # a half of a surrogate pair in front does not keep a box from being read
    assert values == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert all(isinstance(words, str) and words for words in logged["answer_parsed"])


@pytest.mark.slow
@pytest.mark.parametrize(("num_read", "verdict"), [(1, (0.0, "[ended]")), (0, (None, "[skipped]"))])
def test_an_end_of_the_process_is_the_fault_of_what_it_was_reading(
    num_read: int, verdict: tuple[float | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer's after the solution was parsed: 0. Before that the solution's: it does not apply."""
    read, pool, num_calls = module.Server.read, Verifiers(), 0
    assert pool.verify([("1", "none")], "trl", 20.0)[0].reward == 0.0

    def read_and_kill(server: module.Server, seconds: float) -> dict:
        nonlocal num_calls
        if num_calls == num_read:
            server.process.kill()
            server.process.wait(60.0)
            while server.process.stdout.raw.read(1 << 16):
                pass
            server.rest = b""
        num_calls += 1
        return read(server, seconds)

    monkeypatch.setattr(module.Server, "read", read_and_kill)
    (found,) = pool.verify([("1", r"\boxed{1}")], "trl", 20.0)
    assert (found.reward, found.answer) == verdict
    monkeypatch.undo()
    assert pool.verify([("1", r"\boxed{1}")], "trl", 20.0)[0].reward == 1.0
    pool.close()


def test_a_process_that_cant_start_is_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not scored 0."""
    verifiers().close()
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="math-verify can't be started"):
        BUILTIN["accuracy"](["p"], [r"\boxed{1}"], ["1"])


ACTOR = """
import subprocess, sys, os
command = [sys.executable, "-P", "-m", "actors.reward.sandbox.verifier", str(os.getpid())]
server = subprocess.Popen(command, stdin=0, stdout=subprocess.PIPE)
server.stdout.readline()
print(server.pid, flush=True)
server.wait()
"""


@pytest.mark.slow
def test_no_server_outlives_a_reward_actor_that_is_killed() -> None:
    """Also one that does not read the end of its input, because it computes; here this test holds the other end."""
    command, root = [sys.executable, "-c", ACTOR], Path(__file__).parents[4]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        assert not has_ended(server)
        process.kill()
        deadline = time.monotonic() + 60.0
        while not has_ended(server):
            assert time.monotonic() < deadline
            time.sleep(0.01)
