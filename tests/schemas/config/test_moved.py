"""Keys with another place than in earlier releases: named in a run.yaml, understood in what a run has stored."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from schemas.config import RunConfig, check_tree, load_config
from schemas.config.keys import paths
from schemas.config.losses import LossConfig
from schemas.config.moved import DEFAULT_LOSS, MOVED, with_keys_moved
from schemas.config.objective import ObjectiveConfig
from schemas.config.resolved import RESOLVED, write_resolved
from schemas.config.resume import as_tree, differences
from schemas.errors import ConfigError

VALUES: dict[str, tuple[str, str]] = {
    "trainer.loss_normalizer": ("dapo", "step_mean"),
    "trainer.entropy_average": ("dapo", "micro_batch_tokens"),
    "trainer.off_policy_tokens": ("bnpo", "leave"),
    "trainer.loss.advantage_level": ("gspo", "completion"),
    "trainer.loss.sequence_normalizer": ("surogate", "micro_batches"),
    "trainer.loss.above_cap": ("aipo", "weigh"),
    "trainer.loss.trust_region": ("ref_kl", "advantage"),
}
"""For each moved key a loss that has it, and another value than its default."""


def run(folder: Path, loss: str) -> dict[str, Any]:
    """A run with this loss."""
    trainer: dict[str, Any] = {"max_steps": 10, "loss": {"type": loss}}
    if loss == "surogate":
        trainer["loss"]["ratio_type"] = "sequence"
    if loss == "ref_kl":
        trainer["teacher"] = {"path": "some/teacher"}
    return {
        "output_dir": str(folder / "run"),
        "model": {"path": "some/model"},
        "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": trainer,
    }


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set a value, in new sections if need be."""
    *parents, name = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value


def taken(tree: dict[str, Any], path: str) -> Any:
    """Remove a value and return it."""
    *parents, name = path.split(".")
    for parent in parents:
        tree = tree[parent]
    return tree.pop(name)


def stored_before(config: RunConfig) -> dict[str, Any]:
    """The tree that the release before would have stored with this run."""
    tree = as_tree(config)
    compat = tree["trainer"]["loss"].pop("compat")
    for old, new in MOVED.items():
        name = new.rpartition(".")[2]
        if name in compat:
            put(tree, old, compat.pop(name))
    assert compat == {}
    return tree


def test_each_moved_key_is_tried_and_has_a_place() -> None:
    """A key that moves once more is noticed here."""
    assert set(VALUES) == set(MOVED)
    known = {path for path, _ in paths([RunConfig])}
    assert set(MOVED.values()) <= known
    assert not set(MOVED) & known


@pytest.mark.parametrize("old", MOVED)
def test_a_run_yaml_with_an_old_place_is_told_the_new_one(tmp_path: Path, old: str) -> None:
    """And the new place takes the value."""
    loss, value = VALUES[old]
    tree = run(tmp_path, loss)
    put(tree, old, value)
    with pytest.raises(ConfigError) as refused:
        check_tree(tree)
    (problem,) = refused.value.problems
    assert problem.startswith(f"{old}: has moved to {MOVED[old]}")
    assert ("if trainer.loss is not set" in problem) == (not old.startswith("trainer.loss."))
    put(tree, MOVED[old], taken(tree, old))
    assert taken(as_tree(check_tree(tree)), MOVED[old]) == value


@pytest.mark.parametrize("old", MOVED)
def test_a_run_of_the_release_before_resumes_with_equal_values(tmp_path: Path, old: str) -> None:
    """Nothing differs; another value is a difference of the run's identity, under the key's current name."""
    loss, value = VALUES[old]
    tree = run(tmp_path, loss)
    default = check_tree(tree)
    put(tree, MOVED[old], value)
    config = check_tree(tree)
    assert differences(stored_before(config), config) == []
    (found,) = differences(stored_before(config), default)
    assert (found.key, found.before, found.key_class) == (MOVED[old], value, "identity")


@pytest.mark.parametrize("old", MOVED)
def test_what_the_release_before_has_resolved_is_read(tmp_path: Path, old: str) -> None:
    """`actors view`, `rewind` and `replay` read it; a file of another name is a user's and is refused."""
    loss, value = VALUES[old]
    tree = run(tmp_path, loss)
    put(tree, MOVED[old], value)
    config = check_tree(tree)
    path = write_resolved(config)
    assert path.name == RESOLVED
    path.write_text(yaml.safe_dump(stored_before(config)))
    assert load_config(path) == config
    with pytest.raises(ConfigError, match=f"{old}: has moved to {MOVED[old]}"):
        load_config(path.rename(tmp_path / "run.yaml"))


def test_the_default_loss_of_the_hint_is_the_default() -> None:
    """A run that names no loss keeps it when it writes the section for a key of `compat`."""
    assert TypeAdapter(LossConfig).validate_python(yaml.safe_load(DEFAULT_LOSS)) == ObjectiveConfig().loss


def test_a_current_tree_stays_as_it_is_and_a_broken_one_is_left_to_its_check() -> None:
    """A value in the current place is not replaced."""
    tree = {"trainer": {"entropy_average": "old", "loss": {"compat": {"entropy_average": "new"}}}}
    assert with_keys_moved(tree) == {"trainer": {"loss": {"compat": {"entropy_average": "new"}}}}
    assert tree["trainer"]["entropy_average"] == "old"
    assert with_keys_moved({"trainer": {"loss": None}}) == {"trainer": {"loss": None}}
    assert with_keys_moved({"trainer": 3}) == {"trainer": 3}
