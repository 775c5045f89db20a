"""A damaged ledger: its backup, the words that name it, and the run that goes on from there."""

import contextlib
import json
import re
import shlex

import pytest

from actors.cli import main
from actors.ledger import LedgerReader
from actors.ledger.backup import back_up, backup_paths, chains_of
from actors.ops.resume import restore, rewind
from schemas.errors import ConfigError
from tests.ring.harness import (
    ALL,
    PATIENCE_SECONDS,
    SHORT_LEASE,
    Stand,
    check_promise,
    go_on,
    held_reward,
    ring,
    ring_config,
    steps_recorded,
    wait_until,
)

pytestmark = pytest.mark.slow

OTHERS = [f"{kind}-0" for kind in ALL if kind != "trainer"]


def damage(path):
    """Overwrite pages in the middle of a file, and drop what its WAL would mend."""
    path.with_name(path.name + "-wal").unlink(missing_ok=True)
    whole = bytearray(path.read_bytes())
    for page in range(1, len(whole) // 8192, 2):
        whole[page * 8192 : page * 8192 + 4096] = b"\xa5" * 4096
    path.write_bytes(whole)
    return bytes(whole)


def test_a_run_whose_ledger_was_damaged_goes_on_from_its_backup_as_the_words_say(tmp_path, capsys):
    """The error's command, word for word; the witnesses then hold each ordinal once, and what was later is buried."""
    trainer = {"max_steps": 14, "checkpoint": {"interval": 3}}
    # held by its rewards: a trainer that stands in a step would not report the checkpoint, which the backup follows
    held = held_reward(tmp_path, calls=14)
    config = ring_config(tmp_path, trainer=trainer, eval={"num_prompts": 2}, bus=SHORT_LEASE, reward=held)
    path, checkpoints = config.ledger_path, config.output / "checkpoints"
    backup, _ = backup_paths(path)
    last = Stand(step=11)
    with ring(config) as run:
        run.start(*OTHERS).start("trainer-0", learner=last.learner)
        wait_until(backup.exists, "a backup")
        kept = tmp_path / "kept"
        kept.write_bytes(backup.read_bytes())
        start = min(chains_of(kept)[1])
        go_on(tmp_path)
        wait_until(lambda: (checkpoints / f"step_{start + 6}").is_dir(), "two later checkpoints")
        run["trainer-0"].end()
        last.go_on.set()
    for later in backup_paths(path):
        later.unlink(missing_ok=True)
    kept.replace(backup)  # the newer ones could not be written
    damaged = damage(path)

    with ring(config) as run, pytest.raises(ConfigError, match=r"ledger\.path: .*can't be used") as refused:
        run.start("packer-0")
    assert path.read_bytes() == damaged, "the file is left as it is"
    assert str(backup) in str(refused.value)
    command = re.search(r"run `(actors .*?)`", str(refused.value))[1]
    assert main(shlex.split(command)[1:]) == 0

    said = capsys.readouterr().out
    step = int(re.search(r"goes on from step (\d+)", said)[1])
    assert step >= start
    assert (checkpoints / "dead" / f"step_{start + 6}").is_dir()
    assert (checkpoints / f"step_{step}").is_dir()
    aside = next(found for found in path.parent.glob("ledger.sqlite.damaged-*") if found.suffix != ".lock")
    assert aside.read_bytes() == damaged, "the damaged file is kept"
    with ring(config) as run:
        run.start().wait()
    check_promise(config)


def test_a_backup_holds_all_that_no_checkpoint_has_and_none_of_what_is_folded(tmp_path):
    """Rows and payloads of what is settled, composed or trained; the steps of the checkpoint are counts and a chain."""
    config = ring_config(tmp_path, trainer={"max_steps": 9, "checkpoint": {"interval": 3}}, eval={"num_prompts": 0})
    backup, older = backup_paths(config.ledger_path)
    with ring(config) as run:
        run.start()
        wait_until(older.exists, "two backups")
        run.wait()
    found = LedgerReader.of(backup)
    step = found.value("folded")["step"]
    assert step >= 3
    assert all(row.step is None or row.step > step for row in found.groups())
    assert all(known.step > step for known in found.steps())
    needed = [row.ordinal for row in found.groups() if str(row.state) in ("settled", "composed", "trained")]
    assert len(found.payloads(needed)) == len(needed)
    assert set(found.digests()) == set(needed)
    assert found.value("folded")["trained"] == 3 * step
    found.close()


def test_a_backup_that_can_not_be_written_is_a_warning_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    """The bound on its size stands for any reason; the reason is in the log once, and no half-written file stays."""
    monkeypatch.setattr("actors.ledger.backup.MAX_BYTES", -1)
    config = ring_config(tmp_path, trainer={"max_steps": 8, "checkpoint": {"interval": 2}}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start().wait()
    assert steps_recorded(config) == 8
    assert "no backup of the ledger; the run goes on without a newer one" in capsys.readouterr().out
    assert not list(config.output.glob("*ledger.sqlite.backup*"))


def test_a_rewind_behind_a_restored_backup_is_refused_and_stands_in_the_way_of_nothing(tmp_path):
    """The backup has no groups of before its checkpoint; a stored order to go there would fail each later start."""
    config = ring_config(tmp_path, trainer={"max_steps": 9, "checkpoint": {"interval": 3}}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start().wait()
    assert back_up(config.ledger_path)[0] == 9, "all steps of the backup are compacted"
    restore(config.output)
    with pytest.raises(ConfigError, match=r"--step 6: the ledger has groups from step 10 on only"):
        rewind(config.output, 6)
    assert (config.output / "checkpoints" / "step_9").is_dir()
    config = ring_config(tmp_path, trainer={"max_steps": 12, "checkpoint": {"interval": 3}}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start().wait()
    check_promise(config)


def test_a_restored_run_goes_on_at_once_however_many_gangs_came_after_its_backup(tmp_path):
    """The gangs after the backup have taken the checkpoints: the next one is numbered on, and no trainer is refused."""
    trainer = {"max_steps": 9, "checkpoint": {"interval": 3}}
    held = held_reward(tmp_path, calls=12)
    config = ring_config(tmp_path, trainer=trainer, eval={"num_prompts": 0}, reward=held)
    backup, _ = backup_paths(config.ledger_path)
    kept = tmp_path / "kept"
    stand = Stand(step=5)
    with ring(config) as run:
        run.start(*OTHERS).start("trainer-0", learner=stand.learner)
        wait_until(backup.exists, "a backup")
        kept.write_bytes(backup.read_bytes())
        go_on(tmp_path)
        for _ in range(2):
            assert stand.reached.wait(PATIENCE_SECONDS)
            run["trainer-0"].end()
            stand.go_on.set()
            run["trainer-0"].crash()
            before, stand = _incarnation(config), Stand(step=5)
            run.start("trainer-0", learner=stand.learner)
            wait_until(lambda before=before: _incarnation(config) > before, "a new gang")
        stand.go_on.set()
        run.wait()
    newest = _incarnation(config)
    damage(config.ledger_path)
    kept.replace(backup)
    restore(config.output)
    config = ring_config(tmp_path, trainer=trainer | {"max_steps": 12}, eval={"num_prompts": 0}, reward=held)
    with ring(config) as run:
        run.start().wait()
    check_promise(config)
    assert _incarnation(config) == newest + 1


def _incarnation(config):
    """Return the incarnation that writer.json names."""
    return json.loads((config.output / "checkpoints" / "writer.json").read_text())["incarnation"]


def test_a_second_restore_of_one_backup_is_ahead_of_the_ledger_that_it_replaces(tmp_path):
    """A screen that has heard the packer of the first restore would else be told of a packer that is behind."""
    trainer = {"max_steps": 3, "checkpoint": {"interval": 3}}
    config = ring_config(tmp_path, trainer=trainer, eval={"num_prompts": 0}, bus=SHORT_LEASE)
    with ring(config) as run:
        run.start().wait()
    back_up(config.ledger_path)
    kept = tmp_path / "kept"
    kept.write_bytes(backup_paths(config.ledger_path)[0].read_bytes())
    restore(config.output)
    with ring(config) as run:
        run.start().wait()
    first = _term(config)
    backup_paths(config.ledger_path)[0].write_bytes(kept.read_bytes())
    restore(config.output)
    assert _term(config) > first


def _term(config):
    """Return the term of the newest packer."""
    with contextlib.closing(LedgerReader.of(config.ledger_path)) as ledger:
        return ledger.value("term")


def test_restoring_without_a_good_checkpoint_says_what_is_wrong_with_each_backup(tmp_path):
    """Nothing is moved then."""
    config = ring_config(tmp_path, trainer={"max_steps": 4, "checkpoint": {"interval": 2}}, eval={"num_prompts": 0})
    with ring(config) as run:
        run.start().wait()
        wait_until(backup_paths(config.ledger_path)[0].exists, "a backup")
    for checkpoint in (config.output / "checkpoints").glob("step_*"):
        (checkpoint / "checksums.json").unlink()
    before = config.ledger_path.read_bytes()
    with pytest.raises(ConfigError, match=r"no backup of .* can be used \(.*no good checkpoint from its step"):
        restore(config.output)
    assert config.ledger_path.read_bytes() == before
