"""What a benchmark tells of the timeline of a run."""

import json
import time
from pathlib import Path

import pytest

from actors.telemetry import spans
from benchmarks import run_trace
from benchmarks.run_trace import CpuClock, trace_of


def test_idle_gaps_are_those_in_which_neither_trainer_nor_engine_computes(tmp_path: Path) -> None:
    """Two steps of a second: the trainer computes until 0.6, the engine from 0.5 to 0.8, and both wait after it."""
    written = {
        "trainer-0": [
            (at, span)
            for step in (1, 2)
            for at, span in (
                (step, ("wait for batch", 0.0, 0.2, True, {"step": step})),
                (step, ("step", 0.2, 0.8, False, {"step": step, "ordinals": [step]})),
                (step, ("wait for room", 0.6, 0.4, True, {})),
            )
        ],
        "inference-0": [
            (at, span)
            for at in (1, 2)
            for span in (("decode", 0.5, 0.3, False, {}), ("wait for requests", 0.8, 0.2, True, {}))
        ],
    }
    tracks = {"trainer-0": "main", "inference-0": "engine"}
    folder = tmp_path / spans.FOLDER
    folder.mkdir()
    for actor, found in written.items():
        head = {"actor": actor, "pid": 1, "machine": "m", "wall": 0.0, "monotonic": 0.0, "lost": 0}
        lines = [
            [at + start, seconds, tracks[actor], "", name, waits, args]
            for at, (name, start, seconds, waits, args) in found
        ]
        _write(folder / f"{actor}{spans.SUFFIX}", [head, *lines])
    trace = trace_of(tmp_path, 1, 2)
    assert trace["step_ms"] == 1000.0
    assert (trace["both"], trace["one"], trace["neither"]) == (0.1, 0.5, 0.4)
    # from 0.8 on, and on to 0.2 of the next step
    assert trace["longest_gap_ms"] == pytest.approx(400.0)
    assert trace["words"][0].startswith("steps 1 to 2: 2.00 s")


def _write(path: Path, lines: list[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_actor_is_found_by_its_command_line_and_no_other_program() -> None:
    """With arguments as the kernel has them, and as the title that a forked process gives itself."""
    plain = b"python\0-P\0-m\0actors\0run\0trainer\0--config\0a/run.yaml\0--name\0trainer-0\0"
    for line, name in (
        (plain, b"trainer-0"),
        (plain.replace(b"\0", b" ").rstrip() + b"\0", b"trainer-0"),
        (b"docker\0run\0--rm\0--name\0trainer-0\0", None),
    ):
        found = run_trace.NAME.search(line)
        assert (found[1] if found else None) == name


def test_cpu_time_is_that_of_the_processes_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What began before the first sample does not count; a process that takes the place of another begins at 0."""
    trainer, reward, again = ("trainer-0", 1), ("reward-0", 2), ("trainer-0", 3)
    used = iter([{trainer: 10.0}, {trainer: 10.5, reward: 0.25}, {again: 0.5, reward: 0.5}] * 99)
    monkeypatch.setattr(run_trace, "_cpu_of_actors", lambda: next(used).items())
    start = time.time()
    with CpuClock(seconds=0.02, every=1) as clock:
        deadline = time.monotonic() + 60.0
        while len(clock._actors) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        end = clock._actors[2][0]
    seconds = end - clock._actors[0][0]
    found = clock.by_actor(start, end)
    assert found == {"trainer-0": pytest.approx(1.0 / seconds), "reward-0": pytest.approx(0.5 / seconds)}
    assert CpuClock().by_actor(start, end) == {}
