"""Classes of configuration keys by what may change when a run is resumed (protocol rule P23).

free      execution only (paths, timeouts, numbers of processes, learning rate): may change
repack    packing of committed groups: may change; steps not yet trained are packed again
identity  meaning of the groups in the ledger: a change makes another run, refused without `--fork`

A fork keeps the steps up to the newest checkpoint. Later groups are dropped as `forked`, and their examples are issued
again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from schemas.config.run import RunConfig

KeyClass = Literal["free", "repack", "identity"]

REPACK = ("packer.sequence_len", "trainer.num_ranks")
IDENTITY = (
    # what is sampled
    "seed",
    "model.path",
    "model.dtype",
    "model.lora",
    "model.quantization",
    "environments",
    "rollout.group_size",
    # rewards, advantages and masks
    "reward.functions",
    "reward.shaping",
    "reward.none_as_zero",
    "reward.steps",
    "reward.advantage",
    "reward.adv_norm",
    "reward.filters",
    "reward.mask_truncated_completions",
    "reward.mask_no_eos_with_zero",
    # which groups and tokens make a step, so that a replayed step is the step that was trained
    "packer.filter_zero_advantages",
    "packer.groups_per_step",
    "packer.order",
    # what a step minimises, and by how many updates
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
    "trainer.distillation",
    "trainer.sft",
    "trainer.num_iterations",
    "trainer.num_minibatches",
    "trainer.loss_normalizer",
    "trainer.optimizer.type",  # its state is in the checkpoints; its other keys are free
)


@dataclass(frozen=True)
class Difference:
    """A key with another value than in the run so far."""

    key: str
    before: Any
    now: Any
    key_class: KeyClass

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} so far, {self.now!r} now"


def as_tree(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain values, the form stored with a run."""
    return config.model_dump(mode="json")


def differences(before: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """Return the differences to the stored tree of the run so far, in the order of the keys.

    A key missing in the stored tree, new in this release, is no difference.
    """
    return [
        Difference(key, *values, class_of(key)) for key, values in _changed("", dict(before), as_tree(config)).items()
    ]


def class_of(key: str) -> KeyClass:
    """Return the class of a dotted key. A key in neither IDENTITY nor REPACK is free."""
    if _is_under(key, IDENTITY):
        return "identity"
    return "repack" if _is_under(key, REPACK) else "free"


def refusal(found: list[Difference]) -> list[str]:
    """Return error lines for differences of class identity; empty if the run may be resumed."""
    identity = [difference for difference in found if difference.key_class == "identity"]
    return [f"{difference}; this makes another run (--fork, or another output_dir)" for difference in identity]


def _is_under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{prefix}.") for prefix in prefixes)


def _changed(path: str, before: Any, now: Any) -> dict[str, tuple[Any, Any]]:
    """Return (before, now) by dotted key, with numbers for items of a list of sections.

    A section present on one side only counts as one key, the section itself.
    """
    found: dict[str, tuple[Any, Any]] = {}
    if isinstance(before, dict) and isinstance(now, dict):
        if "type" in before and before["type"] != now.get("type"):
            # Another type has other keys, so that a comparison key by key would say nothing.
            return {f"{path}.type": (before["type"], now.get("type"))}
        for name in sorted(now.keys() & before.keys()):
            found |= _changed(f"{path}.{name}" if path else name, before[name], now[name])
    elif _is_table(before) and _is_table(now):
        for number, (entry_before, entry_now) in enumerate(zip_longest(before, now)):
            found |= _changed(f"{path}.{number}", entry_before, entry_now)
    elif before != now:
        found = {path: (before, now)}
    return dict(sorted(found.items()))


def _is_table(value: Any) -> bool:
    """Return whether a value is a list of sections (an empty list counts)."""
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
