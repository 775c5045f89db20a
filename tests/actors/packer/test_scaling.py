"""Numbers of processes that the packer wants, from heartbeats of made-up actors."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from actors.packer.progress import Progress
from actors.packer.scaling import Scaling
from tests.actors.ledger.driver import Engine, Reward, Ring, Rollout, Trainer, policy, settings
from tests.ring.harness import SHORT_LEASE, ring_config

SCALE = {"window": 2.0, "inference": {"max": 3, "price": 2.0}, "reward": {"max": 3}}


class Followed(Ring):
    """A driven machine whose engine has work all the time, and what the packer wants of it."""

    def __init__(self, folder: Path, stored: dict[str, int] | None = None, **sections: Any) -> None:
        super().__init__(settings())
        config = ring_config(folder, "inproc", bus=SHORT_LEASE, **{"scale": SCALE, **sections})
        self.scaling, self.progress = Scaling(config, stored or {}), Progress(config, self.machine)
        self.trainer, self.engine = Trainer("trainer-0"), Engine("inference-0", policy=policy(0))
        self.rollout, self.reward = Rollout("rollout-0"), Reward("reward-0")
        self.add(self.trainer, self.engine, self.rollout, self.reward)
        self.engine.busy = 3

    def look(self, times: int) -> bool:
        """Let seconds pass; return whether other numbers were wanted at any of them."""
        found = False
        for _ in range(times):
            self.turn()
            self.now += 1.0
            found |= self.scaling.look(self.now, self.machine, self.progress)
        return found


@pytest.fixture(autouse=True)
def _busy_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the driver report the load that a test gives them."""
    fields = Engine._fields
    monkeypatch.setattr(Engine, "_fields", lambda engine: fields(engine) | {"load": getattr(engine, "busy", 0)})


def test_a_run_whose_trainer_waits_for_a_busy_engine_wants_another(tmp_path: Path) -> None:
    """After two windows; the values have the number, the cost of an hour, and the reason; the log has a line."""
    ring = Followed(tmp_path)
    assert not ring.look(4)
    with capture_logs() as logs:
        assert ring.look(3)
    assert ring.scaling.wanted == {"inference": 2, "reward": 1}
    because = "the trainer waits 100% of the time, and 1.0 of 1 inference are busy"
    assert ring.scaling.values == {"wanted": {"inference": 2, "reward": 1}, "because": because, "cost": 4.0}
    (line,) = [line for line in logs if line["event"] == "scaled"]
    assert (line["role"], line["before"], line["wanted"], line["because"]) == ("inference", 1, 2, because)


def test_nothing_is_wanted_of_a_run_that_says_nothing(tmp_path: Path) -> None:
    """Without a trainer, and with an engine that drains."""
    ring = Followed(tmp_path)
    ring.look(2)
    ring.engine.phase = "draining"
    assert not ring.look(20)
    ring.engine.phase = "running"
    ring.kill(ring.trainer)
    assert not ring.look(20)


def test_a_run_starts_from_the_processes_that_are_there(tmp_path: Path) -> None:
    """As on a cluster, whose numbers `up` does not know; a later packer from what the last one wanted."""
    ring = Followed(tmp_path)
    ring.add(Reward("reward-1"))
    ring.look(2)
    assert ring.scaling.wanted == {"inference": 1, "reward": 2}
    again = Followed(tmp_path, stored={"inference": 3, "reward": 2})
    again.look(2)
    assert again.scaling.wanted == {"inference": 3, "reward": 2}
    less = Followed(tmp_path, stored={"inference": 9, "reward": 2})
    assert less.look(8)
    assert less.scaling.wanted["inference"] == 3


def test_without_scale_nothing_is_looked_at(tmp_path: Path) -> None:
    """No numbers, no reason, no cost."""
    ring = Followed(tmp_path, scale={})
    assert not ring.look(20)
    assert ring.scaling.values == {"wanted": {}, "because": "", "cost": 0}
