"""Links and citations lead to files and headings that exist, and each page of the site is in its navigation."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import FENCE, ROOT, Page, page, pages, tracked

PAGES = pages()
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEXTS = (".py", ".md", ".yml", ".yaml", ".toml", ".sh", ".service", ".target", ".conf", "Makefile", "Containerfile")
CITED = re.compile(
    r"(?<![\w/.{}$-])((?:actors|benchmarks|bus|deploy|docs|examples|grafana|schemas|tests)/[\w./@-]*[\w/]|\w+\.md)\b(?![\w*{$])"
)
"""Path that starts with a folder of the repository, or the name of a Markdown file."""
SECTION = re.compile(r"\b[A-Z]{4,}(?:\.md)? §.*")
"""Numbered section of a document: documents of the repository have none (those of papers have numbers)."""
MAKES_UP = ("tests/docs/test_links.py", "tests/test_house.py")
"""Files that make paths up: this one, and the tests of the script that measures sources."""
CITING = sorted(path for path in tracked() if path.endswith(TEXTS) and path not in MAKES_UP)


@pytest.mark.parametrize("found", PAGES, ids=lambda found: found.path)
def test_every_relative_link_leads_to_a_file_and_a_heading(found: Page) -> None:
    """Files of the repository, with the anchor of a heading where the target is a page."""
    broken = []
    for link in LINK.findall(FENCE.sub("", found.text)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = os.path.normpath(Path(found.path).parent / path) if path else found.path
        if target not in tracked() or (anchor and anchor not in page(target).anchors):
            broken.append(link)
    assert broken == []


def test_the_navigation_names_each_page_of_the_site_once() -> None:
    """A page outside of the navigation is found by chance only."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(_targets(settings["nav"]))
    decisions = [found.path.removeprefix("docs/") for found in pages("docs/internals/decisions/0")]
    expected = [found.path.removeprefix("docs/") for found in pages("docs/")]
    assert sorted(listed + decisions) == sorted(expected)


def test_the_index_of_decisions_lists_all_of_them() -> None:
    """By number, with the title of the page."""
    index = page("docs/internals/decisions/index.md").text
    for found in pages("docs/internals/decisions/0"):
        number, _, title = found.text.splitlines()[0].removeprefix("# ").partition(". ")
        assert f"| {number} | [{title}]({Path(found.path).name}) |" in index
        assert Path(found.path).name.startswith(f"{int(number):04}-")


def test_no_file_cites_a_file_that_is_not_in_the_repository() -> None:
    """Pages, docstrings, comments and configuration files; names in other folders are not checked."""
    there = {*tracked(), *(Path(name).name for name in tracked())}
    for path in CITING:
        text = (ROOT / path).read_text(encoding="utf-8")
        missing = {cited.rstrip("./") for cited in CITED.findall(text)} - there
        assert [name for name in missing if not _exists_from(name, Path(path).parent)] == [], path
        assert SECTION.findall(text) == [], path


def _targets(entries: object) -> Iterator[str]:
    """Yield the pages of a navigation, at any depth."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for value in entries.values():
            yield from _targets(value)
    elif isinstance(entries, list):
        for entry in entries:
            yield from _targets(entry)


def _exists_from(name: str, folder: Path) -> bool:
    """Return whether a path is of a recipe (NAME), the start of others (`tests/test_`), or relative to some folder."""
    if "NAME" in name or any(path.startswith(name) or path.endswith(f"/{name}") for path in tracked()):
        return True
    return any(str(parent / name) in tracked() for parent in (folder, *folder.parents))
