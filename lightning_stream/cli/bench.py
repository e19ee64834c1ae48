"""``bench``: how fast this machine reads a dataset, what limits it, and with how many workers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import lightning_stream
from lightning_stream.cli.arguments import FoundDataset, add_source, datasets_of, imported
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.formats.encodings.images import load_images
from lightning_stream.order.chain import readable
from lightning_stream.processes import num_processes
from lightning_stream.reading.reader import SampleReader
from lightning_stream.shared_files import scratch_folder
from lightning_stream.stores import LocalStore

HELP = "measure how fast a dataset is read here, name the bottleneck and propose settings"
EXAMPLES = """examples:
  lightning-stream bench s3://bucket/train --batch-size 256
  lightning-stream bench s3://bucket/train --batch-size 256 --transform my_package.images:augment --step-ms 180
"""
_FETCHED_BYTES = 1 << 30
_MARGIN = 1.05  # more workers must pay by 5 %


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    add_source(parser)
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="samples of a batch (default: 64)")
    parser.add_argument("--num-workers", metavar="N,N...", help="numbers to try (default: 0, 1, 2, 4... processors)")
    parser.add_argument("--transform", metavar="MODULE:FUNCTION", help="the transform of the training run")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="time of a training step without its data")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="time of each measurement (default: 5)")


def run(options: argparse.Namespace, out: Output) -> int:
    """Measure the store, then reading from the cache with different numbers of workers."""
    numbers = _numbers(options.num_workers)
    if options.batch_size < 1 or options.seconds <= 0 or (options.step_ms is not None and options.step_ms <= 0):
        raise ValueError("--batch-size is at least 1, and --seconds and --step-ms are positive")
    found = datasets_of(options)
    dataset = next((one for one in found if one.remote.rstrip("/").endswith("/train")), found[0])
    if dataset.index.num_samples == dataset.index.num_deleted:
        raise ValueError(f"bench reads samples; {dataset.store.url} has none")
    others = [one.store.url for one in found if one is not dataset]
    transform = None if options.transform is None else imported(options.transform, "--transform")
    with scratch_folder() as folder:
        about, rates = _measured(dataset, options, transform, numbers, folder, out)
    best, link = _fewest(rates), about["store_samples_per_s"]
    total = min(rates[best], link or np.inf)
    bottleneck, reason = _bottleneck(about, rates, best)
    out.data = {"url": dataset.store.url, "not_measured": others, **about}
    out.data |= {"bottleneck": bottleneck, "num_workers": best, "samples_per_s": total}
    out.line(f"bottleneck: {reason}.")
    out.line(f"proposed: num_workers={best}, which gives {total:,.0f} samples/s")
    if options.step_ms is not None:
        out.data["step_needs_samples_per_s"] = needed = options.batch_size / options.step_ms * 1000
        out.data["waiting_share"] = waits = max(0.0, 1 - total / needed)
        verdict = f"it waits {waits:.0%} of the time" if waits > 0 else "it never waits"
        out.line(f"a step of {options.step_ms:g} ms needs {needed:,.0f} samples/s: {verdict}")
    if others:
        out.line(f"not measured: {', '.join(others)}. To measure another split, pass it.")
    return ExitCode.OK


def _measured(
    dataset: FoundDataset,
    options: argparse.Namespace,
    transform: Callable[[Any], Any] | None,
    numbers: Sequence[int],
    folder: str,
    out: Output,
) -> tuple[dict[str, Any], dict[int, float]]:
    dataset_type = lightning_stream.StreamingDataset  # imports torch, or raises an error that names the extra
    from lightning_stream.dataset import source_of

    is_local = isinstance(dataset.store, LocalStore)
    stream = dataset.stream(folder, options.store_options)
    whole = dataset_type(streams=[stream], shuffle=True, transform=transform)
    reader = source_of(whole).reader
    out.line(f"{dataset.store.url}: {reader.snapshot.num_samples:,} samples in {reader.snapshot.num_shards:,} shards")
    shards, num_bytes, spent_s = _fetched(reader, options.seconds)
    offsets = reader.snapshot.shard_offsets
    ids = np.concatenate([np.arange(offsets[shard], offsets[shard + 1]) for shard in shards])
    stored = num_bytes / max(1, len(ids))
    link = None if is_local else len(ids) / spent_s
    if link is not None:
        out.line(f"  {'from the store':24} {link:>12,.0f} samples/s  {readable(num_bytes / spent_s)}/s")
    rates: dict[int, float] = {}
    for number in numbers:
        rates[number] = _rate(whole.subset(ids), options.batch_size, number, options.seconds)
        name = f"from the cache, {number} workers"
        out.line(f"  {name:24} {rates[number]:>12,.0f} samples/s  {readable(rates[number] * stored)}/s")
    about = {
        "store_samples_per_s": link,
        "cached_samples_per_s": {str(number): rate for number, rate in rates.items()},
        "sample_bytes": stored,
    }
    if transform is not None:
        plain = dataset_type(streams=[stream], shuffle=True).subset(ids)
        about["without_transform_samples_per_s"] = rate = _rate(plain, options.batch_size, 0, options.seconds)
        out.line(f"  {'without the transform':24} {rate:>12,.0f} samples/s  (0 workers)")
    return about, rates


def _fetched(reader: SampleReader, seconds: float) -> tuple[list[int], int, float]:
    """Fetch random shards for a while: which ones, their stored bytes, and the seconds."""
    order = np.random.default_rng(0).permutation(reader.snapshot.num_shards)
    (index,) = reader.indexes
    begin, taken, num_bytes, step = time.perf_counter(), [], 0, reader.config.fetch_threads * 2
    for first in range(0, len(order), step):
        some = order[first : first + step]
        reader.fetch(some)
        taken += some.tolist()
        num_bytes += int(index.stored_bytes[some].sum())
        if time.perf_counter() - begin > seconds or num_bytes > _FETCHED_BYTES:
            break
    return sorted(taken), num_bytes, time.perf_counter() - begin


def _rate(dataset: Any, batch_size: int, num_workers: int, seconds: float) -> float:
    """Samples per second of batches from the cache, without the start of the workers."""
    from lightning_stream.loader import StreamingDataLoader

    loader = StreamingDataLoader(
        dataset, batch_size=batch_size, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    batches = _endless(loader)
    for _ in range(1 + 2 * num_workers):  # those that were made while the workers started
        next(batches)
    begin, count = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - begin) < seconds:
        batch = next(batches)
        for name, value in batch.items() if isinstance(batch, dict) else ():
            load_images(name, value)  # Pillow decodes an image when it is first used
        count += 1
    return count * batch_size / spent_s


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _fewest(rates: dict[int, float]) -> int:
    """The smallest number of workers that nearly all of the speed needs."""
    most = max(rates.values())
    return min(number for number, rate in rates.items() if rate * _MARGIN >= most)


def _bottleneck(about: dict[str, Any], rates: dict[int, float], best: int) -> tuple[str, str]:
    """What limits the speed, and what to do about it."""
    link, plain = about["store_samples_per_s"], about.get("without_transform_samples_per_s")
    if link is not None and link < rates[best]:
        return "store", "the store, in the first epoch; later epochs read the cache. Compress the shards"
    if plain is not None and 0 in rates and rates[0] < plain / 2:
        share = 1 - rates[0] / plain
        return "transform", f"the transform: {share:.0%} of the time of a worker. Use more workers, or make it cheaper"
    return "decoding", "reading and decoding on the processors of this machine"


def _numbers(text: str | None) -> list[int]:
    if text is None:
        most = num_processes(None)
        return [0, *(2**k for k in range(most.bit_length()) if 2**k <= most)]
    try:
        numbers = sorted({int(one) for one in text.split(",")})
    except ValueError as error:
        raise ValueError(f"--num-workers takes numbers, e.g. 0,4,8; found {text!r}") from error
    if numbers[0] < 0:
        raise ValueError(f"--num-workers are 0 or more; found {text}")
    return numbers
