"""Which keys may change between two starts of a run (P23)."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from schemas.config import RunConfig
from schemas.config.base import Section
from schemas.config.keys import paths
from schemas.config.objective import ObjectiveConfig
from schemas.config.resume import as_tree, class_of, differences, key_classes, refusal
from schemas.config.resume_classes import Free, Identity

DEFAULT_LOSS = {"type": "dapo", "old_logprobs": "inference"}


def config(**sections: Any) -> RunConfig:
    """A run, with sections replaced."""
    tree: dict[str, Any] = {
        "model": {"path": "some/model"},
        "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "characters_in_place"}]},
        "trainer": {"max_steps": 10},
    }
    return RunConfig.model_validate(tree | sections)


def _rewarded(**keys: Any) -> dict[str, Any]:
    return {"functions": [{"path": "characters_in_place"}]} | keys


@pytest.mark.parametrize(
    ("sections", "key", "key_class"),
    [
        ({"trainer": {"max_steps": 20}}, "trainer.max_steps", "free"),
        ({"trainer": {"max_steps": 10, "learning_rate": 1e-3}}, "trainer.learning_rate", "free"),
        ({"packer": {"max_async_level": 2}}, "packer.max_async_level", "free"),
        ({"bus": {"lease": 9.0}}, "bus.lease", "free"),
        ({"rollout": {"temperature_schedule": {"type": "linear", "end": 0.5}}}, "rollout.temperature_schedule", "free"),
        ({"packer": {"dynamic_sampling": True}}, "packer.dynamic_sampling", "free"),
        ({"packer": {"online_difficulty_filtering": True}}, "packer.online_difficulty_filtering", "free"),
        ({"packer": {"max_resample_times": 1}}, "packer.max_resample_times", "free"),
        ({"packer": {"pools": {"easy_threshold": 1.0}}}, "packer.pools", "free"),
        (
            {"reward": {"functions": [{"path": "characters_in_place"}], "filters": [{"type": "gibberish"}]}},
            "reward.filters.0",
            "identity",
        ),
        (
            {"reward": {"functions": [{"path": "characters_in_place"}], "mask_truncated_completions": True}},
            "reward.mask_truncated_completions",
            "identity",
        ),
        ({"packer": {"filter_zero_advantages": True}}, "packer.filter_zero_advantages", "identity"),
        (
            {"trainer": {"max_steps": 10, "loss": DEFAULT_LOSS | {"compat": {"loss_normalizer": "step_mean"}}}},
            "trainer.loss.compat.loss_normalizer",
            "identity",
        ),
        ({"packer": {"sequence_len": 4096}}, "packer.sequence_len", "repack"),
        ({"trainer": {"max_steps": 10, "num_ranks": 2}}, "trainer.num_ranks", "repack"),
        ({"seed": 1}, "seed", "identity"),
        ({"trainer": {"max_steps": 10, "num_iterations": 2}}, "trainer.num_iterations", "identity"),
        ({"trainer": {"max_steps": 10, "num_minibatches": 2}}, "trainer.num_minibatches", "identity"),
        ({"trainer": {"max_steps": 10, "reference": {"beta": 0.1}}}, "trainer.reference", "identity"),
        ({"model": {"path": "another/model"}}, "model.path", "identity"),
        ({"model": {"path": "some/model", "lora": {"rank": 4}}}, "model.lora", "identity"),
        ({"environments": [{"type": "arithmetic"}]}, "environments.0.type", "identity"),
        ({"reward": {"functions": [{"path": "exact_match"}]}}, "reward.functions.0.path", "identity"),
        ({"packer": {"groups_per_step": 4}}, "packer.groups_per_step", "identity"),
        ({"reward": _rewarded(none_as_zero=True)}, "reward.none_as_zero", "identity"),
        ({"reward": _rewarded(shaping={"clip": 1.0})}, "reward.shaping.clip", "identity"),
        ({"reward": _rewarded(advantage={"type": "mean"})}, "reward.advantage.type", "identity"),
        ({"reward": _rewarded(mask_no_eos_with_zero=True)}, "reward.mask_no_eos_with_zero", "identity"),
        ({"reward": _rewarded(adv_norm={"mean_level": "batch"})}, "reward.adv_norm", "identity"),
        ({"reward": _rewarded(on_timeout="zero")}, "reward.on_timeout", "free"),
    ],
)
def test_each_change_has_one_class(sections: dict[str, Any], key: str, key_class: str) -> None:
    """The one key that differs is named, with both values and its class."""
    (found,) = differences(as_tree(config()), config(**sections))
    assert (found.key, found.key_class) == (key, key_class)
    assert refusal([found]) == (
        [f"{found}; this makes another run (--fork, or another output_dir)"] * (key_class == "identity")
    )


def test_of_a_list_of_sections_the_one_key_is_named_that_differs() -> None:
    """Not the whole list, before and after; an entry that only one of them has is shown."""
    words = {"type": "reverse_text", "name": "words"}
    numbers = {"type": "arithmetic", "name": "numbers", "max_operand": 9}
    before = as_tree(config(environments=[words, numbers]))
    (found,) = differences(before, config(environments=[words, numbers | {"max_operand": 99}]))
    assert str(found) == "environments.1.max_operand: 9 so far, 99 now"
    (found,) = differences(before, config(environments=[words]))
    assert (found.key, found.now) == ("environments.1", None)


def test_what_is_the_same_differs_in_nothing() -> None:
    """A stored tree of this configuration, and one from before a key existed."""
    assert differences(as_tree(config()), config()) == []
    older = as_tree(config())
    del older["bus"]["lease"]
    assert differences(older, config(bus={"lease": 9.0})) == []
    del older["environments"][0]["rl_weight"]
    assert differences(older, config()) == []


def test_every_key_has_a_class() -> None:
    """Every field of the whole tree: one that is declared without a class ends the first comparison."""
    keys = {path.replace("[]", "") for path, _ in paths([RunConfig])}
    assert keys == set(key_classes())
    assert len(keys) > 300


def test_a_key_without_a_mark_is_refused_and_named() -> None:
    """A forgotten key is never free by accident, not even in a section that is."""

    class Inner(Section):
        known: Free[int] = 0
        forgotten: int = 0

    class Outer(Section):
        inner: Free[Inner | None] = None

    with pytest.raises(TypeError, match=r"inner.forgotten has no resume class; mark its field as Free, Repack or Id"):
        key_classes(Outer)


def test_a_section_of_the_runs_identity_covers_its_keys() -> None:
    """Nothing inside needs a mark, and nothing inside can be free."""

    class Inner(Section):
        unmarked: int = 0
        marked: Free[int] = 0

    class Outer(Section):
        inner: Identity[Inner | None] = None

    assert set(key_classes(Outer).values()) == {"identity"}


def test_types_of_one_section_agree_about_the_class_of_a_key() -> None:
    """The path of a key does not tell the type."""

    class One(Section):
        type: Free[Literal["one"]] = "one"

    class Two(Section):
        type: Identity[Literal["two"]] = "two"

    class Outer(Section):
        either: Annotated[One | Two, Field(discriminator="type")] = One()

    with pytest.raises(TypeError, match=r"either.type has two resume classes"):
        key_classes(Outer)


def test_a_key_of_the_user_has_the_class_of_the_value_around_it() -> None:
    """Keyword arguments may have any names."""
    assert class_of("reward.functions.0.kwargs.a.1.b") == "identity"
    assert class_of("up.torch_threads.trainer") == "free"
    with pytest.raises(KeyError, match="seeds"):
        class_of("seeds")


@pytest.mark.parametrize("key", ObjectiveConfig.model_fields)
def test_all_that_is_minimised_is_of_the_runs_identity(key: str) -> None:
    """The loss and whatever combines with it: a change makes another run, and replay would not know of it."""
    assert class_of(f"trainer.{key}") == "identity"
