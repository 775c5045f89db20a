"""The queue's processes: order, failures, signals, output. A small program stands in for `actors up`."""

import contextlib
import io
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.ops.queue import runner
from actors.ops.queue.plan import QueuedRun
from actors.ops.queue.runner import Queue, shares, slots_of
from actors.process.devices import Gpu
from schemas.errors import ConfigError
from tests.ring.harness import PATIENCE_SECONDS, ring_config, wait_until

STAND_IN = """
    import pathlib, signal, sys, time
    folder, words = pathlib.Path(sys.argv[0]).parent, sys.argv[1:]
    name = pathlib.Path(words[1]).stem
    told = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: told.append(number))
    with (folder / "began").open("a") as began:
        began.write(name + "\\n")
    print(f"{name} says hello", flush=True)
    code, wait = (folder / name).read_text().split()
    while wait == "wait" and not (folder / f"{name}.go").exists():
        if told:
            print("stopping; a second signal kills", file=sys.stderr, flush=True)
            time.sleep(0.5)  # as a run that saves a checkpoint
            if len(told) > 1:
                (folder / f"{name}.twice").touch()
            sys.exit(128 + told[0])
        time.sleep(0.01)
    if code != "0":
        print("warning: no reason", file=sys.stderr)
        print(f"run failed: {name} broke", file=sys.stderr)
    sys.exit(int(code))
"""

Make = Callable[..., list[QueuedRun]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`make(a="0 end", b="1 wait")`: runs with exit code, and whether they wait for a file or a signal."""
    program = tmp_path / "stand_in.py"
    program.write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, str(program)))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    def made(**runs: str) -> list[QueuedRun]:
        for name, behaviour in runs.items():
            (tmp_path / name).write_text(behaviour)
        return [QueuedRun(Path(f"{name}.yaml"), (), ring_config(tmp_path / f"of_{name}")) for name in runs]

    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def later(condition: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Act in a thread once a condition holds, while the block runs the queue in the main thread."""
    thread = threading.Thread(target=lambda: (wait_until(condition, "what the test waits for"), act()), daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def began(folder: Path) -> list[str]:
    """Runs that were started, in order."""
    path = folder / "began"
    return path.read_text().split() if path.exists() else []


def test_runs_go_one_after_the_other_and_on_after_a_failed_one(tmp_path: Path, make: Make, capfd: Any) -> None:
    """The failed one is named with its reason; the exit code is 1."""
    queue = Queue(make(a="0 end", b="1 end", c="0 end"), [{}])
    assert queue.run() == 1
    assert began(tmp_path) == ["a", "b", "c"]
    assert queue.outcomes == {2: "failed: b broke"}
    said = capfd.readouterr()
    assert [line for line in said.out.splitlines() if line.startswith("run ")] == [
        f"run {number} of 3: {name}.yaml in {tmp_path / f'of_{name}' / 'out'}" for number, name in enumerate("abc", 1)
    ]
    assert f"run 2 of 3: b.yaml in {tmp_path / 'of_b' / 'out'}: failed; 1 more to start" in said.err
    assert "run failed: b broke" in said.err


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, None), (1, "failed: a broke"), (2, "refused: a broke"), (3, "ended with exit code 3: a broke")],
)
def test_exit_codes_of_a_run_are_told_in_words(make: Make, code: int, words: str | None) -> None:
    """0 is done; all others make the queue's code 1."""
    queue = Queue(make(a=f"{code} end"), [{}])
    assert queue.run() == (1 if code else 0)
    assert queue.outcomes.get(1) == words


def test_a_run_that_is_killed_has_failed(tmp_path: Path, make: Make) -> None:
    """The next one starts."""
    queue = Queue(make(a="0 wait", b="0 end"), [{}])
    with later(lambda: began(tmp_path) == ["a"], lambda: queue._under[0].process.kill()):
        assert queue.run() == 1
    assert queue.outcomes == {1: "ended by SIGKILL"}
    assert began(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("at_once", [2, 3])
def test_so_many_runs_go_on_at_once(tmp_path: Path, make: Make, capfd: Any, at_once: int) -> None:
    """A further one starts when the first has ended; lines are told apart by run."""
    names = "abcd"
    runs = make(**{name: f"0 {'wait' if name == 'a' else 'end'}" for name in names})
    slots = [{"SLOT": str(slot)} for slot in range(at_once)]
    queue = Queue(runs, slots)
    with later(lambda: sorted(began(tmp_path)) == list(names), lambda: (tmp_path / "a.go").touch()):
        assert queue.run() == 0
    lines = capfd.readouterr().out.splitlines()
    assert {f"[{number} out] {name} says hello" for number, name in enumerate(names, 1)} <= set(lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_under_way_in_order_and_starts_no_further_one(
    tmp_path: Path, make: Make, number: signal.Signals
) -> None:
    """It is passed on once, though the run takes half a second."""
    queue = Queue(make(a="0 end", b="0 wait", c="0 end"), [{}])
    with later(lambda: began(tmp_path) == ["a", "b"], lambda: os.kill(os.getpid(), number)):
        assert queue.run() == 128 + number
    assert queue.outcomes == {2: "stopped", 3: "not started"}
    assert began(tmp_path) == ["a", "b"]
    assert not (tmp_path / "b.twice").exists()


def test_a_second_signal_is_passed_on_too(tmp_path: Path, make: Make) -> None:
    """`actors up` ends at once then."""
    queue = Queue(make(a="0 wait"), [{}])

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: queue._under[0].num_told == 1, "the first signal was passed on")
        os.kill(os.getpid(), signal.SIGTERM)

    with later(lambda: began(tmp_path) == ["a"], twice):
        assert queue.run() == 128 + signal.SIGTERM
    assert (tmp_path / "a.twice").exists()


def test_a_signal_stops_all_runs_at_once(tmp_path: Path, make: Make) -> None:
    """Each hears of it once."""
    queue = Queue(make(a="0 wait", b="0 wait", c="0 end"), [{}, {}])
    with later(lambda: sorted(began(tmp_path)) == ["a", "b"], lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert queue.run() == 143
    assert queue.outcomes == {1: "stopped", 2: "stopped", 3: "not started"}


@pytest.mark.parametrize(("number", "slots"), [(8, 2), (8, 3), (1, 1)])
def test_gpus_are_divided_evenly(number: int, slots: int) -> None:
    """No GPU twice; those left over are nobody's."""
    gpus = [Gpu(str(i)) for i in range(number)]
    found = shares(gpus, slots)
    assert {len(share) for share in found} == {number // slots}
    used = [gpu.entry for share in found for gpu in share]
    assert len(set(used)) == len(used)


def test_each_place_sees_its_own_gpus(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with several places, and only for runs that compute on GPUs."""
    runs = make(a="0 end", b="0 end")
    embedded = {"inference": {"engine": {"type": "embedded"}}}
    real = [QueuedRun(one.path, (), ring_config(one.config.output.parent, **embedded)) for one in runs]
    monkeypatch.setattr(runner, "visible_gpus", lambda: [Gpu(str(i)) for i in range(4)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert slots_of(runs, 2) == [{}, {}]  # the fake engine
    assert slots_of(real, 1) == [{}]
    assert slots_of(real, 5) == [
        {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ]
    monkeypatch.setattr(runner, "visible_gpus", lambda: [Gpu("0")])
    with pytest.raises(ConfigError, match=r"^--at-once: 2 runs need a GPU each, and this machine has 1"):
        slots_of(real, 2)
    monkeypatch.setattr(runner, "visible_gpus", list)
    assert slots_of(real, 2) == [{}, {}]


def test_output_that_can_not_be_read_is_said_to_be_so_and_stops_no_run(tmp_path: Path, capsys: Any) -> None:
    """The pipe is closed: a run would stand still once a pipe without a reader is full."""

    class Broken(io.StringIO):
        def __next__(self) -> str:
            raise OSError(5, "Input/output error")

    broken = Broken()
    runner._pass_on(broken, sys.stdout, "a: ", None)
    assert capsys.readouterr().err == "a: output can't be read any more: OSError: [Errno 5] Input/output error\n"
    assert broken.closed
