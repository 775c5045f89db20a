"""What the wheel brings beside the code exists, and each pattern finds something."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_pattern_of_data_files_finds_files_and_all_pages_are_among_them() -> None:
    """Messages and the schema name pages; whoever has installed the wheel finds them under share/grpo-actors."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [pattern for patterns in tools["data-files"].values() for pattern in patterns]
    found = {pattern: sorted(ROOT.glob(pattern)) for pattern in patterns}
    assert [pattern for pattern, files in found.items() if not files] == []
    pages = {path for files in found.values() for path in files if path.suffix == ".md"}
    assert {path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts} <= pages
    assert all(file.is_file() for files in found.values() for file in files)
