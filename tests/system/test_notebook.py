"""GRPOTrainer in the kernel of a notebook: functions of cells, the progress below a cell, an interrupt."""

import importlib.util
from pathlib import Path

import pytest

from tests.conftest import ModelFolder
from tests.system.tools import missing

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

CELLS = (
    """
from actors import GRPOConfig, GRPOTrainer

def trainer(max_steps, callbacks=()):
    arguments = dict(output_dir="out", per_device_train_batch_size=8, num_generations=4, max_completion_length=8)
    arguments |= dict(max_steps=max_steps, bf16=False, use_cpu=True, learning_rate=1e-3)
    rows = [{{"prompt": f"{{word}}=", "answer": word}} for word in ("abcd", "hello", "world", "train")]
    longest = lambda completions, **columns: [len(text) / 10 for text in completions]
    arguments = GRPOConfig(**arguments)
    return GRPOTrainer({model!r}, longest, arguments, train_dataset=rows, callbacks=list(callbacks))
""",
    '''
import os, signal

class Interrupt:
    """The kernel's manager interrupts the whole process group of the kernel."""

    def on_step_end(self, args, state, control, **values):
        if state.global_step == 2:
            os.killpg(os.getpgrp(), signal.SIGINT)

first = trainer(300, [Interrupt])
first.train()
''',
    """
last = first.state.global_step
assert 2 <= last < 300, last
output = trainer(last + 2).train()
output.global_step - last
""",
)


def test_a_cell_trains_is_interrupted_and_trains_on(tmp_path: Path, model_folder: ModelFolder) -> None:
    """The kernel runs an event loop, has no terminal, and a stdout that only it can write to."""
    if importlib.util.find_spec("ipykernel") is None or importlib.util.find_spec("nbclient") is None:
        missing("make system-deps brings ipykernel and nbclient")
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    define, interrupted, on = (new_code_cell(text) for text in CELLS)
    define.source = define.source.format(model=str(model_folder()))
    interrupted.metadata["tags"] = ["raises-exception"]
    notebook = new_notebook(cells=[define, interrupted, on])
    NotebookClient(notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = ["".join(str(output) for output in cell.outputs) for cell in notebook.cells]
    assert "KeyboardInterrupt" in shown[1]
    assert "interrupt again to kill the run" in shown[1]
    # lines of `actors up`, printed by the kernel
    assert "step" in shown[2]
    assert shown[2].count("'text/plain': '2'") == 1
