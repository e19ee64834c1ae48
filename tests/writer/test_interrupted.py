"""A signal may raise an error between any two steps of a writer: then a sample is whole, or there is no dataset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from lightning_stream.formats.index import Index
from lightning_stream.formats.shard import open_shard
from lightning_stream.writer import MDSWriter

_FILES = ("writer/base.py", "writer/shard_buffer.py", "writer/pipeline.py")
_GUARDED = ("take", "give_back")  # a tracer would come between a lock and its release, where no signal comes


class _Alarm(BaseException):
    """What a handler of a signal raises, as that of Ctrl-C does."""


@contextmanager
def alarm(at: int) -> Iterator[list[int]]:
    """Raise an alarm before the line of this number that is run in a writer; give how many were run."""
    lines = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(_FILES) or code.co_name in _GUARDED:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == at:
                raise _Alarm
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def row(number: int) -> dict[str, Any]:
    return {"id": number, "text": "a" * (number % 5)}


def write_one_by_one(writer: MDSWriter, first: int) -> None:
    for number in range(first, first + 4):
        writer.write(row(number))


def write_together(writer: MDSWriter, first: int) -> None:
    rows = [row(number) for number in range(first, first + 4)]
    writer.write_batch({name: [row[name] for row in rows] for name in rows[0]})


@pytest.mark.parametrize("write", [write_one_by_one, write_together])
def test_a_writer_that_was_interrupted_writes_whole_samples_with_their_lengths_or_fails(
    tmp_path: Path, write: Callable[[MDSWriter, int], None]
) -> None:
    at = 0
    num_failed = 0
    while True:
        at += 1
        out = tmp_path / str(at)
        columns = {"id": "int", "text": "str"}
        writer = MDSWriter(out=out, columns=columns, lengths={"text": len}, size_limit=250, max_workers=0)
        write(writer, 0)
        is_over = False
        try:
            with alarm(at) as lines:
                write(writer, 4)
            is_over = lines[0] < at
        except _Alarm:
            pass
        try:
            write(writer, 8)
            writer.finish()
        except _Alarm:
            num_failed += 1
            assert not (out / "index.json").exists()
            continue
        index = Index.from_file(out / "index.json")
        shards = [open_shard(index.entry(k), out) for k in range(len(index))]
        samples = [shard.sample(k) for shard in shards for k in range(shard.num_samples)]
        numbers = [sample["id"] for sample in samples]
        assert samples == [row(number) for number in numbers]
        assert numbers == sorted(set(numbers))
        assert {*range(4), *range(8, 12)} <= {*numbers}
        lengths = np.concatenate([np.fromfile(out / file.basename, "<u4") for file in index.lengths["text"]])
        assert lengths.tolist() == [len(sample["text"]) for sample in samples]
        if is_over:
            break
        assert writer.num_samples == len(samples)
    assert num_failed
