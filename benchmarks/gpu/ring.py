"""Phase `run`: the quickstart's configuration under `actors up`, with SIGKILL of trainer and engine in the middle.

The model is random, since its warm-up takes a minute. Afterwards the witnesses of the checkpoints are checked as the
chaos tests check them (without the tests: the ledger's own counts), and a step is replayed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.phases import Report
from benchmarks.gpu.setting import Setting
from benchmarks.machine import ROOT

QUICKSTART = ROOT / "examples" / "quickstart"
END_SECONDS = 100.0
Killed = Sequence[tuple[str, int]]
KILLED: Killed = (("trainer-0", 10), ("inference-0", 20))
TOY_KILLED: Killed = (("trainer-0", 4), ("inference-0", 4))
"""In a rehearsal each run loses one actor: each start takes seconds on a CPU."""
BFLOAT16 = ("model.dtype=bfloat16",)
TAIL = 2_000


def measure(setting: Setting, report: Report) -> None:
    """Run full training in float32, then LoRA; on a GPU LoRA in bfloat16, without and with equal bits."""
    with tempfile.TemporaryDirectory(prefix="ring-") as name:
        folder = Path(name)
        model = _write_model(folder / "model")
        kinds: list[tuple[str, str, tuple[str, ...], Killed]] = [
            ("full", "run.yaml", (), setting.size(KILLED, TOY_KILLED[:1])),
            ("lora", "lora.yaml", BFLOAT16 if setting.on_gpu else (), setting.size(KILLED, TOY_KILLED[1:])),
        ]
        if setting.on_gpu:
            kinds.append(("lora-same-bits", "lora.yaml", (*BFLOAT16, "trainer.deterministic=true"), ()))
        for kind, file, keys, killed in kinds:
            with report.case("runs", {"weights": kind, "keys": list(keys)}) as found:
                places = (f"model.path={model}", f"output_dir={folder / kind}", f"model.device={setting.device.type}")
                overrides = (*places, *_sizes(setting), *keys)
                found |= _run(QUICKSTART / file, folder / kind, overrides, killed)


def _write_model(folder: Path) -> Path:
    import torch

    from examples.quickstart.model import make_model, make_tokenizer

    torch.manual_seed(0)
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def _sizes(setting: Setting) -> tuple[str, ...]:
    steps, interval, groups, size = setting.size((40, 10, 8, 16), (10, 3, 2, 4))
    return (
        f"trainer.max_steps={steps}",
        f"trainer.checkpoint.interval={interval}",
        f"packer.groups_per_step={groups}",
        f"rollout.group_size={size}",
        "trainer.checkpoint.keep_last=4",
        "eval.num_prompts=0",
        "ledger.sync=process",
    )


def _run(file: Path, output: Path, overrides: tuple[str, ...], killed: Killed) -> dict[str, Any]:
    """Return the results of a run.

    Args:
        file: configuration.
        output: `output_dir`.
        overrides: keys with other values.
        killed: names of actors, each with the step after which it is killed.
    """
    started = time.monotonic()
    found: dict[str, Any] = {}
    with _up(file, output, overrides) as process:
        for name, step in killed:
            _wait(process, lambda step=step: steps_recorded(output) >= step, f"step {step}", output)
            pid = _wait(process, lambda name=name: actors_of(process.pid).get(name), f"a process {name}", output)
            os.kill(pid, signal.SIGKILL)
            found[f"{name} killed after"] = round(time.monotonic() - started, 1)
        code = process.wait(END_SECONDS)
    if code:
        raise RuntimeError(f"actors up ended with {code}: {_tail(output)}")
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    found["seconds"] = round(time.monotonic() - started, 1)
    for key in ("steps", "completions_per_second", "mismatch_kl", "lag_max", "time_to_first_step_seconds", "ledger"):
        found[key] = summary[key]
    found["weight_update_seconds"] = summary["weight_update_seconds"]
    found["witnesses"] = _witnesses(output)
    ledger = summary["ledger"]
    found["replay"] = _replay(output, summary["steps"])
    found["ok"] = (
        ledger["trained_twice"] == 0
        and ledger["in_flight"] == 0
        and found["witnesses"].get("problem") is None
        and found["replay"]["exit_code"] == 0
    )
    return found


@contextlib.contextmanager
def _up(file: Path, output: Path, overrides: tuple[str, ...]) -> "Iterator[subprocess.Popen[bytes]]":
    """Yield a run; the kernel kills its actors when `actors up` is killed."""
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "actors", "up", str(file), *overrides]
    with (output.parent / f"{output.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", condition: Callable[[], Any], what: str, output: Path) -> Any:
    deadline = time.monotonic() + END_SECONDS
    while not (value := condition()):
        if process.poll() is not None:
            raise RuntimeError(f"actors up ended with {process.returncode} before {what}: {_tail(output)}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {END_SECONDS:g} s: {what}; {_tail(output)}")
        time.sleep(0.05)
    return value


def _tail(output: Path) -> str:
    return (output.parent / f"{output.name}.log").read_text(encoding="utf-8", errors="replace")[-TAIL:]


def steps_recorded(output: Path) -> int:
    """Return the steps in the metrics of a run."""
    path = output / "metrics.jsonl"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def actors_of(parent: int) -> dict[str, int]:
    """Return the pids of a supervisor's actors, by name."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            # a forked actor shows its command as one text
            words = (folder / "cmdline").read_bytes().decode().replace("\0", " ").split()
            state, owner, *_ = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(owner) == parent and state != "Z" and "--name" in words:
                found[words[words.index("--name") + 1]] = int(folder.name)
    return found


def _witnesses(output: Path) -> dict[str, Any]:
    try:
        from tests.ring.witness_checker import WitnessError, check_witnesses
    except ImportError:
        return {"not checked": "the repository's tests are not here; the ledger's counts stand alone"}
    try:
        said = check_witnesses(output)
    except WitnessError as error:
        return {"problem": str(error)}
    return {"steps": said.steps, "trained": len(said.trained), "dropped": len(said.dropped)}


def _replay(output: Path, step: int) -> dict[str, Any]:
    """Train the run's last step but one again."""
    command = [sys.executable, "-m", "actors", "replay", str(output), "--step", str(step - 1)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=END_SECONDS)
    return {"exit_code": done.returncode, "said": (done.stdout + done.stderr[-TAIL:]).splitlines()}
