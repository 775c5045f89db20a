"""Who enters which weight update of the rendezvous channel (P24): heartbeats in, an update out."""

from typing import Any

import numpy as np
import pytest

from actors.ledger.weight_updates import MAX_FAILURES, Updates
from schemas.messages import InferenceHeartbeat, Manifest, PolicyVersion, TrainerHeartbeat, UpdateFailure

PATIENCE = 40.0


def manifest(version: int, channel: Any = "rendezvous") -> Manifest:
    """A published version."""
    policy = PolicyVersion(lineage=1, version=version)
    return Manifest(policy=policy, channel=channel, content="full", uri="tcp://a:1", digest="", num_bytes=1)


def engine(boot_id: str, version: int | None, **changes: Any) -> InferenceHeartbeat:
    """A live engine that serves a version, or none yet."""
    policy = None if version is None else PolicyVersion(lineage=1, version=version)
    values: dict[str, Any] = {
        "run": "r", "name": boot_id, "boot_id": boot_id, "sequence": 1, "phase": "running", "url": "", "load": 0,
        "engine_state": "clean", "policy": policy, "generated_tokens": 0, "holds_two_versions": True,
        "update_seconds": {}, "weight_ranks": 1,
    }  # fmt: skip
    return InferenceHeartbeat(**values | changes)


def trainer(failed: UpdateFailure | None = None) -> TrainerHeartbeat:
    """Rank 0."""
    return TrainerHeartbeat(
        run="r", name="trainer-0", boot_id="t", sequence=1, phase="running", rank=0, num_ranks=1, address="",
        incarnation=1, next_step=1, checkpoints=[], published=[], reports=[], received=np.zeros(0, np.int64),
        failed_update=failed,
    )  # fmt: skip


def failure(update: str, *missed: str) -> UpdateFailure:
    """Of an update, and who is to blame."""
    return UpdateFailure(update=update, missed=list(missed), detail="")


class Scene:
    """Updates with the engines that are there: `boot id: version` or a heartbeat."""

    def __init__(self) -> None:
        self.updates = Updates(term=3, patience=PATIENCE)
        self.now = 100.0

    def see(
        self, target: int, failed: UpdateFailure | None = None, /, **engines: int | InferenceHeartbeat | None
    ) -> tuple[str, str, list[str]] | None:
        """One round; what the directive newly names as (update, group, members), or None."""
        heartbeats = {b: e if isinstance(e, InferenceHeartbeat) else engine(b, e) for b, e in engines.items()}
        if not self.updates.decide(self.now, manifest(target), heartbeats, trainer(failed)):
            return None
        named = self.updates.current
        assert named is not None
        assert named.policy.version == target
        return named.update, named.process_group, [member.boot_id for member in named.members]


def test_all_engines_that_lack_the_target_enter_one_update():
    """Their order is that of their boot ids, on every rank the same."""
    assert Scene().see(0, b=None, a=None) == ("3.1", "3.1", ["a", "b"])


def test_engines_in_the_place_of_the_trainers_copy_have_no_rank():
    """They map the copy; an engine elsewhere is in the group, and so is one that does not tell its place."""
    here, there = "cuda:machine/GPU-1", "cuda:machine/GPU-2"
    heartbeats = {
        name: engine(name, None, weight_place=place) for name, place in {"a": here, "b": there, "c": ""}.items()
    }
    updates = Updates(term=3, patience=PATIENCE)
    updates.decide(100.0, manifest(0, "device").model_copy(update={"place": here}), heartbeats, trainer())
    named = updates.current
    assert named is not None
    assert [member.num_ranks for member in named.members] == [0, 1, 1]
    assert (named.num_ranks, named.first_rank("b"), named.first_rank("c")) == (3, 1, 2)
    assert [named.has_rank(name) for name in "abc"] == [False, True, True]


def test_two_engines_on_a_gpu_without_the_trainer_take_turns_in_updates():
    """NCCL refuses a second rank on a GPU; engines on CPUs are in one group, however many a machine has."""
    here, there = "cuda:machine/GPU-1", "cuda:machine/GPU-2"
    updates = Updates(term=3, patience=PATIENCE)

    def named(places: dict[str, str], **policies: int) -> list[str]:
        heartbeats = {n: engine(n, policies.get(n), weight_place=place) for n, place in places.items()}
        updates.decide(100.0, manifest(0, "device").model_copy(update={"place": here}), heartbeats, trainer())
        assert updates.current is not None
        return [member.boot_id for member in updates.current.members]

    shared = {"a": there, "b": there, "c": here, "d": "cuda:machine/GPU-3"}
    assert named(shared) == ["a", "c", "d"]
    assert named(shared, a=0, c=0, d=0) == ["b"]
    on_cpus = {name: engine(name, None, weight_place="cpu:machine/host") for name in "ab"}
    assert Scene().see(0, **on_cpus) == ("3.1", "3.1", ["a", "b"])


def test_places_count_in_channel_device_alone():
    """With a manifest without a place every engine is in the group."""
    updates = Updates(term=3, patience=PATIENCE)
    updates.decide(100.0, manifest(0), {"a": engine("a", None, weight_place="")}, trainer())
    assert updates.current is not None
    assert updates.current.num_ranks == 2


def test_the_next_version_goes_to_the_same_group():
    """To meet costs more than to send, so members that stay keep their group."""
    scene = Scene()
    scene.see(0, a=None, b=None)
    assert scene.see(1, a=0, b=0) == ("3.2", "3.1", ["a", "b"])


def test_members_are_frozen_while_an_update_is_under_way():
    """A newer version, and an engine that comes, wait for its end."""
    scene = Scene()
    scene.see(0, a=None, b=None)
    assert scene.see(1, a=0, b=None, c=None) is None
    assert scene.updates.under_way
    assert scene.see(1, a=0, b=0, c=None) == ("3.2", "3.2", ["a", "b", "c"])


def test_a_joiner_gets_the_version_that_the_others_serve():
    """By an update of its own: nobody waits for the next step."""
    scene = Scene()
    scene.see(4, a=None)
    assert scene.see(4, a=4) is None
    assert scene.see(4, a=4, b=None) == ("3.2", "3.2", ["b"])


def test_an_engine_that_dies_in_an_update_is_left_out_of_the_next():
    """The others repeat it in a new group."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    assert scene.see(1, a=0) == ("3.2", "3.2", ["a"])


def test_an_engine_that_started_anew_counts_as_another():
    """A boot id that is gone ends the update, whatever name it had."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    assert scene.see(1, a=0, c=None) == ("3.2", "3.2", ["a", "c"])


def test_whoever_missed_is_tried_again_and_quarantined_when_that_does_not_help():
    """The trainer says who was behind the others; an engine that did nothing wrong is never left out."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    named = []
    for attempt in range(1, MAX_FAILURES + 1):
        named.append(scene.see(1, failure(f"3.{attempt}", "b"), a=0, b=0))
    assert named == [("3.2", "3.2", ["a", "b"]), ("3.3", "3.3", ["a", "b"]), ("3.4", "3.4", ["a"])]
    assert scene.updates.quarantined == {"b"}


def test_a_success_forgives_earlier_failures():
    """Only failures in a row count."""
    scene = Scene()
    scene.see(1, a=0)
    for version in range(1, 2 * MAX_FAILURES):
        update = scene.updates.current
        assert update is not None
        assert scene.see(version, failure(update.update, "a"), a=version - 1) is not None
        scene.see(version, a=version)
        scene.see(version + 1, a=version)
    assert scene.updates.quarantined == set()


def test_an_engine_says_itself_that_it_could_not_load():
    """Its own fault, whatever the trainer has seen."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    said = engine("b", 0, failed_update=failure("3.1", "b"))
    assert scene.see(1, a=1, b=said) == ("3.2", "3.2", ["b"])


@pytest.mark.parametrize(("missed", "quarantined"), [((), set()), (("b",), {"b"})])
def test_an_update_that_an_engine_has_given_up_is_held_against_it_only_where_it_says_so(missed: Any, quarantined: Any):
    """Another one is named either way, as often as it is given up."""
    scene = Scene()
    scene.see(1, a=1, b=0)
    for number in range(1, MAX_FAILURES):
        said = engine("b", 0, failed_update=failure(f"3.{number}", *missed))
        assert scene.see(1, a=1, b=said) == (f"3.{number + 1}", f"3.{number + 1}", ["b"])
    scene.see(1, a=1, b=engine("b", 0, failed_update=failure(f"3.{MAX_FAILURES}", *missed)))
    assert scene.updates.quarantined == quarantined


def test_an_engine_that_has_lost_its_weights_is_named_at_once():
    """Its heartbeat is that of a joiner; the failure that it tells with it is of an update that is over."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    assert scene.see(1, a=1, b=1) is None
    lost = engine("b", None, engine_state="quarantined", failed_update=failure("3.1", "b"))
    assert scene.see(1, a=1, b=lost) == ("3.2", "3.2", ["b"])
    assert scene.see(1, a=1, b=lost) is None
    assert scene.see(1, a=1, b=1) is None
    assert not scene.updates.under_way


def test_weights_lost_before_their_success_was_heard_of_end_the_update():
    """Else its members would be waited for as long as they live."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    lost = engine("b", None, engine_state="quarantined", failed_update=failure("3.1", "b"))
    assert scene.see(1, a=1, b=lost) == ("3.2", "3.2", ["b"])


def test_a_failure_of_an_older_update_is_old_news():
    """Heartbeats repeat it; it ends nothing twice."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    scene.see(1, failure("3.1"), a=0, b=0)
    assert scene.see(1, failure("3.1"), a=0, b=0) is None


@pytest.mark.parametrize("changes", [{"weight_ranks": 0}, {"phase": "draining"}])
def test_engines_that_take_no_part_are_never_named(changes: dict[str, Any]):
    """They load by file, or leave."""
    assert Scene().see(1, a=engine("a", 0, **changes)) is None


def test_parallel_workers_bring_a_rank_each():
    """The trainer is rank 0, then come the workers of each engine."""
    scene = Scene()
    scene.see(1, a=engine("a", 0, weight_ranks=2), b=0)
    update = scene.updates.current
    assert update is not None
    assert update.num_ranks == 4
    assert [update.first_rank("a"), update.first_rank("b")] == [1, 3]


def test_other_channels_and_a_missing_trainer_name_nothing():
    """A file needs nobody's presence; a broadcast needs the trainer's."""
    updates, heartbeats = Updates(1, PATIENCE), {"a": engine("a", 0)}
    assert not updates.decide(0.0, manifest(1, "filesystem"), heartbeats, trainer())
    assert not updates.decide(0.0, manifest(1), heartbeats, None)
    assert not updates.decide(0.0, None, heartbeats, trainer())


# --- an update of which nobody tells anything ------------------------------------------------------------------------


def test_an_update_without_any_progress_gives_way_to_another_when_its_patience_is_over():
    """Trainer and members live and say nothing, as when the thread that sends has died; a new group is named."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    scene.now += PATIENCE
    assert scene.see(1, a=0, b=0) is None
    scene.now += 0.1
    assert scene.see(1, a=0, b=0) == ("3.2", "3.2", ["a", "b"])
    assert scene.updates.quarantined == set()


def test_an_update_that_goes_on_slowly_is_left_to_its_members():
    """One bucket of one member in each interval of patience is progress enough, however long all of it takes."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    for received in range(10):
        scene.now += 0.9 * PATIENCE
        assert scene.see(1, a=engine("a", 0, update_progress=received), b=0) is None


def test_each_update_has_its_own_patience():
    """What stood still before, or the time between two updates, is not counted against the next one."""
    scene = Scene()
    scene.see(1, a=0)
    scene.now += 0.9 * PATIENCE
    assert scene.see(1, a=1) is None
    scene.now += 10 * PATIENCE
    assert scene.see(2, a=1) == ("3.2", "3.1", ["a"])
    scene.now += 0.9 * PATIENCE
    assert scene.see(2, a=1) is None


def test_a_silent_member_is_tried_again_without_those_that_have_the_version():
    """Where others serve it and one never does, and never says why, the others have done with it."""
    scene = Scene()
    scene.see(1, a=0, b=0)
    assert scene.see(1, a=1, b=0) is None
    scene.now += PATIENCE + 0.1
    assert scene.see(1, a=1, b=0) == ("3.2", "3.2", ["b"])
