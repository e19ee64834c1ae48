"""A shuffle is one permutation of the whole source, the same whoever writes it, in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.convert import convert
from lightning_stream.convert.spill import Buckets, SpillWriter, bucket_rows

PLAIN: dict[str, Any] = {"compression": None, "num_workers": 1}


@pytest.fixture
def sorted_rows(tmp_path: Path) -> Path:
    """4,000 rows that lie sorted by class."""
    rows = [{"k": k, "label": k // 400, "text": "x" * (k % 7)} for k in range(4000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def test_every_row_comes_once_and_classes_are_mixed(sorted_rows: Path, tmp_path: Path, samples_of: Any) -> None:
    convert(sorted_rows, tmp_path / "out", **PLAIN, shuffle=True, partition_bytes="20kb")
    samples = samples_of(tmp_path / "out")
    assert sorted(sample["k"] for sample in samples) == list(range(4000))
    assert all(sample["label"] == sample["k"] // 400 and len(sample["text"]) == sample["k"] % 7 for sample in samples)
    labels = np.array([sample["label"] for sample in samples]).reshape(20, 200)
    assert all(len(set(block.tolist())) == 10 for block in labels)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["statistics"]["k"] == {"min": 0, "max": 3999}
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "out"}


def test_the_seed_decides_the_order_and_processes_do_not(sorted_rows: Path, tmp_path: Path, files_of: Any) -> None:
    for name, seed, count in (("a", 0, 1), ("b", 0, 2), ("c", 1, 1)):
        convert(
            sorted_rows,
            tmp_path / name,
            shuffle=True,
            seed=seed,
            num_workers=count,
            partition_bytes="60kb",
            val_fraction=0.2,
        )
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") != files_of(tmp_path / "c")


def test_an_image_folder_is_shuffled_by_its_listing(tmp_path: Path, samples_of: Any) -> None:
    for k in range(60):
        path = tmp_path / "in" / f"c{k // 20}" / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff" + bytes([k]))
    convert(tmp_path / "in", tmp_path / "out", **PLAIN, columns={"label": "int", "name": "str"}, shuffle=True)
    samples = samples_of(tmp_path / "out")
    assert len({sample["name"] for sample in samples}) == 60
    assert len({sample["label"] for sample in samples[:20]}) == 3


def test_a_bucket_holds_its_rows_of_all_runs_in_the_order_of_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_stream.convert.spill._RUN_BYTES", 1000)
    buckets = Buckets(str(tmp_path), 5, seed=3)
    keys: dict[int, int] = {}
    for part in range(3):
        with SpillWriter(buckets, "", part, {"n": "int64"}) as writer:
            for begin in range(0, 500, 100):
                writer.write_batch({"n": np.arange(begin, begin + 100) + 1000 * part})
        writer.finish({})
        keys |= {1000 * part + k: key for k, key in enumerate(buckets.keys(part, 0, 500).tolist())}
    found = []
    for bucket in range(5):
        rows = bucket_rows(buckets, "", 3, bucket)
        assert rows is not None
        found += np.frombuffer(rows.joined(), np.int64).tolist()
    assert found == sorted(keys, key=lambda n: keys[n])
