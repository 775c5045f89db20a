"""One filled message of every kind, and their golden files.

A golden file holds the frames of an example as one msgpack list, so a test sees each change of the wire. After a change
that is meant: bump the `version` of the kind unless the change is a new optional field, then write the files anew:

    python -m tests.schemas.messages.examples
"""

from collections.abc import Sequence
from pathlib import Path

import msgpack
import numpy as np

from bus import codec
from bus.codec import Frame
from schemas.config.sampling import SamplingParams
from schemas.messages import (
    MESSAGE_TYPES,
    ActorTask,
    AttemptFailure,
    BatchPart,
    CheckpointInfo,
    DroppedOrdinal,
    EngineAddress,
    InferenceDirective,
    InferenceHeartbeat,
    Manifest,
    Message,
    Neighbours,
    ObserverDirective,
    ObserverHeartbeat,
    PolicyVersion,
    RewardAddress,
    RewardDirective,
    RewardHeartbeat,
    RolloutDirective,
    RolloutGroup,
    RolloutHeartbeat,
    ScoredGroup,
    StepBatch,
    StepReport,
    Ticket,
    TrainerDirective,
    TrainerHeartbeat,
    UpdateFailure,
    WeightMember,
    WeightUpdate,
    drop_fields,
    single_turn,
)

GOLDEN = Path(__file__).parent.parent / "golden"

POLICY = PolicyVersion(lineage=1, version=7)
NEIGHBOURS = Neighbours.of(
    "r1",
    [
        EngineAddress(name="inference-0", boot_id="b1", url="http://h:2"),
        EngineAddress(name="inference-1", boot_id="b3", url=""),
    ],
    [
        RewardAddress(name="reward-0", boot_id="w1", address="ipc:///r"),
        RewardAddress(name="reward-1", boot_id="w2", address="tcp://h:3"),
    ],
)
TICKET = Ticket(
    ordinal=12,
    attempt=1,
    purpose="train",
    environment="arithmetic",
    index=5,
    example_key="abc",
    seed=99,
    num_completions=2,
    sampling=SamplingParams(top_p=0.9, top_k=40, min_p=0.05),
    max_tokens=16,
    min_version=6,
)
FAILURE = AttemptFailure(ordinal=3, attempt=0, reason="timeout", detail="not sampled within 300 s")
MANIFEST = Manifest(
    policy=POLICY, channel="filesystem", content="full", uri="/w/v7", digest="d" * 8, num_bytes=1 << 33, key="0c" * 32
)
MEMBERS = [WeightMember(boot_id="b1", num_ranks=2), WeightMember(boot_id="b3", num_ranks=1)]
UPDATE = WeightUpdate(update="2.9", process_group="2.1", policy=POLICY, members=MEMBERS)
FAILED_UPDATE = UpdateFailure(update="2.8", missed=["b3"], detail="a bucket was not through")

# Two completions of 3 and 2 tokens; the first one was interrupted after its second token by an update from 7 to 8.
GROUP_FIELDS = {
    "run": "r1",
    "sender": "rollout-0",
    "ordinal": 12,
    "attempt": 1,
    "purpose": "train",
    "environment": "arithmetic",
    "example_key": "abc",
    "prompt": [{"role": "user", "content": "1 + 2 = ?"}],
    "columns": {"answer": "3", "nested": {"weights": [0.5, None, True]}},
    "completions": ["it is", "3 ✓"],
    "stop_conditions": ["length", "stop"],
    "token_ids": np.array([10, 11, 12, 13, 14], np.int32),
    "loss_mask": np.array([1, 1, 0, 1, 1], np.uint8),
    "logprobs": np.array([-0.5, -0.25, -1.0, 0.0, -2.0], np.float32),
    **single_turn(np.array([5, 6, 7, 8], np.int32), np.array([0, 3, 5]), np.array([[0, 1, 7], [2, 1, 8], [3, 1, 7]])),
    "segment_temperatures": np.array([1.0, 1.0, 0.5], np.float32),
}
# As above with an environment: the first completion has two samples and a token of the environment, the second failed.
OF_AN_ENVIRONMENT = {
    "stop_conditions": ["max_turns", "timeout"],
    "transcripts": ['[[{"role": "user"}], [{"role": "assistant", "content": "it is"}]]', "[[], []]"],
    "failures": ["", "env_step: ValueError ✓"],
    "prompt_ids": np.array([5, 6, 7, 8, 5], np.int32),
    "prompt_offsets": np.array([0, 4, 5]),
    "sample_offsets": np.array([0, 2, 3, 5]),
    "sample_completions": np.array([0, 0, 1]),
    "sample_prompts": np.array([0, 1, 0]),
    "segments": np.array([[0, 1, 7, 0, 0], [2, 1, 8, 0, 1], [3, -1, -1, 1, 0], [4, 1, 7, 0, 0]]),
    "segment_temperatures": np.array([1.0, 1.0, 1.0, 0.5], np.float32),
    "loss_mask": np.array([1, 1, 1, 0, 1], np.uint8),
    "counts": np.array([[2, 1, 0], [1, 0, 1]]),
    "environment_reward_names": ["won"],
    "environment_rewards_EG": np.array([[0.5, np.nan]]),
    "turn_rewards": np.array([[0, 1, 0.5]]),
}
HEARTBEAT_FIELDS = {
    "run": "r1",
    "boot_id": "b0",
    "sequence": 4,
    "phase": "running",
    "metrics_url": "http://h:1/metrics",
}
DIRECTIVE_FIELDS = {"run": "r1", "term": 2, "phase": "running", "step": 3, "max_steps": 10}
HOLDS = np.array([[12, 1], [13, 0]])

_ALL = (
    RolloutGroup(**GROUP_FIELDS),
    ScoredGroup(
        **GROUP_FIELDS | OF_AN_ENVIRONMENT,
        scorer="reward-0",
        reward_names=["exact", "short"],
        rewards_FG=np.array([[1.0, 0.0], [np.nan, 0.5]]),
        rewards_G=np.array([1.0, 0.25]),
        advantages_G=np.array([0.375, -0.375], np.float32),
        token_advantages=np.array([0.5, 0.5, 0.125, -0.5, -0.25], np.float32),
        logged_columns={"parsed": ["⅓", None]},
        logged_metrics={"share": 0.5},
    ),
    StepBatch(
        run="r1",
        term=2,
        incarnation=1,
        rank=0,
        num_ranks=1,
        step=4,
        **drop_fields([DroppedOrdinal(ordinal=11, reason="poison")]),
        digests=["d12"],
        ordinals=np.array([12]),
        minibatch_offsets=np.array([0, 2, 3]),
        loss_tokens=np.array([2, 1]),
        ref_kl_tokens=np.array([0, 1]),
        num_completions=np.array([1, 1]),
        micro_batch_offsets=np.array([0, 1, 1, 2]),
        sample_offsets=np.array([0, 4, 6]),
        prompt_lengths=np.array([2, 1]),
        sample_ordinals=np.array([12, 12]),
        completions=np.array([1, 0]),
        sample_shared=np.array([0, 0]),
        sample_shares=np.array([1.0, 0.75], np.float32),
        rewards=np.array([0.25, np.nan]),
        rl_weights=np.array([1.0, 0.5], np.float32),
        ref_kl_weights=np.array([0.0, 2.0], np.float32),
        token_ids=np.array([5, 6, 10, 11, 5, 12], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -0.25, 0, -1.0], np.float32),
        advantages=np.array([0, 0, 0.5, 0.5, 0, -0.5], np.float32),
        temperatures=np.ones(6, np.float32),
        versions=np.array([0, 0, 7, 8, 0, 7], np.int32),
    ),
    BatchPart(
        run="r1",
        term=2,
        incarnation=1,
        rank=0,
        step=4,
        frame_bytes=[3, 4],
        start=2,
        data=np.array([7, 8, 9, 10], np.uint8),
    ),
    RolloutHeartbeat(
        **HEARTBEAT_FIELDS, name="rollout-0", fingerprint="f" * 16, free_slots=2, failures=[FAILURE], holds=HOLDS
    ),
    RewardHeartbeat(**HEARTBEAT_FIELDS, name="reward-0", address="ipc:///r", load=1, failures=[FAILURE], holds=HOLDS),
    TrainerHeartbeat(
        **HEARTBEAT_FIELDS,
        name="trainer-0",
        task=ActorTask(name="save checkpoint of step 8", done=2e9, total=6e9, unit="bytes", since=1.7e9),
        rank=0,
        num_ranks=1,
        address="ipc:///t",
        incarnation=1,
        next_step=4,
        checkpoints=[CheckpointInfo(step=3, chain="c3")],
        published=[MANIFEST],
        reports=[StepReport(step=3, values={"loss": -0.125})],
        received=np.array([4, 5]),
    ),
    InferenceHeartbeat(
        **HEARTBEAT_FIELDS,
        name="inference-0",
        url="http://h:2",
        engine_state="clean",
        policy=POLICY,
        load=3,
        generated_tokens=1 << 40,
        holds_two_versions=True,
        update_seconds={"load": 0.5},
        weight_ranks=2,
        failed_update=FAILED_UPDATE,
    ),
    ObserverHeartbeat(**HEARTBEAT_FIELDS, name="screen"),
    RolloutDirective(
        **DIRECTIVE_FIELDS,
        tickets=[TICKET, TICKET.model_copy(update={"ordinal": -1, "purpose": "eval", "policy": POLICY})],
        neighbours=NEIGHBOURS,
        policies=[POLICY],
        engine_policies=np.array([0, -1], np.int8),
        open_rewards=np.array([1, 0], np.uint8),
        neighbour_loads=np.array([3, 0, 1, 2], np.int16),
        scoring=HOLDS,
        release=HOLDS,
    ),
    NEIGHBOURS,
    RewardDirective(**DIRECTIVE_FIELDS, packer_address="ipc:///p", release=np.zeros((0, 2), np.int64)),
    TrainerDirective(
        **DIRECTIVE_FIELDS,
        order="run",
        incarnation=1,
        lineage=1,
        checkpoint=0,
        recorded_step=3,
        keep_version=2,
        update=UPDATE,
    ),
    InferenceDirective(**DIRECTIVE_FIELDS, update_id=9, manifest=MANIFEST, update=UPDATE, trainer_ready=True),
    ObserverDirective(**DIRECTIVE_FIELDS, progress={"reward": 0.5, "peers": {"rollout": 1}, "loss": None}),
)
TABLES = {NEIGHBOURS.table: NEIGHBOURS}
"""As a receiver of the examples has them."""
EXAMPLES: dict[str, Message] = {message.kind: message for message in _ALL}


def decoded(frames: Sequence[Frame]) -> Message:
    """What a receiver makes of frames that has the tables which the examples name.

    Raises:
        DecodeError: the frames are no valid message.
    """
    return codec.decode(frames, tables=TABLES)


def example_frames(kind: str) -> list[bytes]:
    """The frames of an example, as they arrive."""
    return [bytes(frame) for frame in codec.encode(EXAMPLES[kind])]


def golden_path(kind: str) -> Path:
    """The golden file of a kind in its version."""
    return GOLDEN / f"{kind}.{MESSAGE_TYPES[kind].version}.msgpack"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for kind in EXAMPLES:
        golden_path(kind).write_bytes(msgpack.packb(example_frames(kind)))
