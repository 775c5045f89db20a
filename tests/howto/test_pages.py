"""Every page of docs/howto: blocks load and run, keys, links, commands and figures are there, and no page is long."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.algorithms.losses.metrics import DENOMINATORS, NON_LINEAR
from actors.cli import main
from actors.packer.record import step_values
from actors.telemetry.metrics import TRAJECTORY_GAUGES
from actors.telemetry.totals import COLUMNS
from schemas.config import check_tree
from tests.actors.learner.steps import random_samples, run_config, scored_group, step_batch
from tests.conftest import ModelFolder
from tests.howto.origins import with_recorders
from tests.howto.pages import CODE, FOLDER, NAMES, Page, check_key, page, pages, printed_by

MAX_WORDS = 900
THEIRS = ("train.yaml", "infer.yaml", "orch.yaml", "gsm8k_grpo.yaml")
"""Titles of YAML blocks of other systems."""
BASE: dict[str, Any] = {
    "model": {"path": "some/model"},
    "environments": [{"type": "reverse_text"}],
    "reward": {"functions": [{"path": "characters_in_place"}]},
    "trainer": {"max_steps": 1},
}
SECTIONS = (
    "model|environments|rollout|reward|packer|trainer|inference|weights|eval|ledger|bus|telemetry|callbacks|push_to_hub|"
    "up|launch|scale"
)


@pytest.fixture(params=NAMES)
def found(request: pytest.FixtureRequest) -> Page:
    """One page."""
    return page(request.param)


def test_the_pages_are_there() -> None:
    """The list that the navigation has."""
    assert NAMES == [
        "areal", "cluster", "custom-loss", "debugging", "environment", "following", "images", "ms-swift",
        "prime-rl", "scaling", "several-machines", "several-runs", "simulate", "surogate", "timeline", "trl", "turns",
        "view", "vllm",
    ]  # fmt: skip


def test_a_page_is_short(found: Page) -> None:
    """Tables aside, code included."""
    assert found.num_words <= MAX_WORDS


def test_every_block_of_yaml_is_a_run_or_part_of_one(found: Page) -> None:
    """Merged into a small one, section by section."""
    for block in found.blocks:
        if block.language == "yaml" and block.title not in THEIRS:
            tree = yaml.safe_load(block.text)
            merged = {
                name: BASE.get(name, {}) | section if isinstance(section, dict) else section
                for name, section in tree.items()
            }
            check_tree(BASE | merged)


def test_every_block_of_python_runs_and_prints_what_it_says(
    found: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the files of the page; a comment behind a print is its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with_recorders(monkeypatch)
    found.write_files(tmp_path)
    (tmp_path / "problems.csv").write_text("question,answer\n7 + 5?,12\n")
    for name in ("rewards", "my_loss"):  # another page's may have been imported
        sys.modules.pop(name, None)
    for block in found.blocks:
        if block.language == "python":
            expected = re.findall(r"^\s*print\(.*\)  # (.*)$", block.text, re.MULTILINE)
            assert printed_by(block.text, {}) == expected


def test_every_key_that_a_page_names_exists(found: Page) -> None:
    """Dotted names that begin with a section, in code marks, and the keys of `inference.engine` in a table of these."""
    named = [name for name in CODE.findall(found.text) if re.fullmatch(rf"({SECTIONS})(\[\])?\.[a-z_.\[\]]+", name)]
    theirs = {name for table in found.tables if table.head[1:] == ["Here", "How"] for row in table.rows
              for name in CODE.findall(row[0])}  # fmt: skip
    for name in {*named} - theirs:
        check_key(name)
    for table in found.tables:
        if table.head[0] == "Key of `inference.engine`":
            for row in table.rows:
                for name in CODE.findall(row[0]):
                    check_key(f"inference.engine.{name}")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere(found: Page) -> None:
    """To a page below docs, and to a heading of it; repository files are named in code marks."""
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", found.text):
        path = (FOLDER / target if target else FOLDER / f"{found.name}.md").resolve()
        assert path.is_relative_to(FOLDER.parent), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), (target, anchor)
    for name in re.findall(r"`((?:deploy|actors|schemas|examples)/[\w./-]+)`", found.text):
        assert (FOLDER.parents[1] / name).exists(), name


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """What a command says of itself."""
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    return capsys.readouterr().out


def test_every_command_of_ours_exists(found: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """With its options, and the kind of actor behind `run`."""
    commands = re.findall(r"\bactors ((?:status|top|[a-z]+)(?: [^\n`&#]*)?)", " ".join(
        block.text for block in found.blocks if block.language == "sh"
    ) + " ".join(name for name in CODE.findall(found.text) if name.startswith("actors ")))  # fmt: skip
    for command in commands:
        name, *words = command.split()
        text = help_of(capsys, name)
        for option in (word for word in words if word.startswith("--")):
            assert option in text, command
        if name == "run" and words[0].islower():
            assert words[0] in text, command


@pytest.fixture(scope="module")
def columns(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The columns of metrics.jsonl: those of a real step, and those that losses may add."""
    from actors.learner.learner import TorchLearner

    config = run_config(model_folder())
    measured = TorchLearner(config).step(step_batch(random_samples()))
    return {*measured, *step_values(1, [scored_group(0)]), *TRAJECTORY_GAUGES, *DENOMINATORS, *NON_LINEAR, *COLUMNS}


def test_every_figure_that_a_page_names_is_in_metrics_jsonl(found: Page, columns: set[str]) -> None:
    """In the tables with that head; the rewards' own columns are named after functions on the page."""
    functions = {f"reward/{name}" for name in re.findall(r"^def (\w+)\(prompts", found.text, re.MULTILINE)}
    tables = [(table, table.head.index("`metrics.jsonl`")) for table in found.tables if "`metrics.jsonl`" in table.head]
    if found.name == "debugging":
        tables.append((found.table("Name", "Healthy", "Otherwise"), 0))
    names = {name for table, column in tables for row in table.rows for name in CODE.findall(row[column])}
    assert names <= columns | functions | {"reward/NAME"}


def test_the_walks_say_where_the_numbers_are() -> None:
    """A table of figures on each of the five."""
    assert [found.name for found in pages() if any("`metrics.jsonl`" in table.head for table in found.tables)] == [
        "areal", "ms-swift", "prime-rl", "surogate", "trl",
    ]  # fmt: skip
