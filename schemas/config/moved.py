"""Keys with another place than in earlier releases."""

import copy
from collections.abc import Mapping
from typing import Any

MOVED = {
    "trainer.loss_normalizer": "trainer.loss.compat.loss_normalizer",
    "trainer.entropy_average": "trainer.loss.compat.entropy_average",
    "trainer.off_policy_tokens": "trainer.loss.compat.off_policy_tokens",
    "trainer.loss.advantage_level": "trainer.loss.compat.advantage_level",
    "trainer.loss.sequence_normalizer": "trainer.loss.compat.sequence_normalizer",
    "trainer.loss.above_cap": "trainer.loss.compat.above_cap",
    "trainer.loss.trust_region": "trainer.loss.compat.trust_region",
}
"""New place of each key by the old place. In a run.yaml an old place is an error, which names the new place."""

DEFAULT_LOSS = "{type: dapo, old_logprobs: inference}"
"""Default of `trainer.loss`, to write out when the section gets a key: a map without `type` is refused."""


def new_place(path: str) -> str | None:
    """Return the new place of a key, as an error text; None if the key has not moved."""
    new = MOVED.get(path)
    if new is None or path.startswith("trainer.loss."):
        return new
    return f"{new}; if trainer.loss is not set, set it to its default {DEFAULT_LOSS} first"


def with_keys_moved(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration of an earlier release with each key in the current place.

    Values stay as stored: the run resumes with the meaning of its first start.
    """
    # a copy: the caller's tree may be shown or compared again
    tree = copy.deepcopy(dict(stored))
    for old, new in MOVED.items():
        (*parents, name), (*new_parents, new_name) = old.split("."), new.split(".")
        section = _section(tree, parents)
        if name in section:
            # a value in the new place was written by this release, and counts
            _section(tree, new_parents).setdefault(new_name, section.pop(name))
    return tree


def _section(tree: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """Return the section at a path, made if it is missing; an empty map if there is a plain value."""
    for name in path:
        found = tree.setdefault(name, {})
        # a plain value in place of a section is a file edited by hand; its check reports the value
        tree = found if isinstance(found, dict) else {}
    return tree
