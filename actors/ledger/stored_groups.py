"""Groups in the payloads that a ledger stores, also in those of an earlier build."""

from collections.abc import Sequence

from bus import codec
from schemas.errors import DecodeError, ProtocolError
from schemas.messages import ScoredGroup
from schemas.messages.earlier import ScoredGroup1


def stored_group(frames: Sequence[codec.Frame]) -> ScoredGroup:
    """Return the group of a payload.

    Raises:
        DecodeError: the frames are no valid message, or one of a later build.
        ProtocolError: the payload is of another kind.
    """
    try:
        message = codec.decode(frames)
    except DecodeError as error:
        if error.reason != "unknown_version":
            raise
        try:
            message = codec.decode(frames, kinds={ScoredGroup1.kind: ScoredGroup1})
        except DecodeError:
            # neither version fits: the words on the present one
            raise error from None
    if isinstance(message, ScoredGroup1):
        return message.upgraded()
    if not isinstance(message, ScoredGroup):
        raise ProtocolError(f"a payload of the ledger is a {message.kind}, not a scored group")
    return message
