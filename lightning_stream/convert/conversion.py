"""One source on its way into one place: what is there already, what is missing, and what becomes of it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from lightning_stream.convert.job import Job
from lightning_stream.convert.nulls import NullRule
from lightning_stream.convert.plan import parts_of
from lightning_stream.convert.pool import run_parts
from lightning_stream.convert.progress import Progress
from lightning_stream.convert.provenance import (
    Digests,
    check_unchanged,
    noted_source,
    same_content,
    source_difference,
    told_source,
)
from lightning_stream.convert.publish import MANIFEST, Publication
from lightning_stream.convert.receipt import Receipt, check, receipt_name
from lightning_stream.convert.shuffle import buckets_of, end_spill, shuffled_listing, spill_folder, write_shuffled
from lightning_stream.convert.sources.base import Found
from lightning_stream.convert.sources.choose import Source
from lightning_stream.convert.spill import Buckets
from lightning_stream.convert.split import TRAIN, VAL, HeldOut
from lightning_stream.convert.transform import Transform
from lightning_stream.convert.work import Work
from lightning_stream.errors import NotFoundError
from lightning_stream.formats.codecs import check_compression
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.stores import Store, open_store
from lightning_stream.writer.infer import infer_columns
from lightning_stream.writer.place import digest_of

_LOG = logging.getLogger(__name__)
_VERSION = 1
AUTO = "auto"
_IMAGES = ("jpeg", "png", "jpeg_array", "jpegs_array")
_REPLACE = "pass overwrite=True"
_FILL = "Fill them (fill_nulls={column: value}), leave the rows out (drop_nulls=True), or ask for 'json' in columns=."


@dataclass(frozen=True)
class Settings:
    """How a source is written. What decides the bytes enters the fingerprint."""

    out: Any
    keep_local: bool
    store_options: Mapping[str, Any] | None
    columns: Mapping[str, str] | None
    writer: Mapping[str, Any]
    transform: Transform
    nulls: NullRule
    val_fraction: HeldOut | None
    partition_bytes: int
    shuffle_seed: int | None
    overwrite: bool
    force: bool
    tmp_dir: str | None

    def told(self) -> dict[str, Any]:
        """Those that decide what is written, as json knows it."""
        return {
            "version": _VERSION,
            "columns": self.columns,
            **{name: self.writer[name] for name in ("compression", "hashes", "size_limit")},
            "transform": self.transform.told,
            "nulls": asdict(self.nulls),
            "val_fraction": None if self.val_fraction is None else asdict(self.val_fraction),
            "partition_bytes": self.partition_bytes,
            "shuffle_seed": self.shuffle_seed,
        }


@dataclass(frozen=True)
class ConversionResult:
    """What was written.

    Attributes:
        uri: Folder or URL of the dataset, or of its splits.
        num_samples: By split; ``""`` is the whole.
        num_shards: By split.
        num_bytes: Bytes stored.
        columns: Encoding by column name.
        classes: Class names by column: label k is the k-th name.
        seconds: How long it took.
        is_new: False if it was there already, from the same source and settings.
    """

    uri: str
    num_samples: dict[str, int]
    num_shards: dict[str, int]
    num_bytes: int
    columns: dict[str, str]
    classes: dict[str, list[str]]
    seconds: float
    is_new: bool

    @property
    def total(self) -> int:
        """Samples of all splits."""
        return sum(self.num_samples.values())

    def __str__(self) -> str:
        splits = ", ".join(f"{count:,} {split or 'samples'}" for split, count in self.num_samples.items())
        told = f"{splits} in {sum(self.num_shards.values()):,} shards, {self.num_bytes / 1e6:,.1f} MB, at {self.uri}"
        if not self.is_new:
            return f"reusing the existing dataset (same source and settings; force=True writes it again): {told}"
        return f"{told}, in {self.seconds:,.1f} s ({self.total / max(self.seconds, 1e-9):,.0f} per s)"


class Conversion:
    """One source under some settings. Reads only what is needed to know its columns.

    Args:
        source: What is converted.
        settings: How, and where to.

    Raises:
        ValueError: Columns that there are not, or that cannot be inferred.
    """

    def __init__(self, source: Source, settings: Settings) -> None:
        self._settings = settings
        about = json.dumps([noted_source(source), settings.told()], sort_keys=True, default=repr)
        self.fingerprint = hashlib.sha256(about.encode()).hexdigest()[:16]
        self._listed = self._source = source  # as it lies, and in the order in which it is read
        self._reader = source.reader.tuned(strict=settings.columns is None, as_rows=settings.transform.is_given)
        self._buckets: Buckets | None = None
        if settings.shuffle_seed is not None and source.reader.is_listing:
            self._source = shuffled_listing(source, settings.shuffle_seed)
        elif settings.shuffle_seed is not None:
            folder = spill_folder(self._job(settings.out, {}), settings.tmp_dir)
            self._buckets = buckets_of(source, settings.partition_bytes, settings.shuffle_seed, folder)

    def run(self, num_workers: int, progress_bar: bool, began: float) -> ConversionResult:
        """Write what is missing, and publish it.

        Raises:
            FileExistsError: Something else is at the place.
        """
        places = self._places()
        held = self._held(places)
        if len(held) == len(places) and not self._settings.force:
            return self._result(held, began, is_new=False)
        self._refuse_other(places)
        found, columns = self._columns()
        held = {} if self._settings.force else held
        jobs = {split: self._job(out, columns) for split, out in places.items() if split not in held}
        begun = {split: Publication.begin(job, self._settings.overwrite, _REPLACE) for split, job in jobs.items()}
        with Digests(self._listed) as digests:
            receipts, statistics = self._write(found, begun, num_workers, progress_bar)
            self._check(begun, receipts)
            source = told_source(self._listed, digests.wait())
        check_unchanged(self._listed)
        about = {**found.about, "source": source, "settings": self._settings.told(), "read": found.columns}
        for split, publication in begun.items():
            told = {**about, "statistics": statistics[split]} if split in statistics else about
            publication.publish(receipts[split], True, _as_json(told))
        if self._buckets is not None:
            end_spill(self._buckets)
        return self._result(self._held(places), began, is_new=True)

    def _check(self, begun: Mapping[str, Publication], receipts: Mapping[str, Sequence[Receipt]]) -> None:
        try:
            for split in begun:
                check(receipts[split], f"{self._source.place}{split and f' (split {split})'}", _FILL)
        except ValueError:
            for publication in begun.values():  # other settings or another source will write other parts
                publication.cancel()
            if self._buckets is not None:
                end_spill(self._buckets)
            raise

    def _places(self) -> dict[str, Any]:
        """Where each split goes."""
        out = self._settings.out
        if self._settings.val_fraction is None:
            return {"": out}
        return {
            split: tuple(f"{one}/{split}" for one in out) if isinstance(out, tuple) else f"{out}/{split}"
            for split in (TRAIN, VAL)
        }

    def _job(self, out: Any, columns: Mapping[str, str]) -> Job:
        settings = self._settings
        writer = {**settings.writer, "compression": _compression(settings.writer["compression"], columns)}
        return Job(out, settings.keep_local, settings.store_options, columns, writer, self.fingerprint)

    def _held(self, places: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The manifests of the splits that are there, whole, from this source and these settings."""
        found = {}
        for split, out in places.items():
            stores = self._job(out, {}).place.stores
            manifest = _manifest(stores[0]) or {}
            if self._is_ours(manifest) and all(_is_whole(each, manifest) for each in stores):
                found[split] = manifest
        return found

    def _is_ours(self, manifest: Mapping[str, Any]) -> bool:
        if manifest.get("fingerprint") == self.fingerprint:
            return True
        if manifest.get("settings") != _as_json(self._settings.told()):
            return False
        reader = self._listed.reader
        source = manifest["source"]
        alike = (source["kind"], source["reader"]) == (reader.kind, _as_json(dict(reader.settings)))
        return alike and same_content(self._listed, source)

    def _refuse_other(self, places: Mapping[str, Any]) -> None:
        """Raise FileExistsError if another dataset is there, and say how it differs."""
        if "" not in places:
            root = self._job(self._settings.out, {}).store
            if root.exists(INDEX_NAME):
                raise FileExistsError(
                    f"{root.url} holds a dataset without splits, beside which those of this one would be confusing. "
                    "Write to a new place."
                )
        if self._settings.overwrite:
            return
        for out in places.values():
            store = self._job(out, {}).store
            manifest = _manifest(store)
            if manifest is not None and manifest.get("fingerprint") != self.fingerprint and "settings" in manifest:
                raise FileExistsError(
                    f"{store.url} holds a dataset of another conversion: {self._difference(manifest)}. Write to a new "
                    f"place, or {_REPLACE} to replace it."
                )

    def _difference(self, manifest: Mapping[str, Any]) -> str:
        now, before = _as_json(self._settings.told()), manifest["settings"]
        told = [
            f"{name} was {before.get(name)!r:.60}, is {now[name]!r:.60}"
            for name in sorted(now)
            if before.get(name) != now[name]
        ]
        told += filter(None, [source_difference(self._listed, manifest["source"])])
        return "; ".join(told) or "the source is read in another way"

    def _columns(self) -> tuple[Found, dict[str, str]]:
        """What is read, and what is written."""
        settings, source = self._settings, self._source
        if not settings.transform.is_given:
            found = source.reader.find_columns(source.files, settings.columns)
            return found, dict(settings.columns or found.columns)
        found = source.reader.find_columns(source.files, None)
        if settings.columns is not None:
            return found, dict(settings.columns)
        spans = source.reader.spans(source.files[0], settings.partition_bytes)
        for sample, _ in islice(settings.transform.samples(self._reader.read_all(spans, found.columns)), 1):
            return found, infer_columns(sample)
        raise ValueError("transform gave no sample for the first file, to infer columns from. Pass columns=.")

    def _write(
        self, found: Found, begun: Mapping[str, Publication], num_workers: int, progress_bar: bool
    ) -> tuple[dict[str, list[Receipt]], dict[str, Any]]:
        """The receipts of all parts, by split, in order; and statistics that are not in them."""
        settings, source = self._settings, self._source
        parts = parts_of(source, settings.partition_bytes)
        done = frozenset.intersection(*(publication.done for publication in begun.values()))
        jobs = {split: publication.job for split, publication in begun.items()}
        if done:
            _LOG.info("continuing an earlier run: %d parts are written already", len(done))
        work = Work(self._reader, found.columns, jobs, settings.transform, settings.nulls, settings.val_fraction)

        def run(task: Any, pieces: Sequence[Any], phase: str) -> dict[int, dict[str, Receipt]]:
            progress = Progress(len(pieces), phase, progress_bar)
            try:
                run_parts(task, pieces, num_workers, progress)
            finally:
                progress.close()
            return progress.receipts

        statistics: dict[str, Any] = {}
        if self._buckets is None:
            receipts = run(work, [part for part in parts if part.number not in done], "converting")
        else:
            receipts, statistics = write_shuffled(work, parts, self._buckets, done, run)
        for number in done:
            receipts[number] = {split: _earlier(job, number) for split, job in jobs.items()}
        return {split: [receipts[number][split] for number in sorted(receipts)] for split in jobs}, statistics

    def _result(self, manifests: Mapping[str, Mapping[str, Any]], began: float, *, is_new: bool) -> ConversionResult:
        out = self._settings.out
        uri = str(out[-1] if isinstance(out, tuple) else out)
        return _result_of(uri, manifests, time.perf_counter() - began, is_new)


def read_manifest(uri: str | os.PathLike[str], **store_options: Any) -> ConversionResult:
    """Columns, class names and counts of a dataset that `convert` wrote.

    Example::

        classes = read_manifest("s3://bucket/photos").classes["label"]  # ["daisy", "rose"]

    Args:
        uri: Folder or URL of the dataset, or of the folder that holds its ``train`` and ``val``.
        **store_options: For its store.

    Raises:
        NotFoundError: There is no such dataset.
    """
    root = os.fspath(uri).rstrip("/")
    store = open_store(root, store_options or None)
    whole = _manifest(store)
    if whole is not None:
        return _result_of(root, {"": whole}, 0.0, False)
    splits = {split: _manifest(store, f"{split}/{MANIFEST}") for split in (TRAIN, VAL)}
    found = {split: manifest for split, manifest in splits.items() if manifest is not None}
    if not found:
        raise NotFoundError(f"convert writes {MANIFEST} beside a dataset; {store.url} has none. Check the path.")
    return _result_of(root, found, 0.0, False)


def _result_of(uri: str, manifests: Mapping[str, Mapping[str, Any]], seconds: float, is_new: bool) -> ConversionResult:
    first = next(iter(manifests.values()))
    return ConversionResult(
        uri,
        {split: manifest["num_samples"] for split, manifest in manifests.items()},
        {split: manifest["num_shards"] for split, manifest in manifests.items()},
        sum(manifest["num_bytes"] for manifest in manifests.values()),
        dict(first["columns"]),
        dict(first.get("classes", {})),
        seconds,
        is_new,
    )


def writer_settings(
    compression: str | None, hashes: Iterable[str] | None, size_limit: int | str | None
) -> dict[str, Any]:
    """A writer's settings, checked, in one form for each meaning.

    Raises:
        ValueError: One that is none.
    """
    return {
        "compression": AUTO if compression == AUTO else check_compression(compression),
        "hashes": list(hashes_to_write(hashes)),
        "size_limit": None if size_limit is None else parse_bytes(size_limit, "size_limit"),
        "max_workers": 1,
    }


def _compression(asked: str | None, columns: Mapping[str, str]) -> str | None:
    if asked != AUTO:
        return asked
    return None if any(encoding in _IMAGES for encoding in columns.values()) else "zstd"


def _earlier(job: Job, number: int) -> Receipt:
    return Receipt.from_bytes(job.store.read(receipt_name(job.fingerprint, number)))


def _manifest(store: Store, name: str = MANIFEST) -> dict[str, Any] | None:
    try:
        found = json.loads(store.read(name))
    except (NotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _is_whole(store: Store, manifest: Mapping[str, Any]) -> bool:
    """Whether the index that this manifest was written with is there."""
    try:
        return digest_of(store.read(INDEX_NAME)) == manifest.get("index")
    except NotFoundError:
        return False


def _as_json(told: Mapping[str, Any]) -> dict[str, Any]:
    """The same as it comes back from a file."""
    held: dict[str, Any] = json.loads(json.dumps(told, default=repr))
    return held
