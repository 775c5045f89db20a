"""The documents as data: tracked files, pages, their blocks of code and headings."""

import functools
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r'^ *```(\w*)(?: title="([^"]+)")?\n(.*?)^ *```$', re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Code between fences.

    Args:
        language: word behind the fence; empty for none.
        title: name of the file that the block is; empty for a fragment.
    """

    language: str
    title: str
    text: str


@dataclass(frozen=True)
class Page:
    """Markdown document; `path` is relative to the root of the repository."""

    path: str
    text: str

    @property
    def blocks(self) -> list[Block]:
        """All blocks, in order."""
        return [Block(*found) for found in FENCE.findall(self.text)]

    def code(self, language: str) -> list[str]:
        """Return the texts of the blocks of a language, in order."""
        return [block.text for block in self.blocks if block.language == language]

    @property
    def prose(self) -> str:
        """Text without blocks of code, inline code, targets of links, comments and generated tables of keys."""
        text = re.sub(r"<!-- keys .*?<!-- end -->", "", FENCE.sub("", self.text), flags=re.DOTALL)
        return re.sub(r"<!--.*?-->|``.*?``|`[^`\n]*`|\]\([^)]*\)", "", text)

    @property
    def anchors(self) -> set[str]:
        """Anchors of the headings, as GitHub and the site make them."""
        found, seen = set(), Counter[str]()
        for heading in HEADING.findall(FENCE.sub("", self.text)):
            words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
            anchor = words.replace(" ", "-")
            found.add(anchor + (f"_{seen[anchor]}" if seen[anchor] else ""))
            seen[anchor] += 1
        return found


@functools.cache
def tracked() -> frozenset[str]:
    """Return the paths of all files of the repository that git does not ignore, and of their folders."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    files = [file for file in files if (ROOT / file).is_file()]
    folders = {str(parent) for file in files for parent in Path(file).parents}
    return frozenset([*files, *folders])


def pages(*starts: str) -> list[Page]:
    """Return the Markdown files below these paths, or all of the repository."""
    found = [path for path in sorted(tracked()) if path.endswith(".md") and path.startswith(starts or ("",))]
    return [Page(path, (ROOT / path).read_text(encoding="utf-8")) for path in found]


def page(path: str) -> Page:
    """Return one page."""
    return Page(path, (ROOT / path).read_text(encoding="utf-8"))
