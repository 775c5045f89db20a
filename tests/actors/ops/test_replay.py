"""Steps that can't be replayed are refused before anything is computed. Replays of runs are in tests/ring."""

from pathlib import Path
from typing import Any

import pytest

from actors.learner.fake import FakeLearner
from actors.ops.replay import replay
from schemas.errors import ConfigError
from tests.ring.harness import ring_config


@pytest.mark.parametrize("model", [{"lora": {"dropout": 0.1}}, {"dropout": True}])
def test_dropout_of_divided_rows_is_not_replayed(model: dict[str, Any], tmp_path: Path) -> None:
    """One process draws other numbers than the ranks did, which would look like a damaged file."""
    trainer = {"max_steps": 1, "num_ranks": 2, "context_parallel": 2}
    config = ring_config(tmp_path, model={"path": "fake"} | model, trainer=trainer)
    with pytest.raises(ConfigError, match=r"step 1 can't be replayed: .*dropout"):
        replay(config, 1, FakeLearner())
