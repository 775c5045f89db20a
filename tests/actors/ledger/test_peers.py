"""Who counts as a peer: run, build, boot id, sequence, lease (P1, P3, P5, P8), and what a failed run says."""

import pytest

from actors.ledger import Store, replies
from actors.ledger.machine import MIN_POISON_IN_A_ROW
from actors.ledger.peers import MAX_REMEMBERED, Peers
from schemas.errors import ProtocolError
from schemas.messages import Directive, ObserverDirective, ObserverHeartbeat, RewardHeartbeat, RolloutDirective
from tests.actors.ledger.driver import Engine, Reward, Ring, Rollout, Trainer, policy, settings


def ring_with_rollout(slots: int = 4) -> tuple[Ring, Rollout]:
    """One rollout and one engine that serves version 0; the rollout has been heard once."""
    ring = Ring(settings())
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=slots))
    ring.turn()
    return ring, rollout


def said(ring: Ring, identity: str) -> Directive:
    """The newest directive of a peer."""
    directive = ring.directives[identity]
    assert directive is not None
    return directive


def test_a_peer_learns_the_run_from_its_first_state() -> None:
    """Heartbeats carry no run until then, and are taken all the same (P1)."""
    ring, rollout = ring_with_rollout()
    assert rollout.run == ring.machine.run != ""


def test_a_peer_of_another_run_is_told_ours_and_what_it_holds_does_not_count() -> None:
    """Its directive carries our run, so it starts over; its ordinals, unknown here, do not stop the packer (P1)."""
    ring, _ = ring_with_rollout()
    stranger = Rollout("b", run="another run", held={(99, 1): None})
    ring.heartbeat(stranger)
    ring.decide()
    assert said(ring, "b/1").run == ring.machine.run
    assert said(ring, "b/1").refusal == ""
    assert "b/1" not in ring.machine.peers.identities()


def test_a_process_of_another_run_does_not_count_when_it_takes_our_run_over() -> None:
    """After the directive that names our run it may send one more heartbeat, with holds of the other run."""
    ring, _ = ring_with_rollout()
    stranger = Rollout("b", run="another run", held={(99, 1): None})
    ring.heartbeat(stranger)
    stranger.run = ring.machine.run
    ring.heartbeat(stranger)
    ring.decide()
    assert "b/1" not in ring.machine.peers.identities()


def test_another_build_is_refused_by_name() -> None:
    """The refusal says whose messages differ; later heartbeats, which carry no fingerprint, are refused too."""
    ring, _ = ring_with_rollout()
    other = Rollout("b").heartbeat().model_copy(update={"fingerprint": "0000"})
    ring.machine.heard(ring.now, "b/1", other)
    ring.decide()
    assert "b speaks messages 0000" in said(ring, "b/1").refusal
    ring.wait(10)
    assert ring.directives["b/1"] is None, "whoever sends no more heartbeats is forgotten"
    ring.machine.heard(ring.now, "b/1", other.model_copy(update={"fingerprint": None, "run": ring.machine.run}))
    ring.decide()
    assert "different builds" in said(ring, "b/1").refusal
    assert "b/1" not in ring.machine.peers.identities()


def test_a_rank_of_another_configuration_is_refused() -> None:
    """Two ranks where the packer was started for one would wait for each other for ever."""
    ring, _ = ring_with_rollout()
    trainer = ring.add(Trainer("t", num_ranks=2))
    ring.turn()
    assert trainer.over
    assert "trainer.num_ranks is 1" in said(ring, "t/1").refusal


def test_a_new_boot_frees_at_once_what_the_old_one_held() -> None:
    """No lease has to end: the new one's first heartbeat brings out that the old one has no connection (P3)."""
    ring, rollout = ring_with_rollout()
    ring.turn()
    assert ring.machine.groups.held_by == {"a/1": {0, 1, 2, 3}}
    rollout.restart()
    ring.heartbeat(rollout)
    assert ring.machine.groups.held_by == {"a/1": {0, 1, 2, 3}}
    ring.decide()
    ring.heartbeat(rollout)
    ring.decide()
    assert ring.machine.groups.held_by == {"a/2": {0, 1, 2, 3}}
    assert ring.row(0).attempt == 2


def test_a_second_process_of_a_living_name_is_refused_and_the_living_one_goes_on() -> None:
    """It waits for a lease, in which the other one goes on, and hears which process has its name (P3)."""
    ring, living = ring_with_rollout()
    ring.turn()
    stray = ring.add(Rollout("a", boot=2))
    ring.wait(2.9)
    assert not stray.over
    assert isinstance(said(ring, "a/2"), ObserverDirective)
    assert said(ring, "a/2").refusal == ""
    ring.wait(1.1)
    assert stray.over
    directive = said(ring, "a/2")
    assert isinstance(directive, ObserverDirective)
    assert directive.name_taken
    assert directive.refusal == "another process named a is alive (boot 1); give this one another --name"
    assert not living.over
    assert ring.machine.groups.held_by == {"a/1": {0, 1, 2, 3}}
    assert ring.row(0).attempt == 1


def test_a_refused_process_that_pauses_for_longer_than_a_lease_still_hears_that_its_name_is_taken() -> None:
    """A laptop sleeps: the exit code for another reason would end the run of its `actors up` (P3)."""
    ring, _ = ring_with_rollout()
    stray = ring.add(Rollout("a", boot=2))
    ring.wait(5.0)
    assert stray.over
    ring.wait(5.0, stray)
    assert ring.directives["a/2"] is None, "the packer has forgotten the visit"
    ring.turn()
    directive = said(ring, "a/2")
    assert isinstance(directive, ObserverDirective)
    assert (directive.name_taken, "another process named a is alive" in directive.refusal) == (True, True)


def test_a_process_refused_for_another_reason_does_not_hear_that_its_name_is_taken() -> None:
    """It waits beside the living one, and then turns out to be of another build."""
    ring, _ = ring_with_rollout()
    other = Rollout("a", boot=2)
    ring.heartbeat(other)
    ring.machine.heard(ring.now, "a/2", other.heartbeat().model_copy(update={"fingerprint": "0000"}))
    ring.decide()
    directive = said(ring, "a/2")
    assert isinstance(directive, ObserverDirective)
    assert (directive.name_taken, "different builds" in directive.refusal) == (False, True)


def test_a_process_that_waits_beside_another_newcomer_is_refused_after_a_lease_of_its_own() -> None:
    """The holder died silently and the first newcomer has the name: it must go on for a lease, as any holder (P3)."""
    ring, old = ring_with_rollout()
    ring.kill(old)
    first, second = Rollout("a", boot=2), Rollout("a", boot=3)
    ring.probe = lambda: None
    ring.add(first, second)
    ring.wait(2.0)
    ring.now += 1.05
    ring.decide()
    ring.heartbeat(first)
    assert "a/2" in ring.machine.peers.identities()
    ring.heartbeat(second)
    assert ring.machine.peers.refusal_of("a/3") == ""
    ring.wait(2.9)
    assert not second.over
    ring.wait(1.1)
    assert second.over
    assert not first.over


def test_a_rank_that_is_started_by_hand_does_not_break_the_gang() -> None:
    """Its name is that of a member: the gang goes on, and only the newcomer ends."""
    ring = Ring(settings())
    trainer, stray = ring.add(Trainer("t")), Trainer("t", boot=2)
    ring.wait(2.0)
    assert ring.machine.gang.members == {0: "t/1"}
    ring.add(stray)
    ring.wait(5.0)
    assert stray.over
    assert not trainer.over
    assert (ring.machine.gang.incarnation, ring.machine.gang.members) == (1, {0: "t/1"})


def test_a_name_is_free_when_its_holder_says_that_it_is_done_or_its_lease_ends() -> None:
    """A process that leaves in good order is not waited for; one that is frozen is waited for as long as its lease."""
    ring, old = ring_with_rollout()
    old.phase = "done"
    ring.turn()
    new = ring.add(Rollout("a", boot=2))
    ring.turn(old)
    assert "a/2" in ring.machine.peers.identities()
    third = ring.add(Rollout("a", boot=3))
    ring.wait(2.9, old, new)
    assert "a/3" not in ring.machine.peers.identities()
    ring.wait(1.2, old, new)
    assert "a/3" in ring.machine.peers.identities()
    assert not third.over


def test_a_packer_that_stood_still_takes_nobody_for_alive() -> None:
    """The clock of leases stood still as well: the dead holder is late on it, and the newcomer is not refused (P8)."""
    ring, old = ring_with_rollout()
    new, began = Rollout("a", boot=2), ring.now
    ring.heartbeat(new)
    ring.now += 10.0
    for listened in (0.0, 0.1, 3.1, 3.2):
        ring.machine.heard(ring.now, new.identity, new.heartbeat(), began + listened)
        ring.machine.decide(ring.now, began + listened)
        assert ring.machine.peers.refusal_of("a/2") == ""
    assert ring.machine.peers.identities() == ["a/2"]
    assert old.identity not in ring.machine.groups.held_by


def test_a_packer_that_hears_of_a_newer_term_of_its_run_ends() -> None:
    """Another packer has taken over, on a copy of the ledger: two would issue the same ordinals (P2)."""
    ring, rollout = ring_with_rollout()
    rollout.term = ring.machine.term + 1
    with pytest.raises(
        ProtocolError, match=r"a has heard term 2 of this run, and this packer has term 1.*`actors top`"
    ):
        ring.turn()


def test_a_living_peer_of_another_run_frees_at_once_what_it_held() -> None:
    """It was restored from a snapshot of another run, say: its tickets go to others now, not after their deadline."""
    ring, rollout = ring_with_rollout()
    ring.turn()
    ring.add(Rollout("b"))
    rollout.run = "another run"
    ring.turn()
    ring.turn(rollout)
    assert ring.machine.groups.held_by == {"b/1": {0, 1, 2, 3}}


def test_a_peer_whose_beats_change_their_kind_leaves_the_old_kind() -> None:
    """A reward actor of that name is shown to nobody any more, and what it held is free."""
    ring, rollout = ring_with_rollout()
    reward = ring.add(Reward("r"))
    ring.turn()
    assert [peer.name for peer in rollout.directive.rewards] == ["r"]
    ring.kill(reward)
    ring.add(Engine("r", policy=policy(0), sequence=reward.sequence))
    ring.turn()
    ring.turn()
    assert rollout.directive.rewards == []
    assert list(ring.machine.peers.all(RewardHeartbeat)) == []


def test_a_beat_from_before_the_first_word_does_not_replace_a_living_process() -> None:
    """It may be late, of a process that is dead (P3); it is answered, and the living one stays."""
    ring, living = ring_with_rollout()
    ring.heartbeat(Rollout("a", boot=0))
    ring.decide()
    assert isinstance(said(ring, "a/0"), ObserverDirective)
    assert said(ring, "a/0").run == ring.machine.run
    ring.wait(10)
    assert "a/1" in ring.machine.peers.identities()
    assert not living.over
    assert ring.directives["a/0"] is None, "whoever sends no more heartbeats is forgotten"


def test_a_late_beat_of_the_dead_does_not_replace_the_living_after_a_restart_of_the_packer() -> None:
    """It names the run, heard from the packer before; its successor was the first whom the new one heard (P3)."""
    ring, old = ring_with_rollout()
    ring.turn()
    late = old.heartbeat()
    ring.restart_packer()
    old.restart()
    ring.turn()
    assert "a/2" in ring.machine.peers.identities()
    ring.machine.heard(ring.now, "a/1", late)
    ring.turn()
    assert "a/2" in ring.machine.peers.identities()
    assert not old.over


def test_a_process_that_took_a_place_is_no_visitor_any_more() -> None:
    """That it was one once ends with the lease of its first heartbeat, which must not end what it holds."""
    ring, rollout = ring_with_rollout()
    ring.turn()
    rollout.restart()
    ring.wait(8)
    assert ring.machine.groups.held_by["a/2"] == {0, 1, 2, 3}
    assert ring.row(0).attempt == 2


def test_beats_with_an_older_sequence_number_are_ignored() -> None:
    """A late heartbeat tells of a past (P3): here that 4 slots are free, of which 1 has been filled since."""
    ring, rollout = ring_with_rollout(slots=0)
    rollout.slots = 4
    late = rollout.heartbeat()
    rollout.slots = 1
    ring.heartbeat(rollout)
    ring.machine.heard(ring.now, rollout.identity, late)
    ring.decide()
    assert len(ring.machine.groups.held_by["a/1"]) == 1


def test_a_lease_ends_exactly_after_its_time_without_a_beat() -> None:
    """3 s from the receipt of the last heartbeat (P8)."""
    ring, rollout = ring_with_rollout()
    ring.wait(2.9, rollout)
    assert "a/1" in ring.machine.peers.identities()
    ring.wait(0.1, rollout)
    assert "a/1" not in ring.machine.peers.identities()
    assert ring.directives["a/1"] is None, "the control server forgets it"


def test_no_lease_ends_while_nobody_reads_the_beats() -> None:
    """14 rounds in 3.5 s and no heartbeat is read, as with a hanging control thread: all live on, nothing is lost."""
    ring, rollout = ring_with_rollout()
    listened = ring.now
    for _ in range(14):
        ring.now += 0.25
        ring.machine.decide(ring.now, listened)
    assert set(ring.machine.peers.identities()) == {"e/1", rollout.identity}
    assert ring.machine.groups.counters["deaths"] == 0


def test_a_peer_that_died_before_the_packer_was_deaf_is_noticed_after_one_lease_of_listening() -> None:
    """The time for which nobody listened is added to a lease; it does not begin anew."""
    ring, rollout = ring_with_rollout()
    began, deaf = ring.now, 100.0
    ring.machine.decide(began + 2.0, began + 2.0)
    ring.machine.decide(began + 2.0 + deaf, began + 2.0)
    for listened, lives in ((2.9, True), (3.0, False)):
        ring.machine.decide(began + listened + deaf, began + listened)
        assert (rollout.identity in ring.machine.peers.identities()) == lives


def test_slow_rounds_hide_no_death() -> None:
    """Rounds of 2 s in which all heartbeats are read: a lease of 3 s ends with the second round after the last one."""
    ring, rollout = ring_with_rollout()
    engine = ring.doubles[0]
    for _ in range(2):
        for _ in range(2):  # heartbeats come each second and are heard at the end of the round, with their own times
            ring.now += 1.0
            ring.machine.heard(ring.now, engine.identity, engine.heartbeat(), ring.now)
        ring.machine.decide(ring.now, ring.now)
    assert ring.machine.peers.identities() == [engine.identity]
    assert rollout.identity not in ring.machine.peers.identities()


def test_a_beat_counts_from_when_it_was_read_and_not_from_the_round_that_hears_it() -> None:
    """A round of 10 s hears a heartbeat from its beginning: its lease has been over for long."""
    ring, rollout = ring_with_rollout()
    arrived = ring.now + 0.1
    ring.now += 10.0
    ring.machine.heard(ring.now, rollout.identity, rollout.heartbeat(), arrived)
    ring.machine.decide(ring.now, ring.now)
    assert rollout.identity not in ring.machine.peers.identities()


def test_a_packer_that_has_just_started_waits_for_a_lease_of_listening() -> None:
    """The first rounds may be over before anybody is heard; nobody's work is issued again for that."""
    ring, rollout = ring_with_rollout()
    ring.turn()
    assert ring.machine.groups.held_by[rollout.identity]
    ring.restart_packer()
    listened = ring.now
    ring.now += 60.0
    ring.machine.decide(ring.now, listened)
    assert ring.machine.groups.held_by[rollout.identity]
    ring.machine.decide(ring.now, listened + ring.settings.lease)
    assert rollout.identity not in ring.machine.groups.held_by


def test_a_peer_whose_lease_ended_counts_again_with_its_next_beat() -> None:
    """It was only slow; the same boot id is welcome (P8)."""
    ring, rollout = ring_with_rollout()
    ring.wait(5, rollout)
    ring.turn()
    assert "a/1" in ring.machine.peers.identities()
    assert isinstance(said(ring, "a/1"), RolloutDirective)


@pytest.mark.parametrize("ordinal", [4, -1])
def test_an_ordinal_that_was_never_issued_stops_the_packer(ordinal: int) -> None:
    """The ledger has lost commits; the message names the setting that would have kept them (P5)."""
    ring, rollout = ring_with_rollout()
    rollout.held[ordinal, 1] = None
    with pytest.raises(ProtocolError, match=rf"ordinal {ordinal}.*ledger\.sync"):
        ring.turn()


def test_an_unknown_ordinal_in_a_failure_or_in_a_group_stops_the_packer() -> None:
    """Whoever names it, and however (P5)."""
    ring, rollout = ring_with_rollout()
    reward = ring.add(Reward("r"))
    reward.fail((7, 1))
    with pytest.raises(ProtocolError, match="ordinal 7"):
        ring.turn()
    facts = rollout.sample((0, 1), policy(0))
    with pytest.raises(ProtocolError, match="ordinal 8"):
        ring.score(type(facts)(**facts.__dict__ | {"ordinal": 8}))


@pytest.mark.parametrize("what", ["checkpoint", "next_step", "received"])
def test_a_step_that_was_never_composed_stops_the_packer(what: str) -> None:
    """A trainer that is ahead of the ledger has seen commits that are lost (P5)."""
    ring, _ = ring_with_rollout()
    trainer = ring.add(Trainer("t"))
    if what == "checkpoint":
        trainer.disk.chains[3] = "chain"
    elif what == "next_step":
        trainer.next_step = 4
    else:
        trainer.batches[3] = None
    with pytest.raises(ProtocolError, match=r"t knows step 3.*composed only 0.*ledger\.sync"):
        ring.turn()


def test_peers_that_come_and_change_are_told_to_all_at_once() -> None:
    """A rollout that is silent in this round hears of a new reward actor and of an engine's new version (P0, P6)."""
    ring, rollout = ring_with_rollout()
    reward = Reward("r")
    ring.heartbeat(reward)
    ring.decide()
    assert [peer.address for peer in rollout.directive.rewards] == ["ipc://r/1"]
    engine = ring.doubles[0]
    engine.policy = policy(1)
    ring.heartbeat(engine)
    ring.decide()
    assert [peer.policy for peer in rollout.directive.engines] == [policy(1)]


def test_a_beat_that_changes_nothing_for_others_is_answered_to_its_sender_alone() -> None:
    """Otherwise 1 000 peers at one heartbeat a second cost a million directives (P6)."""
    ring, rollout = ring_with_rollout()
    reward = ring.add(Reward("r"))
    ring.turn()
    ring.turn()
    ring.heartbeat(reward)
    assert list(ring.decide()) == ["r/1"]
    ring.settle(rollout, policy(0), 0)
    assert list(ring.decide()) == ["a/1"], "a settled group concerns its holder"
    reward.get(rollout.sample((1, 1), policy(0)))
    ring.turn()
    ring.settle(rollout, policy(0), 1)
    ring.score(reward.held[1, 1])
    assert sorted(ring.decide()) == ["a/1", "r/1"], "and whoever names it"


def test_when_the_run_fails_every_peer_is_refused() -> None:
    """Also one that comes later; the reason names the last failure and its example's key (P11)."""
    ring = Ring(settings(groups_per_step=64))
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=64))
    while not rollout.over:
        ring.turn()
        for hold in rollout.to_sample:
            rollout.fail(hold)
    dropped = ring.machine.groups.dropped["train"]["poison"]
    assert dropped >= 4 * 64 > MIN_POISON_IN_A_ROW
    assert ring.machine.phase == "failed"
    late = ring.add(Rollout("b"))
    ring.turn()
    for double in (late, ring.doubles[0]):
        assert "groups in a row" in said(ring, double.identity).refusal
        assert "(k" in said(ring, double.identity).refusal


def test_a_settled_group_between_poison_drops_keeps_the_run_going() -> None:
    """Only an unbroken row of drops says that nothing works: here 31, one good group, 31."""
    ring = Ring(settings(groups_per_step=1, max_steps=100, max_async_level=99))
    groups = ring.machine.groups
    groups.poison_in_a_row = MIN_POISON_IN_A_ROW - 1
    ring.add(Engine("e", policy=policy(0)))
    rollout = ring.add(Rollout("a", slots=1))
    ring.turn()
    ring.settle(rollout, policy(0))
    ring.turn()
    assert groups.poison_in_a_row == 0
    assert not ring.machine.failure


def test_an_observer_sees_progress_and_is_not_waited_for() -> None:
    """`actors top` gets plain values with its directive; its presence does not keep the packer (P27)."""
    ring, _ = ring_with_rollout()
    fields = {"name": "o", "boot_id": "1", "phase": "running", "run": "", "sequence": 1}
    ring.machine.heard(ring.now, "o/1", ObserverHeartbeat(**fields))
    assert replies.directives(ring.machine, lambda: {"step": 3})[b"o/1"].progress == {"step": 3}
    for double in ring.doubles:
        double.phase = "done"
    assert not ring.machine.everybody_left
    ring.turn()
    assert ring.machine.everybody_left


def test_refusals_that_are_remembered_are_bounded() -> None:
    """A process that is started again and again leaves 10 000 of them at most."""
    peers = Peers(3.0)
    for boot in range(MAX_REMEMBERED + 5):
        peers.refuse(f"a/{boot}", "no")
    assert [peers.refusal_of(f"a/{boot}") for boot in (0, 4, 5)] == ["", "", "no"]


def test_a_run_keeps_its_id_and_each_start_raises_the_term(tmp_path: "object") -> None:
    """The id is made with the ledger (P1); the term fences directives and batches of an earlier packer (P2)."""
    path = f"{tmp_path}/ledger.sqlite"
    first = Store(path)
    first.close()
    second = Store(path)
    second.close()
    assert (first.run, first.term, second.term) == (second.run, 1, 2)


def test_repeated_heartbeats_renew_a_lease_and_ask_for_work_as_whole_ones_do() -> None:
    """A rollout actor at rest is taken in by its number alone; nobody is told anything, and it keeps its place."""
    ring = Ring(settings())
    engine = ring.add(Engine("e", policy=policy(0)))
    idle = ring.add(Rollout("idle", slots=0))
    ring.turn()
    ring.turn()
    ring.decide()
    whole = idle.heartbeat()
    ring.machine.heard(ring.now, idle.identity, whole)
    known = ring.machine.peers.heartbeat_of(idle.identity)
    assert known is not None
    ring.decide()
    for number in range(1, 4):
        ring.now += 0.9 * ring.settings.lease
        ring.heartbeat(engine)
        assert ring.machine.renewed(ring.now, idle.identity, known, whole.sequence + number)
        ring.machine.decide(ring.now)
        assert idle.identity in ring.machine.peers.identities()
        assert idle.identity.encode() not in replies.directives(ring.machine)
    assert not ring.machine.renewed(ring.now, idle.identity, known, whole.sequence), "it is late"
    other = whole.numbered(whole.sequence + 9)
    assert not ring.machine.renewed(ring.now, idle.identity, other, other.sequence), "it repeats something else"
    ring.now += 1.1 * ring.settings.lease
    ring.machine.decide(ring.now)
    assert idle.identity not in ring.machine.peers.identities()
    assert not ring.machine.renewed(ring.now, idle.identity, known, whole.sequence + 20), "it has left"


def test_a_rollout_actor_at_rest_hears_of_a_change_though_it_only_repeats_itself() -> None:
    """Its heartbeats ask for nothing: whatever changes for all actors at rest is found in each round."""
    ring = Ring(settings())
    engine = ring.add(Engine("e", policy=policy(0)))
    idle = ring.add(Rollout("idle", slots=0))
    ring.turn()
    ring.turn()
    ring.heartbeat(engine)
    assert idle.identity not in ring.decide()
    engine.policy = policy(1)
    ring.heartbeat(engine)
    assert idle.identity in ring.decide()
    assert isinstance(idle.directive, RolloutDirective)
    assert [peer.policy for peer in idle.directive.engines] == [policy(1)]
