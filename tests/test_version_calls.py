"""Random calls that change a dataset, beside a list of samples for each version, as docs/storage.md says."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter, StreamingDataset, add_lengths, versions
from lightning_stream.errors import ConflictError


@dataclass(frozen=True)
class Content:
    """A version: the values of all samples, the ids of the deleted ones, the further columns, and its lengths."""

    values: tuple[int, ...]
    deleted: frozenset[int] = frozenset()
    columns: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [k for k in range(len(self.values)) if k not in self.deleted]

    @property
    def samples(self) -> list[dict[str, int]]:
        return [sample_of(self.values[k], self.columns) for k in self.ids]


def sample_of(value: int, columns: tuple[str, ...]) -> dict[str, int]:
    return {"x": value} | {name: value * int(name[1:]) for name in columns}


class Calls:
    """One dataset, the calls that change it, and the versions that they make. `late` is a writer that is still open."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.next_value = 0
        self.next_column = 2
        self.late: tuple[MDSWriter, Content, tuple[int, ...]] | None = None
        self.made: list[Content] = []
        self.overwrite()

    @property
    def newest(self) -> Content:
        return self.made[-1]

    def writer(self, content: Content, **how: Any) -> tuple[MDSWriter, Content, tuple[int, ...]]:
        """A writer of some new samples with the columns and lengths of a version."""
        count = self.random.randrange(1, 5)
        values = tuple(range(self.next_value, self.next_value + count))
        self.next_value += count
        columns = dict.fromkeys(sample_of(0, content.columns), "int")
        lengths: dict[str, Any] = dict.fromkeys(content.lengths, lambda sample: sample["x"] % 5)
        compression = self.random.choice((None, "zstd"))
        writer = MDSWriter(
            out=self.folder, columns=columns, lengths=lengths, size_limit=60, compression=compression, **how
        )
        for value in values:
            writer.write(sample_of(value, content.columns))
        return writer, content, values

    def check(self) -> None:
        number = self.random.randrange(len(self.made))
        for version, content in ((None, self.newest), (number, self.made[number])):
            dataset = StreamingDataset(self.folder, version=version)
            assert dataset[:] == content.samples
            assert dataset.original_ids(range(len(content.ids))).tolist() == content.ids
            for name in content.lengths if version is None else ():
                assert dataset.lengths(name).tolist() == [content.values[k] % 5 for k in content.ids]
        assert len(versions.log(self.folder)) == len(self.made)

    # The calls

    def overwrite(self) -> None:
        content = Content((), lengths=self.random.choice(((), ("a",))))
        writer, _, values = self.writer(content, overwrite=True)
        writer.finish()
        self.made = [replace(content, values=values)]

    def append(self) -> None:
        self.finish(*self.writer(self.newest, append=True))

    def append_later(self) -> None:
        late = self.late
        self.late = self.writer(self.newest, append=True)
        if late is not None:
            self.finish(*late)

    def finish(self, writer: MDSWriter, began: Content, values: tuple[int, ...]) -> None:
        now = self.newest
        is_like = (began.columns, began.lengths) == (now.columns, now.lengths)
        was_not_replaced = any(content is began for content in self.made)
        if not (is_like and was_not_replaced):
            with pytest.raises(ConflictError):
                writer.finish()
            return
        writer.finish()
        self.made.append(replace(now, values=now.values + values))

    def delete(self) -> None:
        ids = self.random.sample(range(len(self.newest.values)), min(2, len(self.newest.values)))
        new = self.newest.deleted.union(ids)
        assert versions.delete_rows(self.folder, ids) == len(new) - len(self.newest.deleted)
        if ids:
            self.made.append(replace(self.newest, deleted=new))

    def refuse(self) -> None:
        with pytest.raises(ValueError, match="ids are those of samples"):
            versions.delete_rows(self.folder, [len(self.newest.values)])
        with pytest.raises((ValueError, FileExistsError)):
            versions.add_column(self.folder, "x", "int", np.zeros(len(self.newest.ids), np.int64))

    def add_column(self) -> None:
        if self.newest.ids:
            name = f"y{self.next_column}"
            self.next_column += 1
            values = [sample_of(sample["x"], (name,))[name] for sample in self.newest.samples]
            assert versions.add_column(self.folder, name, "int", values) == len(values)
            self.made.append(replace(self.newest, columns=(*self.newest.columns, name)))

    def add_lengths(self) -> None:
        if "b" not in self.newest.lengths:
            add_lengths(self.folder, {"b": lambda sample: sample["x"] % 5}, num_workers=1)
            self.made.append(replace(self.newest, lengths=(*self.newest.lengths, "b")))

    def compact(self) -> None:
        number = len(versions.log(self.folder))
        versions.compact(self.folder)
        if len(versions.log(self.folder)) > number:
            values = tuple(self.newest.values[k] for k in self.newest.ids)
            columns = self.newest.columns if values else ()
            self.made.append(replace(self.newest, values=values, deleted=frozenset(), columns=columns))


CALLS = ["append"] * 3 + ["append_later"] * 4 + ["delete"] * 3 + ["add_column", "add_lengths", "compact", "refuse"]
CALLS += ["overwrite"]


@pytest.mark.parametrize("seed", range(8))
def test_every_version_has_its_samples_after_any_calls_and_a_refused_call_changes_nothing(
    tmp_path: Path, seed: int
) -> None:
    calls = Calls(tmp_path, seed)
    for _ in range(10):
        getattr(calls, calls.random.choice(CALLS))()
        calls.check()
