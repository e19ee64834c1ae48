"""What a mixture schedule costs: the numbers of all streams at every global batch of 10^9 samples, and single reads.

python benchmarks/mixture_scale.py [--samples 1e9] [--batch 1024] [--streams 4]
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from lightning_stream.order import Schedule
from lightning_stream.order.mixture import Mixture

_TOGETHER = 2**16  # batches


def main() -> None:
    """Measure step and linear schedules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=float, default=1e9)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    total, size = int(options.samples), options.batch
    names = [f"s{i}" for i in range(options.streams)]
    weights = [{name: 1 + (i * k) % 5 for i, name in enumerate(names)} for k in (1, 2, 3)]
    points = list(zip((0, total * 2 // 5, total), weights, strict=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for interpolation in ("step", "linear"):
        began = time.process_time()
        mixture = Mixture(Schedule(points, interpolation=interpolation), [total] * len(names))  # type: ignore[arg-type]
        for first in range(0, total, _TOGETHER * size):
            mixture.counts(np.arange(first, min(first + _TOGETHER * size, total), size))
        took = time.process_time() - began
        began = time.process_time()
        reads = 100
        for at in range(0, total, total // reads):
            mixture.read(at, at + size)
        each = (time.process_time() - began) / reads
        print(f"{interpolation}: {total:,} samples in {took:.2f} CPU-s; one batch anywhere {each * 1e6:.0f} us")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"peak memory grew by {grown:.0f} MB")


if __name__ == "__main__":
    main()
