"""Processes that change one dataset and are killed. Importable, and what each such process runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from lightning_stream import versions
from lightning_stream.errors import ConflictError
from lightning_stream.formats.index import Index
from lightning_stream.stores import Store, open_store
from lightning_stream.version_log import read_newest
from lightning_stream.writer import MDSWriter

ROWS = 3
COLUMN_EVERY = 7  # of the changes of the first process, the first few
NUM_COLUMNS = 3


def kind_of(number: int, change: int) -> str:
    """What a change of a process is: an append, the deletion of one of its rows, or a further column."""
    if number == 0 and change % COLUMN_EVERY == COLUMN_EVERY - 1 and change < NUM_COLUMNS * COLUMN_EVERY:
        return "column"
    return "delete" if change % 4 == 3 else "append"


def rows_of(number: int, change: int) -> list[int]:
    """The values that an append adds; no other has them."""
    first = 1_000_000 * (number + 1) + ROWS * change
    return list(range(first, first + ROWS))


def deleted_value(number: int, change: int) -> int:
    """The value that a deletion removes: the second one of the process's append before it."""
    while kind_of(number, change) != "append":
        change -= 1
    return rows_of(number, change)[1]


def value_of(column: str, x: int) -> int:
    """The value of a further column ``y2``."""
    return x * int(column[1:]) + 1


def raw_values(store: Store, index: Index, known: dict[str, list[int]]) -> list[int]:
    """The column ``x`` of all samples, deleted ones included; shards never change, so each is read once."""
    found: list[int] = []
    for entry in map(index.entry, range(len(index))):
        name = entry.raw.basename
        if name not in known:
            data = store.read(name)
            offsets = np.frombuffer(data, "<u4", entry.num_samples + 1, 4)
            at = 8 * entry.names.index("x")
            known[name] = [int.from_bytes(data[k + at : k + at + 8], "little", signed=True) for k in offsets[:-1]]
        found += known[name]
    return found


class Changer:
    """Changes a dataset as process `number` does."""

    def __init__(self, url: str, options: Any, number: int) -> None:
        self.url, self.options, self.number = url, options, number
        self._known: dict[str, list[int]] = {}

    def change(self, change: int) -> None:
        """Make a change, also if it was made before a kill."""
        getattr(self, kind_of(self.number, change))(change)

    def append(self, change: int) -> None:
        """Append rows, with a value for each column that there is."""
        x = np.array(rows_of(self.number, change))
        while True:
            columns = dict.fromkeys(read_newest(open_store(self.url, self.options)).index.columns, "int")
            rows = {name: x if name == "x" else np.array([value_of(name, int(one)) for one in x]) for name in columns}
            try:
                with MDSWriter(
                    out=self.url, columns=columns, append=True, key=f"{self.number}-{change}", max_workers=0,
                    store_options=self.options,
                ) as writer:  # fmt: skip
                    writer.write_batch(rows)
            except (ConflictError, ValueError):  # a column was added meanwhile
                if columns.keys() == read_newest(open_store(self.url, self.options)).index.columns.keys():
                    raise
            else:
                return

    def delete(self, change: int) -> None:
        """Delete a row by its id."""
        store = open_store(self.url, self.options)
        values = raw_values(store, read_newest(store).index, self._known)
        number = values.index(deleted_value(self.number, change))
        versions.delete_rows(self.url, [number], key=f"{self.number}-{change}", store_options=self.options)

    def column(self, change: int) -> None:
        """Add a column."""
        name = f"y{change}"
        if name not in read_newest(open_store(self.url, self.options)).index.columns:
            versions.add_column(
                self.url, name, "int", lambda row: value_of(name, int(row["x"])), store_options=self.options
            )


class KilledProcess:
    """A process that makes its changes, and is started again where it was killed."""

    def __init__(self, url: str, options: Any, number: int, count: int) -> None:
        self._task = {"url": url, "options": options, "number": number, "end": count}
        self.done = self.num_kills = 0
        self._start()

    def _start(self) -> None:
        task = json.dumps({**self._task, "begin": self.done})
        self.process = subprocess.Popen([sys.executable, __file__, task], stdout=subprocess.PIPE, bufsize=0)

    def read(self) -> bool:
        """Read a line, or start the process again; False once all is done."""
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            self.done = int(line) + 1
            return True
        self.process.stdout.close()
        if self.done == self._task["end"]:
            assert self.process.wait() in (0, -signal.SIGKILL)
            return False
        assert self.process.wait() == -signal.SIGKILL, f"a process ended with {self.process.returncode}"
        self._start()
        return True

    def kill(self) -> None:
        """Kill it, wherever it is."""
        self.process.kill()
        self.num_kills += 1


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    changer = Changer(task["url"], task["options"], task["number"])
    for k in range(task["begin"], task["end"]):
        changer.change(k)
        sys.stdout.write(f"{k}\n")
        sys.stdout.flush()
