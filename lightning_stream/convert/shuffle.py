"""Rows in a random order over the whole source, in bounded memory: every part is spilled, then every bucket written."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_stream.convert.job import Job
from lightning_stream.convert.part import PartWriter, merged_statistics
from lightning_stream.convert.plan import Part
from lightning_stream.convert.receipt import Receipt, receipt_name
from lightning_stream.convert.sources.choose import Source
from lightning_stream.convert.spill import Buckets, SpillWriter, bucket_rows
from lightning_stream.convert.split import mixed
from lightning_stream.convert.work import Tell, Work
from lightning_stream.writer.place import is_remote

_BUCKET_BYTES = 64 << 20

Runner = Callable[[Any, Sequence[Any], str], "dict[int, dict[str, Receipt]]"]


@dataclass(frozen=True)
class Bucket:
    """A part of the dataset in its new order.

    Attributes:
        number: Its place.
    """

    number: int

    def __str__(self) -> str:
        return f"bucket {self.number}"


@dataclass(frozen=True)
class Scatter(Work):
    """Spills the rows of parts into buckets."""

    buckets: Buckets | None = None

    def run(self, part: Part, tell: Tell) -> dict[str, Receipt]:
        """Spill a part."""
        return self.written(part, tell)

    def writer(self, split: str, part: int) -> SpillWriter:
        """Takes the rows."""
        assert self.buckets is not None
        return SpillWriter(self.buckets, split, part, self.jobs[split].columns)

    def finish(self, part: Part, writers: Mapping[str, Any], receipts: Mapping[str, Receipt]) -> None:  # noqa: ARG002
        """Make the spill whole, unless nulls are in it."""
        for split, receipt in receipts.items():
            if receipt.is_good:
                writers[split].finish({"rows": receipt.num_samples, "statistics": dict(receipt.statistics)})


@dataclass(frozen=True)
class Gather:
    """Writes buckets.

    Attributes:
        jobs: The datasets, by split.
        buckets: Where the rows are.
        num_parts: That were spilled.
    """

    jobs: Mapping[str, Job]
    buckets: Buckets
    num_parts: int

    def run(self, bucket: Bucket, tell: Tell) -> dict[str, Receipt]:
        """Write a bucket, and then its receipts."""
        receipts = {}
        for split, job in self.jobs.items():
            writer = PartWriter(job, bucket.number)
            with writer:
                rows = bucket_rows(self.buckets, split, self.num_parts, bucket.number)
                if rows is not None:
                    writer.write_encoded(rows)
            receipts[split] = Receipt(bucket.number, "", writer.num_samples, tuple(writer.shards))
        tell(sum(receipt.num_samples for receipt in receipts.values()))
        for split, job in self.jobs.items():
            job.store.put(receipt_name(job.fingerprint, bucket.number), receipts[split].to_bytes())
        return receipts


def shuffled_listing(source: Source, seed: int) -> Source:
    """The source with its files, each a sample, in a random order."""
    order = np.argsort(mixed(seed, 0, np.arange(len(source.files), dtype=np.uint64)), kind="stable")
    return replace(source, files=tuple(source.files[k] for k in order.tolist()))


def buckets_of(source: Source, partition_bytes: int, seed: int, folder: Path) -> Buckets:
    """So many that each is at most a part, and 64 MiB of the source."""
    total = sum(file.num_bytes for file in source.files)
    return Buckets(str(folder), max(1, -(-total // min(partition_bytes, _BUCKET_BYTES))), seed)


def spill_folder(job: Job, tmp_dir: str | None) -> Path:
    """Where a conversion spills: beside a local dataset, else among this machine's temporary files."""
    name = f"spill-{job.fingerprint}"
    if tmp_dir is not None:
        return Path(tmp_dir).expanduser().absolute() / name
    if is_remote(job.kept_at):
        return Path(tempfile.gettempdir()) / f"lightning_stream-{name}"
    place = Path(job.kept_at)
    return place.with_name(f".{place.name}.{name}")


def write_shuffled(
    work: Work, parts: Sequence[Part], buckets: Buckets, done: Iterable[int], run: Runner
) -> tuple[dict[int, dict[str, Receipt]], dict[str, Any]]:
    """Spill what is not spilled yet, and write the buckets that are not written yet.

    Args:
        work: As for rows in their own order.
        parts: All parts.
        buckets: Where to spill.
        done: Numbers of the buckets that an earlier run wrote.
        run: Has parts written by processes, and gives the receipts by number; its last argument names the phase.

    Returns:
        The receipts by number and split: of the spills if one of them holds what cannot be written, else of the
        buckets; and statistics by split.
    """
    missing = [Bucket(k) for k in range(buckets.count) if k not in set(done)]
    if missing:
        Path(buckets.folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        unspilled = [part for part in parts if any(buckets.meta(split, part.number) is None for split in work.jobs)]
        scatter = Scatter(work.reader, work.read, work.jobs, work.transform, work.nulls, work.val_fraction, buckets)
        spilled = run(scatter, unspilled, "reading")
        if not all(receipt.is_good for each in spilled.values() for receipt in each.values()):
            return spilled, {}
    notes = {split: [buckets.meta(split, part.number) for part in parts] for split in work.jobs}
    statistics = {
        split: merged_statistics(Receipt(0, "", statistics=note["statistics"]) for note in each if note is not None)
        for split, each in notes.items()
    }
    return run(Gather(work.jobs, buckets, len(parts)), missing, "writing"), statistics


def end_spill(buckets: Buckets) -> None:
    """Remove what was spilled."""
    shutil.rmtree(buckets.folder, ignore_errors=True)
