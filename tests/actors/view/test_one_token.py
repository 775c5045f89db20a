"""One token of the quickstart followed from the viewer to the formula."""

import json
import math
from pathlib import Path

import pytest

from actors.ops.screens.watch import config_of
from actors.view.viewed_run import ViewedRun
from tests.actors.view.one_token import RECORDED_GROUPS, STEPS, loss_by_hand, short_quickstart
from tests.actors.view.test_server import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


async def test_the_loss_of_each_token_follows_from_what_the_page_has(tmp_path: Path) -> None:
    """To 1e-5, before and after the average; a group that is not recorded is said to be so."""
    output = short_quickstart(tmp_path)
    config = config_of(output, [])
    viewed = ViewedRun(config, tmp_path / "cache")
    num_tokens, num_moved = 0, 0
    async with served([viewed]) as client:
        for step in range(1, STEPS + 1):
            ordinals = (await client.get(f"runs/0/steps/{step}"))[1]["packing"]["ordinals"]
            for ordinal in ordinals[:RECORDED_GROUPS]:
                for sample in range(config.rollout.group_size):
                    _, rows = await client.get(f"runs/0/groups/{ordinal}/samples/{sample}")
                    trainer = rows["trainer"]
                    assert (trainer["words"], trainer["loss"]) == ("", "surogate")
                    (loss_tokens,) = json.loads(trainer["loss_tokens"])
                    for t in range(len(rows["id"])):
                        shown = {"logp": rows["trainer_logprob"][t], "q": rows["logprob"][t]}
                        shown["advantage"] = rows["advantage"][t]
                        by_hand = 0.0 if rows["rules"][t] else loss_by_hand(shown, trainer["keys"])
                        assert rows["value"][t] == pytest.approx(by_hand, abs=1e-5)
                        assert rows["loss"][t] == pytest.approx(by_hand / loss_tokens, abs=1e-5)
                        assert rows["ratio"][t] == pytest.approx(math.exp(shown["logp"] - shown["q"]), rel=1e-5)
                        num_tokens += 1
                        num_moved += abs(rows["ratio"][t] - 1) > 1e-3 and abs(by_hand) > 0.1
            beyond = (await client.get(f"runs/0/groups/{ordinals[RECORDED_GROUPS]}/samples/0"))[1]
            assert "Set telemetry.token_details to 3 or more" in beyond["trainer"]["words"]
    viewed.close()
    # most tokens have a loss, and off policy their ratio is not 1
    assert num_moved > 10
    assert num_tokens > 100
