"""Image files and image processors for tests."""

import io
import json
from pathlib import Path

import numpy as np


def png(height: int, width: int, seed: int = 0) -> bytes:
    """A file with random pixels."""
    from PIL import Image  # imported here: most models of the tests see no image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write_processor(folder: Path) -> None:
    """Write the image processor of the tiny models: patches of 4 × 4 pixels, images of 64 to 1024 pixels."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        # without these vLLM normalizes no pixels, where transformers takes other values
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
