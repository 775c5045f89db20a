"""Names of the files with the trainer's values per token: a reader of them needs no torch."""

import re

FOLDER = "tokens"
"""Folder below output_dir."""
NAME = re.compile(r"step_(\d{6,})\.rank(\d+)\.safetensors")
"""Step and rank of a file."""


def name_of(step: int, rank: int) -> str:
    """Return the name of the file of a step and a rank."""
    return f"step_{step:06d}.rank{rank}.safetensors"
