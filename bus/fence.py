"""The fence against messages of other runs (P1: receivers compare run ids) and of older terms (P2) of the packer.

Addresses are reused: the port of a dead process may belong to another run a moment later. At the packer's old address a
packer of another run may answer, or an older packer of the same run on the other side of a broken network. Keys keep
other runs out; without keys, only this check does.
"""


class Fence:
    """The run of this process, and the newest term of its packer. Run "" and term 0: not known yet."""

    def __init__(self, run: str = "", term: int = 0) -> None:
        self.run, self.term = run, term

    def refuses(self, run: str, term: int | None = None) -> str:
        """Return why a message must be dropped, `foreign_run` or `old_term`; empty if the message is for this process.

        Args:
            run: run id in the message.
            term: term of the sending packer; None for groups: good in any term.
        """
        if self.run and run != self.run:
            return "foreign_run"
        # groups carry no term: a group sampled under an older term of the packer is as good
        return "old_term" if term is not None and term < self.term else ""

    def follow(self, run: str, term: int) -> None:
        """Set the run of this process, and raise the newest known term. An older term changes nothing."""
        self.run, self.term = run, max(term, self.term)
