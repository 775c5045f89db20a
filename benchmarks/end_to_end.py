"""Speed of a whole run, compared with a plain synchronous loop: same model, batch, reward and loss, in turns.

The plain loop calls `generate`, scores, computes forward and backward pass on a padded batch, and steps. It has all
cores in each phase. The whole run is `actors up` with its default number of threads. The result is the ratio of
completions trained per second, which does not depend on the speed of the machine.

    python -m benchmarks.end_to_end [--steps 60] [--rounds 2] [--json PATH]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import publish

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
GROUPS, GROUP_SIZE, MAX_TOKENS = 8, 16, 12


def main() -> None:
    """Run both in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        print(json.dumps(plain_loop(arguments.plain, arguments.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, QUICKSTART / "model.py", model], check=True, capture_output=True)
        rows = []
        for number in range(arguments.rounds):
            plain = _plain(model, arguments.steps)
            ours = _ours(model, Path(folder) / f"out{number}", arguments.steps)
            rows.append(
                {"round": number, "plain": round(plain, 1), "ours": round(ours, 1), "ratio": round(ours / plain, 2)}
            )
    publish({"completions_per_second": rows}, rows, arguments.json)


def _plain(model: Path, steps: int) -> float:
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--plain", model, "--steps", str(steps)]
    output = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout
    return float(json.loads(output.splitlines()[-1]))


def _ours(model: Path, output: Path, steps: int) -> float:
    overrides = [f"model.path={model}", f"output_dir={output}", f"trainer.max_steps={steps}", "eval.num_prompts=0"]
    command = [sys.executable, "-m", "actors", "up", QUICKSTART / "run.yaml", *overrides]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return GROUPS * GROUP_SIZE * (len(lines) - 1) / (lines[-1]["time"] - lines[0]["time"])


def plain_loop(folder: Path, steps: int) -> float:
    """Return the completions trained per second. The first step is left out, as in the whole run."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from actors.datasets.generated import ReverseText
    from actors.reward.builtin import characters_in_place
    from schemas.config.data import ReverseTextConfig

    logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    environment = ReverseText(ReverseTextConfig(), "train", 0)
    started = 0.0
    for step in range(steps):
        if step == 1:
            started = time.perf_counter()
        examples = [environment.example(step * GROUPS + i) for i in range(GROUPS)]
        prompts = tokenizer(
            [e.prompt for e in examples], return_tensors="pt", padding=True, return_token_type_ids=False
        )
        with torch.no_grad():
            sequences = model.generate(**prompts, do_sample=True, num_return_sequences=GROUP_SIZE,
                                       max_new_tokens=MAX_TOKENS, pad_token_id=0)  # fmt: skip
        width = prompts["input_ids"].shape[1]
        texts = tokenizer.batch_decode(sequences[:, width:], skip_special_tokens=True)
        answers = [e.columns["answer"] for e in examples for _ in range(GROUP_SIZE)]
        rewards = torch.tensor(characters_in_place([""] * len(texts), texts, answers)).view(GROUPS, GROUP_SIZE)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        ended = (sequences[:, width:] == 2).cumsum(1)
        mask = torch.cat([(ended <= 1) & ~((ended == 1) & (sequences[:, width:] != 2))], 1).float()
        attention = torch.cat([prompts["attention_mask"].repeat_interleave(GROUP_SIZE, 0), mask.long()], 1)
        logits = model(sequences, attention_mask=attention, position_ids=(attention.cumsum(1) - 1).clamp(min=0)).logits
        logprobs = torch.log_softmax(logits[:, width - 1 : -1], -1).gather(2, sequences[:, width:, None])[..., 0]
        loss = -(advantages[:, None] * logprobs * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return GROUPS * GROUP_SIZE * (steps - 1) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
