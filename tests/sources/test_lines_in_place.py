"""Files of lines read in place: compressed or not, each line once, and nothing that fails in the middle of an epoch."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from lightning_stream import StreamingDataset
from lightning_stream.convert import convert

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress, ".xz": lzma.compress
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


def text(numbers: range) -> bytes:
    return "".join(json.dumps({"x": k, "s": "ab" * 40}) + "\n" for k in numbers).encode()


def values(uri: Path | str, name: str = "x") -> list[Any]:
    dataset = StreamingDataset(remote=str(uri))
    return [dataset[k][name] for k in range(dataset.size)]


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("num_rows", [1, 5, 3000])
def test_compressed_lines_are_read_in_place(ending: str, num_rows: int, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / f"a.jsonl{ending}").write_bytes(PACKERS[ending](text(range(num_rows))))
    (folder / f"b.jsonl{ending}").write_bytes(PACKERS[ending](text(range(num_rows, 2 * num_rows)).rstrip()))
    (folder / f"c.jsonl{ending}").write_bytes(PACKERS[ending](b""))
    assert values(folder) == list(range(2 * num_rows))
    done = convert(folder, tmp_path / "out", num_workers=1)
    assert done.keeps_order
    assert values(done.uri) == list(range(2 * num_rows))


def test_parts_that_are_compressed_one_after_another_are_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for ending in (".gz", ".zst", ".bz2", ".xz"):
        parts = [PACKERS[ending](text(range(k, k + 10))) for k in range(0, 30, 10)]
        (folder / f"{ending[1:]}.jsonl{ending}").write_bytes(b"".join(parts))
    assert values(folder) == 4 * list(range(30))


@pytest.mark.parametrize("ending", PACKERS)
def test_a_compressed_array_of_objects_is_read_in_place(ending: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / f"a.json{ending}").write_bytes(PACKERS[ending](json.dumps([{"x": k} for k in range(100)]).encode()))
    assert values(folder) == list(range(100))
