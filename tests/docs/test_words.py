"""Limits of the documents: words of the README, lines of its configuration, entries of the glossary, plain English."""

import re

import pytest

from tests.docs.pages import Page, page, pages

GLOSSARY_ENTRIES = 40
README_WORDS, README_YAML_LINES = 700, 15
RIDDLES = frozenset(["what", "who", "whom", "whose", "whoever", "those", "it", "them", "they", "such"])
RIDDLE_PERCENT = 2.5
"""Of all words. Each stands for a noun that the reader has to find."""
ODD = re.compile(
    r"\b(anew|whoever|whatever|somebody|everybody|nobody|whom|lest|thereof|beside|besides|goes? on|going on|"
    r"be it|such as|those (?:that|who))\b",
    re.IGNORECASE,
)
"""Words and phrases that a reader meets in no other technical text, or that open a riddle."""
OTHERS = ("docs/howto/", "docs/reference/configuration.md", "docs/reference/metrics.md")
"""Pages with limits of their own, and pages generated from docstrings, which `tests.house` measures."""
PAGES = pages("README", "CONTRIBUTING", "CHANGELOG", "benchmarks/", "deploy/", "docs/", "grafana/")
ENGLISH = [found for found in PAGES if not found.path.startswith(OTHERS)]


def test_the_readme_is_short() -> None:
    """Whatever is longer has a page of its own."""
    readme = page("README.md")
    assert len(readme.text.split()) <= README_WORDS
    (configuration,) = readme.code("yaml")
    assert len(configuration.splitlines()) <= README_YAML_LINES


def test_the_glossary_is_short_sorted_and_without_repetition() -> None:
    """Both tables in the order of the alphabet."""
    text = page("docs/glossary.md").text
    tables = re.findall(r"^\| Term \| Meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    terms = [[row.split(" | ")[0].strip("| ") for row in table.splitlines()] for table in tables]
    assert [sorted(found, key=str.lower) for found in terms] == terms
    entries = [term for found in terms for term in found]
    assert len(set(entries)) == len(entries) <= GLOSSARY_ENTRIES


@pytest.mark.parametrize("found", ENGLISH, ids=lambda found: found.path)
def test_pages_are_in_plain_english(found: Page) -> None:
    """Odd words are absent, and words that stand for a noun are few: naming the noun again costs the reader nothing."""
    assert sorted({word.lower() for word in ODD.findall(found.prose)}) == []
    words = re.findall(r"[A-Za-z][A-Za-z'’-]*", found.prose)
    riddles = [word for word in words if word.lower() in RIDDLES]
    assert len(riddles) <= max(5, len(words) * RIDDLE_PERCENT / 100)
