"""Hook of the site: links to files outside of docs/ become plain text, since the site has no copy of these files."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page with each link that leaves docs/ replaced by the words of the link and the path."""
    folder = posixpath.dirname(page.file.src_uri)

    def plain(match: re.Match[str]) -> str:
        words, target = match.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target.partition("#")[0]))
        if path.startswith("docs/"):
            return match[0]
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    return LINK.sub(plain, markdown)
