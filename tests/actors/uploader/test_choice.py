"""Choice of checkpoints to push, and the copies that outlive their removal."""

import shutil
from pathlib import Path

import pytest

from actors.uploader.choice import due, updates_model
from actors.uploader.files import Saved, keep, place_of, run_of, saved_by
from schemas.config.push_to_hub import HubStrategy, PushToHubConfig
from tests.actors.uploader.runs import RUN, saved

TEN, TWENTY, THIRTY = (Saved(step, f"chain{step}") for step in (10, 20, 30))


@pytest.mark.parametrize(
    ("strategy", "always", "is_end", "wanted"),
    [
        ("end", False, False, []),
        ("end", False, True, [THIRTY]),
        ("end", True, True, [THIRTY]),
        ("every_save", False, False, [THIRTY]),
        ("checkpoint", False, False, [THIRTY]),
        ("every_save", True, False, [TWENTY, THIRTY]),
        ("checkpoint", True, False, [TWENTY, THIRTY]),
        ("all_checkpoints", False, False, [TWENTY, THIRTY]),
    ],
)
def test_what_is_due(strategy: HubStrategy, always: bool, is_end: bool, wanted: list[Saved]) -> None:
    """Three are saved, the first is on the hub."""
    config = PushToHubConfig(hub_strategy=strategy, hub_always_push=always)
    assert due([TEN, TWENTY, THIRTY], {TEN.chain}, config, is_end=is_end) == wanted
    assert due([], set(), config, is_end=is_end) == []
    assert due([THIRTY], {THIRTY.chain}, config, is_end=is_end) == []


def test_an_older_checkpoint_never_replaces_the_model() -> None:
    """Unless the newer one is of a history given up, which is not among the saved ones."""
    assert updates_model(THIRTY, [TEN, TWENTY, THIRTY], {TEN.chain})
    assert not updates_model(TWENTY, [TEN, TWENTY, THIRTY], {THIRTY.chain})
    assert updates_model(TWENTY, [TEN, TWENTY], {THIRTY.chain})


def test_a_copy_costs_no_room_and_outlives_the_checkpoint(tmp_path: Path) -> None:
    """Hard links, of which none is half there."""
    saved(tmp_path, 3)
    [three] = saved_by(tmp_path)
    assert (three.step, run_of(tmp_path)) == (3, RUN)
    copy = keep(tmp_path, three)
    assert copy is not None
    original = tmp_path / "checkpoints" / "step_3"
    assert (copy / "model.safetensors").samefile(original / "model.safetensors")
    shutil.rmtree(original)
    assert place_of(tmp_path, three) == copy == keep(tmp_path, three)
    shutil.rmtree(copy)
    assert place_of(tmp_path, three) is None
    assert keep(tmp_path, three) is None


def test_a_checkpoint_that_goes_while_it_is_copied_is_none(tmp_path: Path) -> None:
    """Nothing is left of the copy."""
    saved(tmp_path, 3)
    [three] = saved_by(tmp_path)
    (tmp_path / "checkpoints" / "step_3" / "config.json").unlink()
    assert keep(tmp_path, three) is None
    assert list((tmp_path / "uploads").iterdir()) == []


def test_a_checkpoint_of_another_history_is_not_taken_for_the_saved_one(tmp_path: Path) -> None:
    """The folder has the name, and another chain."""
    saved(tmp_path, 3)
    assert place_of(tmp_path, Saved(3, "another")) is None
