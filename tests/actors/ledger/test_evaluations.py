"""Which version the engines serve (P22), evaluations of exactly one policy (P26), and the end of a run (P27)."""

import json

import pytest

from actors.ledger import Changes, ExampleRef, GroupState
from actors.ledger.engines import Engines
from schemas.config.sampling import SamplingParams
from schemas.messages import Manifest, PolicyVersion
from tests.actors.ledger.driver import Engine, Ring, Rollout, Trainer, manifest_of, policy, settings


def manifests(*policies: PolicyVersion) -> list[Manifest]:
    """As published."""
    return [manifest_of(p) for p in policies]


class Run(Ring):
    """A whole ring of one each; `go` lets everybody work until something holds."""

    def __init__(self, num_evals: int = 2, save_every: int = 2, **changes: object) -> None:
        super().__init__(settings(**changes), num_evals)
        self._join(save_every)

    def _join(self, save_every: int = 2) -> None:
        self.engine = self.add(Engine("e"))
        self.rollout = self.add(Rollout("a", slots=9))
        self.trainer = self.add(Trainer("t", save_every=save_every, last_step=self.settings.max_steps))
        self.evaluated: list[int] = []

    def work(self, sample_evals: bool = True) -> None:
        """One turn, and whatever each can do then."""
        self.turn()
        self.evaluated += self.machine.finished_evals
        self.machine.finished_evals.clear()
        if self.engine in self.doubles:
            self.engine.load(self.trainer)
        for ordinal, attempt in self.rollout.to_sample:
            served, ticket = self.engine.policy, self.rollout.held[ordinal, attempt]
            fits = served == ticket.policy if ordinal < 0 else served and served.version >= ticket.min_version
            if fits and (ordinal >= 0 or sample_evals):
                self.settle(self.rollout, served, ordinal)
        if self.trainer.can_train:
            self.trainer.train()

    def go(self, until: "object", turns: int = 40, sample_evals: bool = True) -> None:
        """Work until the condition holds."""
        for _ in range(turns):
            if until():
                return
            self.work(sample_evals)
        pytest.fail(f"not within {turns} turns")

    @property
    def open(self) -> int:
        """Eval groups that are waited for."""
        return len(self.machine.evaluations.open)


# --- P22 -------------------------------------------------------------------------------------------------------------


def test_engines_are_given_the_newest_version_of_the_live_lineage() -> None:
    """Each new one under a new update id (P22)."""
    engines = Engines(Changes())
    assert engines.retarget(manifests(policy(0)), None, None, 0)
    assert engines.retarget(manifests(policy(0), policy(1), policy(2)), None, None, 0)
    assert engines.target.policy == policy(2)
    assert engines.update_id == 2
    assert not engines.retarget(manifests(policy(1), policy(2)), None, None, 0)


def test_engines_never_go_back_while_a_new_lineage_replays() -> None:
    """They serve 5; lineage 2 starts from 3: they switch at its 5, not before (P22)."""
    engines = Engines(Changes())
    engines.retarget(manifests(policy(5)), None, None, 5)
    for version in (3, 4):
        assert not engines.retarget(manifests(policy(version, lineage=2)), None, None, 5)
        assert engines.target.policy == policy(5)
    assert engines.retarget(manifests(policy(5, lineage=2)), None, None, 5)
    assert engines.target.policy == policy(5, lineage=2)


def test_the_key_of_a_version_is_never_stored_and_comes_back_with_the_trainers_next_beat() -> None:
    """Whoever reads it could forge weights on the wire; without it a restarted packer's engines could load none."""
    changes = Changes()
    keyed = [manifest.model_copy(update={"key": "5e" * 32}) for manifest in manifests(policy(5))]
    Engines(changes).retarget(keyed, None, None, 5)
    assert "5e5e" not in json.dumps(changes.values)
    engines = Engines(Changes())
    engines.restore(changes.values["target"])
    assert not engines.retarget(keyed, None, None, 5)  # it is the same version
    assert engines.target == keyed[0]


def test_a_restarted_packer_does_not_send_engines_back() -> None:
    """It may hear a trainer that replays version 3 before the engine that serves 5 (P22)."""
    changes = Changes()
    Engines(changes).retarget(manifests(policy(5)), None, None, 5)
    engines = Engines(Changes())
    engines.restore(changes.values["target"])
    assert not engines.retarget(manifests(policy(3, lineage=2)), None, None, 0)
    assert engines.target.policy == policy(5)


def test_no_version_newer_than_the_next_evaluation_passes_before_it() -> None:
    """Version 4 is to be evaluated, 6 is published: 4 first (P26)."""
    engines = Engines(Changes())
    engines.retarget(manifests(policy(3), policy(4), policy(6)), None, 4, 3)
    assert engines.target.policy == policy(4)
    engines.retarget(manifests(policy(4), policy(6)), policy(4), 4, 4)
    assert engines.target.policy == policy(4)
    engines.retarget(manifests(policy(4), policy(6)), None, 8, 4)
    assert engines.target.policy == policy(6)


# --- P26 -------------------------------------------------------------------------------------------------------------


def test_versions_are_evaluated_at_start_periodically_and_at_the_end() -> None:
    """Every 2 of 5 steps, before and after: 0, 2, 4, 5 (P26)."""
    run = Run(max_steps=5, eval_every_steps=2, eval_at_start=True, eval_at_end=True)
    run.go(lambda: run.machine.phase == "done")
    assert run.evaluated == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eval_at_end": True}, [4]),
        ({"eval_at_start": True}, [0]),
        ({"eval_every_steps": 4, "eval_at_end": True}, [4]),
        ({"eval_every_steps": 3}, [3]),
        ({}, []),
    ],
)
def test_only_the_evaluations_that_are_asked_for_take_place(changes: dict[str, object], expected: list[int]) -> None:
    """A last step that is also a multiple is evaluated once, and only if the end is asked for (P26)."""
    run = Run(**changes)
    run.go(lambda: run.machine.phase == "done")
    assert run.evaluated == expected


def test_without_examples_nothing_is_evaluated() -> None:
    """`eval.num_prompts: 0` turns it off."""
    run = Run(num_evals=0, eval_at_start=True, eval_at_end=True)
    run.go(lambda: run.machine.phase == "done")
    assert run.evaluated == []


def test_evaluation_tickets_go_first_and_name_exactly_one_policy() -> None:
    """Both prompts, before any train ticket, pinned to the version that the engine serves (P26)."""
    run = Run(eval_at_start=True, eval_completions=3, eval_sampling=SamplingParams(temperature=0.5))
    run.rollout.slots = 2
    run.go(lambda: run.open == 2, sample_evals=False)
    run.turn()
    tickets = [run.rollout.held[hold] for hold in sorted(run.rollout.held, reverse=True)]
    assert [(t.ordinal, t.purpose, t.policy, t.num_completions, t.sampling.temperature) for t in tickets] == [
        (-1, "eval", policy(0), 3, 0.5),
        (-2, "eval", policy(0), 3, 0.5),
    ]


def test_engines_keep_the_policy_until_its_evaluation_has_settled() -> None:
    """The trainer goes on to version 2 meanwhile, and keeps the files of 0 (P26)."""
    run = Run(eval_at_start=True, max_async_level=1)
    run.go(lambda: run.trainer.next_step == 3, sample_evals=False)
    run.work(sample_evals=False)
    assert run.engine.target is None
    assert run.engine.policy == policy(0)
    assert run.trainer.directive.keep_version == 0
    run.go(lambda: run.evaluated == [0])
    run.work()
    assert run.engine.policy == policy(2)


def test_a_copy_sampled_by_another_policy_is_a_failed_attempt() -> None:
    """An evaluation is of one policy or of none (P26)."""
    run = Run(eval_at_start=True)
    run.go(lambda: run.rollout.to_sample, sample_evals=False)
    run.settle(run.rollout, policy(1), -1)
    assert run.row(-1).failures == 1


@pytest.mark.parametrize("how", ["reported", "scored", "death"])
def test_an_evaluation_group_dropped_as_poison_does_not_keep_the_evaluation_open(how: str) -> None:
    """The other group settles; the evaluation is finished without it, whichever way it failed (P11, P26)."""
    run = Run(eval_at_start=True)
    run.go(lambda: (-1, 1) in run.rollout.held, sample_evals=False)
    run.settle(run.rollout, policy(0), -2)
    run.turn()
    for attempt in (1, 2, 3):
        if how == "reported":
            run.rollout.fail((-1, attempt))
        elif how == "scored":
            run.settle(run.rollout, policy(7), -1)
        else:
            run.rollout.slots = 1
            run.rollout.restart()
        run.turn()
        run.turn()
    if how == "death":
        run.row(-1).failures = 2
        run.rollout.fail((-1, run.row(-1).attempt))
        run.turn()
    assert run.row(-1).reason == "poison"
    assert run.machine.finished_evals == [0]
    assert run.open == 0


def test_an_evaluation_is_void_when_its_policy_is_gone_and_begins_again() -> None:
    """Engine and trainer die; lineage 2 brings version 2 again: new ordinals, and no result is mixed (P26)."""
    run = Run(eval_every_steps=2, save_every=1)
    run.go(lambda: run.open == 2, sample_evals=False)
    run.work(sample_evals=False)
    run.settle(run.rollout, policy(2), -1)
    run.trainer.restart()
    run.trainer.disk.chains = {1: run.trainer.disk.chains[1]}
    run.engine.restart()
    run.go(lambda: run.row(-1).state is GroupState.DROPPED, sample_evals=False)
    assert [run.row(o).reason for o in (-1, -2)] == ["eval_void", "eval_void"], "the settled one too"
    run.go(lambda: run.evaluated == [2])
    assert [run.row(o).policy for o in (-3, -4)] == [policy(2, lineage=2)] * 2
    assert {run.row(o).example for o in (-3, -4)} == {ExampleRef("held_out", i, f"e{i}") for i in (0, 1)}


def test_an_evaluation_goes_on_while_a_new_lineage_replays_as_long_as_an_engine_serves_its_policy() -> None:
    """The trainer died and starts from step 1; the engine has version 2 of the dead lineage (P22, P26)."""
    run = Run(eval_every_steps=2, save_every=1)
    run.go(lambda: run.open == 2, sample_evals=False)
    run.trainer.restart()
    run.trainer.disk.chains = {1: run.trainer.disk.chains[1]}
    run.go(lambda: run.trainer.next_step == 3, sample_evals=False)
    assert run.engine.policy == policy(2)
    assert run.open == 2
    run.go(lambda: run.evaluated == [2])
    assert run.row(-1).state is GroupState.SETTLED
    run.go(lambda: run.machine.phase == "done")


def test_an_evaluation_of_a_version_that_can_never_come_back_is_skipped() -> None:
    """Version 0 was to be evaluated; the host dies; the trainer starts from step 2: the run goes on (P26)."""
    run = Run(eval_at_start=True, save_every=1)
    run.go(lambda: run.trainer.next_step == 3, sample_evals=False)
    run.work(sample_evals=False)
    run.trainer.restart()
    run.engine.restart()
    run.go(lambda: run.machine.phase == "done")
    assert run.evaluated == []
    assert run.machine.groups.dropped["eval"]["eval_void"] == 2


def test_a_finished_evaluation_is_told_again_by_a_restarted_packer_that_has_not_written_it_down() -> None:
    """The rows are committed one round before the reporter's part; no result gets lost between them (P27)."""
    run = Run(eval_at_start=True)
    run.go(lambda: run.machine.evaluations.done == [0])
    run.restart_packer()
    assert run.machine.finished_evals == [0]
    run.store.commit(type(run.machine.take_changes())(values={"evals": {"0": {}}}), {})
    run.restart_packer()
    assert run.machine.finished_evals == []


def test_an_evaluation_under_way_goes_on_after_a_restart_of_the_packer() -> None:
    """Policy and open groups are in the rows (P26)."""
    run = Run(eval_at_start=True)
    run.go(lambda: run.open == 2, sample_evals=False)
    run.restart_packer()
    assert run.machine.evaluations.policy == policy(0)
    run.go(lambda: run.evaluated == [0])
    assert run.machine.groups.num_issued["eval"] == 2


@pytest.mark.parametrize("when", ["before a gang forms", "as it forms"])
@pytest.mark.parametrize("sample_anew", [True, False])
def test_an_evaluation_of_a_history_that_was_given_up_is_not_mixed_with_the_next_of_its_version(
    when: str, sample_anew: bool
) -> None:
    """Version 4 is being evaluated when the run goes back to step 2; its last group settles meanwhile (P23, P26)."""
    run = Run(max_steps=8, eval_every_steps=2)
    run.go(lambda: run.evaluated == [2])
    run.go(lambda: run.open == 2, sample_evals=False)
    run.work(sample_evals=False)
    assert run.machine.evaluations.policy == policy(4)
    run.restart_packer()
    run.machine.rewind(2, sample_anew)
    run.commit()
    run.trainer.disk.chains = {2: run.trainer.disk.chains[2]}
    run.trainer.restart()
    run.engine.restart()
    run.heartbeat(run.engine, run.rollout)
    run.settle(run.rollout, policy(4), -3)
    if when == "before a gang forms":
        run.settle(run.rollout, policy(4), -4)
        run.decide()
        assert run.machine.rewind_order is not None
    run.heartbeat(run.trainer)
    run.settle(run.rollout, policy(4), -4)
    run.decide()
    assert run.machine.rewind_order is None
    assert run.machine.evaluations.done == [2]
    assert 4 not in run.machine.finished_evals
    assert [run.row(ordinal).reason for ordinal in (-3, -4)] == ["eval_void", "eval_void"]
    run.evaluated.clear()
    run.go(lambda: 4 in run.evaluated)
    settled = [row for row in run.machine.groups.rows.values() if row.policy and row.policy.version == 4]
    assert {row.policy for row in settled if row.state is GroupState.SETTLED} == {policy(4, lineage=2)}


# --- P27 -------------------------------------------------------------------------------------------------------------


def test_phases_from_start_to_end() -> None:
    """No ticket yet; tickets; last step trained; durable, evaluated and written down (P27)."""
    run = Run(eval_at_end=True, save_every=9)
    seen = []
    for _ in range(40):
        run.work()
        seen.append(run.machine.phase)
    assert list(dict.fromkeys(seen)) == ["starting", "running", "finishing", "done"]


def test_the_run_is_not_done_before_its_last_checkpoint_is_durable_and_evaluated() -> None:
    """Last step, then durable checkpoint, then final evaluation, then done (P27)."""
    run = Run(eval_at_end=True)
    run.go(lambda: run.machine.trained_step == 4, sample_evals=False)
    saved, run.trainer.disk.chains = run.trainer.disk.chains, {}
    run.machine.durable_step = 0
    for _ in range(5):
        run.work()
    assert (run.machine.phase, run.machine.evaluations.policy) == ("finishing", None)
    run.trainer.disk.chains = saved
    run.work(sample_evals=False)
    assert run.machine.evaluations.policy == policy(4)
    assert run.machine.phase == "finishing"
    run.go(lambda: run.machine.phase == "done")
    assert run.evaluated == [4]


def test_the_run_is_not_done_before_its_last_step_is_written_down() -> None:
    """metrics.jsonl would lack a line (P27)."""
    run = Run()
    run.go(lambda: run.machine.phase == "done")
    run.machine.recorded_step = 3
    assert run.machine.phase == "finishing"


def test_the_packer_stays_until_all_peers_are_done_or_gone() -> None:
    """The last heartbeat of one, the end of the lease of the other (P27)."""
    run = Run()
    run.go(lambda: run.machine.phase == "done")
    assert not run.machine.everybody_left
    run.trainer.phase = run.engine.phase = "done"
    run.turn()
    assert not run.machine.everybody_left
    run.wait(4, run.rollout)
    assert run.machine.everybody_left


def test_a_trainer_that_dies_during_the_final_evaluation_does_not_undo_the_run() -> None:
    """It starts again from the last checkpoint and has nothing to train; the evaluation goes on (P26, P27)."""
    run = Run(eval_at_end=True)
    run.go(lambda: run.open == 2, sample_evals=False)
    run.trainer.restart()
    run.work(sample_evals=False)
    assert run.machine.phase == "finishing"
    run.go(lambda: run.machine.phase == "done")
    assert run.evaluated == [4]
