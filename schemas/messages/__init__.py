"""All message types of the bus, by kind. A new kind is one class, and its name in one of the tuples below."""

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from schemas.messages.base import FORMAT, Frozen, Message, check_name
from schemas.messages.batch import BatchPart, DroppedOrdinal, StepBatch, drop_fields
from schemas.messages.control import (
    ActorPhase,
    ActorTask,
    AttemptFailure,
    CheckpointInfo,
    DeviceUse,
    Directive,
    EngineAddress,
    EnginePeer,
    EngineState,
    Heartbeat,
    InferenceDirective,
    InferenceHeartbeat,
    Manifest,
    Neighbours,
    ObserverDirective,
    ObserverHeartbeat,
    RewardAddress,
    RewardDirective,
    RewardHeartbeat,
    RewardPeer,
    RolloutDirective,
    RolloutHeartbeat,
    RunPhase,
    StepReport,
    Ticket,
    TrainerDirective,
    TrainerHeartbeat,
    TrainerOrder,
    UpdateFailure,
    WeightMember,
    WeightUpdate,
)
from schemas.messages.groups import (
    NO_POLICY,
    SEGMENT_LINEAGE,
    SEGMENT_ORIGIN,
    SEGMENT_START,
    SEGMENT_TURN,
    SEGMENT_VERSION,
    TOOL_CALLS,
    TOOL_FAILURES,
    TURNS,
    TURNS_REWARD,
    EnvironmentFailure,
    ImagePlace,
    Origin,
    PolicyVersion,
    Prompt,
    Purpose,
    RolloutGroup,
    ScoredGroup,
    StopCondition,
    single_turn,
)

DATA_KINDS: tuple[type[Message], ...] = (RolloutGroup, ScoredGroup, StepBatch, BatchPart)
HEARTBEAT_KINDS: tuple[type[Heartbeat], ...] = (
    RolloutHeartbeat,
    RewardHeartbeat,
    TrainerHeartbeat,
    InferenceHeartbeat,
    ObserverHeartbeat,
)
DIRECTIVE_KINDS: tuple[type[Directive], ...] = (
    RolloutDirective,
    RewardDirective,
    TrainerDirective,
    InferenceDirective,
    ObserverDirective,
)
ALL_KINDS: tuple[type[Message], ...] = (*DATA_KINDS, *HEARTBEAT_KINDS, *DIRECTIVE_KINDS, Neighbours)
MESSAGE_TYPES: dict[str, type[Message]] = {kind.kind: kind for kind in ALL_KINDS}


@cache
def fingerprint() -> str:
    """Return a digest of all message types. Two builds with equal fingerprints understand each other."""
    return fingerprint_of(MESSAGE_TYPES.values())


def fingerprint_of(message_types: Iterable[type[Message]]) -> str:
    """Return 16 hex digits of a digest over kinds, versions, arrays and fields, including values nested in messages."""
    lines, todo = {f"format {FORMAT}"}, list[type[BaseModel]](message_types)
    while todo:
        model = todo.pop()
        name = (
            f"{model.kind} {model.version} {model.layout.text} {model.texts}"
            if issubclass(model, Message)
            else model.__name__
        )
        fields = {}
        for key, field in model.model_fields.items():
            # the text of a validator has its memory address, which differs between processes
            shown = re.sub(r" at 0x[0-9a-fA-F]+", "", str(field.annotation))
            fields[key] = (shown, field.is_required())
        line = f"{name} {sorted(fields.items())}"
        # a value may occur in many messages
        if line not in lines:
            lines.add(line)
            # values nested in messages are part of the wire format too
            todo += [inner for field in model.model_fields.values() for inner in _values_in(field.annotation)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def _values_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for argument in get_args(annotation) for inner in _values_in(argument)]


__all__ = [
    "DATA_KINDS",
    "DIRECTIVE_KINDS",
    "HEARTBEAT_KINDS",
    "MESSAGE_TYPES",
    "NO_POLICY",
    "SEGMENT_LINEAGE",
    "SEGMENT_ORIGIN",
    "SEGMENT_START",
    "SEGMENT_TURN",
    "SEGMENT_VERSION",
    "TOOL_CALLS",
    "TOOL_FAILURES",
    "TURNS",
    "TURNS_REWARD",
    "ActorPhase",
    "ActorTask",
    "AttemptFailure",
    "BatchPart",
    "CheckpointInfo",
    "DeviceUse",
    "Directive",
    "DroppedOrdinal",
    "EngineAddress",
    "EnginePeer",
    "EngineState",
    "EnvironmentFailure",
    "Frozen",
    "Heartbeat",
    "ImagePlace",
    "InferenceDirective",
    "InferenceHeartbeat",
    "Manifest",
    "Message",
    "Neighbours",
    "ObserverDirective",
    "ObserverHeartbeat",
    "Origin",
    "PolicyVersion",
    "Prompt",
    "Purpose",
    "RewardAddress",
    "RewardDirective",
    "RewardHeartbeat",
    "RewardPeer",
    "RolloutDirective",
    "RolloutGroup",
    "RolloutHeartbeat",
    "RunPhase",
    "ScoredGroup",
    "StepBatch",
    "StepReport",
    "StopCondition",
    "Ticket",
    "TrainerDirective",
    "TrainerHeartbeat",
    "TrainerOrder",
    "UpdateFailure",
    "WeightMember",
    "WeightUpdate",
    "check_name",
    "drop_fields",
    "fingerprint",
    "fingerprint_of",
    "single_turn",
]
