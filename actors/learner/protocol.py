"""Interface between trainer actor and learner."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from actors.learner.snapshots import Snapshot
from bus.weights import Weights
from schemas.messages import StepBatch

if TYPE_CHECKING:
    from actors.learner.ranks import Ranks


class Learner(Protocol):
    """Interface of a learner for the trainer actor: restore, join, then publish, step, save in turn.

    `learner.TorchLearner` is the real one, `fake.FakeLearner` the test double.
    """

    def warm_up(self) -> None:
        """Take the memory of a step, as far as it is known before the first one. Together with all ranks, after `join`.

        An engine that is started afterwards on the same GPU finds the memory that is left for good.
        """
        ...

    def release_memory(self) -> None:
        """Give the memory back that only a step needs, to an engine that takes turns with this trainer on the GPU."""
        ...

    @property
    def inexact(self) -> str:
        """Reason why a step that is computed again may have other bits; empty if it has the same."""
        ...

    def step(self, batch: StepBatch, ranks: "Ranks", before: Sequence[StepBatch] = ()) -> dict[str, float]:
        """Train one step together with the other ranks; return measurements under the reporter's keys.

        Args:
            batch: batch of this rank.
            ranks: all ranks of the gang.
            before: batches of lower ranks that this process computes as well: a replay computes the batches of a whole
                gang.

        Raises:
            FloatingPointError: gradients are not finite, twice.
            RunFailedError: trainer and engine differ too much.
            RanksBrokenError: another rank is gone.
        """
        ...

    def weights(self) -> Weights:
        """Return the current policy for publishing. For rank 0."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the content of a checkpoint: the model in its public format, in `trainer/` the state to continue.

        For rank 0.
        """
        ...

    def restore(self, folder: Path) -> None:
        """Restore the state saved in a checkpoint's folder."""
        ...

    def join(self, ranks: "Ranks", shall_wait: Callable[[], object]) -> None:
        """Start with a complete gang, after any restore. A learner with shards keeps its own shards now.

        Args:
            ranks: this rank's access to all ranks.
            shall_wait: called in a thread during waits for other ranks; raises when the gang shall not wait any more.
        """
        ...

    def serve_gathers(self) -> None:
        """Lend shards to rank 0, which publishes and saves, until rank 0 releases this rank.

        For other ranks than 0.
        """
        ...

    def release_ranks(self) -> None:
        """Release the other ranks from `serve_gathers`. For rank 0, after publishing and saving."""
        ...
