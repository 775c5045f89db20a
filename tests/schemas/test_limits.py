"""The table of limits: one place, and the page that shows it."""

from pathlib import Path

from schemas import limits

PAGE = Path(__file__).parent.parent.parent / "docs/reference/security.md"


def test_the_page_on_security_shows_the_table_of_limits_as_it_is() -> None:
    """A limit that changes changes on the page: `python -c "from schemas import limits; print(limits.describe())"`."""
    assert f"```text\n{limits.describe()}\n```" in PAGE.read_text(encoding="utf-8")


def test_every_limit_of_the_table_is_told_in_its_unit() -> None:
    """Sizes that are whole mebibytes or kibibytes are told so, others as they are."""
    told = limits.describe()
    for text in ("64 MiB", "512 KiB", "4096 keys", "320 frames", "200 bytes"):
        assert text in told
