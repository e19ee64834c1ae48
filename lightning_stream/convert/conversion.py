"""One source on its way into one dataset: what exists already, what is missing, and what happens with it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from lightning_stream.convert.fingerprint import function_text
from lightning_stream.convert.partition import OutputSpec
from lightning_stream.convert.pool import Progress, run_partitions
from lightning_stream.convert.publish import Publication
from lightning_stream.convert.receipt import Receipt, check, receipt_name
from lightning_stream.convert.result import (
    ConversionResult,
    as_json,
    check_unchanged,
    differences,
    is_whole,
    manifest_of,
    result_of,
    source_identity,
    source_record,
)
from lightning_stream.convert.shuffle import Shuffle, shuffled_listing
from lightning_stream.convert.sources.base import Found, Source
from lightning_stream.convert.split import TRAIN, VAL, ValidationSplit, identifying
from lightning_stream.convert.task import NullRule, PartitionTask, Transform
from lightning_stream.formats.codecs import check_compression
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.formats.index import INDEX_NAME
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.writer.infer import infer_columns

_LOG = logging.getLogger(__name__)
_VERSION = 2
_AUTO, _DEFAULT_COMPRESSION = "auto", "zstd"
_MEDIA = ("jpeg", "png", "jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "audio", "video")
_REPLACE = "pass overwrite=True"
_FILL = "Fill them (fill_nulls={column: value}), drop the rows (drop_nulls=True), or ask for 'json' in columns=."


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
    val_fraction: float | None
    group_by: str | None
    seed: int
    shuffle: bool
    partition_bytes: int | None
    tmp_dir: str | None
    overwrite: bool
    force: bool

    def to_dict(self) -> dict[str, Any]:
        """Return those that decide what is written, as JSON knows them."""
        return as_json({
            "version": _VERSION,
            "columns": self.columns,
            **{name: self.writer[name] for name in ("compression", "hashes", "size_limit")},
            "transform": function_text(self.transform.function),
            "nulls": asdict(self.nulls),
            "val_fraction": self.val_fraction,
            "group_by": self.group_by,
            "seed": self.seed if self.shuffle or self.val_fraction is not None else None,
            "shuffle": self.shuffle,
            "partition_bytes": self.partition_bytes,
        })  # fmt: skip


class Conversion:
    """One source under some settings. Reads only what is needed to know its columns."""

    def __init__(self, source: Source, settings: Settings, found: Found | None = None) -> None:
        self._settings, self._found = settings, found
        self._described = settings.to_dict()
        about = json.dumps([as_json(source_identity(source)), self._described], sort_keys=True)
        self.fingerprint = hashlib.sha256(about.encode()).hexdigest()[:16]
        self._listed = self._source = source  # as it is listed, and in the order in which it is read
        self._reader = source.reader.reading(settings.columns)
        self._partition_bytes = settings.partition_bytes or source.partition_bytes
        self._shuffle: Shuffle | None = None
        if settings.shuffle and source.reader.is_listing:
            self._source = shuffled_listing(source, settings.seed)
        elif settings.shuffle:
            spec = self._spec(settings.out, {}, None)
            self._shuffle = Shuffle.plan(source, spec, self._partition_bytes, settings.seed, settings.tmp_dir)

    def run(self, num_workers: int, progress_bar: bool) -> ConversionResult:
        """Write what is missing, and publish it."""
        begin, outs = time.perf_counter(), self._outs()
        uri = str(self._settings.out[-1] if isinstance(self._settings.out, tuple) else self._settings.out)
        held = {} if self._settings.force else self._held(outs)
        if len(held) == len(outs):
            return result_of(uri, held, time.perf_counter() - begin)
        self._refuse_other(outs)
        if self._shuffle is not None and self._settings.force:
            self._shuffle.clean()
        found, columns = self._columns()
        specs = {split: self._spec(out, columns, found) for split, out in outs.items() if split not in held}
        begun = {split: Publication.begin(spec, self._settings.overwrite, _REPLACE) for split, spec in specs.items()}
        receipts = self._write(found, columns, begun, num_workers, progress_bar)
        self._check(begun, receipts)
        check_unchanged(self._listed.files)
        about = {**found.about, "source": source_record(self._listed), "settings": self._described}
        about["read"] = found.columns
        for split, publication in begun.items():
            publication.publish(receipts[split], True, as_json(about))
        if self._shuffle is not None:
            self._shuffle.clean()
        return result_of(uri, self._held(outs), time.perf_counter() - begin, is_new=True)

    def _check(self, begun: Mapping[str, Publication], receipts: Mapping[str, Sequence[Receipt]]) -> None:
        try:
            for split in begun:
                check(receipts[split], f"{self._source.name}{split and f' (split {split})'}", _FILL)
        except ValueError:
            for publication in begun.values():  # other settings or another source will write other partitions
                publication.cancel()
            if self._shuffle is not None:
                self._shuffle.clean()
            raise

    def _outs(self) -> dict[str, Any]:
        """Where each split goes."""
        out = self._settings.out
        if self._settings.val_fraction is None:
            return {"": out}
        return {split: folder_of(out, split) for split in (TRAIN, VAL)}

    def _spec(self, out: Any, columns: Mapping[str, str], found: Found | None) -> OutputSpec:
        settings = self._settings
        writer = dict(settings.writer)
        if writer["compression"] == _AUTO:
            media = () if found is None or settings.transform.function is not None else found.media
            is_media = any(kind in _MEDIA or name in media for name, kind in columns.items())
            writer["compression"] = None if is_media else _DEFAULT_COMPRESSION
        return OutputSpec(out, settings.keep_local, settings.store_options, columns, writer, self.fingerprint)

    def _held(self, outs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The manifests of the splits that exist, whole, from this source and these settings."""
        found = {}
        for split, out in outs.items():
            stores = self._spec(out, {}, None).place.stores
            manifest = manifest_of(stores[0]) or {}
            is_ours = manifest.get("fingerprint") == self.fingerprint
            if is_ours and all(is_whole(store, manifest) for store in stores):
                found[split] = manifest
        return found

    def _refuse_other(self, outs: Mapping[str, Any]) -> None:
        """Raise FileExistsError if another dataset is there, with how it differs."""
        if "" not in outs:
            refuse_beside(self._spec(self._settings.out, {}, None))
        for out in () if self._settings.overwrite else outs.values():
            store = self._spec(out, {}, None).store
            manifest = manifest_of(store)
            if manifest is None or manifest.get("fingerprint") == self.fingerprint or "settings" not in manifest:
                continue
            difference = differences(self._described, manifest["settings"], self._listed, manifest["source"])
            raise FileExistsError(
                f"{store.url} holds another conversion's dataset: {difference}. Write to another folder, or {_REPLACE}."
            )

    def _columns(self) -> tuple[Found, dict[str, str]]:
        """What is read, and what is written."""
        settings, source = self._settings, self._source
        is_plain = settings.transform.function is None
        asked = settings.columns if is_plain else None
        found = self._found or source.reader.find_columns(source.files, asked)
        if is_plain or settings.columns is not None:
            return found, dict(settings.columns or found.columns)
        splits = source.reader.input_splits(source.files[0], self._partition_bytes)
        for sample, _ in islice(settings.transform.samples(self._reader.read_all(splits, found.columns)), 1):
            return found, infer_columns(sample)
        raise ValueError("transform returned no sample for the first file, to infer columns from. Pass columns=.")

    def _write(
        self, found: Found, columns: Mapping[str, str], begun: Mapping[str, Publication], num_workers: int, shown: bool
    ) -> dict[str, list[Receipt]]:
        """The receipts of all partitions, by split, in order."""
        settings = self._settings
        partitions = self._source.partitions(self._partition_bytes)
        done: frozenset[int] = frozenset()
        if not settings.force:
            done = frozenset.intersection(*(publication.done for publication in begun.values()))
        specs = {split: publication.spec for split, publication in begun.items()}
        if done:
            _LOG.info("continuing an earlier run: %d partitions are written already", len(done))
        split = None
        if settings.val_fraction is not None:
            hashed = identifying(columns, found.identity)
            split = ValidationSplit(settings.val_fraction, settings.seed, settings.group_by, hashed)
        task = PartitionTask(
            self._reader, found.columns, specs, settings.transform, settings.nulls, split, settings.columns is None
        )

        def run(task: Any, pieces: Sequence[Any], phase: str) -> dict[int, dict[str, Receipt]]:
            return run_partitions(task, pieces, num_workers, Progress(len(pieces), phase, shown))

        if self._shuffle is None:
            receipts = run(task, [each for each in partitions if each.number not in done], "converting")
        else:
            receipts = self._shuffle.write(task, partitions, done, run)
        for number in done:
            receipts[number] = {split: _earlier(spec, number) for split, spec in specs.items()}
        return {split: [receipts[number][split] for number in sorted(receipts)] for split in specs}


def folder_of(out: Any, split: str) -> Any:
    """Return where a split goes: a folder below ``out``."""
    return tuple(f"{one}/{split}" for one in out) if isinstance(out, tuple) else f"{out}/{split}"


def refuse_beside(spec: OutputSpec) -> None:
    """Raise FileExistsError if there is a dataset without splits where splits are to be written."""
    if spec.store.exists(INDEX_NAME):
        raise FileExistsError(
            f"{spec.store.url} holds a dataset without splits; train and val beside it would be confusing. Write to "
            "another folder."
        )


def writer_settings(
    compression: str | None, hashes: Iterable[str] | None, size_limit: int | str | None
) -> dict[str, Any]:
    """Return a writer's settings, checked, in one form for each meaning; ValueError for a wrong one."""
    return {
        "compression": _AUTO if compression == _AUTO else check_compression(compression),
        "hashes": list(hashes_to_write(hashes)),
        "size_limit": None if size_limit is None else parse_bytes(size_limit, "size_limit"),
        "max_workers": 1,
    }


def _earlier(spec: OutputSpec, number: int) -> Receipt:
    return Receipt.from_bytes(spec.store.read(receipt_name(spec.fingerprint, number)))
