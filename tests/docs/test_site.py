"""The site of mkdocs is built without a warning, and shows each page."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_all_pages(tmp_path: Path) -> None:
    """`make site`, strictly: broken links, missing anchors and pages outside of the navigation are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in pages("docs/"):
        path = page.path.removeprefix("docs/").removesuffix(".md")
        file = "index.html" if path.endswith("index") else f"{Path(path).name}/index.html"
        assert (tmp_path / "site" / Path(path).parent / file).is_file(), page.path
    for picture in (ROOT / "docs" / "images").glob("*.svg"):
        assert (tmp_path / "site/images" / picture.name).is_file()


def test_links_that_leave_the_pages_become_text() -> None:
    """Links between pages stay as they are."""
    import importlib.util
    from types import SimpleNamespace

    spec = importlib.util.spec_from_file_location("site_links", ROOT / "docs/site_links.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/engines.md"))
    links = {
        "[a](../tutorial.md#x)": "[a](../tutorial.md#x)",
        "[examples/judge](../../examples/judge)": "`examples/judge`",
        "[code](../../bus/data.py#L1)": "code (`bus/data.py`)",
        "![i](../images/up.svg)": "![i](../images/up.svg)",
    }
    for link, expected in links.items():
        assert hook.on_page_markdown(link, page=page, config=None, files=None) == expected
