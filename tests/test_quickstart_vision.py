"""The quickstart with images: its pictures, its start model, and whole runs."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.models.image_tokens import ImageTokens
from actors.models.tokenizer import Tokenizer
from actors.packer.record import EVAL_SAMPLES
from schemas.config.model import ModelConfig
from tests.test_examples import ROOT, run_quickstart

FOLDER = ROOT / "examples/quickstart"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import of a module of the example by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_each_number_has_a_picture_and_a_row_of_one_split(modules: Any, tmp_path: Path) -> None:
    """800 numbers are trained, 200 others held out; another seed has other pictures of the same numbers."""
    digits = modules("digits")
    drawn = []
    for seed in range(2):
        digits.write_rows(tmp_path / str(seed), seed)
        files = [path for path in (tmp_path / str(seed)).rglob("*") if path.is_file()]
        drawn.append({str(path.relative_to(tmp_path / str(seed))): path.read_bytes() for path in files})
    first, other = drawn
    assert first.keys() == other.keys()
    assert {path for path in first if first[path] == other[path]} == {"train.jsonl", "eval.jsonl"}
    answers = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in first[f"{split}.jsonl"].splitlines()]
        assert [row["prompt"][0]["content"][0]["path"] for row in rows] == [f"{split}/{r['answer']}.png" for r in rows]
        answers[split] = {row["answer"] for row in rows}
    assert {split: len(numbers) for split, numbers in answers.items()} == {"train": 800, "eval": 200}
    assert answers["train"] | answers["eval"] == {f"{number:03}" for number in range(1000)}
    assert {path for path in first if path.endswith(".png")} == {
        f"{split}/{number}.png" for split, numbers in answers.items() for number in numbers
    }


@pytest.mark.slow
def test_the_run_has_the_prompts_of_the_warm_up(modules: Any, tmp_path: Path) -> None:
    """The chat template and the rule for image tokens make of a row what the warm-up makes of a picture."""
    vision_model, digits = modules("vision_model"), modules("digits")
    modules("model").save(tmp_path, vision_model.make_model(), *vision_model.make_tokenizer_and_processor())
    row = digits.row("407", "407.png")
    model = ModelConfig(path=str(tmp_path))
    size = (digits.CELL, digits.CELL * digits.NUM_DIGITS)
    ids, places = ImageTokens.of_model(model).expand(Tokenizer(model).encode(row["prompt"]), [size])
    assert ids == vision_model.PROMPT
    assert [place.length for place in places] == [digits.NUM_DIGITS]
    (answer,) = vision_model.token_ids([row["answer"]]).tolist()
    assert [*Tokenizer(model).encode_text(row["answer"]), vision_model.EOS] == answer


def test_the_best_model_of_the_warm_up_names_less_than_half_of_the_numbers(modules: Any) -> None:
    """Its loss is smallest, and has no gradient, where a digit has 0.73 and each other digit 0.03."""
    torch, vision_model, model = modules("torch"), modules("vision_model"), modules("model")
    targets = vision_model.token_ids(["407"])
    p = torch.full((*targets.shape, len(vision_model.VOCABULARY)), 1e-9)
    p[..., vision_model.DIGIT_IDS.start : vision_model.DIGIT_IDS.stop] = 0.03
    p.scatter_(2, targets[..., None], 0.73)
    p[:, -1] = 1e-9
    p[:, -1, vision_model.EOS] = 1.0
    logits = p.log().requires_grad_()
    model.softened_cross_entropy(logits, targets, vision_model.SOFTENING, vision_model.DIGIT_IDS).backward()
    assert logits.grad.abs().max() < 1e-6
    assert 0.3 < vision_model.TARGET < 0.73**3 < 0.45


def run_vision(output: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Summary and printed text of a run of the quickstart with images."""
    completed = run_quickstart([sys.executable, FOLDER / "vision.py", "--output", output, *overrides])
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert f"{output / 'report.html'} shows curves" in completed.stdout
    return json.loads((output / "summary.json").read_text()), completed.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("quickstart")
def test_a_short_run_of_the_quickstart_with_images_is_whole(tmp_path: Path) -> None:
    """Three steps: nothing lost, trainer and engine agree, held-out numbers in the table; then it is continued."""
    overrides = ("trainer.max_steps=3", "trainer.warmup_steps=1", "eval.num_prompts=8", "packer.max_async_level=0")
    summary, printed = run_vision(tmp_path, *overrides)
    ledger = summary["ledger"]
    assert (ledger["issued"], ledger["trained"], ledger["trained_twice"]) == (24, 24, 0)
    assert "held-out exact match (sampled)" in printed
    held_out = {json.loads(line)["answer"] for line in (tmp_path / "digits/eval.jsonl").read_text().splitlines()}
    shown = [line.split() for line in printed.splitlines() if " before '" in line]
    assert len(shown) == EVAL_SAMPLES
    assert {words[0] for words in shown} <= held_out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(line["mismatch_max"] for line in lines) <= 1e-4
    summary, _ = run_vision(tmp_path, "--resume", "trainer.max_steps=4")
    assert summary["ledger"]["trained"] == 32


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("quickstart")
def test_the_quickstart_with_images_learns(tmp_path: Path) -> None:
    """Exact match of sampled numbers, held out, rises from at most 0.5 to at least 0.9; nothing is trained twice."""
    summary, printed = run_vision(tmp_path)
    assert summary["eval_before"]["digits"]["exact_match"] <= 0.5
    assert summary["eval_after"]["digits"]["exact_match"] >= 0.9
    assert "trained twice 0" in printed
