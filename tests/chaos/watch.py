"""What a run under `actors up` does, seen from outside: processes, work done, steps, and the faults that are armed.

Work is what an actor's own /metrics counts, at the edge by which others depend on it: groups sent, groups scored,
tokens sampled, steps trained; of the packer, steps recorded in a term. A count begins at 0 with each process, so work
of a new process, or more of the same one, is work after the fault.
"""

import contextlib
import http.client
import json
import os
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.ops.up.server_pool import name_of
from schemas.config import RunConfig
from tests.chaos.threads import Thread
from tests.ring.harness import children, scrape, steps_recorded

POLL_SECONDS = 0.05
DROPPED = "grpo_bus_dropped_frames_total{"
POOL = "inference-pool-0"
MARK_SECONDS = 60.0
WORK = {
    "rollout": "grpo_rollout_groups_total",
    "reward": "grpo_reward_groups_total",
    "inference": "grpo_inference_generated_tokens_total",
    "trainer": "grpo_trainer_steps_total",
}


class LateError(Exception):
    """Something did not come about in time; the text names it."""


class UpEndedError(Exception):
    """`actors up` has ended in the middle of a run."""


@dataclass(frozen=True)
class Mark:
    """How far an actor was: its process, and what that had done."""

    pid: int
    done: float
    issued: int = 0
    """Ordinals, of the packer: it works again when it admits new groups and records a step."""


class Watch:
    """Looks at one run.

    Args:
        config: of the run; `telemetry.metrics_port` is the first child's.
        order: of the children, by which they get their ports.
        host: of an actor's /metrics.
        faults: folder of armed faults.
    """

    def __init__(self, config: RunConfig, order: list[str], host: Callable[[str], str], faults: Path) -> None:
        self.config, self._order, self._host, self._faults = config, order, host, faults
        self.up: subprocess.Popen[bytes] | None = None
        pool = config.inference.pool
        self._in_pool = {"inference-0": name_of(pool.urls[0])} if pool else {}
        """Names of actors that a pool has started, by the names that they have elsewhere."""

    def wait(self, condition: Callable[[], Any], what: str, timeout: float) -> Any:
        """The condition's first true value.

        Raises:
            LateError: not within the timeout.
            UpEndedError: `actors up` has ended.
        """
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            if self.up is not None and self.up.poll() is not None:
                raise UpEndedError(f"actors up ended with {self.up.returncode}, while waiting for: {what}")
            if time.monotonic() > deadline:
                raise LateError(f"not within {timeout:g} s: {what}")
            time.sleep(POLL_SECONDS)
        return value

    def pid(self, name: str) -> int:
        """Of an actor's process; 0 while there is none."""
        if self.up is None:
            return 0
        started = children(self.up.pid)
        if name in self._in_pool and POOL in started:
            return children(started[POOL]).get(self._in_pool[name], 0)
        return started.get(name, 0)

    def steps(self) -> int:
        """Steps recorded."""
        return steps_recorded(self.config)

    def mark(self, name: str) -> Mark:
        """How far an actor is."""
        if name.startswith("packer"):
            return Mark(self.pid(name), self.steps(), self.issued())
        return self.wait(lambda: self._mark(name), f"/metrics of {name}", MARK_SECONDS)  # type: ignore[no-any-return]

    def has_worked_since(self, name: str, mark: Mark, *, anew: bool) -> bool:
        """Whether an actor has done work after a mark; `anew`: in another process."""
        pid = self.pid(name)
        if not pid or (anew and pid == mark.pid):
            return False
        if name.startswith("packer"):
            return self.steps() > mark.done and self.issued() > mark.issued
        done = self._counted(name)
        return done is not None and done > (mark.done if pid == mark.pid else 0)

    def term(self) -> int:
        """The packer's, as the ledger has it; 0 where there is none yet."""
        return self._ask("SELECT value FROM meta WHERE key = 'term'")

    def issued(self) -> int:
        """The newest ordinal in the ledger."""
        return self._ask("SELECT max(ordinal) FROM groups")

    def _ask(self, query: str) -> int:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{self.config.ledger_path}?mode=ro", uri=True)) as ledger:
                row = ledger.execute(query).fetchone()
                return int(row[0]) if row and row[0] else 0
        except sqlite3.OperationalError:
            return 0

    def _mark(self, name: str) -> Mark | None:
        pid, done = self.pid(name), self._counted(name)
        return None if done is None else Mark(pid, done)

    def _counted(self, name: str) -> float | None:
        """What an actor says of its work; None where it can't be reached."""
        kind = name.partition("-")[0]
        try:
            lines = self._metrics(name).splitlines()
        except (OSError, http.client.HTTPException):  # it may die while it answers
            return None
        if not lines:
            return None
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{WORK[kind]} ", f"{WORK[kind]}{{")))

    def num_foreign(self, name: str) -> float:
        """Messages of other runs that an actor's process has dropped."""
        try:
            lines = self._metrics(name).splitlines()
        except (OSError, http.client.HTTPException):
            return 0.0
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(DROPPED) and 'reason="foreign_run"' in line
        )

    def _metrics(self, name: str) -> str:
        """Of an actor; of a pool, which has none, those of its actor."""
        if name in (POOL, *self._in_pool):
            return scrape(self.config, self._in_pool.get("inference-0", ""))
        port = self.config.telemetry.metrics_port + self._order.index(name)
        with urllib.request.urlopen(f"http://{self._host(name)}:{port}/metrics", timeout=5.0) as answer:
            text: str = answer.read().decode()
            return text

    # --- logs ----------------------------------------------------------------------------------------------------

    def log_size(self, name: str) -> int:
        """Bytes that an actor and those before it have written."""
        path = self._log(name)
        return path.stat().st_size if path.exists() else 0

    def has_said(self, name: str, since: int, thread: Thread) -> bool:
        """Whether the log has the words for an exception in a thread, behind so many bytes."""
        with contextlib.suppress(FileNotFoundError), self._log(name).open("rb") as log:
            log.seek(since)
            for line in log.read().decode("utf-8", "replace").splitlines():
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    if said["event"] in thread.says and said.get("thread", thread.name).startswith(thread.name):
                        return True
        return False

    def _log(self, name: str) -> Path:
        return self.config.output / "logs" / f"{self._in_pool.get(name, name)}.log"

    # --- armed faults --------------------------------------------------------------------------------------------

    def arm(self, actor: str, point: str, harm: str) -> None:
        """Have this actor take a harm (see `actors.process.fault_points`) when it next passes the point."""
        armed = self._faults / f"{self._in_pool.get(actor, actor)}@{point}"
        armed.with_name(f"{armed.name}.hit").unlink(missing_ok=True)
        staged = armed.with_name(f".{armed.name}")
        staged.write_text(harm, encoding="utf-8")
        staged.rename(armed)  # whole or not there

    def hit(self, actor: str, point: str) -> float:
        """When an armed fault was taken, as wall-clock time; 0 while it was not."""
        try:
            return (self._faults / f"{self._in_pool.get(actor, actor)}@{point}.hit").stat().st_ctime
        except FileNotFoundError:
            return 0.0

    def disarm(self) -> None:
        """Nothing is armed any more."""
        for path in self._faults.iterdir():
            path.unlink(missing_ok=True)

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process, if it is still there."""
        assert pid > 0, "0 would be this very process and its group"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
