"""Work that runs in jobs of Spark has the results of this machine, bit for bit, also where a third of its tasks die."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter, StreamingDataset, fingerprint, spark_jobs
from lightning_stream.cli import main
from lightning_stream.convert import add_lengths, convert
from lightning_stream.errors import FormatError, SnapshotMismatch
from lightning_stream.spark import excluded_ids
from lightning_stream.spark_jobs import run_in_spark, sent
from lightning_stream.versions import delete_rows

ROWS, LEAST = 120, 1500


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every third task's process is killed once, when it has done a piece; the folder has a file for each death."""
    folder, worker = tmp_path / "deaths", spark_jobs._worker
    folder.mkdir()

    def fragile(received: Callable[[], Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
        work = worker(received)

        def dying(batches: Iterator[Any]) -> Iterator[Any]:
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            for result in work(batches):
                if context.partitionId() % 3 == 0 and context.attemptNumber() == 0:
                    (folder / f"{context.stageId()}-{context.partitionId()}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield result

        return dying

    monkeypatch.setattr(spark_jobs, "_worker", fragile)
    return folder


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of twelve shards, of which two make a piece of work."""
    for module in ("cli.check._PART_BYTES", "convert.lengths._PARTITION_BYTES", "spark.filter._PART_BYTES"):
        monkeypatch.setattr(f"lightning_stream.{module}", 32 << 10)
    random, columns = np.random.default_rng(7), {"id": "int64", "noise": "bytes"}
    with MDSWriter(out=str(tmp_path / "shards"), columns=columns, size_limit="16kb") as writer:
        for number in range(ROWS):
            writer.write({"id": number, "noise": random.bytes(LEAST + number)})
    return tmp_path / "shards"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_convert_writes_the_same_files(spark: Any, tmp_path: Path, deaths: Path) -> None:
    (tmp_path / "in").mkdir()
    lines = [json.dumps({"id": number, "text": f"row {number} " * 20}) for number in range(600)]
    for number in range(4):
        (tmp_path / "in" / f"{number}.jsonl").write_text("\n".join(lines[number::4]))
    settings: dict[str, Any] = {"partition_bytes": "24kb", "size_limit": "16kb", "lengths": {"text": len}}
    settings |= {"shuffle": True, "val_fraction": 0.3}
    here = convert(tmp_path / "in", tmp_path / "here", num_workers=1, **settings)
    there = convert(tmp_path / "in", tmp_path / "there", spark=spark, **settings)
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")
    assert (there.num_samples, there.num_bytes) == (here.num_samples, here.num_bytes)
    assert len(list(deaths.iterdir())) >= 2


def test_lengths_are_the_same(spark: Any, tmp_path: Path, shards: Path, deaths: Path) -> None:
    found = add_lengths(shards, {"noise": len}, spark=spark)
    there = files_of(shards)
    np.testing.assert_array_equal(found["noise"], np.arange(ROWS, dtype=np.uint32) + LEAST)
    again = add_lengths(shards, {"noise": len}, num_workers=1, overwrite=True)
    np.testing.assert_array_equal(found["noise"], again["noise"])
    names = {name for name in there if name.endswith(".bin")}
    assert names
    assert {name: files_of(shards)[name] for name in names} == {name: there[name] for name in names}
    assert list(deaths.iterdir())


def test_check_finds_the_same(
    spark: Any, tmp_path: Path, shards: Path, deaths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = sorted(shards.glob("*.mds"))[3]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    found = []
    for flags in (["--num-workers", "1"], ["--spark", spark.sparkContext.master], ["--spark", "local", "--decode"]):
        assert main(["check", str(shards), "--json", *flags]) == 1
        (about,) = json.loads(capsys.readouterr().out)["datasets"]
        found.append((about["corrupt"], about["samples"]))
    assert [one["shard"] for one in found[0][0]] == [3]
    assert found[1] == found[2] == found[0]
    assert list(deaths.iterdir())


def test_ids_that_a_filter_excludes_are_those_of_a_dataset(
    spark: Any, tmp_path: Path, shards: Path, deaths: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    divisor = 7

    def is_kept(sample: dict[str, Any]) -> bool:
        return sample["id"] % divisor != 0 and len(sample["noise"]) >= LEAST

    ids = excluded_ids(str(shards), is_kept, spark=spark)
    assert ids.tolist() == list(range(0, ROWS, divisor))
    np.save(tmp_path / "ids.npy", ids)
    by_ids, by_filter = {"filter": {"exclude_ids": tmp_path / "ids.npy"}}, {"filter": is_kept}
    read = [[sample["id"] for sample in StreamingDataset(str(shards), **by)] for by in (by_ids, by_filter)]
    assert read[0] == read[1]
    assert len(read[0]) == ROWS - len(ids)
    assert list(deaths.iterdir())


def test_a_worker_that_imported_a_module_before_it_was_edited_imports_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_rule_of_a_job.py"
    monkeypatch.setattr(fingerprint, "_users_files", lambda: {file.stem: str(file)})
    file.write_text("def more(x):\n    return x + 1\n")
    of_worker = importlib.import_module(file.stem)
    file.write_text("def more(x):\n    return x + 100\n")
    monkeypatch.delitem(sys.modules, file.stem)
    task = sent(importlib.import_module(file.stem).more)
    monkeypatch.setitem(sys.modules, file.stem, of_worker)
    received = task()
    assert received(1) == 101
    assert task() is received, "once is enough"


def test_a_dataset_that_changes_while_it_is_asked_about_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "mds")
    with MDSWriter(out=out, columns={"id": "int"}) as writer:
        writer.write_batch({"id": np.arange(10)})

    def changed(task: Callable[[Any], Any], pieces: list[Any], *_: Any) -> dict[int, Any]:
        delete_rows(out, [0])
        return {piece.partition_id: task(piece) for piece in pieces}

    monkeypatch.setattr("lightning_stream.spark.filter.run_partitions", changed)
    with pytest.raises(SnapshotMismatch, match="was changed while its samples were asked about"):
        excluded_ids(out, lambda _: True, spark=None)  # type: ignore[arg-type]


def test_more_pieces_than_a_job_come_in_their_order(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_jobs, "_PIECES_OF_A_JOB", 7)
    monkeypatch.setattr(spark_jobs, "_MOST_TASKS", 3)
    done: list[tuple[int, int]] = []
    run_in_spark(spark, lambda piece: piece * piece, range(16), lambda *pair: done.append(pair))
    assert done == [(piece, piece * piece) for piece in range(16)]


def test_an_error_of_a_piece_is_raised_as_that_error(spark: Any) -> None:
    def fails(piece: int) -> None:
        raise FormatError(f"piece {piece} is damaged.")

    with pytest.raises(FormatError, match=r"^piece 5 is damaged\. \(In one of Spark's executors\.\)$"):
        run_in_spark(spark, fails, [5], lambda *_: None)


def test_a_shuffle_in_a_cluster_needs_a_folder_that_all_share(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match=r"a folder that all machines share\. Pass tmp_dir="):
        convert(tmp_path / "rows.jsonl", "s3://bucket/out", shuffle=True, spark=spark)
