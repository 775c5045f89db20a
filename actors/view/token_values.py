"""The trainer's values of a sample's tokens, out of the files that `telemetry.token_details` makes.

A sample is found by its group, its completion and its tokens, and only its part of the arrays is read. Where there is
no record, the words say why, and name the key that makes one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.ledger import LedgerReader
from actors.telemetry.token_files import FOLDER, NAME, name_of
from actors.view.formulas import AVERAGES, RULES, SYMBOLS, formula_of, keys_of
from actors.view.plain import number
from schemas.config import RunConfig
from schemas.config.objective import MODIFIERS
from schemas.messages import ScoredGroup

KEY = "telemetry.token_details"
COLUMNS = {
    "trainer_logprob": "logprobs_T",
    "old_logprob": "old_logprobs_T",
    "reference_logprob": "reference_logprobs_T",
    "teacher_logprob": "teacher_logprobs_T",
    "trainer_advantage": "advantages_T",
    "ratio": "ratio_T",
    "entropy": "entropy_T",
    "value": "values_T",
    "loss": "loss_T",
}
"""Columns of a page, with their arrays in the file."""
RULE = "rule/"
"""Start of the names of arrays of rules."""

Value = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Place of a group in the step that trains it."""

    step: int
    position: int
    """Number of the group in the step, from 0."""
    first_completion: int
    """Number of the group's first completion among those of the step."""


def place_of(ledger: LedgerReader | None, ordinal: int) -> Place | str:
    """Return the place of a group in its step, or the reason why the trainer has no values of the group."""
    if ordinal < 0:
        return "an evaluation is not trained, so there are no values of the trainer"
    row = None if ledger is None else ledger.group(ordinal)
    if ledger is None or row is None:
        return "the ledger has no row of this group, so its step is not known"
    if row.reason is not None:
        return f"this group was dropped ({row.reason}), so there are no values of the trainer"
    step = None if row.step is None else ledger.step(row.step)
    if step is None or ordinal not in step.ordinals:
        return "no step has this group yet, so there are no values of the trainer"
    position = step.ordinals.index(ordinal)
    before = [ledger.group(one) for one in step.ordinals[:position]]
    return Place(step.step, position, sum(one.num_completions for one in before if one is not None))


def trainer_values(config: RunConfig, group: ScoredGroup, sample: int, place: Place | str, chosen: slice) -> Value:
    """Return the values of a page's tokens: `trainer` with loss, formula and words, and a column per value.

    Values of tokens outside the loss mask are None. Without a record there is `trainer` alone, with its words.

    Args:
        config: configuration of the run.
        group: the stored group.
        sample: number of the sample in the group.
        place: place of the group in its step, or the reason why there is none.
        chosen: the tokens, from the first one of the sample on.
    """
    if isinstance(place, str):
        return {"trainer": {"words": f"{place[0].upper()}{place[1:]}."}}
    try:
        found = list(_matches(config.output, group, sample, place))
        if len(found) == 1:
            path, start = found[0]
            return _columns(config, path, slice(start + chosen.start, start + chosen.stop))
    except Exception as error:  # noqa: BLE001 - safetensors has its own kinds, and a file may be removed meanwhile
        return {"trainer": {"words": f"The record of step {place.step} in {FOLDER}/ can't be read: {error}"}}
    return {"trainer": {"words": _words_without(config, place, len(found))}}


def _matches(output: Path, group: ScoredGroup, sample: int, place: Place) -> Iterator[tuple[Path, int]]:
    """Yield the file and the first token of each record of a sample."""
    # imported here: lists and overviews need no safetensors
    from safetensors import safe_open

    own = slice(*group.sample_offsets[sample : sample + 2].tolist())
    completion = place.first_completion + int(group.sample_completions[sample])
    for path in _files(output, place.step):
        with safe_open(path, "numpy") as file:
            of_group = file.get_tensor("ordinals_B") == group.ordinal
            offsets_B = file.get_tensor("offsets_B").tolist()
            for b in np.flatnonzero(of_group & (file.get_tensor("completions_B") == completion)).tolist():
                place_T = slice(offsets_B[b], offsets_B[b + 1])
                # a step that is trained again with other tokens, or another branch of the completion
                if _is_same(file.get_slice("token_ids_T")[place_T], group.token_ids[own]) and _is_same(
                    file.get_slice("inference_logprobs_T")[place_T], group.logprobs[own]
                ):
                    yield path, place_T.start


def _files(output: Path, step: int) -> list[Path]:
    """Return the files of a step by rank."""
    ranks = [int(name[2]) for path in (output / FOLDER).glob(name_of(step, 0).replace("rank0", "rank*"))
             if (name := NAME.fullmatch(path.name))]  # fmt: skip
    return [output / FOLDER / name_of(step, rank) for rank in sorted(ranks)]


def _is_same(recorded: NDArray[Any], own: NDArray[Any]) -> bool:
    return bool(np.array_equal(recorded, own, equal_nan=recorded.dtype.kind == "f"))


def _words_without(config: RunConfig, place: Place, num_records: int) -> str:
    """Return why there is no record of a sample, with the key that makes one."""
    kept, files = config.telemetry.token_details, _files(config.output, place.step)
    if num_records > 1:
        return "Several branches of this completion have the same tokens, and the record can't tell them apart."
    if not kept and not files:
        return (
            f"The trainer's values of single tokens are not recorded: {KEY} is 0. Set {KEY}: 1 to record the first "
            "group of each step from the next start on, a larger number for more groups. metrics.jsonl has means."
        )
    if files and place.position >= kept:
        recorded = "the first group" if kept == 1 else f"the first {kept} groups"
        return (
            f"The trainer's values of this group are not recorded: {KEY} is {kept}, so {recorded} of each step are "
            f"recorded, and this group is number {place.position + 1} of step {place.step}. Set {KEY} to "
            f"{place.position + 1} or more."
        )
    if files:
        return (
            f"The record of step {place.step} does not have these tokens: packing left them out as their advantage "
            "is 0 (packer.filter_zero_advantages), or their rank is on a machine without the run's output_dir."
        )
    return (
        f"There is no record of step {place.step} in {FOLDER}/: the step is not trained yet, was trained before {KEY} "
        "was set, or is older than the newest 256 MiB of its rank, which are kept."
    )


def _columns(config: RunConfig, path: Path, chosen: slice) -> Value:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        names = set(file.keys())
        # safetensors refuses an empty slice: the page behind the last token
        read = chosen if chosen.stop > chosen.start else slice(0, 1)
        arrays = {name: file.get_slice(name)[read] for name in names if name.endswith("_T")}
        facts = file.metadata() or {}
    arrays = {name: array[: chosen.stop - chosen.start] for name, array in arrays.items()}
    is_in = arrays["loss_mask_T"].astype(bool)
    columns = {
        column: [number(value) if inside else None for value, inside in zip(arrays[name].tolist(), is_in, strict=True)]
        for column, name in COLUMNS.items()
        if name in arrays
    }
    flags = {name.removeprefix(RULE).removesuffix("_T"): arrays[name] for name in sorted(names) if name[:5] == RULE}
    rules = [[name for name in flags if flags[name][t] and is_in[t]] for t in range(is_in.size)]
    loss = facts.get("loss", "")
    return columns | {
        "rules": rules,
        "trainer": {
            "words": "",
            "file": f"{FOLDER}/{path.name}",
            "loss": loss,
            "formula": formula_of(loss),
            "symbols": SYMBOLS if formula_of(loss) else "",
            # keys of the loss never change within a run
            "keys": keys_of(config.trainer.loss) if loss == config.trainer.loss.type else {},
            "modifiers": [f"trainer.{name}" for name in ("reference", *MODIFIERS) if _acts(config, name)],
            "average": AVERAGES.get(facts.get("average", ""), ""),
            "loss_tokens": facts.get("loss_tokens", ""),
            "rules": {name: RULES.get(name, "") for name in flags},
        },
    }


def _acts(config: RunConfig, key: str) -> bool:
    """Return whether a modifier of the objective is on."""
    trainer = config.trainer
    return bool(getattr(trainer, key) != type(trainer).model_fields[key].get_default())
