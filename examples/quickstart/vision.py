"""The quickstart with images: a tiny model that sees learns to name drawn digits.

    python examples/quickstart/vision.py [--seed N] [--output DIR] [--resume] [key=value ...]

The output directory (default outputs/quickstart-vision) has all files: `digits/` with rows and pictures, `model/`,
`report.html`, and the files of the run (docs/reference/files.md).
"""

import sys
import time

from common import HERE, arguments_of, train
from quickstart import report


def main() -> int:
    """Run the quickstart; return 0. A failed command exits with its own code."""
    arguments = arguments_of(__doc__, "outputs/quickstart-vision").parse_args()
    started = time.monotonic()
    output = arguments.output.resolve()
    digits = output / "digits"
    places = [f"environments.0.path={digits}/train.jsonl", f"environments.0.eval_path={digits}/eval.jsonl"]
    arguments.overrides = [*places, *arguments.overrides]
    train(arguments, output, HERE / "vision.yaml", "vision_model.py", "--digits", digits)
    report(output, "sampled")
    print(f"the quickstart took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
