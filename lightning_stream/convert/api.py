"""`convert`: files of rows to MDS shards, each row exactly once, the same bytes for any number of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_stream.convert.conversion import Conversion
from lightning_stream.convert.mds import open_dataset
from lightning_stream.convert.publish import ConversionResult, read_manifest
from lightning_stream.convert.task import Transform
from lightning_stream.errors import checking
from lightning_stream.formats.codecs import check_compression
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.processes import num_processes, refuse_in_worker
from lightning_stream.sources.choose import open_source
from lightning_stream.sources.files import Uris
from lightning_stream.sources.inputs import Inputs
from lightning_stream.sources.nulls import NullRule
from lightning_stream.stores import absolute, is_remote
from lightning_stream.writer.lengths import LengthFunctions, check_functions
from lightning_stream.writer.place import Out

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lightning_stream.processes import Workers


@checking
def convert(
    source: Uris | Inputs,
    out: Out,
    *,
    columns: Mapping[str, str] | None = None,
    compression: str | None = "auto",
    hashes: Iterable[str] | None = None,
    size_limit: int | str | None = "auto",
    num_workers: int | None = None,
    kind: str | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
    transform_partition: Callable[[Iterator[dict[str, Any]]], Iterable[Mapping[str, Any]]] | None = None,
    fill_nulls: Mapping[str, Any] | None = None,
    drop_nulls: bool = False,
    val_fraction: float | None = None,
    group_by: str | None = None,
    shuffle: bool = False,
    seed: int = 0,
    tmp_dir: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    exist_ok: bool = False,
    force: bool = False,
    keep_local: bool = False,
    progress_bar: bool = False,
    partition_bytes: int | str | None = None,
    source_options: Mapping[str, Any] | None = None,
    source_store_options: Mapping[str, Any] | None = None,
    store_options: Mapping[str, Any] | None = None,
    lengths: LengthFunctions | None = None,
    spark: SparkSession | None = None,
) -> ConversionResult:
    """Write files of rows as an MDS dataset, in parallel processes.

    Example::

        convert("s3://bucket/raw/*.parquet", "s3://bucket/train", columns={"text": "str", "label": "int64"})

    Every row is in the dataset exactly once, also if processes are killed. index.json comes last: without it there is
    no dataset, and the same call then writes only the missing partitions. The same source and settings give the same
    files, with any number of processes. ``manifest.json`` beside the index holds schema, counts and source files; if it
    describes this source and these settings, nothing is written again.

    A source folder with the folders ``train`` and ``val`` (or ``validation``, ``test``), or with files whose names
    begin so, is written as the datasets ``out/train`` and ``out/val``.

    Args:
        source: A file, a folder, a pattern with ``*``, or a list of these, as paths or URLs of any store; a
            `datasets.Dataset` object; or `Inputs`, with a function that returns the samples of each.
        out: A local folder, a URL, or (local folder, URL).
        columns: Encodings by column name: only these columns are written. None for all, inferred.
        compression: E.g. ``"zstd"`` or ``"zstd:7"``; None for none. ``"auto"`` is zstd, but none where a column holds
            images, sound or video, which are compressed already.
        hashes: Digests of every file that the index holds; None for ``["xxh3_64"]``, ``[]`` for none.
        size_limit: Bytes of a shard, as a number or ``"64mb"``. ``"auto"``: each piece of a source that
            `StreamingDataset` can read in place becomes a shard, e.g. a row group of Parquet. Then the samples have the
            same ids and the same order, and a training run that read the source continues on the dataset. It is 64 MB
            for other sources, and with transforms, ``shuffle``, ``val_fraction``, rules for nulls or
            ``partition_bytes``, which write other rows or shards.
        num_workers: Processes; None for one per processor. 1 writes in this process.
        kind: The kind of the files, where their names do not show it: ``parquet``, ``jsonl``, ``csv``, ``images``...
        transform: Called with each row (a dict); returns a sample, None to drop the row, or an iterable of samples. It
            must be deterministic. Without ``columns``, the first sample decides them.
        transform_partition: Called instead with an iterator over the rows of a partition; returns its samples: for what
            needs several rows at once, e.g. to pack texts into blocks of tokens.
        fill_nulls: Values that are written instead of nulls, by column.
        drop_nulls: Drop rows with nulls in columns that have no null (all but json).
        val_fraction: Share of the rows that is written to ``out/val``; the others go to ``out/train``. A hash of the
            row's content decides (of an image folder: of the image), so added files move no row between the splits.
        group_by: A column: rows with the same value there are in the same split.
        shuffle: Write the rows in a random order over the whole source: good if it is sorted, e.g. by class. Rows pass
            through temporary files, about as large as the dataset without compression.
        seed: Chooses the random order and the rows of the validation split.
        tmp_dir: A folder for those files; None for one beside a local ``out``, else the system's.
        overwrite, exist_ok: Replace another dataset at ``out``, as a whole, at the end.
        force: Write the dataset again even if it exists already, from the same source and settings.
        keep_local: With a pair, keep the local copies too.
        progress_bar: Show a line that counts partitions and rows on stderr.
        partition_bytes: Bytes of the source that one process writes at a time, e.g. ``"256mb"``. None: by its size.
        source_options: For the reader, e.g. ``{"delimiter": ";"}``, ``{"on_bad": "skip"}`` for bad lines or
            ``{"media_root": "s3://bucket/images"}`` for rows that name files; ``{"hidden": True}`` reads files whose
            names begin with ``_`` or ``.``, too.
        source_store_options, store_options: For the stores of the source and of ``out``.
        lengths: Functions by name, e.g. ``{"tokens": len}``, as `MDSWriter` takes them; a whole sample has the columns
            that are written.
        spark: A Spark session, whose executors do the work of the processes, on all machines of its cluster. They must
            see the source, `out`, and, for `shuffle`, `tmp_dir` under the same names.

    Raises:
        ValueError: Settings, columns or values that cannot be written; null values, with column and count; no rows.
        FormatError: A damaged file, or one whose name does not fit.
        NotFoundError: The files do not exist.
        FileExistsError: ``out`` holds something else; names the differences.
        LightningStreamError: Workers died several times.
    """
    begin = time.perf_counter()
    refuse_in_worker("convert()")
    if group_by is not None and val_fraction is None:
        raise ValueError("group_by keeps rows together in the validation split; it needs val_fraction.")
    if not isinstance(columns, Mapping | None):
        raise ValueError(f"columns must be a dict of encodings by name, {{'text': 'str'}}; got {columns!r:.80}.")
    place = absolute(out)
    outs = place if isinstance(place, tuple) else (place,)
    conversion = Conversion(
        source=open_dataset(source, kind, source_options, source_store_options)
        or open_source(source, kind, source_options, source_store_options, outs),
        out=outs,
        keep_local=keep_local,
        store_options=store_options,
        columns=None if columns is None else dict(columns),
        writer={
            "compression": "auto" if compression == "auto" else check_compression(compression),
            "hashes": list(hashes_to_write(hashes)),
            "size_limit": size_limit if size_limit in (None, "auto") else parse_bytes(size_limit, "size_limit") or None,
        },
        transform=Transform(transform, transform_partition),
        nulls=NullRule(dict(fill_nulls or {}), drop_nulls),
        val_fraction=val_fraction,
        group_by=group_by,
        seed=seed,
        shuffle=shuffle,
        partition_bytes=None if partition_bytes is None else max(1, parse_bytes(partition_bytes, "partition_bytes")),
        tmp_dir=None if tmp_dir is None else os.fspath(tmp_dir),
        overwrite=overwrite or exist_ok or force,
        force=force,
        lengths=check_functions(lengths),
    )
    if spark is not None and shuffle and tmp_dir is None and is_remote(conversion.uri):
        raise ValueError("shuffle with spark= moves rows through a folder that all machines share. Pass tmp_dir=.")
    if conversion.source.reader.kind == "mds" and conversion.source.name.rstrip("/") == str(conversion.uri):
        raise ValueError(f"a dataset is written beside the one that is read; both are {conversion.uri}. Name another.")
    conversion.source.reader.is_strict = columns is None or conversion.transform.function is not None
    result = _converted(conversion, spark or num_processes(num_workers), progress_bar)
    return replace(result, seconds=time.perf_counter() - begin, num_left_out=conversion.source.num_left_out)


def _converted(conversion: Conversion, workers: Workers, progress_bar: bool) -> ConversionResult:
    source = conversion.source
    if not source.splits:
        return conversion.run(workers, progress_bar)
    if conversion.val_fraction is not None:
        raise ValueError(
            f"{source.name} holds the splits {', '.join(source.splits)} already, so val_fraction does not apply. Omit "
            "it, or pass a list of files or folders to split them in another way."
        )
    conversion.refuse_beside()
    asked = None if conversion.transform.function is not None else conversion.columns
    files = tuple(file for split_files in source.splits.values() for file in split_files)
    schema = replace(source, files=files).find_columns(asked)
    done = []
    for split, files in source.splits.items():
        reader = copy(source.reader)
        if not reader.is_listing:  # the classes of images are those of all splits
            reader.begin(files)
        part = replace(source, files=files, splits={}, reader=reader)
        out = conversion.out_of(split)
        done.append(replace(conversion, source=part, out=out, schema=schema).run(workers, progress_bar))
    options = conversion.store_options or {}
    result = read_manifest(conversion.uri, **(options if is_remote(conversion.uri) else {}))
    return replace(result, is_new=any(part_result.is_new for part_result in done))
