"""The pictures of docs/reference/screens.md are what the commands show, and its words name keys that there are."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from schemas.config import RunConfig

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs/images"
NAMES = ("up", "top", "status")
KEY = re.compile(r"(?<![\w./-])(up|rollout|reward|packer|trainer|eval|bus|ledger|inference)\.([a-z_]+)(?![\w/]|\.py)")


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location("draw", IMAGES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_what_the_commands_show_today(draw: ModuleType, name: str) -> None:
    """`python docs/images/draw.py` makes these files; each line of the screen stands in its picture, as text."""
    drawn = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == draw.svg(draw.screen(name)), "run: python docs/images/draw.py"
    texts = [
        "".join(text.itertext()) for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert texts == [line for line in draw.screen(name) if line]
    assert f"(../images/{name}.svg)" in (ROOT / "docs/reference/screens.md").read_text(encoding="utf-8")


def test_the_picture_of_status_shows_a_run_that_is_not_healthy(draw: ModuleType) -> None:
    """Its reward actor was frozen; the command's exit code is the last line."""
    lines = draw.screen("status")
    assert (lines[1], lines[-1]) == ("not healthy", "1")
    assert any(line.strip().startswith("reward-0 has not been heard for ") for line in lines)
    assert draw.screen("top")[1].startswith("quickstart  running  step ")


@pytest.mark.parametrize("path", ["docs/reference/screens.md", "actors/ops/screens/limits.py"])
def test_every_key_that_is_advised_exists(path: str) -> None:
    """Advice to change a key that has another name by now would be worse than none."""
    keys = {match.groups() for match in KEY.finditer((ROOT / path).read_text(encoding="utf-8"))}
    assert len(keys) > 8
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    assert [f"{s}.{key}" for s, key in sorted(keys) if key not in sections[s].model_fields] == []
