"""One source on its way into one dataset: what exists already, what is missing, and what happens with it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning_stream.convert.partition import OutputSpec, Receipt, Receipts, check
from lightning_stream.convert.publish import (
    MANIFEST,
    SPLITS,
    ConversionResult,
    Publication,
    alone,
    cancel,
    differences,
    finished,
    manifest_of,
    sweep_rest,
)
from lightning_stream.convert.shuffle import Shuffle, shuffled_listing
from lightning_stream.convert.task import TRAIN, VAL, PartitionTask, Transform, ValidationSplit, kept_length
from lightning_stream.errors import FormatError, StoreError
from lightning_stream.fingerprint import function_text
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.processes import Progress, run_partitions
from lightning_stream.sources.base import (
    Columns,
    Partition,
    Piece,
    Pieces,
    Source,
    SourceSchema,
    partitions_of,
    read_splits,
    warn_of_others,
)
from lightning_stream.sources.files import check_unchanged
from lightning_stream.sources.in_place import shards_text
from lightning_stream.sources.nulls import NullRule, nullable_columns, widened_columns
from lightning_stream.stores import Options
from lightning_stream.writer.infer import infer_columns
from lightning_stream.writer.lengths import LengthFunctions, check_measurable
from lightning_stream.writer.place import CONTROL, Transaction

if TYPE_CHECKING:
    from lightning_stream.processes import Workers

_LOG = logging.getLogger(__name__)
_VERSION = 4
_SHARD_BYTES = 64 << 20
_MAX_PIECE_BYTES = 1 << 30
_MANY_SHARDS = 1000
_SMALL_SHARD_BYTES = 1 << 20
_SMALL_SHARDS = (
    "%s has %d shards of %d KB on average, as the pieces of the source are. size_limit='64mb' writes fewer and larger "
    "ones, which are fetched faster, but a training run that read the source in place cannot continue on those."
)
_MEDIA = ("jpeg", "png", "jpeg_array", "jpegarray", "list[jpeg]", "list[png]", "audio", "video")


@dataclass(frozen=True)
class Conversion:
    """One source under some settings: those of `convert`. `writer` has compression, hashes and size_limit."""

    source: Source
    out: tuple[str, ...]
    keep_local: bool
    store_options: Options | None
    columns: Columns | None
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
    lengths: LengthFunctions = field(default_factory=dict)
    schema: SourceSchema | None = None  # the columns of the source, if they are known already

    @cached_property
    def record(self) -> dict[str, Any]:
        """What decides the bytes that are written, as a manifest holds it."""
        settings = {
            "version": _VERSION,
            "columns": self.columns,
            **self.writer,
            "size_limit": self._size_limit,
            "transform": function_text(self.transform.function),
            "nulls": asdict(self.nulls),
            "val_fraction": self.val_fraction,
            "group_by": self.group_by,
            "seed": self.seed if self.shuffle or self.val_fraction is not None else None,
            "shuffle": self.shuffle,
            "partition_bytes": self.partition_bytes,
        }
        if self.all_lengths:
            settings["lengths"] = {name: function_text(function) for name, function in self.all_lengths.items()}
        return _as_json({"source": self.source.record, "settings": settings})

    @cached_property
    def fingerprint(self) -> str:
        """Differs between conversions that write other bytes."""
        text = json.dumps([_as_json(self.source.identity), self.record["settings"]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def uri(self) -> str:
        """Where the dataset stays."""
        return self.out[-1]

    @property
    def outs(self) -> dict[str, tuple[str, ...]]:
        """Where each split goes."""
        return {"": self.out} if self.val_fraction is None else {split: self.out_of(split) for split in (TRAIN, VAL)}

    def out_of(self, split: str) -> tuple[str, ...]:
        """Where a split goes: a folder below ``out``."""
        return tuple(f"{out}/{split}" for out in self.out)

    @property
    def by_piece(self) -> bool:
        """Whether each piece of the source becomes a shard, as where it is read in place, which keeps the order."""
        has_all_rows = self.transform.function is None and self.nulls == NullRule() and self.val_fraction is None
        is_free = self.writer["size_limit"] == "auto" and self.partition_bytes is None and not self.shuffle
        source = self.source
        return has_all_rows and is_free and source.reader.has_pieces(source.files) and bool(source.files[0].root)

    @cached_property
    def all_lengths(self) -> LengthFunctions:
        """The functions of lengths; those that the source has are kept, unless a transform makes other samples."""
        measured = () if self.transform.function is not None else self.source.reader.lengths
        return {**dict.fromkeys(measured, kept_length), **self.lengths}

    def run(self, workers: Workers, progress_bar: bool) -> ConversionResult:
        """Write what is missing, and publish it."""
        num_bytes = self.partition_bytes or self.source.partition_bytes
        shuffle = Shuffle.plan(self.source, self.uri, self.fingerprint, num_bytes, self.seed, self.tmp_dir)
        with alone(self.uri):
            shuffle.sweep()
            with shuffle.alone() if self._shuffles_rows else nullcontext():
                manifests = {} if self.force else self._manifests()
                for split in manifests:
                    sweep_rest(self._place(self.outs[split]), self.fingerprint)
                if len(manifests) == len(self.outs):
                    return ConversionResult.of(self.uri, manifests)
                self._refuse_other()
                return self._run(frozenset(manifests), shuffle, num_bytes, workers, progress_bar)

    def _run(
        self, finished: frozenset[str], shuffle: Shuffle, num_bytes: int, workers: Workers, progress_bar: bool
    ) -> ConversionResult:
        """Write the splits that are not finished."""
        schema = self.schema or self.source.find_columns(self.columns if self.transform.function is None else None)
        splits, by_piece = self._splits(schema, num_bytes)
        if self.source.reader.is_strict:
            warn_of_others(splits, schema.columns)
        schema = self._settled(schema, splits)
        columns = self._columns(schema, splits)
        if unknown := self.nulls.fill.keys() - columns.keys() - schema.columns.keys():
            raise ValueError(f"fill_nulls names columns; {', '.join(unknown)} is none of {', '.join(columns)}.")
        if self.force:
            shuffle.clean()
        limit = None if by_piece else _SHARD_BYTES if self._size_limit == "auto" else self._size_limit
        specs = {
            split: self._spec(out, columns, schema, limit) for split, out in self.outs.items() if split not in finished
        }
        task = self._task(schema, columns, specs, by_piece)  # first: what is wrong in the arguments leaves no files
        begun = {split: Publication.begin(spec, self.overwrite) for split, spec in specs.items()}
        done = frozenset.intersection(
            *(frozenset() if self.force else publication.done for publication in begun.values())
        )
        partitions = partitions_of(splits, num_bytes)
        try:
            receipts = self._write(task, partitions, shuffle, done, workers, progress_bar)
        except Exception:
            with suppress(StoreError):  # the caller gets the error that ended the conversion
                for publication in begun.values() if isinstance(workers, int) else ():  # tasks of Spark may still write
                    cancel(publication.place, if_unwritten=True)
            raise
        in_order = {split: [receipts[partition_id][split] for partition_id in sorted(receipts)] for split in specs}
        try:
            for split in begun:
                by = f" (split {split}, by val_fraction={self.val_fraction} and the content of each row)"
                check(in_order[split], f"{self.source.name}{split and by}")
            check_unchanged(self.source.files)
        except (ValueError, FormatError):
            for publication in begun.values():  # other settings or another source will write other partitions
                cancel(publication.place)
            raise
        for split, publication in begun.items():
            notes = {**_as_json({**schema.notes, "read": schema.columns}), **self.record}
            digest = self._source_digest(splits, in_order[split]) if by_piece else ""
            publication.publish(in_order[split], True, notes, digest)
        done_now = replace(ConversionResult.of(self.uri, self._manifests()), is_new=True)
        num_shards = sum(done_now.num_shards.values())
        if by_piece and num_shards > _MANY_SHARDS and done_now.num_bytes < num_shards * _SMALL_SHARD_BYTES:
            _LOG.warning(_SMALL_SHARDS, self.uri, num_shards, done_now.num_bytes // num_shards >> 10)
        return done_now

    @property
    def _shuffles_rows(self) -> bool:
        """Whether rows pass through temporary files."""
        return self.shuffle and not self.source.reader.is_listing

    def _place(self, out: Any) -> Transaction:
        return Transaction(out, self.keep_local, self.store_options)

    def _manifests(self) -> dict[str, dict[str, Any]]:
        """The manifests of the splits that exist, whole, from this source and these settings."""
        manifests = {split: finished(self._place(out), self.fingerprint) for split, out in self.outs.items()}
        return {split: manifest for split, manifest in manifests.items() if manifest is not None}

    def _refuse_other(self) -> None:
        """Raise FileExistsError if another dataset is there, with how it differs."""
        if self.val_fraction is not None:
            self.refuse_beside()
        for split in SPLITS if self.val_fraction is None and self.overwrite else ():
            self._remove_remains(self._place(self.out_of(split)))
        for out in () if self.overwrite else self.outs.values():
            store = self._place(out).stores[0]
            manifest = manifest_of(store) or {}
            if "settings" in manifest and manifest.get("fingerprint") != self.fingerprint:
                raise FileExistsError(
                    f"{store.url} holds another conversion's dataset: {differences(manifest, self.record)}. Write to "
                    "another folder, or pass overwrite=True."
                )

    def refuse_beside(self) -> None:
        """Raise FileExistsError if there is a dataset without splits where splits are to be written."""
        place = self._place(self.out)
        store = place.stores[0]
        if store.exists(INDEX_NAME):
            raise FileExistsError(
                f"{store.url} holds a dataset without splits; train and val beside it would be confusing. Write to "
                "another folder."
            )
        self._remove_remains(place)

    def _remove_remains(self, place: Transaction) -> None:
        """Remove what a conversion left that was cut short at a place where this one writes no dataset."""
        names = place.look()
        if INDEX_NAME in names or not any(name.startswith(f"{CONTROL}/") for name in names):
            return
        if not self.overwrite:
            raise FileExistsError(
                f"{place.store.url} holds shards of a conversion that differs from this one and did not finish. Write "
                "to a new place, or pass overwrite=True, which removes them."
            )
        cancel(place)
        for store in place.stores:
            if "fingerprint" in (manifest_of(store) or {}):
                store.delete(MANIFEST)

    @property
    def _size_limit(self) -> int | str | None:
        limit = self.writer["size_limit"]
        return limit if self.by_piece or limit != "auto" else _SHARD_BYTES

    def _splits(self, schema: SourceSchema, num_bytes: int) -> tuple[list[Piece], bool]:
        """The parts of the source, and whether each becomes a shard."""
        source = self.source
        if self.shuffle and source.reader.is_listing:
            source = shuffled_listing(source, self.seed)
        splits = source.cut(schema.columns, num_bytes, by_piece=self.by_piece)
        largest = max(splits, key=lambda piece: piece.num_bytes, default=None)
        if not self.by_piece or largest is None or largest.num_bytes <= _MAX_PIECE_BYTES:
            return splits, self.by_piece
        _LOG.warning(
            "%s has a piece of %d MB, which is too large for a shard. Shards of 64 MB are written; their order is not "
            "that of the source where it is read in place.",
            largest.file.uri, largest.num_bytes >> 20,
        )  # fmt: skip
        return splits, False

    def _settled(self, schema: SourceSchema, splits: Pieces) -> SourceSchema:
        """The columns as where the source is read in place: they hold the values of all files, and known nulls."""
        if self.columns is not None or self.transform.function is not None:
            return schema
        wider = widened_columns(schema.columns, splits)
        columns = wider if self.nulls != NullRule() else nullable_columns(self.source.reader, wider, splits)
        names = [name for name in columns if columns[name] != wider[name]]
        if names:
            _LOG.warning(
                "%s has nulls in %s, which become json, as where StreamingDataset reads it in place. Pass fill_nulls=, "
                "drop_nulls=True or columns= for other encodings.",
                self.source.name, ", ".join(names),
            )  # fmt: skip
        return replace(schema, columns=columns)

    def _source_digest(self, splits: Pieces, receipts: Sequence[Receipt]) -> str:
        """The digest of the source where it is read in place; empty if its files have names that no index may have."""
        if (digest := self.source.reader.source_digest) is not None:
            return digest
        rows = [count for receipt in receipts for count in receipt.rows]
        shards = [piece._replace(num_rows=count) for piece, count in zip(splits, rows, strict=True) if count]
        try:
            text = b"{" + shards_text(self.source.reader.kind, {"row": "bytes"}, shards) + b"}"
            return Index.from_bytes(text, self.source.name).digest
        except FormatError:
            return ""

    def _columns(self, schema: SourceSchema, splits: Pieces) -> dict[str, str]:
        """What is written."""
        if self.transform.function is None or self.columns is not None:
            return dict(self.columns or schema.columns)
        batches = read_splits(self.source.reader, splits, schema.columns)
        for sample, _ in islice(self.transform.samples(batches, ""), 1):
            return infer_columns(sample)
        raise ValueError("transform returned no sample to infer columns from. Pass columns=.")

    def _spec(self, out: Any, columns: Columns, schema: SourceSchema, size_limit: Any) -> OutputSpec:
        writer = {**self.writer, "size_limit": size_limit, "max_workers": 1, "lengths": self.all_lengths}
        if writer["compression"] == "auto":
            media = () if self.transform.function is not None else schema.media
            is_media = any(kind in _MEDIA or name in media for name, kind in columns.items())
            writer["compression"] = None if is_media else "zstd"
        return OutputSpec(out, self.keep_local, self.store_options, columns, writer, self.fingerprint)

    def _task(
        self, schema: SourceSchema, columns: Columns, specs: Mapping[str, OutputSpec], by_piece: bool
    ) -> PartitionTask:
        split = None
        if self.val_fraction is not None:
            if self.group_by is not None and self.group_by not in columns:
                raise ValueError(f"group_by={self.group_by!r} is not a column; the columns are {', '.join(columns)}.")
            hashed = {name: columns[name] for name in schema.identity if name in columns} or columns
            split = ValidationSplit(self.val_fraction, self.seed, self.group_by, hashed)
        check_measurable(self.lengths, columns)
        return PartitionTask(
            self.source.reader,
            schema.columns,
            columns,
            specs,
            self.transform,
            self.nulls,
            split,
            self.columns is None,
            self.all_lengths,
            by_piece,
        )

    def _write(
        self,
        task: PartitionTask,
        partitions: Sequence[Partition],
        shuffle: Shuffle,
        done: frozenset[int],
        workers: Workers,
        progress_bar: bool,
    ) -> Receipts:
        """The receipts of all partitions, by number and split."""

        def run(task: Any, pieces: Sequence[Partition], phase: str) -> Receipts:
            progress = Progress(len(pieces), phase) if progress_bar else lambda _: None

            def report(receipts: dict[str, Receipt]) -> None:
                progress(sum(receipt.num_samples for receipt in receipts.values()))

            return run_partitions(task.run, pieces, workers, report)

        if self._shuffles_rows:
            receipts = shuffle.write(task, partitions, done, run)
        else:
            receipts = run(task, [part for part in partitions if part.partition_id not in done], "converting")
        for partition_id in done:
            receipts.setdefault(partition_id, {split: spec.receipt(partition_id) for split, spec in task.specs.items()})
        return receipts


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same as it is read back from a file."""
    return json.loads(json.dumps(values, default=repr))  # type: ignore[no-any-return]
