"""What the packer's metrics say of a run, by hand and in a ring of threads."""

import json
import math

import pytest

from actors.algorithms.curriculum import Curriculum
from actors.algorithms.moving_levels import MovingLevel
from actors.ledger import ExampleRef, Machine, Store
from actors.packer.examples import Examples
from actors.packer.gauges import engine_states
from actors.packer.record import RunRecord
from actors.packer.settings import settings_of
from actors.telemetry.metrics import ENGINE_STATES, TRAJECTORY_GAUGES, Metrics
from actors.telemetry.reporter import Reporter
from schemas.config.environments import CurriculumConfig
from schemas.messages import InferenceHeartbeat, Manifest, PolicyVersion, UpdateFailure
from tests.actors.packer.test_long_prompts import Rows
from tests.actors.packer.test_record import Told, scored, trainer, trajectories
from tests.ring.harness import ring, ring_config, summary_of


@pytest.fixture
def told(tmp_path):
    """A record of a run of three steps."""
    made = Told(tmp_path)
    yield made
    made.store.close()


def value(told, name, **labels):
    """As Prometheus sees it."""
    return told.metrics.registry.get_sample_value(f"grpo_packer_{name}", labels)


def test_gauges_show_the_newest_recorded_step(told):
    """Step 2: rewards 0 and 2, completions of 1 and 2 tokens, lag 1; advantages that differ."""
    told.train(1, 2)
    told.turn()
    shown = [value(told, name) for name in ("reward_mean", "reward_std", "completion_tokens_mean", "lag_max")]
    assert shown == [1.0, 1.0, 1.5, 1.0]
    assert value(told, "groups_without_variance") == 0.0
    assert value(told, "truncated_fraction") == 0.0
    assert value(told, "function_reward_mean", function="f") == 1.0
    assert (value(told, "lag_budget_steps"), value(told, "max_steps")) == (1.0, 3.0)


def test_gauges_of_trajectories_are_of_the_newest_step_or_no_number(told):
    """A step without trajectories shows no number, and not those of an earlier step."""
    told.groups[1] = trajectories()

    def shown():
        return [value(told, name) for name in TRAJECTORY_GAUGES]

    assert all(map(math.isnan, shown()))
    told.train(1)
    told.turn()
    assert shown() == [3.0, 0.5, 1.5, 0.5]
    told.train(2)
    told.turn()
    assert all(map(math.isnan, shown()))


def test_gauge_shows_the_level_of_each_environment():
    """It moves with the groups of its own environment; 0 without levels."""
    metrics = Metrics("packer")
    levels = [MovingLevel(CurriculumConfig(levels=3, start=1, window=1, raise_at=0.5)), None]
    rows = {"sums": Rows([1] * 6), "words": Rows([1])}
    examples = Examples(rows, {}, Curriculum([6, 1], None, seed=0, levels=levels), {}, metrics)

    def shown():
        return [metrics.registry.get_sample_value("grpo_packer_level", {"environment": label}) for label in rows]

    assert shown() == [1.0, 0.0]
    examples.note_difficulty(ExampleRef("words", 0, ""), scored([1.0, 1.0], [0, 0]))
    examples.note_difficulty(ExampleRef("sums", 3, ""), scored([1.0, 1.0], [0, 0]))
    assert shown() == [2.0, 0.0]


def test_restarted_packer_shows_the_newest_step_and_evaluation_that_it_finds(told, tmp_path):
    """A reward of 0 until the next step would be a collapse to whoever watches."""
    assert value(told, "eval_version") == -1.0
    told.train(1, 2)
    told.turn([(0, [scored([1.0, 0.0], [0, 0])]), (2, [scored([1.0, 1.0], [0, 0])])])
    for seen in (told, Told(tmp_path, told.store)):
        assert value(seen, "reward_mean") == 1.0
        assert value(seen, "function_reward_mean", function="g") == 1.0
        assert value(seen, "eval_version") == 2.0
        assert value(seen, "eval_exact_match", environment="e") == 1.0
        assert value(seen, "eval_mean_reward", environment="e") == 1.0


def test_totals_of_the_ledger_are_there_before_anybody_scrapes(tmp_path):
    """A counter that came back as 0 and jumped to its total would be a rise of that much."""
    machine = Machine(settings_of(ring_config(tmp_path, "inproc")), "r", 2, 0.0, draw=lambda excluded=(): None)
    machine.groups.num_issued["train"], machine.groups.dropped["train"]["poison"] = 40, 3
    metrics, store = Metrics("packer"), Store(":memory:")
    RunRecord(ring_config(tmp_path, "inproc"), store, machine, metrics, Reporter(tmp_path), lambda o: None, None)
    value = metrics.registry.get_sample_value
    assert value("grpo_packer_issued_total", {"purpose": "train"}) == 40.0
    assert value("grpo_packer_drops_total", {"purpose": "train", "reason": "poison"}) == 3.0
    store.close()


def test_what_could_not_be_measured_is_no_number_and_not_0(told):
    """No completion of the step or of the evaluation could be scored."""
    nothing = scored([math.nan, math.nan], [0, 0])
    told.groups[1] = nothing
    told.train(1)
    told.turn([(0, [nothing])])
    assert math.isnan(value(told, "reward_mean"))
    assert math.isnan(value(told, "function_reward_mean", function="f"))
    assert math.isnan(value(told, "eval_exact_match", environment="e"))


def test_nobody_is_a_target_any_more_when_the_run_is_done(told):
    """Until then the packer is one, also when it can't go on: that it is down is worth an alert."""
    told.record.metrics_target = ("packer", "packer-0", "http://127.0.0.1:9100/metrics")
    told.train(1, 2, 3)
    told.turn()
    targets = told.output / "metrics_targets.json"
    assert len(json.loads(targets.read_text())) == 1
    told.finish()
    told.turn()
    assert told.machine.phase == "done"
    assert json.loads(targets.read_text()) == []


def engine(name, state, policy=None):
    """A heartbeat."""
    return InferenceHeartbeat(
        run="", name=name, boot_id=name, sequence=1, phase="running", url="http://x", engine_state=state,
        policy=policy, load=0, generated_tokens=0, holds_two_versions=False, update_seconds={}, weight_ranks=1,
    )  # fmt: skip


def fail_updates(updates, heartbeat, number):
    """Name so many updates with one engine alone, each of which rank 0 reports as missed by the engine."""
    engines, policy = {f"{heartbeat.name}/{heartbeat.boot_id}": heartbeat}, PolicyVersion(lineage=1, version=0)
    target = Manifest(policy=policy, channel="rendezvous", content="full", uri="", digest="d", num_bytes=1)
    for _ in range(number):
        assert updates.decide(0.0, target, engines, trainer(1, []))
        failure = UpdateFailure(update=updates.current.update, missed=[heartbeat.boot_id], detail="")
        updates.decide(0.0, None, engines, trainer(1, []).model_copy(update={"failed_update": failure}))


def test_engines_are_counted_by_state_and_who_is_left_out_as_quarantined(tmp_path):
    """One that is clean and has failed three updates in a row is named no more; another says itself that it is not."""
    machine = Machine(settings_of(ring_config(tmp_path, "inproc")), "r", 1, 0.0, draw=lambda excluded=(): None)
    heartbeats = [
        engine("a", "clean", PolicyVersion(lineage=1, version=0)),
        engine("b", "clean"),
        engine("c", "quarantined"),
    ]
    for heartbeat in [*heartbeats, engine("d", "starting")]:
        machine.peers.heard(0.0, f"{heartbeat.name}/{heartbeat.name}", heartbeat)
    assert engine_states(machine) == {"clean": 2, "quarantined": 1, "starting": 1}
    fail_updates(machine.updates, engine("b", "clean"), number=3)
    assert engine_states(machine) == {"clean": 1, "quarantined": 2, "starting": 1}


@pytest.mark.slow
def test_tokens_of_groups_are_counted_by_what_became_of_them(tmp_path):
    """In a run where nothing is masked and nothing is dropped, what has settled is what was trained."""
    config = ring_config(tmp_path, "inproc")
    with ring(config) as run:
        run.start()
        run.wait()
        packer = run["packer-0"]
        name = "grpo_packer_completion_tokens_total"
        counted = {
            (purpose, verdict): packer.value(name, purpose=purpose, verdict=verdict)
            for purpose in ("train", "eval")
            for verdict in ("settled", "filtered", "copy", "failed")
        }
        engines = sum(packer.value("grpo_packer_engines", state=state) for state in ENGINE_STATES)
    assert counted["train", "settled"] == summary_of(config)["trained_tokens"] > 0
    assert counted["eval", "settled"] > 0
    assert counted["train", "filtered"] == counted["train", "failed"] == 0
    assert engines in (0, 1), "it leaves when the run is done"
