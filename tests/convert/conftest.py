"""What a conversion wrote, as tests look at it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import open_shard


@pytest.fixture
def samples_of() -> Callable[[Path], list[dict[str, Any]]]:
    """All samples of an uncompressed dataset, in order."""

    def read(place: Path) -> list[dict[str, Any]]:
        index = Index.from_bytes((place / "index.json").read_bytes(), str(place))
        found = []
        for number in range(len(index)):
            shard = open_shard(index.entry(number), place)
            found += [shard.sample(k) for k in range(shard.num_samples)]
        return found

    return read


@pytest.fixture
def files_of() -> Callable[[Path], dict[str, bytes]]:
    """All files below a folder."""

    def read(place: Path) -> dict[str, bytes]:
        return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}

    return read


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """A file of 3,000 JSON lines."""
    path = tmp_path / "rows.jsonl"
    rows = [{"k": k, "x": k / 4, "text": f"wört {k}", "tokens": list(range(k % 5 + 1))} for k in range(3000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
