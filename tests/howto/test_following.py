"""docs/howto/following.md: its callback is told events with these names, and its events are all that there are."""

import re
from pathlib import Path

from actors.callbacks.progress import TrainerControl, TrainerState, evaluation_log, step_log
from actors.process.user_code import load_function
from actors.telemetry.metrics import CALLBACK_EVENTS
from tests.howto.pages import CODE, page

PAGE = page("following")


def test_the_callback_of_the_page_reads_what_it_is_told(tmp_path: Path, capsys) -> None:
    """Both methods, with logs as the files of a run give them."""
    PAGE.write_files(tmp_path)
    callback = load_function(f"{tmp_path}/my_callbacks.py:Notify", "callbacks.0.path")()
    control, state = TrainerControl(), TrainerState(global_step=4, best_metric=0.5)
    metrics = evaluation_log({"environments": {"here": {"mean_reward": 0.25}}}, "here")
    callback.on_evaluate(None, state, control, metrics=metrics)
    assert capsys.readouterr().out == "step 4: 0.250, best 0.5\n"
    for kl, stops in ((None, False), (1.0, False), (11.0, True)):
        callback.on_log(None, state, control, logs=step_log({"step": 2, "kl": kl}, 0.0, 2))
        assert control.should_training_stop == stops


def test_the_table_names_all_events() -> None:
    """Those that are counted in the metric."""
    [table] = [table for table in PAGE.tables if table.head[0] == "Event"]
    assert [name for row in table.rows for name in CODE.findall(row[0])] == [
        "on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_epoch_begin", "on_epoch_end", "on_evaluate",
        "on_save", "on_train_end",
    ]  # fmt: skip
    assert set(CALLBACK_EVENTS) == set(re.findall(r"`(on_\w+)`", PAGE.text.partition("## Uploads")[0]))
