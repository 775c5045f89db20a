"""Measurements and checks that need a GPU, in phases; each writes OUT/PHASE.json.

    python -m benchmarks.gpu --phases env,kernels --out OUT [--device cuda|cpu] [--tiny]

A phase stops at its limit of time, and an error is a result too, so later phases run in any case. `--tiny --device cpu`
rehearses every phase with toy sizes: no figure of a rehearsal means anything. README.md has the order of calls.
"""

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.phases import DONE, NOT_HERE, Report, problems, run_apart, run_guarded
from benchmarks.machine import ROOT

PHASES: Mapping[str, tuple[int, str]] = {
    "env": (30, "environment"),
    "kernels": (180, "kernels"),
    "learner": (180, "learner"),
    "ceilings": (90, "ceilings"),
    "trainer": (420, "trainer"),
    "profile": (90, "profiling"),
    "engine": (240, "engine"),
    "run": (240, "ring"),
    "weights": (240, "transfer"),
    "qlora": (120, "qlora"),
    "vllm_probe": (40, "vllm_probe"),
}
"""Limit in seconds and module of each phase, in the order of running. A module has a function `measure`."""
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables for the folders of compiled kernels, kept between calls: compiling them again takes minutes."""
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
MODELS = "models"
KEPT = Path("outputs/gpu")
"""Folder of caches and models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the phases; return 0 if all have ended in order, without an error or a failed check in any case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="phases: " + ", ".join(f"{name} ({seconds} s)" for name, (seconds, _) in PHASES.items()),
    )
    parser.add_argument("--phases", type=_phases, default=list(PHASES), help="names with commas, or all (the default)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder of compiled kernels and models")
    parser.add_argument("--here", choices=PHASES, help=argparse.SUPPRESS)  # a phase in this process
    given = parser.parse_args(arguments)
    if given.here:
        _run_here(given.here, given)
        return 0
    # SIGTERM, as a batch system sends it, must not leave the process of a phase behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    given.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(given.out), "--device", given.device]
    command += ["--keep", str(given.keep), *(["--tiny"] if given.tiny else [])]
    good = True
    for name in given.phases:
        path = given.out / f"{name}.json"
        found = run_apart([*command, "--here", name], path, PHASES[name][0], _environment(given.keep))
        wrong = list(problems(found.get("results", {})))
        good = good and found["ended"] in (DONE, NOT_HERE) and not wrong
        print(_line(name, found, wrong), flush=True)
    return 0 if good else 1


def _phases(words: str) -> list[str]:
    names = list(PHASES) if words == "all" else words.split(",")
    if unknown := [name for name in names if name not in PHASES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: no such phase; there are {', '.join(PHASES)}")
    return names


def _environment(keep: Path) -> dict[str, str]:
    """Return the environment of a phase: nothing is fetched from the hub, and compiled kernels are kept.

    Actors start with `python -P`, which does not look into the working directory, and on a GPU machine this project is
    not installed; so its folder is in PYTHONPATH.
    """
    kept = {variable: str((keep / folder).absolute()) for variable, folder in CACHES.items()}
    # as `actors up` has it: rows of ever new lengths would break a pool of fixed segments up
    pool = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, **pool, **QUIET, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _line(name: str, found: Mapping[str, Any], wrong: Sequence[str]) -> str:
    error = found.get("error") or {}
    words = " ".join(filter(None, [error.get("type"), str(error.get("words", "")).partition("\n")[0][:200]]))
    failed = f"{len(wrong)} cases with an error or a failed check: {', '.join(wrong[:5])}" if wrong else ""
    return f"== {name}: {found['ended']}, {found['seconds']:.0f} s. {words} {failed}".rstrip()


def _run_here(name: str, given: argparse.Namespace) -> None:
    import torch

    from benchmarks.gpu.setting import Setting
    from benchmarks.machine import machine

    seconds, module = PHASES[name]
    setting = Setting(torch.device(given.device), given.tiny, (given.keep / MODELS).absolute())
    if setting.on_gpu and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU; --device cpu --tiny rehearses the phases")
    setting.folder.mkdir(parents=True, exist_ok=True)
    head = {"phase": name, "limit_seconds": seconds, "device": given.device, "tiny": given.tiny, "machine": machine()}
    report = Report(given.out / f"{name}.json", json.loads(json.dumps(head, default=str)))
    measure = importlib.import_module(f"benchmarks.gpu.{module}").measure
    run_guarded(report, seconds, lambda: measure(setting, report))
    # daemon threads of engines and groups would keep the process, or crash its end
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
