"""A DataFrame's cache under fork, with a conversion that needs no Spark; and what it is keyed by."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter
from lightning_stream.convert.partition import OutputSpec, PartitionWriter, Receipt
from lightning_stream.convert.publish import Publication
from lightning_stream.errors import CacheError
from lightning_stream.spark import convert, frame_cache
from lightning_stream.spark.frame_cache import FrameCache


@dataclass(frozen=True)
class Job:
    fingerprint: str
    out: str


@dataclass(frozen=True)
class Conversion:
    """Writes ten rows once it may."""

    job: Job
    analyzed: str = ""
    stamps: None = None
    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def write(self) -> list[Any]:
        self.begun.set()
        assert self.go.wait(30)
        with MDSWriter(out=self.job.out, columns={"id": "int"}) as writer:
            writer.write_batch({"id": list(range(10))})
        return []


def test_a_child_forked_while_its_parent_converts_waits_for_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion = Conversion(Job("key", ""))
    monkeypatch.setattr(frame_cache.Conversion, "plan", lambda *_: conversion)
    cache = frame_cache.FrameCache(None, cache=tmp_path)
    cache.start()
    assert conversion.begun.wait(30)
    with cache._lock:
        child = os.fork()
    if not child:
        signal.alarm(20)
        num_rows = 0
        try:
            num_rows = len(cache)
        finally:
            os._exit(int(num_rows != 10))
    conversion.go.set()
    assert os.waitpid(child, 0)[1] == 0
    assert len(cache) == 10


@dataclass(frozen=True)
class Planned:
    """The plan of a conversion that another process does."""

    job: OutputSpec


def written(spec: OutputSpec, number: int, ids: range) -> Receipt:
    with PartitionWriter(spec, number) as writer:
        writer.write_batch({"id": list(ids)})
    return spec.put(writer.receipt({}))


def test_all_partitions_come_while_another_process_converts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = OutputSpec("", False, None, {"id": "int"}, {"compression": None}, "key")
    monkeypatch.setattr(frame_cache.Conversion, "plan", lambda *_: Planned(spec))
    cache = frame_cache.FrameCache(None, cache=tmp_path)
    spec, parts = replace(spec, out=cache.uri), cache.parts()
    with frame_cache.alone(cache.uri):
        publication = Publication.begin(spec, overwrite=True)
        receipts = [written(spec, 0, range(4))]
        found = ids_of(next(parts))
        receipts += [written(spec, 1, range(0)), written(spec, 2, range(4, 9)), written(spec, 3, range(9, 12))]
        publication.publish(receipts, True, {})
    for part in parts:
        found += ids_of(part)
    assert found == list(range(12))


def test_rows_of_an_earlier_run_that_are_written_again_are_an_error_for_who_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = OutputSpec("", False, None, {"id": "int"}, {"compression": None}, "key")
    monkeypatch.setattr(frame_cache.Conversion, "plan", lambda *_: Planned(spec))
    cache = frame_cache.FrameCache(None, cache=tmp_path)
    spec, parts = replace(spec, out=cache.uri), cache.parts()
    written(spec, 0, range(4))
    with frame_cache.alone(cache.uri):
        publication = Publication.begin(spec, overwrite=True)
        assert ids_of(next(parts)) == [0, 1, 2, 3]
        publication.publish([written(spec, 0, range(5)), written(spec, 1, range(5, 9))], True, {})
    with pytest.raises(CacheError, match=r"Read the DataFrame again\.$"):
        list(parts)
    assert [number for part in cache.parts() for number in ids_of(part)] == list(range(9))


def ids_of(part: Any) -> list[int]:
    return part.batch(np.arange(part.snapshot.num_samples))["id"].tolist()  # type: ignore[no-any-return]


def test_files_that_are_not_local_are_those_of_spark_s_listing(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "local_path", lambda _: None)
    file = tmp_path / "in" / "rows {1}.csv"
    file.parent.mkdir()

    def key_of(text: str, time: int) -> str:
        file.write_text(text)
        os.utime(file, (time, time))
        return FrameCache(spark.read.schema("id int").csv(str(file.parent)), cache=tmp_path / "cache").uri

    keys = [key_of("1\n2\n", 1_700_000_000), key_of("3\n4\n", 1_700_000_009), key_of("1\n2\n3\n", 1_700_000_000)]
    assert len(set(keys)) == 3
    assert key_of("1\n2\n", 1_700_000_000) == keys[0]
    monkeypatch.setattr(convert, "_listed", lambda *_: [])  # a file system that Spark cannot list
    assert key_of("1\n2\n", 1_700_000_000) != key_of("1\n2\n", 1_700_000_000)


def test_rows_that_depend_on_files_which_spark_does_not_list_are_of_their_dataframe_alone(
    spark: Any, tmp_path: Path
) -> None:
    for name in ("rows", "others"):
        (tmp_path / name).write_text("1\n")
        spark.read.schema("id int").csv(str(tmp_path / name)).createOrReplaceTempView(name)

    def key_of(condition: str) -> str:
        rows = spark.sql(f"select id from rows where {condition}")
        return FrameCache(rows, cache=tmp_path / "cache").uri

    assert key_of("id > (select max(id) from others)") != key_of("id > (select max(id) from others)")
    assert key_of("id in (select id from others)") == key_of("id in (select id from others)")


def test_rows_that_changed_before_the_first_use_are_not_kept_under_the_name_of_the_former_ones(
    spark: Any, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("1\n")
    rows = FrameCache(spark.read.schema("id int").csv(str(tmp_path / "in.csv")), cache=tmp_path / "cache")
    (tmp_path / "in.csv").write_text("1\n2\n")
    with pytest.raises(CacheError, match=r"was changed before\. Nothing was converted"):
        len(rows)
    assert not Path(rows.uri).exists()


def test_a_relative_cache_is_the_drivers(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = FrameCache(spark.range(7), cache="rows")
    assert Path(rows.uri).parent == tmp_path / "rows"
    assert len(rows) == 7
