"""The threads of the actors: where each can be made to raise, in which actors it runs, and what must come of it.

`tests/chaos/test_chaos.py` holds this table against the code, in which every thread has a name, and against the plans.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PEERS = ("rollout", "reward", "inference", "trainer")
ACTORS = ("packer", *PEERS)
POOL = "inference-pool"
"""The process that starts an inference actor for each server that is there."""


@dataclass(frozen=True)
class Thread:
    """A thread, or the threads of a pool."""

    made: str
    """Name, as the code has it that makes the thread."""
    place: str
    """Where its loop or its work passes by, and raises."""
    kinds: tuple[str, ...]
    """Actors in which it runs."""
    says: tuple[str, ...] = ("thread failed",)
    """One of these events is in the actor's log then; the one of this default with the thread's name."""
    ends: bool = True
    """Whether its process ends; else the process goes on."""
    called: str = ""
    """Beginning of its name as it runs, where that is not `made`."""

    @property
    def name(self) -> str:
        """Beginning of its name in the log."""
        return self.called or self.made.strip("'")


THREADS = (
    Thread("f'control-{name}'", "control.client", (*PEERS, POOL), called="control-"),
    Thread("'control-server'", "control.server", ("packer",)),
    Thread("'name'", "name", (*PEERS, POOL)),
    Thread("'control-unfinished'", "unfinished", ("packer", "reward", "trainer")),
    Thread("'authenticator'", "authenticator", (*ACTORS, POOL)),
    Thread("'keys'", "keys", (*ACTORS, POOL)),
    Thread("'log'", "log", (*ACTORS, POOL)),
    Thread("'metrics'", "metrics", ACTORS),
    Thread("'scored'", "packer.inbox", ("packer",)),
    Thread("'payloads'", "packer.payloads", ("packer",)),
    Thread("'record'", "packer.record", ("packer",)),
    Thread("'backup'", "packer.backup", ("packer",)),
    Thread("'batches'", "trainer.inbox", ("trainer",)),
    Thread("'weights'", "trainer.weights", ("trainer",)),
    Thread("'ranks'", "trainer.ranks", ("trainer",)),
    Thread("'reward-async'", "reward.loop", ("reward",)),
    Thread("'http'", "inference.http", ("inference",)),
    Thread("'engine'", "inference.engine", ("inference",), says=("engine failed",)),
    Thread("name", "inference.relay", ("inference",), called="sglang"),
    # pools
    Thread("'checkpoint'", "checkpoint.written", ("trainer",), ("checkpoint not saved; training goes on",), ends=False),
    Thread("'score'", "reward.scored", ("reward",), ("scoring failed",), ends=False),
    Thread("'score'", "reward.sent", ("reward",), ("thread failed", "actor failed")),  # the main thread sends as well
    Thread("'reward'", "reward.function", ("reward",), ("group not scored",), ends=False),
    Thread("'filler'", "trainer.filler", ("trainer",), ("actor failed",)),
    # what hands its exceptions on
    Thread("'meeting'", "trainer.meeting", ("trainer",), ("another rank is lost",)),
    Thread("'rendezvous'", "weights.meeting", ("trainer",), ("weights not sent",), ends=False),
    Thread("'rendezvous'", "weights.meeting", ("inference",), ("weight update given up",), ends=False),
    Thread("'weights-left'", "weights.left", ("trainer", "inference"), ends=False),
)
ELSEWHERE = {
    "'fake-engine'": "test_work_whose_result_nobody_reads_ends_the_process_when_it_raises",  # of a double
    "'step-batches'": "test_an_error_of_packing_ends_the_packer",  # only with steps of many tokens
    "'micro-batches'": "test_an_error_is_raised_when_its_micro_batch_is_due",  # on a GPU alone
    "'abort'": "test_an_abort_that_hangs_or_fails_holds_no_exit_up",  # over NCCL alone
    "'upload'": "test_a_hub_that_fails_is_asked_again_up_to_a_limit",  # only with push_to_hub
    "'carrier'": "test_a_backup_that_can_not_be_copied_is_copied_at_a_later_look",  # only over several nodes
    "'reward-workers'": "test_the_end_waits_for_no_call",  # only with functions in workers
    # only with rewards by these names: exceptions reach the thread `reward`, which waits for all answers
    "'code-tests'": "test_a_machine_that_cant_run_programs_scores_nothing",
    "'verify'": "test_a_process_that_cant_start_is_an_error_of_the_machine",
    # only with GRPOTrainer, in the process of a user
    "'reward-here'": "test_a_reward_actor_that_fails_ends_the_run_with_its_error",
    "'up-stderr'": "test_output_that_can_not_be_read_ends_the_run_with_its_error",
    "'up-stdout'": "test_output_that_can_not_be_read_ends_the_run_with_its_error",
    "'flush'": "test_a_process_that_is_to_end_ends_though_its_output_can_not_be_flushed",  # the end is under way
    "'tokens'": "test_a_disk_that_takes_no_values_of_tokens_fails_no_step",  # only with telemetry.token_details
    "'queue-output'": "test_output_that_can_not_be_read_is_said_to_be_so_and_stops_no_run",  # only with several runs
    # only in `actors view`, which is no part of a run
    "'catalogue'": "test_a_catalogue_that_can_not_be_kept_is_said_to_be_so",
    "'view'": "test_an_answer_that_takes_too_long_ends_in_words",
    # telemetry ends no actor
    "'spans'": "test_an_error_that_nobody_expected_ends_the_recording_and_nothing_else",
    "'parent'": "test_a_process_that_the_kernel_does_not_kill_ends_with_its_parent",  # on other systems than Linux
}
"""Threads that no run here has, or in which nothing is left to be lost, and the tests that have them."""


def thread_at(actor: str, place: str) -> Thread:
    """The thread of an actor that passes by this place.

    Raises:
        KeyError: it has none.
    """
    for thread in THREADS:
        if thread.place == place and kind_of(actor) in thread.kinds:
            return thread
    raise KeyError(f"{actor} has no thread that passes by {place}")


def kind_of(actor: str) -> str:
    """Of inference-pool-0: inference-pool."""
    return actor.rpartition("-")[0]


def pairs() -> Iterator[tuple[str, str]]:
    """Each kind of actor with each place of a thread that it has."""
    for thread in THREADS:
        for kind in thread.kinds:
            yield kind, thread.place
