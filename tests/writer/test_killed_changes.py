"""Processes that append, delete and add columns while they are killed: nothing is lost, doubled or seen in part,
and a version that is read by its name stays what it was."""

from __future__ import annotations

import random
import selectors
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="StreamingDataset needs torch: uv sync")

from servers.s3 import bucket_at, options_of
from support.changers import KilledProcess, deleted_value, kind_of, raw_values, rows_of, value_of

from lightning_stream import StreamingDataset
from lightning_stream.stores import Store, open_store
from lightning_stream.version_log import Version, read_changes, read_newest, read_version
from lightning_stream.writer import MDSWriter

_KILLED = 1 / 8  # of the changes, followed by a kill within 0.2 s
_WRITERS = 4


class Watcher:
    """Reads the dataset while others change it, and compares each look with the former one."""

    def __init__(self, url: str, options: Any, folder: Path) -> None:
        self.store = open_store(url, options)
        self._url, self._options, self._folder = url, options, folder
        self._known: dict[str, list[int]] = {}
        self._values: list[int] = []
        self._deleted: set[int] = set()
        self._pinned: tuple[str, list[int]] | None = None
        self.num_looks = self.num_runs = 0

    def look(self) -> None:
        """Samples keep their ids, appends are whole, and what is deleted stays deleted."""
        version = read_newest(self.store)
        values = raw_values(self.store, version.index, self._known)
        assert values[: len(self._values)] == self._values
        assert len(set(values)) == len(values)
        deleted = deleted_ids(self.store, version)
        assert self._deleted <= deleted
        self._values, self._deleted = values, deleted
        self.num_looks += 1
        if self._pinned is None and version.number >= 5:
            self._pinned = version.index.digest, live(values, deleted)
        if self._pinned is not None and self.num_looks % 8 == 0:
            self._run_the_pinned()

    def _run_the_pinned(self) -> None:
        assert self._pinned is not None
        digest, wanted = self._pinned
        assert read_version(self.store, digest[:16]).index.digest == digest
        local = self._folder / str(self.num_runs)
        dataset = StreamingDataset(remote=self._url, local=local, version=digest[:16], **_stream(self._options))
        assert [dataset[k]["x"] for k in range(len(dataset))] == wanted
        self.num_runs += 1


def _stream(options: Any) -> dict[str, Any]:
    return {} if options is None else {"stream_config": {"options": options}}


def deleted_ids(store: Store, version: Version) -> set[int]:
    file = version.index.deleted
    return set() if file is None else set(np.frombuffer(store.read(file.basename), "<i8").tolist())


def live(values: list[int], deleted: set[int]) -> list[int]:
    return [value for k, value in enumerate(values) if k not in deleted]


def change_and_kill(url: str, options: Any, count: int, watcher: Watcher) -> int:
    """Let processes change a dataset while they are killed at random moments; give the number of kills."""
    draw = random.Random(3)
    processes = [KilledProcess(url, options, number, count) for number in range(_WRITERS)]
    running = list(processes)
    kills: dict[KilledProcess, float] = {}  # when each is killed next
    try:
        while running:
            with selectors.DefaultSelector() as selector:
                for process in running:
                    assert process.process.stdout is not None
                    selector.register(process.process.stdout, selectors.EVENT_READ, process)
                ready = [key.data for key, _ in selector.select(0.05)]
            for process in ready:
                if not process.read():
                    running.remove(process)
                elif draw.random() < _KILLED:
                    kills.setdefault(process, time.monotonic() + draw.uniform(0, 0.2))
                elif process is processes[0] and not process.num_kills:  # at least one kill, on any machine
                    kills.setdefault(process, time.monotonic())
            for process in [one for one, when in kills.items() if one in running and time.monotonic() > when]:
                del kills[process]
                process.kill()
                watcher.look()
    finally:
        for process in processes:
            process.process.kill()
            process.process.wait()
    return sum(process.num_kills for process in processes)


def _place(kind: str, folder: Path, request: Any) -> tuple[str, Any]:
    if kind == "folder":
        return str(folder / "set"), None
    endpoint = request.getfixturevalue(f"{kind}_endpoint")
    bucket_at(endpoint, "changes")
    return "s3://changes/set", options_of(endpoint)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("folder", 4),
        pytest.param("folder", 8, marks=pytest.mark.nightly),
        pytest.param("moto", 40, marks=pytest.mark.nightly),
        pytest.param("ceph", 125, marks=pytest.mark.nightly),
    ],
)
def test_writers_that_are_killed_lose_and_double_no_append_no_deletion_and_no_column(
    tmp_path: Path, kind: str, count: int, request: Any
) -> None:
    url, options = _place(kind, tmp_path, request)
    with MDSWriter(out=url, columns={"x": "int"}, store_options=options) as writer:
        writer.write({"x": 0})
    watcher = Watcher(url, options, tmp_path)
    begin = time.monotonic()
    num_kills = change_and_kill(url, options, count, watcher)
    took_s = time.monotonic() - begin
    watcher.look()
    store = watcher.store
    newest = read_newest(store)
    changes = [(number, k) for number in range(_WRITERS) for k in range(count)]
    kinds = Counter(kind_of(*change) for change in changes)
    appended = [0, *(x for change in changes if kind_of(*change) == "append" for x in rows_of(*change))]
    deleted = {deleted_value(*change) for change in changes if kind_of(*change) == "delete"}
    dataset = StreamingDataset(remote=url, local=tmp_path / "end", **_stream(options))
    samples = [dataset[k] for k in range(len(dataset))]
    assert sorted(sample["x"] for sample in samples) == sorted(set(appended) - deleted)
    columns = [f"y{k}" for k in range(count) if kind_of(0, k) == "column"]
    for sample in samples:
        assert sample == {"x": sample["x"], **{name: value_of(name, int(sample["x"])) for name in columns}}
    log = read_changes(store, newest.root)
    assert Counter(change.operation for change in log) == kinds
    assert len({change.key for change in log if change.key}) == kinds["append"] + kinds["delete"]
    assert num_kills > 0
    sys.stderr.write(
        f"\n{kind}: {len(log)} commits {dict(kinds)}, {num_kills} kills, {watcher.num_looks} looks, "
        f"{watcher.num_runs} runs of one version, lost 0, doubled 0, {took_s:.0f} s\n"
    )
