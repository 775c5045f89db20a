"""The quickstart with a real vLLM (`make test-system`)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.actors.engines.vllm.runs import VLLM, Say

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """GiB for keys and values."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after its warm-up, with a head of its own."""
    from transformers import Qwen3ForCausalLM

    spec = importlib.util.spec_from_file_location("quickstart_model", ROOT / "examples/quickstart/model.py")
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    shape = quickstart.make_model().config
    shape.tie_word_embeddings = False
    quickstart.make_model = lambda: Qwen3ForCausalLM(shape)
    folder = tmp_path_factory.mktemp("quickstart") / "model"
    quickstart.build(folder, seed=0)
    return folder


@pytest.mark.parametrize(
    ("example", "changes", "steps"),
    [
        pytest.param("run.yaml", ["weights.channel=rendezvous"], 60, id="full weights by broadcast, the first steps"),
        pytest.param("run.yaml", ["weights.channel=device"], 60, id="full weights from memory, the first steps"),
        pytest.param(
            "run.yaml", ["weights.channel=rendezvous"], 300, id="full weights by broadcast", marks=pytest.mark.long
        ),
        # larger steps of a smaller adapter: vLLM's kernels for adapters are slow on CPUs
        pytest.param(
            "lora.yaml",
            ["model.lora.rank=8", "trainer.learning_rate=4.0e-3", "trainer.warmup_steps=5"],
            300,
            id="adapters",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_quickstart_learns_with_vllm(
    warm_model: Path, tmp_path: Path, say: Say, example: str, changes: list[str], steps: int
) -> None:
    """Held-out exact match of 0.85 after all steps, and at lag 0 vLLM's logprobs are the trainer's."""
    tree = yaml.safe_load((ROOT / "examples/quickstart" / example).read_text())
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree | {"inference": {"engine": VLLM}}))
    places = [f"output_dir={tmp_path / 'out'}", f"model.path={warm_model}"]
    same = ["packer.max_async_level=0", f"trainer.max_steps={steps}"]
    command = [sys.executable, "-m", "actors", "up", str(path), *places, *same, *changes]
    with (tmp_path / "up.log").open("wb") as log:
        up = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            assert up.wait(800.0) == 0, (tmp_path / "up.log").read_text()
        finally:
            up.kill()  # and the kernel its actors
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    before, after = (found[when]["reverse_text"]["exact_match"] for when in ("eval_before", "eval_after"))
    parts = ", ".join(f"{part} {1000 * seconds:.1f} ms" for part, seconds in found["weight_update_seconds"].items())
    say(
        f"exact match {before:.3f} → {after:.3f} in {found['wall_seconds']:.0f} s, mismatch KL "
        f"{found['mismatch_kl']:.1e}; an update: {parts}"
    )
    assert steps < 300 or after >= 0.85
    assert abs(found["mismatch_kl"]) < 1e-3
    assert found["lag_max"] == 0
    assert found["ledger"]["trained_twice"] == found["ledger"]["in_flight"] == 0
