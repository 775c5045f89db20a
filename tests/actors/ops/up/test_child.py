"""What `actors up` says of its children's logs."""

import json
import os

from actors.ops.up.child import newest_traceback


def test_the_newest_traceback_is_found_with_its_file(tmp_path):
    """Of several actors' logs; lines without one and lines that are no JSON tell nothing."""

    def line(at, **fields):
        return json.dumps({"timestamp": f"2026-01-01T00:00:0{at}Z"} | fields) + "\n"

    (tmp_path / "reward-0.log").write_text(line(1, exception="older") + line(5, exception="Traceback: E") + "plain\n")
    (tmp_path / "rollout-0.log").write_text(line(3, exception="other") + line(9, event="sampled"))
    assert newest_traceback(tmp_path) == (tmp_path / "reward-0.log", "Traceback: E")
    os.utime(tmp_path / "reward-0.log", (1, 1))
    assert newest_traceback(tmp_path, since=1000.0) == (tmp_path / "rollout-0.log", "other")
    assert newest_traceback(tmp_path / "nowhere") is None
