"""docs/reference/configuration.md is written from the configuration classes, with every key."""

import itertools
import re
from pathlib import Path

import pytest
import yaml

from schemas.config import RunConfig, check_tree
from schemas.config.keys import Key, keys_in, paths
from schemas.config.reference import anchor, configuration_page, type_text
from schemas.config.resume import key_classes
from schemas.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs/reference/configuration.md"
TEXT = configuration_page()


def rows(path: str) -> dict[str, list[list[str]]]:
    """The other cells of each key in the table of a section, by the key's name."""
    heading = f"## `{path}`\n" if path else "## Top level\n"
    table = TEXT.split(heading)[1].split("\n## ")[0].split("\n### ")[0].split("| Key |")[1]
    found: dict[str, list[list[str]]] = {}
    for line in table.splitlines()[2:]:
        name, *cells = re.split(r" (?<!\\)\| ", line.strip("| "))
        found.setdefault(name.strip("`"), []).append(cells)
    return found


def test_the_page_is_current() -> None:
    """`make docs` writes it."""
    assert PAGE.read_text(encoding="utf-8") == TEXT


def test_every_key_has_a_row_with_its_resume_class_and_its_document() -> None:
    """A type's key `type` stands above the table."""
    for path, key in paths([RunConfig]):
        section, _, name = path.rpartition(".")
        if name == "type" and len(key_types(path)) > 1:
            assert f"Resume: {key_classes()[path.replace('[]', '')]}." in TEXT.split(f"## `{section}`\n")[1][:200]
            continue
        found = rows(section)[name]
        assert any(key.field.description and cells[-1][:20] == flat(key)[:20] for cells in found), path
        assert {cells[2] for cells in found} <= {key_classes()[path.replace("[]", "")], "see there"}, path
        assert key.is_container or all(cells[2] != "see there" for cells in found), path


def key_types(path: str) -> set[str]:
    """The values that the key `type` has at a path."""
    return {str(key.field.default) for other, key in paths([RunConfig]) if other == path}


def flat(key: Key) -> str:
    """The document of a key as a cell has it."""
    return " ".join((key.field.description or "").split()).replace("|", "\\|")


def test_every_link_leads_to_a_heading_and_headings_differ() -> None:
    """Sections are reached from the list of sections, and from the key that holds them."""
    headings = [anchor(heading) for heading in re.findall(r"^#{2,3} `(.+)`$", TEXT, re.MULTILINE)]
    assert len(headings) == len(set(headings)) > 30
    assert set(re.findall(r"\]\(#(\w+)\)", TEXT)) == set(headings)


def test_a_page_that_a_document_names_is_a_link() -> None:
    """Relative to the page, to a file that is there."""
    pages = set(re.findall(r"\]\(([^#)]+)\)", TEXT))
    assert "docs/" not in TEXT
    assert len(pages) > 2
    assert [page for page in pages if not (PAGE.parent / page).is_file()] == []


def test_the_smallest_run_is_one() -> None:
    """The YAML at the top, as it stands."""
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    config = check_tree(yaml.safe_load(block))
    required = {key.name for key in keys_in([RunConfig]) if key.field.is_required()}
    # rows of a file have no rewards of their own
    assert config.model_fields_set == required | {"reward"}
    with pytest.raises(ConfigError, match=r"reward\.functions: is empty, and \w+ has no rewards of its own"):
        check_tree({key: value for key, value in yaml.safe_load(block).items() if key != "reward"})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("seed", "integer ≥ 0, < 2147483648"),
        ("environments", "non-empty [list of sections](#environments)"),
        ("model.lora", "[section](#modellora) or `null`"),
        ("model.lora.target_modules", "text or list of text"),
        ("rollout.top_p", "number > 0, ≤ 1"),
        ("trainer.loss.dual_clip", "number > 1 or `null`"),
        ("reward.functions[].kwargs", "map of text to any value"),
        ("up.torch_threads", "map of `trainer`, `inference` to integer"),
        ("packer.dynamic_sampling", "`true` or `false`"),
        ("packer.order", "`ordinal`, `arrival`"),
    ],
)
def test_a_type_is_told_with_its_bounds(path: str, said: str) -> None:
    """In words, with the values that a key allows."""
    found = {where: type_text(key, where) for where, key in paths([RunConfig])}
    assert found[path] == said


def test_rows_of_one_key_stand_together() -> None:
    """`epsilon_high` has three meanings, and each names its losses."""
    table = TEXT.split("## `trainer.loss`\n")[1].split("\n### ")[0].split("| Key |")[1]
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert [name for name, _ in itertools.groupby(names)] == list(dict.fromkeys(names))
    assert names.count("epsilon_high") == len(rows("trainer.loss")["epsilon_high"]) == 3
