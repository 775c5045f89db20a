"""Pictures of three digits, and the rows of a data set that shows them."""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

NUM_DIGITS = 3
CELL = 16
"""Pixels of the square in which a digit is drawn."""
NUM_HELD_OUT = 200


def numbers(split: str) -> list[str]:
    """Return the numbers of a split, `train` or `eval`; no number is in both, whichever the seed of a run."""
    shuffled = [f"{number:0{NUM_DIGITS}}" for number in range(10**NUM_DIGITS)]
    random.Random(0).shuffle(shuffled)
    return shuffled[:NUM_HELD_OUT] if split == "eval" else shuffled[NUM_HELD_OUT:]


def draw(number: str, rng: random.Random) -> Image.Image:
    """Return a picture of a number: bright digits, each at a place and of a color of its own, on a dark ground."""
    font = ImageFont.load_default(CELL + 2)
    picture = Image.new("RGB", (CELL * NUM_DIGITS, CELL), _color(rng, 0, 60))
    pen = ImageDraw.Draw(picture)
    for n, digit in enumerate(number):
        place = (CELL * n + CELL // 2 + rng.randint(-2, 2), CELL // 2 + rng.randint(-1, 1))
        color = _color(rng, 150, 255)
        pen.text(place, digit, font=font, anchor="mm", fill=color, stroke_width=0.4, stroke_fill=color)
    return picture


def _color(rng: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def row(number: str, file: str) -> dict[str, Any]:
    """Return the row of a number whose picture is in a file."""
    content = [{"type": "image", "path": file}, {"type": "text", "text": "="}]
    return {"prompt": [{"role": "user", "content": content}], "answer": number}


def write_rows(folder: Path, seed: int) -> None:
    """Write train.jsonl and eval.jsonl, a row per number, with the pictures next to them as PNG files."""
    rng = random.Random(seed)
    for split in ("train", "eval"):
        (folder / split).mkdir(parents=True)
        with (folder / f"{split}.jsonl").open("w") as rows:
            for number in numbers(split):
                file = f"{split}/{number}.png"
                draw(number, rng).save(folder / file)
                rows.write(json.dumps(row(number, file)) + "\n")
