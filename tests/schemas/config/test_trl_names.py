"""TRL's words are met with the key that does the same here, and not with one that is spelled alike."""

from typing import Any

import pytest

from schemas.config import check_tree
from schemas.config.keys import paths
from schemas.config.run import RunConfig
from schemas.config.trl_names import TRL_NAMES
from schemas.errors import ConfigError


def problem(section: str, key: str) -> str:
    """The one problem of a configuration with this key in this section; `""` is the top."""
    tree: dict[str, Any] = {
        "model": {"path": "m"}, "environments": [{"type": "reverse_text"}],
        "reward": {"functions": [{"path": "exact_match"}]}, "trainer": {"max_steps": 1}, "rollout": {},
    }  # fmt: skip
    (tree[section] if section else tree)[key] = 1
    with pytest.raises(ConfigError) as error:
        check_tree(tree)
    (words,) = error.value.problems
    return words


@pytest.mark.parametrize(
    ("section", "word", "ours"),
    [
        ("trainer", "num_generations", "rollout.group_size"),
        ("rollout", "max_completion_length", "rollout.max_tokens"),
        ("trainer", "save_steps", "trainer.checkpoint.interval"),
        ("", "loss_type", "trainer.loss.type"),
        ("trainer", "beta", "trainer.reference.beta"),
        ("trainer", "gradient_accumulation_steps", "packer.groups_per_step and trainer.num_minibatches"),
    ],
)
def test_a_word_of_trl_is_answered_with_the_key_here(section: str, word: str, ours: str) -> None:
    """In whatever section it stands."""
    assert problem(section, word).endswith(
        f"{word}: no such key; TRL's {word} is {ours} here (docs/reference/libraries.md)"
    )


def test_every_key_that_is_named_exists() -> None:
    """A renamed one would be advised in vain; no word is a key of ours at the same place."""
    known = {path for path, _ in paths([RunConfig])}
    assert [key for keys in TRL_NAMES.values() for key in keys if key not in known] == []
    assert [word for word in TRL_NAMES if word in known] == []


def test_a_slip_is_still_answered_with_the_nearest_key() -> None:
    """`learning_rat` is no word of TRL's."""
    assert "did you mean 'learning_rate'?" in problem("trainer", "learning_rat")
