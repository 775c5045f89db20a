"""Uploads by the process of its own, with the real huggingface_hub and a stand-in for the hub's server."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.uploader.record import lines_of, read_uploads
from tests.actors.uploader.runs import PATIENCE_SECONDS, done, record, saved, start, uploaded
from tests.model_hub import TOKEN, ModelHub, model_hub
from tests.ring.harness import wait_until

MODEL = ["README.md", "config.json", "model.safetensors"]
WHOLE = ["checksums.json", "config.json", "model.safetensors", "trainer/state.json", "witness.json"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ModelHub]:
    """A hub without repositories."""
    with model_hub(tmp_path / "hub") as server:
        yield server


@pytest.mark.slow
def test_the_newest_checkpoint_is_pushed_as_a_model_and_its_token_stays_secret(tmp_path: Path, hub: ModelHub) -> None:
    """One commit with what transformers loads; the token is in no file of the run and not in the log."""
    config = done(tmp_path, 3, 6, hub_private_repo=True)
    code, log = uploaded(config, hub)
    assert code == 0, log
    [commit] = hub.commits("org/model")
    assert (commit.title, sorted(commit.files)) == ("Step 6 of ring", MODEL)
    assert commit.files["model.safetensors"] == (config.output / "checkpoints/step_6/model.safetensors").read_bytes()
    assert hub.repositories["org/model"].visibility == "private"
    assert record(config)["pushed"][0]["commit"] == commit.id
    assert lines_of(read_uploads(config.output)) == ["hub: step 6 is on org/model"]
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "hub" not in path.parts]
    assert not [text for text in (log.encode(), *texts) if TOKEN.encode() in text or b"X-Amz" in text]
    assert list((config.output / "uploads").iterdir()) == []
    # a second process has nothing to do
    assert uploaded(config, hub)[0] == 0
    assert len(hub.commits("org/model")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "titles", "files"),
    [
        ("end", ["Step 6 of ring"], MODEL),
        ("checkpoint", ["Step 6 of ring"], [*MODEL, *(f"last-checkpoint/{name}" for name in WHOLE)]),
        (
            "all_checkpoints",
            ["Step 3 of ring", "Step 6 of ring"],
            [*MODEL, *(f"step_{step}/{name}" for step in (3, 6) for name in WHOLE)],
        ),
    ],
)
def test_strategies_have_the_meaning_of_transformers(
    tmp_path: Path, hub: ModelHub, strategy: str, titles: list[str], files: list[str]
) -> None:
    """The model in the root is the newest one in each case."""
    config = done(tmp_path, 3, 6, hub_strategy=strategy)
    code, log = uploaded(config, hub)
    assert code == 0, log
    assert hub.titles("org/model") == titles
    tree = hub.commits("org/model")[-1].files
    assert sorted(tree) == sorted(files)
    assert tree["model.safetensors"] == (config.output / "checkpoints/step_6/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_branch_is_made_and_a_name_without_an_owner_is_the_users(tmp_path: Path, hub: ModelHub) -> None:
    """With the token of a variable of another name, and every checkpoint."""
    config = done(tmp_path, 3, 6, hub_model_id="mine", hub_revision="trial", hub_always_push=True, token_env="MY_TOKEN")
    code, log = uploaded(config, hub, token="of_somebody_else")
    assert code == 0, log
    assert hub.titles("me/mine", "trial") == ["Step 3 of ring", "Step 6 of ring"]
    assert hub.titles("me/mine") == []
    assert record(config)["repository"] == "me/mine@trial"


@pytest.mark.slow
def test_a_token_that_the_hub_refuses_is_said_in_words_and_tried_once(tmp_path: Path, hub: ModelHub) -> None:
    """401 and 403; with a better token the same command pushes."""
    config = done(tmp_path, 3)
    code, log = uploaded(config, hub, token="hf_wrong")
    assert code == 0, "the run is done all the same"
    words = f"{hub.url} does not let this token write to org/model (401): set HF_TOKEN, or push_to_hub.token_env"
    assert record(config)["unpushed"] == {"3": words}
    assert log.count("checkpoint not pushed") == 1
    assert "hf_wrong" not in log
    assert lines_of(read_uploads(config.output)) == [
        f"hub: step 3 is NOT pushed: {words}",
        "hub: the same command pushes what is missing",
    ]
    hub.forbidden = True
    _, log = uploaded(config, hub)
    assert "may not write to org/model (403): it needs write access" in log
    hub.forbidden = False
    assert uploaded(config, hub)[0] == 0
    assert record(config)["unpushed"] == {}
    assert hub.titles("org/model") == ["Step 3 of ring"]


@pytest.mark.slow
def test_a_hub_that_fails_is_asked_again_up_to_a_limit(tmp_path: Path, hub: ModelHub) -> None:
    """500 twice and then success; 500 always: given up with the words, until the next start."""
    config = done(tmp_path, 3, max_attempts=3)
    hub.failures = [500, 503]
    code, log = uploaded(config, hub)
    assert code == 0, log
    assert log.count("checkpoint not pushed; training goes on") == 2
    assert hub.titles("org/model") == ["Step 3 of ring"]
    saved(config.output, 6)
    hub.failures = [500] * 3
    code, log = uploaded(config, hub)
    assert code == 0, log
    assert f"{hub.url} answers 500 for org/model" in record(config)["unpushed"]["6"]
    assert log.count("checkpoint not pushed; training goes on") == 3
    assert uploaded(config, hub)[0] == 0
    assert hub.titles("org/model") == ["Step 3 of ring", "Step 6 of ring"]


def test_a_hub_that_is_not_there_is_said(tmp_path: Path, hub: ModelHub) -> None:
    """No server at the address."""
    config = done(tmp_path, 3, max_attempts=1)
    hub.server_close()
    _, log = uploaded(config, hub)
    assert record(config)["unpushed"] == {"3": f"{hub.url} can't be reached"}, log


@pytest.mark.slow
@pytest.mark.parametrize("hub_strategy", ["every_save", "all_checkpoints"])
def test_a_process_killed_after_its_commit_pushes_nothing_twice(
    tmp_path: Path, hub: ModelHub, hub_strategy: str
) -> None:
    """kill -9 between the commit and its answer: the next process finds the commit, and pushes what is missing."""
    config = done(tmp_path, 3, 6, hub_strategy=hub_strategy)
    hub.loses_answers = True
    process = start(config, hub)
    wait_until(lambda: hub.commits("org/model"), "the commit")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_SECONDS)
    hub.loses_answers = False
    assert record(config)["pushed"] == []
    code, log = uploaded(config, hub)
    assert code == 0, log
    titles = ["Step 6 of ring"] if hub_strategy == "every_save" else ["Step 3 of ring", "Step 6 of ring"]
    assert hub.titles("org/model") == titles
    assert [one["commit"] for one in record(config)["pushed"]] == [commit.id for commit in hub.commits("org/model")]


@pytest.mark.slow
def test_a_push_without_an_answer_ends_its_process_and_the_next_one_looks(tmp_path: Path, hub: ModelHub) -> None:
    """Exit code 1, for the supervisor to start a new one; the commit is there, and is not repeated."""
    config = done(tmp_path, 3, attempt_timeout=3.0)
    hub.loses_answers = True
    code, log = uploaded(config, hub)
    assert code == 1
    assert "(push_to_hub.attempt_timeout)" in record(config)["unpushed"]["3"], log
    hub.loses_answers = False
    assert uploaded(config, hub)[0] == 0
    assert hub.titles("org/model") == ["Step 3 of ring"]
    assert record(config)["unpushed"] == {}


@pytest.mark.slow
def test_a_lost_record_is_found_again_on_the_hub(tmp_path: Path, hub: ModelHub) -> None:
    """Commits carry the chain of their checkpoint."""
    config = done(tmp_path, 3, 6, hub_strategy="all_checkpoints")
    assert uploaded(config, hub)[0] == 0
    (config.output / "uploads.json").write_text("{")
    code, log = uploaded(config, hub)
    assert code == 0, log
    assert "uploads.json can't be read" in log
    assert hub.titles("org/model") == ["Step 3 of ring", "Step 6 of ring"]


@pytest.mark.slow
def test_a_checkpoint_that_was_removed_before_its_push_is_said(tmp_path: Path, hub: ModelHub) -> None:
    """Where each one is to be pushed; the others are."""
    config = done(tmp_path, 3, hub_strategy="all_checkpoints")
    saved(config.output, 6, keep_last=1)
    code, log = uploaded(config, hub)
    assert code == 0, log
    assert hub.titles("org/model") == ["Step 6 of ring"]
    assert "removed before it was pushed; raise trainer.checkpoint.keep_last" in log
    last = lines_of(read_uploads(config.output))[-1]
    assert last == "hub: NOT pushed, since removed before (trainer.checkpoint.keep_last): step 3"


@pytest.mark.slow
def test_steps_of_a_new_history_are_pushed_over_those_given_up(tmp_path: Path, hub: ModelHub) -> None:
    """The run went back to step 3: the model in the root is the living one, though an older step."""
    config = done(tmp_path, 3, 6, hub_always_push=True)
    assert uploaded(config, hub)[0] == 0
    (config.output / "checkpoints" / "witness" / "step_6.json").unlink()
    saved(config.output, 5, history="b")
    assert uploaded(config, hub)[0] == 0
    assert hub.titles("org/model") == ["Step 3 of ring", "Step 6 of ring", "Step 5 of ring"]
    tree = hub.commits("org/model")[-1].files
    assert tree["model.safetensors"] == (config.output / "checkpoints/step_5/model.safetensors").read_bytes()
