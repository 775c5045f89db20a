"""docs/howto/view.md: its filters, keys and figures are those of the pages."""

import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from actors.cli import main
from actors.view import listing, server
from actors.view.access import FEWEST_CHARACTERS, TOKEN_VARIABLE
from actors.view.listing import Query
from tests.howto.pages import CODE, page

PAGE = page("view")
APP = (Path(server.__file__).parent / "static" / "app.js").read_text()
VALUES = {"purpose": "eval"}
"""Values of filters that take no number."""


def test_every_filter_of_the_page_is_one_of_the_server() -> None:
    """And all of these are on the page, apart from the places of pages."""
    table = PAGE.table("In the address", "Keeps")
    names = [name for row in table.rows for name in CODE.findall(row[0])]
    for name in names:
        query = server.query_of(make_mocked_request("GET", f"/?{name}={VALUES.get(name, '1')}"))
        assert query != Query(), name
    asked = set(re.findall(r'\(request, "(\w+)"|text\("(\w+)"', Path(server.__file__).read_text()))
    known = {one or other for one, other in asked} - {"run", "ordinal", "completion", "sample", "step", "points"}
    assert set(names) == known - {"start", "count", "limit", "before"}


def test_every_key_of_the_page_does_something() -> None:
    """The list that `?` shows has them too."""
    table = PAGE.table("Key", "Does")
    keys = {key for row in table.rows for key in CODE.findall(row[0])}
    bound = set(re.findall(r'^\s*["\']?([a-z/?\[\]])["\']?: (?:\(|theme|keys)', APP, re.MULTILINE))
    bound |= set(re.findall(r"(?:^|\s|\{)([a-z]): \(\)", "".join(path.read_text() for path in _scripts())))
    bound |= set(re.findall(r'"([/?\[\]])":', "".join(path.read_text() for path in _scripts())))
    bound |= set(re.findall(r"\b([a-z]): (?:theme|keys)", APP))
    assert keys == bound
    shown = re.findall(r'\["([^"]+)", "', APP.partition("const KEYS = [")[2].partition("];")[0])
    assert keys <= {key for keys in shown for key in keys.split(", ")}


def _scripts() -> list[Path]:
    return sorted((Path(server.__file__).parent / "static").glob("*.js"))


def test_the_figures_of_the_page_are_those_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Port, token, time of an answer, refresh."""
    with pytest.raises(SystemExit):
        main(["view", "--help"])
    told: Any = capsys.readouterr().out
    assert "8420" in told
    assert "ssh -L 8420:127.0.0.1:8420" in PAGE.text
    assert f"`{TOKEN_VARIABLE}` sets one of at least {FEWEST_CHARACTERS} characters" in PAGE.text.replace("\n", " ")
    assert f"at most {listing.SECONDS:g} s" in PAGE.text
    assert "const REFRESH = 3000;" in APP
    assert "every three seconds" in PAGE.text.replace("\n", " ")
