"""The ledger on disk: one packer, a local disk, whole commits, and what comes back from it (P2, P18)."""

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from actors.ledger import Changes, ExampleRef, Group, GroupState, LedgerReader, Step, Store
from actors.ledger.rows import AttemptOutcome
from actors.ledger.store import (
    LATER_COLUMNS,
    NETWORK_FILE_SYSTEMS,
    check_file_system,
    digest_of,
    file_system_of,
    mounts,
)
from schemas.errors import ConfigError, ProtocolError, RunFailedError
from schemas.messages import DroppedOrdinal
from tests.actors.ledger.driver import policy

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/scratch xfs rw 0 0
tmpfs /data tmpfs rw 0 0
lake:/data /data lustre rw 0 0
host:/x /mnt/my\\040share cifs rw 0 0
"""


def a_group(ordinal: int = 0, **changes: object) -> Group:
    """An issued one."""
    return Group(ordinal, ExampleRef("words", 3, f"k{ordinal}"), 7, 2, 1, **changes)


def a_step(number: int, *ordinals: int) -> Step:
    """Without drops."""
    return Step(number, ordinals, (), tuple(f"d{o}" for o in ordinals), f"chain {number}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a ledger that does not exist yet, in a folder that does not either."""
    return tmp_path / "run" / "ledger.sqlite"


# --- one packer, a local disk ----------------------------------------------------------------------------------------


def test_a_second_packer_is_refused_while_the_first_holds_the_ledger(path: Path) -> None:
    """The lock is beside the file and goes with its process (P2)."""
    first = Store(path)
    with pytest.raises(ConfigError, match=r"ledger\.path: another packer holds .*ledger\.sqlite"):
        Store(path)
    first.close()
    Store(path).close()


def test_a_second_packer_is_refused_through_a_symbolic_link_too(path: Path) -> None:
    """A link to the file, or to its folder, is the same ledger (P2)."""
    first = Store(path)
    (path.parent.parent / "folder").symlink_to(path.parent)
    (path.parent.parent / "link.sqlite").symlink_to(path)
    for other in (path.parent.parent / "folder" / path.name, path.parent.parent / "link.sqlite"):
        with pytest.raises(ConfigError, match=r"another packer holds"):
            Store(other)
    first.close()


@pytest.mark.slow
def test_a_killed_packer_leaves_no_lock_and_all_that_it_committed(path: Path) -> None:
    """kill -9 right after a commit, with `sync: process` (P2)."""
    script = (
        "import os, sys; from actors.ledger import Changes, Store; store = Store(sys.argv[1]);"
        "from actors.ledger.store import digest_of; frames = [b'frame'];"
        "store.commit(Changes(values={'kept': [1, 2]}), {3: (digest_of(frames), frames)});"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=120, env=dict(os.environ))
    assert ended.returncode == -signal.SIGKILL
    store = Store(path)
    assert store.value("kept") == [1, 2]
    assert store.payloads([3]) == [[b"frame"]]
    assert store.term == 2
    store.close()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/", "ext4"),
        ("/home/user/run", "nfs4"),
        ("/home/scratch/run", "xfs"),
        ("/home/scratchpad", "nfs4"),
        ("/data/run", "lustre"),
        ("/mnt/my share/run", "cifs"),
    ],
)
def test_the_innermost_and_latest_mount_tells_the_file_system(folder: str, kind: str) -> None:
    """A name is not a prefix of another, a later mount hides an earlier one, spaces are escaped in /proc/mounts."""
    assert file_system_of(Path(folder), MOUNTS) == kind


def test_network_file_systems_are_refused_by_name() -> None:
    """WAL needs shared memory; the message has key, path and kind."""
    with pytest.raises(ConfigError, match=r"ledger\.path: /home/u/ledger\.sqlite is on nfs4.*local disk"):
        check_file_system(Path("/home/u/ledger.sqlite"), MOUNTS)
    check_file_system(Path("/home/scratch/ledger.sqlite"), MOUNTS)
    check_file_system(Path("/home/u/ledger.sqlite"), "")
    assert {"nfs", "nfs4", "lustre", "cifs", "ceph", "fuse.sshfs"} <= NETWORK_FILE_SYSTEMS
    assert {"9p", "virtiofs", "panfs", "fuse.blobfuse2", "fuse.rclone"} <= NETWORK_FILE_SYSTEMS


def test_this_machines_mounts_can_be_read(tmp_path: Path) -> None:
    """Where there is a /proc/mounts, a folder of this machine is on something."""
    if mounts():
        assert file_system_of(tmp_path, mounts())


@pytest.mark.parametrize(("sync", "level"), [("process", 1), ("node", 2)])
def test_sync_node_flushes_each_commit_and_sync_process_can_not_damage_the_file(
    path: Path, sync: str, level: int
) -> None:
    """SQLite's `synchronous` is NORMAL or FULL, in WAL mode: after OFF an OS crash may leave a corrupt file."""
    store = Store(path, sync)
    assert store.database.execute("PRAGMA synchronous").fetchone() == (level,)
    assert store.database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


# --- commits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["step twice", "value without JSON"])
def test_a_commit_is_all_or_nothing(broken: str) -> None:
    """What fails last takes all before it along, and the next commit works."""
    store = Store(":memory:")
    store.commit(Changes(steps=[a_step(1, 0)]), {})
    changes = Changes(groups={0: a_group()}, steps=[a_step(2, 1)], values={"a": 1})
    if broken == "step twice":
        changes.steps.append(a_step(1, 0))
    else:
        changes.values["b"] = object()
    with pytest.raises((sqlite3.Error, TypeError)):
        store.commit(changes, {0: ("d", [b"x"])})
    assert store.groups() == []
    assert store.digests() == {}
    assert [step.step for step in store.steps()] == [1]
    assert store.value("a") is None
    store.commit(Changes(values={"a": 2}), {})
    assert store.value("a") == 2


def test_a_row_comes_back_as_it_was_and_is_replaced_by_its_next_version() -> None:
    """All columns of a train and of an eval group; the packer's clock is not among them."""
    full = {"state": GroupState.DURABLE, "attempt": 4, "outcome": AttemptOutcome.DIED, "failures": 2, "deaths": 1}
    rest = {"holder": "a/1", "oldest_version": 5, "arrival": 9, "step": 6, "reason": "stale", "origin": 1}
    rest |= {"resamples": 2, "position": 8}
    train, held_out = a_group(2, **full, **rest), a_group(-1, policy=policy(3, lineage=2))
    store = Store(":memory:")
    store.commit(Changes(groups={2: a_group(2), -1: held_out}), {})
    store.commit(Changes(groups={2: train}), {})
    assert store.groups() == [held_out, train]
    train.issued_at = 5.0
    store.commit(Changes(groups={2: train}), {})
    assert store.groups()[1].issued_at == 0.0


def test_a_ledger_from_before_a_column_existed_is_taken_over(path: Path) -> None:
    """Rows of a run that is under way when the software is renewed; what they lack is 0."""
    store = Store(path)
    store.commit(Changes(groups={0: a_group(0, origin=5, resamples=1, position=3)}), {})
    for column in LATER_COLUMNS:
        store.database.execute(f"ALTER TABLE groups DROP COLUMN {column}")
    store.close()
    assert LedgerReader.of(path).groups() == [a_group(0, origin=5)]
    store = Store(path)
    assert store.groups() == [a_group(0, origin=5)]
    store.commit(Changes(groups={1: a_group(1, resamples=2)}), {})
    assert store.groups() == [a_group(0, origin=5), a_group(1, resamples=2)]
    store.close()


def test_pools_are_what_was_last_said_of_each_example() -> None:
    """A commit names what has moved; what is normal again is forgotten."""
    store = Store(":memory:")
    store.commit(Changes(pools={"a": "easy", "b": "hard", "c": "easy"}), {})
    store.commit(Changes(pools={"a": "hard", "c": "normal", "d": "normal"}), {})
    assert store.pools() == {"a": "hard", "b": "hard"}


def test_steps_come_back_in_order() -> None:
    """Ordinals, drops with reasons, digests and chain."""
    store = Store(":memory:")
    dropped = (DroppedOrdinal(ordinal=4, reason="poison"),)
    second = Step(2, (5, 3), dropped, ("a", "b"), "chain")
    store.commit(Changes(steps=[second]), {})
    store.commit(Changes(steps=[a_step(1, 0, 1)]), {})
    assert store.steps() == [a_step(1, 0, 1), second]


def test_payloads_come_back_byte_by_byte_in_the_order_asked_for() -> None:
    """Frames of any content, empty ones too; the digests beside them."""
    store = Store(":memory:")
    frames = {0: [b"\x00\xff", b""], 1: [b"one"], 2: []}
    digests = {ordinal: digest_of(parts) for ordinal, parts in frames.items()}
    store.commit(Changes(), {ordinal: (digests[ordinal], parts) for ordinal, parts in frames.items()})
    assert store.payloads([2, 0, 1]) == [frames[2], frames[0], frames[1]]
    assert store.digests() == digests


def test_a_payload_that_is_not_what_was_written_ends_the_run_in_words(path: Path) -> None:
    """A page that still looks like one: the digest beside it tells, and the words name a way on."""
    store = Store(path, output_dir="outputs/run")
    store.commit(Changes(), {0: (digest_of([b"one"]), [b"two"])})
    with pytest.raises(RunFailedError, match=r"ledger.sqlite is damaged: the payload of ordinal 0 is not what was wri"):
        store.payloads([0])
    store.close()


def test_the_start_of_a_large_ledger_reads_its_small_tables_alone(path: Path, monkeypatch) -> None:
    """Damage in a payload is found when that is read; damage in a table that the start reads is found at the start."""
    monkeypatch.setattr("actors.ledger.store.WHOLE_CHECK_BYTES", 0)
    store = Store(path)
    frames = [bytes(100_000)]
    store.commit(Changes(groups={o: a_group(o) for o in range(500)}), {0: (digest_of(frames), frames)})
    (groups_root,) = store.database.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'groups'").fetchone()
    store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    whole = path.read_bytes()
    last_page = len(whole) - 8192
    path.write_bytes(whole[: last_page + 4] + b"\xa5" * 8188)
    store = Store(path)
    with pytest.raises(RunFailedError, match=r"is damaged: the payload of ordinal 0"):
        store.payloads([0])
    store.close()
    start = (groups_root - 1) * 8192
    path.write_bytes(whole[:start] + b"\xa5" * 8192 + whole[start + 8192 :])
    with pytest.raises(ConfigError, match=r"can't be used"):
        Store(path)


def test_folded_payloads_are_deleted_in_slices_bounded_in_bytes_and_rows(path: Path, monkeypatch) -> None:
    """One slice with each commit, however much has been compacted, and a crash in between loses none of the rest."""
    monkeypatch.setattr("actors.ledger.store.SLICE_BYTES", 10_000)
    monkeypatch.setattr("actors.ledger.store.SLICE_ROWS", 8)
    store = Store(path)
    large, small = {o: ("d", [bytes(3_000)]) for o in range(12)}, {o: ("d", [b"x"]) for o in range(12, 40)}
    store.commit(Changes(groups={o: a_group(o) for o in range(41)}), large | small | {40: ("d", [bytes(50_000)])})
    sizes = dict(store.database.execute("SELECT ordinal, LENGTH(frames) FROM payloads"))
    before, slices = set(sizes), []
    store.commit(Changes(gone_groups=list(range(41))), {})
    assert store.groups() == []
    assert store.digests() == {}, "compacted ones are not counted among those that are kept"
    while store.unswept:
        left = {ordinal for (ordinal,) in store.database.execute("SELECT ordinal FROM payloads")}
        slices.append(before - left)
        before = left
        if len(slices) == 3:
            store.close()
            store = Store(path)
        else:
            store.commit(Changes(), {})
    assert all(sum(sizes[ordinal] for ordinal in part) <= 10_000 or len(part) == 1 for part in slices)
    assert max(map(len, slices)) <= 8
    assert store.database.execute("SELECT COUNT(*) FROM payloads").fetchone() == (0,)
    store.close()


def test_a_payload_that_comes_and_folds_in_one_commit_does_not_stay(path: Path) -> None:
    """The last group of an evaluation settles, the evaluation is written down, and its rows go, all in one round."""
    store = Store(path)
    store.commit(Changes(gone_groups=[-1]), {-1: ("d", [b"x"])})
    while store.unswept:
        store.commit(Changes(), {})
    assert store.database.execute("SELECT COUNT(*) FROM payloads").fetchone() == (0,)
    store.close()


def test_deleting_folded_payloads_does_not_write_them_through_the_wal(path: Path) -> None:
    """Zeroing what is deleted (`secure_delete`, the default of some builds) would write each page once more."""
    store = Store(path)
    blob = os.urandom(400_000)
    for first in range(0, 60, 10):
        store.commit(Changes(), {ordinal: ("d", [blob]) for ordinal in range(first, first + 10)})
    store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.commit(Changes(gone_groups=list(range(60))), {})
    while store.unswept:
        store.commit(Changes(), {})
    assert path.with_name(path.name + "-wal").stat().st_size < 2_000_000
    store.close()


def test_a_missing_payload_is_named() -> None:
    """Which ordinal, of which ledger."""
    with pytest.raises(ProtocolError, match=r":memory: has no payload of ordinal 7"):
        Store(":memory:").payloads([7])


def test_values_are_any_json_and_absent_ones_are_none() -> None:
    """By key or all at once."""
    store = Store(":memory:")
    store.commit(Changes(values={"a": {"b": [1, None, "x"]}}), {})
    assert store.value("a") == {"b": [1, None, "x"]}
    assert store.value("c") is None
    assert set(store.values()) == {"run", "term", "a"}


# --- counts ----------------------------------------------------------------------------------------------------------


def test_rows_are_counted_by_purpose_state_and_reason() -> None:
    """By the database, from the rows alone."""
    rows = [
        a_group(0),
        a_group(1, state=GroupState.DROPPED, reason="stale"),
        a_group(2, state=GroupState.DROPPED, reason="poison"),
        a_group(3, state=GroupState.DROPPED, reason="poison"),
        a_group(-1, state=GroupState.SETTLED),
    ]
    store = Store(":memory:")
    store.commit(Changes(groups={row.ordinal: row for row in rows}), {})
    assert store.counts() == {
        ("train", "issued", None): 1,
        ("train", "dropped", "stale"): 1,
        ("train", "dropped", "poison"): 2,
        ("eval", "settled", None): 1,
    }


def test_ordinals_trained_twice_are_counted_from_the_steps() -> None:
    """In two steps, in three, and twice in one: three ordinals."""
    store = Store(":memory:")
    steps = [a_step(1, 0, 1), a_step(2, 1, 2), a_step(3, 1, 3, 3), a_step(4, 2)]
    store.commit(Changes(steps=steps[:1]), {})
    assert store.trained_twice() == 0
    store.commit(Changes(steps=steps[1:]), {})
    assert store.trained_twice() == 3


def test_an_empty_round_changes_nothing() -> None:
    """Changes are false when there are none, so the packer need not commit."""
    assert not Changes()
    assert Changes(values={"a": 1})
    assert Changes(pools={"a": "easy"})
    assert Changes(steps=[a_step(1)])
    assert Changes(groups={0: a_group()})
