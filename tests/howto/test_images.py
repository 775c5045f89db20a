"""Prompts with images: the page's rows and run fit a model that sees images."""

import contextlib
import io
from pathlib import Path

import pytest
import yaml

from actors.ops.preflight import preflight
from schemas.config import check_tree
from tests import models
from tests.howto.pages import page
from tests.ring.test_images import TEMPLATE


def test_the_run_of_the_page_passes_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own rows, and a tiny model in place of the large one."""
    monkeypatch.chdir(tmp_path)
    found = page("images")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(found.block("rows.py"), {})
    assert printed.getvalue() == "4 rows\n"
    models.build(tmp_path / "model", "qwen3_vl")
    tree = yaml.safe_load(found.block("run.yaml"))
    tree["model"] |= {"path": str(tmp_path / "model"), "chat_template": TEMPLATE}
    # the tiny model has 96 positions
    tree["rollout"]["max_tokens"], tree["packer"]["sequence_len"] = 8, 96
    tree["inference"]["engine"]["max_sequence_len"] = 96
    (note,) = preflight(check_tree(tree, tmp_path), starts=False)
    assert note.startswith("packer.groups_per_step: 8, but train.jsonl has 4 rows")
