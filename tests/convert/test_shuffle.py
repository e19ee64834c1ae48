"""A shuffle is one permutation of the whole source, the same for any number of processes, in bounded memory."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream.convert import convert
from lightning_stream.convert.shuffle import GatherTask, row_keys
from lightning_stream.convert.task import PartitionTask
from lightning_stream.errors import UnavailableError
from lightning_stream.shared_files import FileLock, no_locks
from lightning_stream.sources.base import partitions_of
from lightning_stream.sources.choose import open_source

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


_began, _go_on = threading.Event(), threading.Event()


def _waits_in_its_first_row(row: dict[str, Any]) -> dict[str, Any]:
    if not _began.is_set():
        _began.set()
        assert _go_on.wait(60)
    return row


def test_two_conversions_of_one_source_share_no_temporary_files(
    sorted_rows: Path, tmp_path: Path, files_of: Any
) -> None:
    settings = {**PLAIN, "shuffle": True, "tmp_dir": str(tmp_path / "tmp"), "transform": _waits_in_its_first_row}
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(convert, sorted_rows, tmp_path / "a", **settings)
        assert _began.wait(60)
        convert(sorted_rows, tmp_path / "b", **settings)
        _go_on.set()
        assert first.result(60).num_samples == {"": 4000}
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_temporary_folder_that_somebody_else_made_is_refused(
    sorted_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="must be a folder of this user"):
        convert(sorted_rows, tmp_path / "out", **PLAIN, shuffle=True, tmp_dir=str(tmp_path / "tmp"))


def test_an_image_folder_is_shuffled_by_its_listing(tmp_path: Path, samples_of: Any) -> None:
    for k in range(60):
        path = tmp_path / "in" / f"c{k // 20}" / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff" + bytes([k]) + b"\xff\xd9")
    convert(tmp_path / "in", tmp_path / "out", **PLAIN, columns={"label": "int", "name": "str"}, shuffle=True)
    samples = samples_of(tmp_path / "out")
    assert len({sample["name"] for sample in samples}) == 60
    assert len({sample["label"] for sample in samples[:20]}) == 3


def test_rows_are_in_the_order_of_their_keys_over_several_runs_and_buckets(
    tmp_path: Path, samples_of: Any, sorted_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_stream.convert.shuffle._RUN_BYTES", 2000)
    monkeypatch.setattr("lightning_stream.convert.shuffle._BUCKET_BYTES", 9000)
    convert(sorted_rows, tmp_path / "out", **PLAIN, shuffle=True, seed=5, partition_bytes="30kb")
    starts = np.cumsum([0, *partition_rows(sorted_rows, 30_000)])
    keys = np.concatenate([row_keys(5, k, 0, int(end - begin)) for k, (begin, end) in enumerate(pairwise(starts))])
    assert [sample["k"] for sample in samples_of(tmp_path / "out")] == np.argsort(keys).tolist()


def partition_rows(path: Path, partition_bytes: int) -> list[int]:
    source = open_source(path, None, None, None)
    partitions = partitions_of(source.cut({}, partition_bytes), partition_bytes)
    assert len(partitions) > 3
    read = [source.reader.read(each.splits, {"k": "int64"}) for each in partitions]
    return [sum(len(batch.rows) for batch in batches) for batches in read]


def test_a_partition_may_have_no_row_of_a_split(tmp_path: Path, samples_of: Any) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"k": {k}, "x": "{"x" * 200}"}}\n' for k in range(40)))
    out = tmp_path / "out"
    done = convert(tmp_path / "rows.jsonl", out, **PLAIN, shuffle=True, val_fraction=0.1, partition_bytes=300)
    assert 0 < done.num_samples["val"] < 10  # of some 30 partitions
    found = [sample["k"] for split in ("train", "val") for sample in samples_of(out / split)]
    assert sorted(found) == list(range(40))


def _fails_late(row: dict[str, Any]) -> dict[str, Any]:
    if row["k"] == 3900:
        raise LookupError("no such row")
    return row


@pytest.mark.parametrize("more", [{"num_workers": 1}, {"num_workers": 2}, {"tmp_dir": "tmp"}])
def test_a_conversion_that_fails_leaves_no_temporary_files(
    sorted_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**PLAIN, "shuffle": True, "partition_bytes": "60kb", "transform": _fails_late, **more}
    with pytest.raises(LookupError):
        convert(sorted_rows, tmp_path / "out", **settings)
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.jsonl", "out", "tmp"}
    assert [*tmp_path.glob("tmp/*")] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, UnavailableError])
def test_one_that_was_interrupted_continues_and_another_one_removes_what_it_left(
    sorted_rows: Path,
    tmp_path: Path,
    files_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    def interrupt(*_: Any) -> None:
        raise error

    settings: dict[str, Any] = {**PLAIN, "shuffle": True, "partition_bytes": "60kb"}
    for name in ("out", "other"):
        with monkeypatch.context() as patch:
            patch.setattr(GatherTask, "run", interrupt)
            with pytest.raises(error):
                convert(sorted_rows, tmp_path / name, **settings)
        (left,) = tmp_path.glob(f".{name}.*")
        assert left.is_dir()
    with monkeypatch.context() as patch:
        patch.setattr(PartitionTask, "run", None)
        convert(sorted_rows, tmp_path / "out", **settings)
    convert(sorted_rows, tmp_path / "whole", **settings)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert [*tmp_path.glob(".out*")] == []
    convert(sorted_rows, tmp_path / "other", **PLAIN, seed=1, overwrite=True)
    assert [*tmp_path.glob(".*")] == []


def test_temporary_files_may_be_where_there_are_no_locks(
    sorted_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: uv sync --group test")

    def fail(lock: FileLock) -> bool:
        raise no_locks(lock.path)

    monkeypatch.setattr(FileLock, "try_acquire", fail)
    settings = {**PLAIN, "shuffle": True, "tmp_dir": tmp_path / "not" / "yet"}
    assert convert(sorted_rows, "memory://shuffled-without-locks/out", **settings).total == 4000
    assert [*(tmp_path / "not" / "yet").iterdir()] == []


def test_of_two_conversions_that_are_the_same_one_waits_and_reuses_the_dataset(
    sorted_rows: Path, tmp_path: Path
) -> None:
    _began.clear()
    _go_on.clear()
    pytest.importorskip("fsspec", reason="needs fsspec: uv sync --group test")
    settings = {**PLAIN, "shuffle": True, "tmp_dir": str(tmp_path / "tmp"), "transform": _waits_in_its_first_row}
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(convert, sorted_rows, "memory://shuffled-at-once/out", **settings)
        assert _began.wait(60)
        second = threads.submit(convert, sorted_rows, "memory://shuffled-at-once/out", **settings)
        time.sleep(0.3)
        _go_on.set()
        assert [first.result(60).is_new, second.result(60).is_new] == [True, False]
    assert [*(tmp_path / "tmp").iterdir()] == []
