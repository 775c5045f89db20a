"""All messages of the bus, by kind. A new kind is one class and one line here."""

import hashlib
from functools import cache

from schemas.messages.base import Frozen, Message
from schemas.messages.control import (
    ActorPhase,
    AttemptFailure,
    Beat,
    CheckpointInfo,
    EnginePeer,
    EngineState,
    InferenceBeat,
    InferenceState,
    Manifest,
    ObserverBeat,
    ObserverState,
    RewardBeat,
    RewardPeer,
    RewardState,
    RolloutBeat,
    RolloutState,
    RunPhase,
    State,
    StepReport,
    Ticket,
    TrainerBeat,
    TrainerOrder,
    TrainerState,
)
from schemas.messages.data import (
    SEGMENT_LINEAGE,
    SEGMENT_START,
    SEGMENT_VERSION,
    DroppedOrdinal,
    Policy,
    Prompt,
    Purpose,
    RolloutGroup,
    ScoredGroup,
    StepBatch,
)

DATA_KINDS: tuple[type[Message], ...] = (RolloutGroup, ScoredGroup, StepBatch)
BEAT_KINDS: tuple[type[Beat], ...] = (RolloutBeat, RewardBeat, TrainerBeat, InferenceBeat, ObserverBeat)
STATE_KINDS: tuple[type[State], ...] = (RolloutState, RewardState, TrainerState, InferenceState, ObserverState)
MESSAGE_TYPES: dict[str, type[Message]] = {kind.kind: kind for kind in (*DATA_KINDS, *BEAT_KINDS, *STATE_KINDS)}


@cache
def fingerprint() -> str:
    """A digest of every kind, version and field: two builds with the same one understand each other (§5)."""
    lines = []
    for kind, message_type in sorted(MESSAGE_TYPES.items()):
        specs = message_type.layout.specs
        fields = {name: str(specs.get(name, field.annotation)) for name, field in message_type.model_fields.items()}
        lines.append(f"{kind} {message_type.version} {sorted(fields.items())}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


__all__ = [
    "BEAT_KINDS",
    "DATA_KINDS",
    "MESSAGE_TYPES",
    "SEGMENT_LINEAGE",
    "SEGMENT_START",
    "SEGMENT_VERSION",
    "STATE_KINDS",
    "ActorPhase",
    "AttemptFailure",
    "Beat",
    "CheckpointInfo",
    "DroppedOrdinal",
    "EnginePeer",
    "EngineState",
    "Frozen",
    "InferenceBeat",
    "InferenceState",
    "Manifest",
    "Message",
    "ObserverBeat",
    "ObserverState",
    "Policy",
    "Prompt",
    "Purpose",
    "RewardBeat",
    "RewardPeer",
    "RewardState",
    "RolloutBeat",
    "RolloutGroup",
    "RolloutState",
    "RunPhase",
    "ScoredGroup",
    "State",
    "StepBatch",
    "StepReport",
    "Ticket",
    "TrainerBeat",
    "TrainerOrder",
    "TrainerState",
    "fingerprint",
]
