"""An actor's place in the run: when it leaves and when it gives up."""

import time

import pytest

from actors.process import membership as membership_module
from actors.process.membership import Drain, Membership, PackerSilentError, StartOverError
from bus.control import ControlServer, client, connection
from schemas.errors import PeerRefusedError
from schemas.messages import Heartbeat, ObserverDirective, ObserverHeartbeat
from tests.ring.harness import ring_config, wait_until


class Packer:
    """Answers every heartbeat with the directive that it was given."""

    def __init__(self, address: str) -> None:
        self.heartbeats: list[Heartbeat] = []
        self._server = ControlServer(address, self._heard)
        self._identity = b""
        self._server.start()

    def _heard(self, identity: bytes, heartbeat: Heartbeat) -> None:
        self._identity = identity
        self.heartbeats.append(heartbeat)

    def say(self, run: str = "r", refusal: str = "", term: int = 1) -> None:
        """Publish a directive to the peer."""
        directive = ObserverDirective(
            run=run, term=term, phase="running", step=3, max_steps=9, refusal=refusal, progress={"step": 3}
        )
        self._server.publish({self._identity: directive})

    def close(self) -> None:
        """Fall silent."""
        self._server.close()


class Clock:
    """Time that a test moves, from now on."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def peers(tmp_path, request):
    """A packer and a peer that it has heard; the parameter is `bus.peer_timeout`."""
    timeout = getattr(request, "param", 30.0)
    config = ring_config(tmp_path, "inproc", bus={"beat_interval": 0.05, "lease": 1.5, "peer_timeout": timeout})
    membership = Membership(config, ObserverHeartbeat, "peer-0")
    packer = Packer(membership.addresses.control)
    membership.start(phase="running")
    wait_until(lambda: packer.heartbeats, "the first heartbeat")
    yield membership, packer
    membership.close()
    packer.close()


def test_newest_state_is_at_hand_without_waiting(peers):
    """What the packer has said is what `latest` returns; before that it is None."""
    membership, packer = peers
    assert membership.latest() is None
    packer.say()
    assert wait_until(membership.latest, "a directive").progress == {"step": 3}


def test_another_run_means_to_start_over_once_ours_has_been_silent_for_a_lease(peers):
    """A packer that serves run s has taken the place of the one of run r that this process belongs to."""
    membership, packer = peers
    packer.say(run="r")
    wait_until(membership.latest, "run r")
    packer.say(run="s")
    with pytest.raises(StartOverError, match="run s, this process belongs to r"):
        wait_until(lambda: membership.latest().run == "s", "run s")
    assert membership.silent_seconds > 1.5


def test_a_peer_does_not_change_to_and_fro_between_two_packers(peers, monkeypatch):
    """Directives of another run between those of ours, for longer than a lease: none is taken, all are counted (P1)."""
    membership, packer = peers
    # the client's time passes here alone: held up, this test would let our packer be silent for a lease
    clock = Clock()
    for module in (client, connection):
        monkeypatch.setattr(module, "time", clock)
    packer.say(run="r")
    wait_until(membership.latest, "run r")
    dropped = membership.counts.dropped
    for _ in range(8):
        before = dropped["foreign_run"]
        packer.say(run="s")
        wait_until(lambda before=before: dropped["foreign_run"] > before, "run s is dropped")
        clock.now += 0.5
        newest = membership.latest()
        assert newest.run == "r"
        packer.say(run="r")
        wait_until(lambda newest=newest: membership.latest() is not newest, "run r is taken")
        clock.now += 0.5
        assert membership.latest().run == "r"
    assert dropped["foreign_run"] >= 8
    runs = [heartbeat.run for heartbeat in packer.heartbeats]
    assert set(runs[: runs.index("r")]) <= {""}
    assert set(runs[runs.index("r") :]) == {"r"}


def test_states_of_an_older_term_are_dropped(peers):
    """Two packers of one run in a partition, or a late directive: the newer term counts, also in heartbeats (P2)."""
    membership, packer = peers
    packer.say(term=3)
    wait_until(lambda: membership.latest() and membership.latest().term == 3, "term 3")
    packer.say(term=2)
    wait_until(lambda: membership.counts.dropped["old_term"], "term 2")
    assert membership.latest().term == 3
    wait_until(lambda: packer.heartbeats[-1].term == 3, "term 3 in a heartbeat")
    packer.say(term=4)
    wait_until(lambda: membership.latest().term == 4, "term 4")
    wait_until(lambda: packer.heartbeats[-1].term == 4, "term 4 in a heartbeat")
    terms = [heartbeat.term for heartbeat in packer.heartbeats]
    assert terms == sorted(terms)
    assert 2 not in terms


def test_refusal_ends_the_peer_with_its_words(peers):
    """The packer's reason is the error."""
    membership, packer = peers
    packer.say(refusal="they are different builds")
    with pytest.raises(PeerRefusedError, match="they are different builds"):
        wait_until(lambda: membership.wait(0.1) and False, "refusal")


@pytest.mark.parametrize("peers", [0.6], indirect=True, ids=[""])
def test_silence_beyond_the_timeout_names_the_key_and_the_address(peers):
    """0.6 s without a directive: the error names bus.peer_timeout and where the packer was looked for."""
    membership, packer = peers
    packer.close()
    with pytest.raises(PackerSilentError, match=r"at inproc://.*bus.peer_timeout 0.6 s"):
        wait_until(lambda: membership.wait(0.1) and False, "silence")


def test_last_beat_says_done(peers):
    """Whoever leaves says so, so that the packer does not wait for its lease."""
    membership, packer = peers
    membership.close()
    wait_until(lambda: packer.heartbeats[-1].phase == "done", "the last heartbeat")


def test_drain_waits_for_work_but_not_for_ever(monkeypatch):
    """Nobody leaves before a drain; with work in hand after its seconds, without work after the farewell."""
    clock = Clock()
    clock.now = 100.0
    monkeypatch.setattr(membership_module, "time", clock)
    drain = Drain(20.0)
    assert not drain
    assert drain.phase == "running"
    assert not drain.may_leave(holds_work=False)
    drain.begin()
    assert drain.phase == "draining"
    assert not drain.may_leave(holds_work=False), "the packer has not heard of it yet"
    clock.now = 101.0
    drain.begin()  # a second wish does not begin anew
    assert drain.may_leave(holds_work=False)
    assert not drain.may_leave(holds_work=True)
    clock.now = 120.5
    assert drain.may_leave(holds_work=True)
