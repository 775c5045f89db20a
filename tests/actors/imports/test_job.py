"""Each key of the input is reported once, and what the input does not say stays open by name."""

from pathlib import Path

import pytest

from actors.cli import main
from actors.cli.parser import IMPORTED
from actors.imports.command import SYSTEMS, run_yaml
from actors.imports.job import Import, Options, Unreadable
from actors.imports.report import Verdict
from schemas.config.load import check_tree
from schemas.errors import ConfigError

DEFAULTS = {"lr": 1e-6, "batch": 8, "beta": 0.04, "seed": 42}


def job(**given: object) -> Import:
    """Import of the given keys, with the defaults of an invented system."""
    return Import(given, DEFAULTS, "Origin 1.0", Options())


def test_a_renamed_key_and_a_default_of_the_origin_are_written() -> None:
    """The comment tells where a value comes from."""
    one = job(lr=1e-5)
    one.rename("lr", "trainer.learning_rate")
    one.rename("seed", "seed")
    assert one.run.tree == {"seed": 42, "trainer": {"learning_rate": 1e-5}}
    assert [(entry.key, entry.verdict) for entry in one.report.entries] == [("lr", Verdict.RENAMED)]
    assert "seed: 42  # default of Origin 1.0" in one.run.text()


def test_keys_that_decide_together_are_each_reported_once() -> None:
    """A second entry of a key is a fault of the system's module."""
    one = job(batch=16, lr=1e-5)
    one.convert(["batch", "lr"], {"packer.groups_per_step": 2}, "16 ÷ 8 = 2")
    one.convert(["batch"], {"rollout.group_size": 8}, "8")
    assert [entry.key for entry in one.report.entries] == ["batch", "lr"]
    with pytest.raises(AssertionError, match="lr is reported twice"):
        one.rename("lr", "trainer.learning_rate")


def test_a_key_that_nobody_asked_for_is_refused_with_the_name_that_was_meant() -> None:
    """A misspelt key is not lost."""
    one = job(batsh=3, lr=1e-5)
    one.rename("lr", "trainer.learning_rate")
    one.finish(["batch"])
    (entry,) = one.report.of(Verdict.REFUSED)
    assert entry.key == "batsh"
    assert "did you mean batch?" in entry.text


def test_a_key_without_counterpart_is_refused_only_where_it_has_an_effect() -> None:
    """The origin's own default may be without counterpart as well."""
    one = job(beta=0.0)
    one.refuse_unless("beta", (0.0, None), "no KL here")
    assert one.report.entries[0].verdict is Verdict.IRRELEVANT
    default = job()
    default.refuse_unless("beta", (0.0, None), "no KL here")
    assert default.report.notes == ["beta is 0.04 by default: no KL here"]
    assert not default.report.entries
    given = job(beta=0.1)
    given.refuse_unless("beta", (0.0, None), "no KL here", "leave it out")
    assert given.report.entries[0].text == "no KL here; leave it out"


def test_what_the_input_does_not_say_is_refused_by_name() -> None:
    """All missing values at once, and nothing else about the file."""
    one = job()
    one.ask("trainer.max_steps", "rows of the training data; --rows N")
    one.run.set("reward.functions.0.weight", 1.0)
    one.ask("reward.functions.0.path", "reward function; --reward FILE.py:F")
    with pytest.raises(ConfigError) as error:
        check_tree(one.run.tree)
    assert list(error.value.problems) == [
        "reward.functions.0.path: is missing: reward function; --reward FILE.py:F",
        "trainer.max_steps: is missing: rows of the training data; --rows N",
    ]


def test_the_file_has_the_report_as_comments() -> None:
    """Each key stands in one comment at the top."""
    one = job(lr=1e-5, unknown=1)
    one.convert("lr", {"trainer.learning_rate": 1e-5}, "1e-05 unchanged")
    one.ask("trainer.max_steps", "rows")
    one.note("the origin shuffles otherwise")
    one.finish()
    text = run_yaml(one, [])
    comments = [line for line in text.splitlines() if line.startswith("#")]
    for words in ("lr=1e-05 → trainer.learning_rate", "unknown=1", "trainer.max_steps: rows", "shuffles otherwise"):
        assert sum(words in line for line in comments) == 1


@pytest.mark.parametrize("value", [1e-5, 3, 0.1, 1e9, "a: b", "yes", None, True, ["q"], {"a": 1}, "line\nline", "1e-5"])
def test_values_are_read_back_as_they_were_written(value: object) -> None:
    """As the loader of run.yaml reads the line."""
    one = job()
    one.run.set("model.lora.alpha", value)
    assert one.run.tree["model"]["lora"]["alpha"] == value


@pytest.mark.parametrize("system", IMPORTED)
def test_each_system_of_the_command_line_answers(
    system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With words about a file that does not exist; a system without a module would be a traceback."""
    assert set(IMPORTED) == set(SYSTEMS)
    assert main(["import", system, str(tmp_path / "none.toml")]) == 2
    assert "none.toml: can't be read" in capsys.readouterr().err


def test_a_value_that_only_a_run_would_give_is_asked_for() -> None:
    """The key is reported as refused, and each key of run.yaml that follows from it stays open."""
    one = job(lr=Unreadable("args.lr"), batch=Unreadable("int(os.environ['B'])"), seed=Unreadable("args.seed"))
    one.rename("lr", "trainer.learning_rate")
    one.convert(["batch", "beta"], {"packer.groups_per_step": one.value("batch")}, "8")
    one.irrelevant("seed", "no seed here")
    assert [(entry.key, entry.value, entry.verdict) for entry in one.report.entries] == [
        ("lr", "args.lr", Verdict.REFUSED),
        ("batch", "int(os.environ['B'])", Verdict.REFUSED),
        ("seed", "args.seed", Verdict.IRRELEVANT),
    ]
    assert [question.target for question in one.report.questions] == ["trainer.learning_rate", "packer.groups_per_step"]
    assert "--lr VALUE" in one.report.questions[0].text
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate: is missing"):
        check_tree(one.run.tree)
