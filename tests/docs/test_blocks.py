"""Blocks of code on the pages: YAML is loaded, Python is executed or parsed, commands are commands."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from actors.cli import parse
from schemas.config import RunConfig, check_tree
from tests.docs.pages import ROOT, Block, Page, pages

OTHER_TESTS = ("docs/howto/",)
PAGES = [
    found for found in pages("README", "CONTRIBUTING", "deploy/", "docs/") if not found.path.startswith(OTHER_TESTS)
]
LANGUAGES = {"sh", "yaml", "python", "text", "json"}
EXECUTED = {
    "README.md": "tests/test_examples.py",
    "docs/tutorial.md": "tests/docs/test_tutorial.py",
    "docs/reference/rewards.md": "tests/test_examples.py",
    "docs/reference/losses.md": "tests/test_algorithms_doc.py",
    "docs/reference/advantages.md": "tests/test_algorithms_doc.py",
    "docs/reference/sampling.md": "tests/test_algorithms_doc.py",
    "docs/reference/libraries.md": "tests/test_algorithms_doc.py",
    "docs/reference/files.md": "tests/actors/api/test_run_files.py",
    "docs/reference/agents.md": "tests/ring/test_agents.py",
    "docs/reference/asking.md": "tests/actors/engines/http/test_openai.py",
}
"""Pages with Python, and the test that executes it."""
RUN: dict[str, Any] = {
    "model": {"path": "some/model"},
    "environments": [{"type": "reverse_text"}],
    "reward": {"functions": [{"path": "characters_in_place"}]},
    "trainer": {"max_steps": 1},
}
"""Required keys; a piece of a configuration is merged into them."""
PLACES = {"N": "1", "KIND": "rollout", "PID": "1"}
"""Values for the capitals in commands."""


def _of(language: str) -> list[Any]:
    """Return a parameter for each block of a language: page and block."""
    found = [(page, block) for page in PAGES for block in page.blocks if block.language == language]
    return [pytest.param(page, block, id=f"{page.path}:{block.text.split(chr(10))[0][:40]}") for page, block in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_each_block_has_a_language(page: Page) -> None:
    """A block without a language is checked by no test; output and drawings are `text`."""
    assert {block.language for block in page.blocks} <= LANGUAGES


@pytest.mark.parametrize(("page", "block"), _of("yaml"))
def test_each_yaml_block_is_a_configuration_or_part_of_one(page: Page, block: Block) -> None:
    """Merged section by section into the required keys; configurations of other programs are parsed."""
    tree = yaml.safe_load(block.text) or {}
    if "apiVersion" in tree:
        return
    assert set(tree) <= set(RunConfig.model_fields)
    check_tree(RUN | {name: _merged(RUN.get(name), section) for name, section in tree.items()})


@pytest.mark.parametrize(("page", "block"), _of("python"))
def test_each_python_block_is_executed_by_a_test(page: Page, block: Block) -> None:
    """The test names the page; here the code is compiled, under the page's name."""
    compile(block.text, page.path, "exec")
    name = page.path.rpartition("/")[2].removesuffix(".md")
    assert name in (ROOT / EXECUTED[page.path]).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "block"), _of("sh"))
def test_commands_of_the_project_parse_and_their_overrides_are_keys(page: Page, block: Block) -> None:
    """`actors …` and `make …`; commands of other programs are not looked at."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for words in _commands(block.text):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets
        if words[0] == "actors" and "--version" not in words:
            arguments = [PLACES.get(word, word) for word in words[1:]]
            for override in getattr(parse(arguments), "overrides", []):
                _find(override.partition("=")[0], known="learning_rat=" not in override)


def test_every_test_that_a_page_names_exists() -> None:
    """Pages promise nothing without a test."""
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", tests))
    for page in PAGES:
        named = set(re.findall(r"`(test_\w+)`", page.text))
        assert sorted(named - defined) == [], page.path


def _merged(base: Any, section: Any) -> Any:
    return {**base, **section} if isinstance(base, dict) and isinstance(section, dict) else section


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block, without comments, pipes and what comes behind `&` or `||`."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if line.count('"') % 2 == 0 else []
        for stop in ("|", "||", "&&", "&", ">"):
            words = words[: words.index(stop)] if stop in words else words
        if words:
            yield words


def _find(path: str, known: bool) -> None:
    """Check that a dotted path is a key of the configuration."""
    section: Any = RunConfig
    for name in path.split("."):
        assert (name in section.model_fields) == (known or name != path.split(".")[-1]), path
        if name in section.model_fields:
            section = section.model_fields[name].annotation
