"""docs/howto/simulate.md: its commands print what the page says, and its table has all figures."""

import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from actors.cli import main
from actors.cli.parser import make_parser
from actors.simulate.models import Times, parse_setting
from tests.howto.pages import page
from tests.marks import first_of

PAGE = page("simulate")
PRINTED = [
    (command.text, text.text)
    for command, text in zip(PAGE.blocks, PAGE.blocks[1:], strict=False)
    if (command.language, text.language) == ("sh", "text")
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "printed"), first_of(PRINTED))
def test_a_command_prints_what_the_page_says(
    command: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last digit, since a simulation is a function of its inputs; `…` stands for lines left out."""
    monkeypatch.chdir(tmp_path)
    PAGE.write_files(tmp_path)
    assert main(shlex.split(command)[1:]) == 0
    text, _, note = capsys.readouterr().out.partition("\nnote: ")
    pattern = ".*".join(map(re.escape, printed.strip().split("…")))
    assert re.fullmatch(pattern, text.strip(), re.DOTALL)
    assert "--like RUN" in note
    picture = re.search(r"--picture (\S+)", command)
    assert picture is None or (tmp_path / picture.group(1)).is_file()


def test_three_blocks_are_printed() -> None:
    """The report, a sweep, a split."""
    assert len(PRINTED) == 3


def test_all_commands_parse() -> None:
    """Also those that need a run of your own."""
    commands = [block.text for block in PAGE.blocks if block.language == "sh"]
    assert len(commands) == 5
    for command in commands:
        make_parser().parse_args(shlex.split(command)[1:])


def test_the_table_has_each_figure_with_its_default() -> None:
    """In the order of the code."""
    rows = PAGE.table("Figure", "Default", "Meaning").rows
    figures = {row[0].strip("`"): row[1] for row in rows}
    assert list(figures) == list(asdict(Times()))
    for name, value in asdict(Times()).items():
        assert float(figures[name].replace("no limit", "inf")) == value
        parse_setting(f"{name}=1")
