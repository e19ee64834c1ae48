"""Whatever Spark's tasks suffer, the dataset is the one that an undisturbed conversion writes, byte by byte."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_stream import LocalDataset
from lightning_stream import spark as room
from lightning_stream.convert.publish import Publication
from lightning_stream.errors import FormatError
from lightning_stream.spark.convert import check_unchanged, stamps_of
from lightning_stream.writer.place import Transaction, listed_files

COLUMNS = {"id": "int64", "twice": "int64"}


def files_of(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }


def kwargs(out: Path) -> dict[str, Any]:
    return {"out": str(out), "compression": None, "columns": COLUMNS, "size_limit": "2kb"}


def doubled(frame: Any, marker: str = "", fail_at: int = -1, times: int = 0) -> Any:
    """Rows, with a failure in the middle of the partition that holds `fail_at`, `times` over."""
    for number in frame["id"].tolist():
        if number == fail_at:
            seen = sorted(Path(marker).glob("seen-*"))
            if len(seen) < times:
                (Path(marker) / f"seen-{len(seen)}").touch()
                raise RuntimeError("this attempt was made to fail")
            (Path(marker) / "passed").touch()
        yield {"id": number, "twice": 2 * number}


def noisy(frame: Any, marker: str = "") -> Any:
    """As `doubled`, but the first attempt writes other bytes before it fails."""
    first = not (Path(marker) / "failed").exists()
    for number in frame["id"].tolist():
        if first and number == 900:
            (Path(marker) / "failed").touch()
            raise RuntimeError("this attempt was made to fail")
        yield {"id": number, "twice": 0 if first and number >= 500 else 2 * number}


@pytest.fixture
def undisturbed(spark: Any, tmp_path: Path) -> dict[str, bytes]:
    room.dataframe_to_mds(spark.range(0, 1000, 1, 2), mds_kwargs=kwargs(tmp_path / "calm"), udf_iterable=doubled)
    return files_of(tmp_path / "calm")


def test_a_task_that_fails_once_changes_nothing(spark: Any, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    failing = {"marker": str(tmp_path), "fail_at": 800, "times": 1}
    source = spark.range(0, 1000, 1, 2)
    room.dataframe_to_mds(source, mds_kwargs=kwargs(tmp_path / "out"), udf_iterable=doubled, udf_kwargs=failing)
    assert (tmp_path / "passed").exists()
    assert files_of(tmp_path / "out") == undisturbed
    assert not list((tmp_path / "out").rglob(".draft-*"))


def test_an_attempt_that_wrote_other_bytes_leaves_none(
    spark: Any, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    source = spark.range(0, 1000, 1, 2)
    room.dataframe_to_mds(
        source, mds_kwargs=kwargs(tmp_path / "out"), udf_iterable=noisy, udf_kwargs={"marker": str(tmp_path)}
    )
    assert (tmp_path / "failed").exists()
    assert files_of(tmp_path / "out") == undisturbed


def test_a_rerun_after_a_crash_writes_only_what_is_missing(spark: Any, tmp_path: Path) -> None:
    spark.range(0, 1000, 1, 2).write.parquet(str(tmp_path / "in"))

    def convert(times: int, name: str) -> None:
        (tmp_path / "times").write_text(str(times))
        room.dataframe_to_mds(
            spark.read.parquet(str(tmp_path / "in")),
            mds_kwargs=kwargs(tmp_path / name),
            udf_iterable=counted,
            udf_kwargs={"root": str(tmp_path)},
        )

    with pytest.raises(Exception, match="made to fail"):
        convert(99, "out")
    assert not (tmp_path / "out" / "index.json").exists()
    (receipt,) = (tmp_path / "out").rglob("*.json.zst")
    shard = next((tmp_path / "out" / f"part-{receipt.name[:5]}").iterdir())
    before = shard.stat().st_mtime_ns
    (tmp_path / "rows.log").unlink()
    convert(0, "out")
    again = (tmp_path / "rows.log").read_text().split()
    assert again == ["500"]  # rows of the one partition that had failed
    assert shard.stat().st_mtime_ns == before
    convert(0, "calm")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "calm")


def test_the_same_call_continues_for_chosen_columns_of_rows_of_no_file(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = spark.createDataFrame([(7, "x")], "id long, text string").coalesce(1)
    settings = {"out": str(tmp_path / "out"), "columns": {"id": "int64"}}
    with monkeypatch.context() as patch:
        patch.setattr(Publication, "publish", None)
        with pytest.raises(TypeError, match="not callable"):
            room.dataframe_to_mds(rows, mds_kwargs=settings)
    (shard,) = (tmp_path / "out" / "part-00000").iterdir()
    before = shard.stat().st_mtime_ns
    room.dataframe_to_mds(rows, mds_kwargs=settings)
    assert shard.stat().st_mtime_ns == before
    assert [sample["id"] for sample in LocalDataset(tmp_path / "out")] == [7]


def counted(frame: Any, root: str) -> Any:
    with (Path(root) / "rows.log").open("a") as log:
        log.write(f"{len(frame)}\n")
    failing = int((Path(root) / "times").read_text())
    for number in frame["id"].tolist():
        if number == 900 and failing:
            raise RuntimeError("this attempt was made to fail")
        yield {"id": number, "twice": 2 * number}


def test_rows_that_begin_as_those_of_an_earlier_run_are_not_taken_for_them(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyspark: uv sync --extra spark")
    from lightning_stream.spark.partition import SparkJob, continued

    job = replace(SparkJob.read(kwargs(tmp_path)), columns={"id": "int64"}, fingerprint="0123456789abcdef")
    again = replace(job, done=frozenset([0]))

    def rows(*ends: int) -> Iterator[Any]:
        for begin, end in pairwise(ends):
            yield pa.record_batch({"id": range(begin, end)})

    first = continued(job, 0, rows(0, 5, 9))
    assert first.num_samples == 9
    (shard,) = tmp_path.glob("part-00000/*")
    shard.unlink()
    assert continued(again, 0, rows(0, 5, 9)).files() == first.files()
    assert not shard.exists()  # it was not written again
    for ends, num_samples in (((0, 5), 5), ((0, 5, 9, 11), 11), ((0, 4), 4), ((0, 0), 0)):
        receipt = continued(again, 0, rows(*ends))
        assert receipt.num_samples == num_samples
        assert job.receipt(0).files() == receipt.files()
        assert continued(again, 0, rows(*ends)).files() == receipt.files()


def test_remains_of_another_conversion_are_not_taken_for_this_one(spark: Any, tmp_path: Path) -> None:
    failing = {"marker": str(tmp_path), "fail_at": 800, "times": 99}
    source = spark.range(0, 1000, 1, 2)
    with pytest.raises(Exception, match="made to fail"):
        room.dataframe_to_mds(source, mds_kwargs=kwargs(tmp_path / "out"), udf_iterable=doubled, udf_kwargs=failing)
    with pytest.raises(FileExistsError, match="differs from this one"):
        room.dataframe_to_mds(source, mds_kwargs=kwargs(tmp_path / "out"), udf_iterable=doubled)


def touching(frame: Any, root: str) -> Any:
    """Rows, while another program writes the first of their files again."""
    if (Path(root) / "changes").exists():
        first = min(Path(root, "in").glob("*.parquet"))
        os.utime(first, ns=(0, 0))
    yield from doubled(frame)


def test_source_files_that_change_while_spark_reads_them_are_an_error(spark: Any, tmp_path: Path) -> None:
    spark.range(0, 100, 1, 1).write.parquet(str(tmp_path / "in"))

    def convert() -> None:
        rows = spark.read.parquet(str(tmp_path / "in"))
        settings = kwargs(tmp_path / "out")
        room.dataframe_to_mds(rows, mds_kwargs=settings, udf_iterable=touching, udf_kwargs={"root": str(tmp_path)})

    (tmp_path / "changes").touch()
    with pytest.raises(FormatError, match=r"in/part-00000\S+ was changed meanwhile. Nothing was published"):
        convert()
    assert files_of(tmp_path / "out") == {}
    (tmp_path / "changes").unlink()
    convert()
    assert len(LocalDataset(tmp_path / "out")) == 100


def test_a_file_that_changed_is_found_where_another_one_is_gone(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.touch()
    frame = SimpleNamespace(inputFiles=lambda: [file.as_uri() for file in files], sparkSession=None)
    before = stamps_of(frame)
    files[0].unlink()
    check_unchanged(frame, before)
    assert stamps_of(frame) is None
    files[1].write_text("other rows")
    with pytest.raises(FormatError, match=r"/b was changed meanwhile"):
        check_unchanged(frame, before)


def test_a_conversion_that_was_killed_after_its_index_was_put_is_finished_by_the_same_call(
    spark: Any, tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = spark.range(0, 1000, 1, 2)

    def convert() -> None:
        room.dataframe_to_mds(source, mds_kwargs=kwargs(tmp_path / "out"), udf_iterable=doubled)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "sweep", killed)
        with pytest.raises(KeyboardInterrupt):
            convert()
    assert files_of(tmp_path / "out") != undisturbed
    convert()
    assert files_of(tmp_path / "out") == undisturbed
    with pytest.raises(FileExistsError):  # now it is a dataset like any other
        convert()


def refused(frame: Any) -> Any:
    from lightning_stream.errors import AccessError

    raise AccessError("s3://bucket must be writable; the keys are those of a reader.")
    yield frame


def lacking(frame: Any) -> Any:
    import nowhere_to_be_found  # type: ignore[import-not-found,unused-ignore]

    yield nowhere_to_be_found


def test_an_error_in_an_executor_is_raised_as_that_error(spark: Any, tmp_path: Path) -> None:
    from lightning_stream.errors import AccessError, MissingExtraError

    for udf, kind, said in (
        (refused, AccessError, r"^s3://bucket must be writable; .* \(In one of Spark's executors\.\)$"),
        (lacking, MissingExtraError, "executors has no module 'nowhere_to_be_found'. Install it on every machine"),
    ):
        with pytest.raises(kind, match=said) as caught:
            room.dataframe_to_mds(
                spark.range(5), mds_kwargs={**kwargs(tmp_path / "out"), "exist_ok": True}, udf_iterable=udf
            )
        assert caught.value.__cause__ is not None


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killed_executors_and_speculation_change_nothing(
    tmp_path: Path, spark: Any, undisturbed: dict[str, bytes]
) -> None:
    script = Path(__file__).parents[1] / "support" / "spark_cluster.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    assert len(list(tmp_path.glob("lagging-*"))) >= 2  # the slow partition was run twice at once
    assert files_of(tmp_path / "out-kill") == undisturbed
    assert files_of(tmp_path / "out-lag") == undisturbed
    verbs = tmp_path / "verbs"
    assert (verbs / "killed").exists()
    assert len(list(verbs.glob("lagging-*"))) >= 2
    for out in (verbs / "out-kill", verbs / "out-lag"):
        assert [sample["id"] for sample in LocalDataset(out)] == list(range(1000))
        assert files_of(out).keys() <= {"index.json", *listed_files((out / "index.json").read_bytes())}
