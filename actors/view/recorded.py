"""Groups and steps of a run out of its ledger: a group with its tokens, a group's life, the packing of a step."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from actors.algorithms.advantages import with_step_advantages
from actors.algorithms.advantages.shaping import environment_weights
from actors.algorithms.batches import batches_of_step
from actors.algorithms.lag import lag_of
from actors.ledger import LedgerReader
from actors.ledger.compacted_history import CompactedHistory
from actors.ledger.rows import Group, Step
from actors.ledger.stored_groups import stored_group
from schemas.config import RunConfig
from schemas.errors import ConfigError, DecodeError, ProtocolError
from schemas.messages import ScoredGroup, StepBatch, drop_fields

PICTURE_BYTES = 256 << 20
"""Bytes of the largest step whose packing is computed again for a picture."""
LATER = {"settled": 1, "composed": 2, "trained": 3, "durable": 4}
"""States that a group goes through, with their place."""


@contextmanager
def opened(config: RunConfig) -> Iterator[LedgerReader | None]:
    """Provide the ledger for a block, read-only; None if there is none.

    Raises:
        ConfigError: the file is there and can't be read.
    """
    if not config.ledger_path.is_file():
        yield None
        return
    ledger = LedgerReader.of(config.ledger_path)
    try:
        yield ledger
    finally:
        ledger.close()


def tokens_of(ledger: LedgerReader | None, ordinal: int, config: RunConfig) -> tuple[ScoredGroup | None, str]:
    """Return a group with its tokens, and words about its advantages; or None, and the reason why there are no tokens.

    Advantages over all groups of a step are computed by the packer when the step is composed. They are computed here
    in the same way, from all groups of the step.
    """
    if ledger is None:
        return None, "the ledger of the run is not there, so tokens are not known"
    found = _payloads(ledger, [ordinal])
    if isinstance(found, str) and is_compacted(ledger, ordinal):
        return None, (
            "tokens of this group are gone, and with them their values: its step is compacted. The ledger keeps tokens "
            f"of steps in checkpoints for {config.ledger.keep_steps} steps (ledger.keep_steps) beyond those that a "
            "checkpoint may need again. Records of the trainer in tokens/ hold numbers alone, which have no place "
            "without the tokens; texts and rewards are above"
        )
    if isinstance(found, str):
        return None, f"tokens of this group are gone: {found}. ledger.keep_steps says for how many steps they are kept"
    row = ledger.group(ordinal)
    if config.reward.advantage.level != "step" and config.reward.adv_norm is None:
        return found[0], ""
    step = None if row is None or row.step is None else ledger.step(row.step)
    if step is None:
        return found[0], "advantages are provisional: the packer computes them over all groups of a step"
    if ledger.payload_bytes(step.ordinals) > PICTURE_BYTES:
        return found[0], "advantages are provisional: the step is too large to compute them again for a page"
    payloads = _payloads(ledger, step.ordinals)
    if isinstance(payloads, str):
        return found[0], "advantages are provisional: other groups of the step are gone"
    try:
        normed = with_step_advantages(payloads, config.reward, environment_weights(config.environments))
    except ValueError as error:  # config.resolved.yaml is of a later start, with other functions
        return found[0], f"advantages are provisional: those of the step can't be computed again: {error}"
    return normed[step.ordinals.index(ordinal)], ""


def payload_of(ledger: LedgerReader | None, ordinal: int) -> ScoredGroup | None:
    """Return a group with the advantages that its reward actor gave; None if the ledger does not have its tokens."""
    found = "" if ledger is None else _payloads(ledger, [ordinal])
    return None if isinstance(found, str) else found[0]


def life_of(ledger: LedgerReader | None, ordinal: int, config: RunConfig) -> dict[str, Any]:
    """Return a group's life as the ledger has it: the facts of its row, and an entry per event, oldest first."""
    if ledger is None:
        return {"words": "the ledger of the run is not there", "events": []}
    row = ledger.group(ordinal)
    if row is None:
        return {"words": _of_missing(ledger, ordinal), "events": []}
    step = None if row.step is None else ledger.step(row.step)
    digest = "" if step is None or ordinal not in step.ordinals else step.digests[step.ordinals.index(ordinal)]
    return {
        "words": "",
        "events": [*_until_settled(row), *_after(ledger, row, step, config)],
        "example": {"environment": row.example.environment, "index": row.example.index, "key": row.example.key},
        "seed": row.seed,
        "completions": row.num_completions,
        "state": str(row.state),
        "attempt": row.attempt,
        "outcome": str(row.outcome),
        "failures": row.failures,
        "deaths": row.deaths,
        "holder": row.holder,
        "min_version": row.min_version,
        "policy": None if row.policy is None else str(row.policy),
        "oldest": row.oldest_version,
        "lag": None if row.step is None or row.oldest_version is None else lag_of(row.step, row.oldest_version),
        "step": row.step,
        "reason": row.reason,
        "origin": row.origin,
        "resamples": row.resamples,
        "digest": digest,
        "chain": "" if step is None else step.chain,
    }


def is_compacted(ledger: LedgerReader, ordinal: int) -> bool:
    """Return whether the row of a group is compacted: it was trained or dropped, and is in checkpoints."""
    return ordinal in CompactedHistory.of(ledger.value("folded")).finished


def _of_missing(ledger: LedgerReader, ordinal: int) -> str:
    compacted = CompactedHistory.of(ledger.value("folded"))
    if ordinal in compacted.finished:
        return (
            f"the row of this group is compacted: it was trained or dropped by a step up to {compacted.step}, all of "
            "which are in checkpoints"
        )
    return "the ledger has no group with this number; an evaluation's row is gone once the evaluation is old"


def _until_settled(row: Group) -> Iterator[dict[str, Any]]:
    at_least = f"by version {row.min_version} or newer" if row.policy is None else f"by version {row.policy} alone"
    yield {
        "what": "issued",
        "words": f"example {row.example.index} of {row.example.environment}, seed {row.seed}, to be sampled {at_least}",
    }
    if row.origin is not None:
        yield {"what": "in place of", "words": "another group that was dropped", "ordinal": row.origin}
    if row.attempt:
        parts = [f"{row.attempt} attempt{'' if row.attempt == 1 else 's'}"]
        parts += [f"{row.failures} failed"] if row.failures else []
        parts += [f"{row.deaths} deaths of a rollout actor meanwhile"] if row.deaths else []
        yield {"what": "sampled", "words": ", ".join(parts)}
    if row.holder is not None:
        yield {"what": "held", "words": f"by {row.holder}, attempt {row.attempt} ({row.outcome})"}
    if row.arrival is not None:
        yield {
            "what": "settled",
            "words": f"number {row.arrival} to arrive, its oldest token of version {row.oldest_version}",
        }


def _after(ledger: LedgerReader, row: Group, step: Step | None, config: RunConfig) -> Iterator[dict[str, Any]]:
    reached = LATER.get(str(row.state), 0)
    if row.step is not None and reached >= LATER["composed"]:
        place = "" if step is None else f", at place {step.ordinals.index(row.ordinal) + 1} of {len(step.ordinals)}"
        lag = "" if row.oldest_version is None else f", with a lag of {lag_of(row.step, row.oldest_version)}"
        yield {"what": "composed", "words": f"into step {row.step}{place}{lag}", "step": row.step}
    if reached >= LATER["trained"]:
        yield {"what": "trained", "words": "by all ranks"}
    if reached >= LATER["durable"] and row.step is not None:
        saved = _checkpoint_of(config.output, row.step)
        where = "in a good checkpoint" if saved is None else f"in the checkpoint step_{saved}"
        yield {"what": "durable", "words": where}
    if row.reason is not None:
        reported = next((s.step for s in ledger.steps() if any(d.ordinal == row.ordinal for d in s.dropped)), None)
        told = "" if reported is None else f"; the witness of step {reported} has it"
        yield {"what": "dropped", "words": f"{row.reason}{told}"}
        for ordinal in ledger.groups_from(row.ordinal):
            yield {"what": "replaced by", "words": "another group", "ordinal": ordinal}


def _checkpoint_of(output: Path, step: int) -> int | None:
    """Return the first kept checkpoint that has a step; None if it is gone."""
    names = (folder.name.removeprefix("step_") for folder in (output / "checkpoints").glob("step_*"))
    return min((int(name) for name in names if name.isdecimal() and int(name) >= step), default=None)


def packing_of(ledger: LedgerReader | None, number: int, config: RunConfig) -> dict[str, Any]:
    """Return the packing of a step: the rows of each rank with their samples, or the reason why it is not known."""
    step = None if ledger is None else ledger.step(number)
    if ledger is None or step is None:
        return {"words": "the ledger has no groups of this step: it is compacted, or not composed yet", "ranks": []}
    members = {
        "ordinals": list(step.ordinals),
        "dropped": [[one.ordinal, one.reason] for one in step.dropped],
        "chain": step.chain,
    }
    num_bytes = ledger.payload_bytes(step.ordinals)
    if num_bytes > PICTURE_BYTES:
        words = (
            f"the groups of this step have {num_bytes >> 20} MiB; packing is shown of up to {PICTURE_BYTES >> 20} MiB"
        )
        return members | {"words": words, "ranks": []}
    payloads = _payloads(ledger, step.ordinals)
    if isinstance(payloads, str):
        return members | {"words": f"the packing can't be computed again: {payloads}", "ranks": []}
    # neither run nor incarnation is part of the computation
    header = {"run": "view", "term": 0, "incarnation": 0, "step": number, "digests": list(step.digests)}
    try:
        batches = batches_of_step(payloads, config, **header, **drop_fields(step.dropped))
    except ValueError as error:  # config.resolved.yaml is of a later start, with other keys
        return members | {"words": f"the packing can't be computed again: {error}", "ranks": []}
    first = np.cumsum([0, *(group.num_completions for group in payloads)]).tolist()
    firsts = dict(zip(step.ordinals, first, strict=False))
    ranks = [_rank(batch, config.packer.sequence_len, firsts) for batch in batches]
    return members | {"words": "", "sequence_len": config.packer.sequence_len, "ranks": ranks}


def _rank(batch: StepBatch, sequence_len: int, firsts: dict[int, int]) -> dict[str, Any]:
    """Return the rows of a rank. Tokens that a sample shares with the one before are in the row once."""
    lengths, prompts = np.diff(batch.sample_offsets).tolist(), batch.prompt_lengths.tolist()
    shared, ordinals = batch.sample_shared.tolist(), batch.sample_ordinals.tolist()
    completions = batch.completions.tolist()
    loss = np.add.reduceat(batch.loss_mask, batch.sample_offsets[:-1], dtype=np.int64).tolist() if lengths else []
    rows = []
    for start, end in zip(batch.micro_batch_offsets[:-1].tolist(), batch.micro_batch_offsets[1:].tolist(), strict=True):
        samples = [
            {
                "ordinal": ordinals[b],
                "completion": completions[b] - firsts[ordinals[b]],
                "prompt": prompts[b] - shared[b],
                "shared": shared[b],
                "tokens": lengths[b] - prompts[b],
                "loss_tokens": loss[b],
            }
            for b in range(start, end)
        ]
        used = sum(one["prompt"] + one["tokens"] for one in samples)
        rows.append({"samples": samples, "used": used, "free": max(0, sequence_len - used)})
    minibatches = batch.minibatch_offsets.tolist()
    return {"rank": batch.rank, "rows": rows, "minibatches": minibatches, "tokens": sum(row["used"] for row in rows)}


def _payloads(ledger: LedgerReader, ordinals: Sequence[int]) -> list[ScoredGroup] | str:
    """Return groups with their tokens, or the reason why one of them can't be had."""
    try:
        return [stored_group(frames) for frames in ledger.payloads(ordinals)]
    except (ProtocolError, DecodeError, sqlite3.DatabaseError) as error:
        return str(error)


def counts_of(config: RunConfig) -> dict[tuple[str, str, str | None], int]:
    """Return the number of groups by (purpose, state, reason); empty without a ledger that can be read."""
    try:
        with opened(config) as ledger:
            return {} if ledger is None else ledger.counts()
    except (ConfigError, sqlite3.DatabaseError):
        return {}
