"""The fenced code blocks of the README and of the documentation's pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, its title and its text."""

    line: int
    language: str
    title: str
    text: str

    @property
    def is_skipped(self) -> bool:
        return self.title.startswith("Not run by the tests: ")


def blocks_of(page: str) -> list[Block]:
    lines = (ROOT / page).read_text().splitlines()
    found, start = [], None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        match = re.fullmatch(r'\s*```(\w+)(?: title="([^"]*)")?', lines[start])
        assert match, f"{page}:{start + 1}: a block names its language, and at most a title: {lines[start]}"
        indent = len(lines[start]) - len(lines[start].lstrip())
        text = "".join(f"{one[indent:]}\n" for one in lines[start + 1 : number])
        found.append(Block(start + 1, match[1], match[2] or "", text))
        start = None
    assert start is None, f"{page}: the last block does not end"
    return found
