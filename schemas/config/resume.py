"""Which keys of a run may change when it goes on (P23).

free      anything that says how the run is carried out: paths, timeouts, counts of processes, learning rate
repack    how committed groups are packed: steps that are not yet trained are packed anew
identity  what the groups in the ledger are an answer to; a change makes another run, which `--fork` begins

A fork keeps the steps up to the newest durable checkpoint; what came after is dropped as `forked` and its examples are
issued again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from schemas.config.run import RunConfig

KeyClass = Literal["free", "repack", "identity"]

REPACK = ("packer.sequence_len", "trainer.num_ranks")
IDENTITY = (
    "seed",
    "model.path",
    "model.dtype",
    "model.lora",
    "model.quantization",
    "environments",
    "rollout.group_size",
    "reward.functions",
    "reward.shaping",
    "reward.none_as_zero",
    "reward.steps",
    "reward.advantage",
    "reward.filters",
    "reward.mask_truncated_completions",
    "packer.groups_per_step",
    "packer.order",
    "trainer.loss",
    "trainer.correction",
    "trainer.off_policy_mask_threshold",
    "trainer.off_policy_tokens",
    "trainer.top_entropy_quantile",
    "trainer.entropy_coef",
    "trainer.entropy_average",
    "trainer.adaptive_entropy",
    "trainer.reference",
    "trainer.teacher",
    "trainer.sft",
    "trainer.num_iterations",
    "trainer.num_minibatches",
    "trainer.optimizer.type",
)


@dataclass(frozen=True)
class Difference:
    """A key whose value is another one than in the run so far."""

    key: str
    before: Any
    now: Any
    key_class: KeyClass

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} so far, {self.now!r} now"


def as_tree(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain values, as it is stored with a run."""
    return config.model_dump(mode="json")


def differences(before: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """What differs from the stored tree of the run so far, in the order of the keys; new keys differ from nothing."""
    return [
        Difference(key, *values, class_of(key)) for key, values in _changed("", dict(before), as_tree(config)).items()
    ]


def class_of(key: str) -> KeyClass:
    """The class of a dotted key."""
    if _is_under(key, IDENTITY):
        return "identity"
    return "repack" if _is_under(key, REPACK) else "free"


def refusal(found: list[Difference]) -> list[str]:
    """What to tell who would go on with another identity; empty where nothing stands against it."""
    identity = [difference for difference in found if difference.key_class == "identity"]
    return [f"{difference}; this makes another run (--fork, or another output_dir)" for difference in identity]


def _is_under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{prefix}.") for prefix in prefixes)


def _changed(path: str, before: Any, now: Any) -> dict[str, tuple[Any, Any]]:
    """(before, now) by dotted key. Sections that only one of them has, and lists, are compared whole."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return {} if before == now else {path: (before, now)}
    found: dict[str, tuple[Any, Any]] = {}
    for name in now.keys() & before.keys():
        found |= _changed(f"{path}.{name}" if path else name, before[name], now[name])
    return dict(sorted(found.items()))
