"""Processes that append to one dataset and are killed. Importable, so that a process can run it."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from lightning_stream.writer import MDSWriter

ROWS = 3


def append(url: str, options: Any, number: int, batch: int, key: str | None) -> None:
    """Append a few rows that no other batch has."""
    first = 1_000_000 * (number + 1) + ROWS * batch
    with MDSWriter(out=url, columns={"x": "int"}, append=True, key=key, store_options=options, max_workers=0) as writer:
        writer.write_batch({"x": np.arange(first, first + ROWS)})


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for each in range(given["begin"], given["end"]):
        append(given["url"], given["options"], given["number"], each, f"{given['number']}-{each}")
        sys.stdout.write(f"{each}\n")
        sys.stdout.flush()
