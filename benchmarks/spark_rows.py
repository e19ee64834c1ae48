"""A DataFrame straight into PyTorch: when the first batch comes, and what the driver holds while all rows pass.

    python benchmarks/spark_rows.py [--rows 10000000] [--partitions 40] [--batch 4096]

Prints seconds to the first batch, to the last, and what the whole conversion took; and the driver's resident memory
before, at most while the rows pass, and after, beside the bytes of the rows. Java's memory is Spark's own and is not
counted.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

from lightning_stream.spark import StreamToTorchDataset, local_session

COLUMNS = ("x0", "x1", "x2", "x3", "label")


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Highest:
    """The most memory that this process held since it was made, looked at every 20 ms."""

    def __init__(self):
        self.mib = resident_mib()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._over.wait(0.02):
            self.mib = max(self.mib, resident_mib())

    def stop(self):
        self._over.set()
        self._thread.join()
        return self.mib


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--partitions", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--cache", required=True, help="an empty folder for the shards")
    options = parser.parse_args()
    session = local_session("local[2]", conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    expressions = [f"cast(rand({k}) as float) as {name}" for k, name in enumerate(COLUMNS)]
    frame = session.range(0, options.rows, 1, options.partitions).selectExpr(*expressions)
    warm = StreamToTorchDataset(session.range(10).selectExpr("id"), ["id"], cache=f"{options.cache}/warm")
    assert sum(len(batch) for batch in warm.batches(3)) == 10
    dataset = StreamToTorchDataset(frame, COLUMNS[:-1], COLUMNS[-1], cache=options.cache)
    before, highest, began = resident_mib(), Highest(), time.perf_counter()
    first = converted = None
    rows = 0
    for features, _ in dataset.batches(options.batch):
        first = first or time.perf_counter() - began
        rows += len(features)
        if converted is None and dataset.spark_df.cache.is_complete:
            converted = time.perf_counter() - began
    last = time.perf_counter() - began
    assert rows == options.rows
    converted = "after the last batch" if converted is None else f"{converted:.1f} s"
    most = highest.stop()
    size = rows * 4 * len(COLUMNS) / 2**20
    print(f"{rows:,} rows of {len(COLUMNS)} floats ({size:.0f} MiB) in {options.partitions} partitions")
    print(f"first batch after {first:.1f} s, all converted by {converted}, last batch after {last:.1f} s")
    print(f"driver's memory: {before:.0f} MiB before, {most:.0f} at most, {resident_mib():.0f} after")
    session.stop()


if __name__ == "__main__":
    main()
