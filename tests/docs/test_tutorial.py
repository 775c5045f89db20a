"""The tutorial is executed from its first file to its last command, with a tenth of the steps."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.docs.pages import ROOT, page
from tests.ports import free_port

NEXT = re.compile(r'(?:<!-- ([\w -]+) -->\n)?^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
"""Block with the comment in front of it, which says what a reader does: `Ctrl-C`, `in the background`, `of one run`."""
DONE_ELSEWHERE = re.compile(r"^(make quickstart|source .*)\n", re.MULTILINE)
"""Commands that set up the environment; `tests/test_examples.py` trains the quickstart."""
SECONDS = 300


def _shortened(text: str, port: int) -> str:
    """Return the tutorial with a tenth of the steps, for one machine."""
    text = re.sub(r"(?<!\d)([234])00(?!\d)", r"\g<1>0", text).replace("interval: 50", "interval: 10")
    return (
        text.replace("10.0.0.5:5555", f"127.0.0.1:{port}")
        .replace("10.0.0.5", "127.0.0.1")
        .replace("10.0.0.6", "127.0.0.1")
    )


def _model(folder: Path) -> None:
    """Write the quickstart's model and tokenizer without the warm-up, which takes a minute."""
    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    try:
        import model
    finally:
        sys.path.pop(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.make_model().save_pretrained(folder)
    model.make_tokenizer().save_pretrained(folder)


def _steps(folder: Path) -> int:
    metrics = folder / "outputs/mine/metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.xdist_group("quickstart")
def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    """Files are written, commands executed, what they print is compared unless it is of one run alone."""
    text = _shortened(page("docs/tutorial.md").text, free_port())
    _model(tmp_path / "outputs/quickstart/model")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    printed, background = "", []
    for comment, language, title, code in NEXT.findall(text):
        if title:
            (tmp_path / title).write_text(code)
            continue
        if language == "text":
            assert comment == "of one run" or code in printed
            continue
        command = (
            ["bash", "-e", "-c", DONE_ELSEWHERE.sub("", code)] if language == "sh" else [sys.executable, "-c", code]
        )
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        if comment == "in the background":
            background.append(process)
            continue
        if comment == "Ctrl-C":
            _interrupt(process, tmp_path)
        printed, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == (130 if comment == "Ctrl-C" else 0), f"{code}\n{printed}"
    for process in background:
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
    ledger = json.loads((tmp_path / "outputs/mine/summary.json").read_text())["ledger"]
    assert (ledger["trained"], ledger["trained_twice"], ledger["in_flight"]) == (40 * 8, 0, 0)
    assert (tmp_path / "outputs/mine/curve.png").stat().st_size > 5_000


def _interrupt(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Press Ctrl-C in the terminal of a run once it has trained one more step: it ends by itself after ten."""
    steps, end = _steps(folder), time.monotonic() + SECONDS
    while _steps(folder) < steps + 1 and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
