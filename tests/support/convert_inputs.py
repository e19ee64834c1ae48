"""What the tests of conversion read: inputs whose reading can go wrong in a worker process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_stream.convert import Inputs, convert

ROWS = 400


def samples(given: tuple[str, int]) -> Iterator[dict[str, Any]]:
    """The rows of one input; notes beside the others that it is read."""
    folder, number = given
    with (Path(folder) / "read").open("a") as log:
        log.write(f"{number}\n")
    for k in range(ROWS):
        yield {"n": number * ROWS + k, "text": f"row {k} " * 20}


def dying_once(given: tuple[str, int]) -> Iterator[dict[str, Any]]:
    """The same, but the first process that reads input 1 is killed in the middle of it."""
    for row in samples(given):
        yield row
        if row["n"] == ROWS + ROWS // 2 and not (Path(given[0]) / "died").exists():
            (Path(given[0]) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def dying(given: tuple[str, int]) -> Iterator[dict[str, Any]]:
    """The same, but every process that reads input 1 is killed."""
    for row in samples(given):
        yield row
        if row["n"] == ROWS + ROWS // 2:
            os.kill(os.getpid(), signal.SIGKILL)


def raising(given: tuple[str, int]) -> Iterator[dict[str, Any]]:
    """The same, but input 1 cannot be read."""
    yield from samples(given)
    if given[1] == 1:
        raise LookupError("input 1 is gone")


def letters(sample: Any) -> int:
    """A length that the samples' columns do not have."""
    return sample["text"].count("ö") + len(sample["tokens"])


def doubled(row: Any) -> Any:
    """Two rows of most rows, and none of the others."""
    return [row, {**row, "tokens": row["tokens"] * 2}] if row["k"] % 3 else None


def run(folder: str, out: str, num_inputs: int, **settings: Any) -> Any:
    """Convert some inputs."""
    return convert(Inputs([(folder, k) for k in range(num_inputs)], samples), out, size_limit=20_000, **settings)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]), num_workers=2, shuffle=sys.argv[4] == "shuffle")
