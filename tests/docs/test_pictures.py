"""The curves on the pages are drawn from the values beside them. `tests/test_screens.py` holds the terminal screens."""

import importlib.util
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.docs.pages import ROOT, pages

IMAGES = ROOT / "docs/images"


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    """The script, which is in no package."""
    import sys

    spec = importlib.util.spec_from_file_location("curves", IMAGES / "curves.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["curves"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_curves_are_what_the_script_draws(curves: ModuleType) -> None:
    """`python docs/images/curves.py` writes them; each is XML with a line and a mean for each value."""
    for name, panels in curves.PICTURES.items():
        drawn = (IMAGES / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == curves.svg(name), "run: python docs/images/curves.py"
        lines = list(ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}polyline"))
        assert len(lines) == 2 * sum(len(panel.values) for panel in panels)


def test_every_picture_is_on_a_page() -> None:
    """Nothing is kept that nobody sees."""
    text = "".join(page.text for page in pages("README", "docs/"))
    assert [path.name for path in IMAGES.glob("*.svg") if f"images/{path.name})" not in text] == []
