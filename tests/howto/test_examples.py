"""Configurations below examples: what a text looks like in the file is what a run gets."""

from pathlib import Path

from schemas.config import load_config
from schemas.config.data import JsonlConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_system_prompt_of_gsm8k_names_the_marker() -> None:
    """A `#` after a space starts a comment in YAML, so the text is quoted."""
    (environment,) = load_config(EXAMPLES / "gsm8k" / "run.yaml").environments
    assert isinstance(environment, JsonlConfig)
    assert environment.system_prompt == "Reason step by step, then give the final answer as a number after ####."
