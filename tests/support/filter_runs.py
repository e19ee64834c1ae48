"""A process that reads a filtered dataset and prints which ids it keeps; and filters that note each of their calls."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_stream.reading import filters

PART_SAMPLES = 20


@dataclass(frozen=True)
class NotDivisible:
    """Keeps ids that are not divisible by a number."""

    divisor: int

    def __call__(self, sample: dict[str, Any]) -> bool:
        return int(sample["id"]) % self.divisor != 0


@dataclass(frozen=True)
class Noting:
    """Keeps ids that are not divisible by a number, and notes each id that it is called with in a file."""

    notes: str
    divisor: int = 3
    killed: str = ""  # "self" or "parent": which process the sample of id 150 kills, once

    def __call__(self, sample: dict[str, Any]) -> bool:
        number = int(sample["id"])
        file = os.open(self.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, b"%d\n" % number)
        os.close(file)
        if number == 150 and self.killed and not Path(self.notes + ".killed").exists():
            while _num_first_parts(Path(self.notes).parent) < 5:  # other processes may be at work on these
                time.sleep(0.01)
            Path(self.notes + ".killed").touch()
            os.kill(os.getppid() if self.killed == "parent" else os.getpid(), signal.SIGKILL)
        return number % self.divisor != 0


def _num_first_parts(folder: Path) -> int:
    """How many parts of an evaluation are kept, from the first one on without a gap."""
    names = [path.name.removesuffix(".result").rpartition(".")[2] for path in folder.rglob("*-*.result")]
    ends, end, count = dict(name.split("-") for name in names), "0", 0
    while end in ends:
        end, count = ends[end], count + 1
    return count


def main(remote: str, local: str, notes: str, killed: str) -> None:
    """Print the kept ids, evaluated in parts of few samples."""
    from lightning_stream import StreamingDataset  # with torch, which the workers of a filter do not need

    filters._MIN_SAMPLES, filters._ALONE_S = PART_SAMPLES, 0
    dataset = StreamingDataset(remote, local=local, filter=Noting(notes, killed=killed))
    print(json.dumps(dataset.original_ids(range(dataset.size)).tolist()))


if __name__ == "__main__":
    main(*sys.argv[1:])
