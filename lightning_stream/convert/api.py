"""`convert`: files of rows to MDS shards, each row exactly once, the same bytes however many processes write them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from lightning_stream.convert.conversion import Conversion, ConversionResult, Settings, writer_settings
from lightning_stream.convert.files import Places
from lightning_stream.convert.nulls import NullRule
from lightning_stream.convert.plan import part_size
from lightning_stream.convert.sources.choose import open_source
from lightning_stream.convert.sources.function import Inputs
from lightning_stream.convert.split import HeldOut
from lightning_stream.convert.transform import Transform
from lightning_stream.convert.worker import IN_WORKER
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.shared_files import FileLock
from lightning_stream.stores import LocalStore
from lightning_stream.writer.place import Out, is_remote

_WAIT_S = 24 * 3600.0


def convert(
    source: Places | Inputs,
    out: Out,
    *,
    columns: Mapping[str, str] | None = None,
    compression: str | None = "auto",
    hashes: Iterable[str] | None = None,
    size_limit: int | str | None = "64mb",
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
    force: bool = False,
    keep_local: bool = False,
    progress_bar: bool = False,
    partition_bytes: int | str | None = None,
    source_options: Mapping[str, Any] | None = None,
    source_store_options: Mapping[str, Any] | None = None,
    store_options: Mapping[str, Any] | None = None,
    exist_ok: bool = False,
    **former: NoReturn,
) -> ConversionResult:
    """Write files of rows as an MDS dataset, in parallel processes.

    Example::

        convert("s3://bucket/raw/*.parquet", "s3://bucket/train", columns={"text": "str", "label": "int64"})

    Every row is in the dataset exactly once, whatever becomes of the processes. index.json comes last: without it there
    is no dataset, and then the same call again writes only the parts that are missing. The same source and settings
    give the same files, however many processes write them. ``manifest.json`` beside the index tells schema, row counts,
    source files and statistics; if it tells of this very source and these settings, nothing is written again.

    Args:
        source: A file, a folder, a pattern with ``*``, or a list of these; paths, or URLs of any store. Or `Inputs`,
            with a function that gives the samples of each.
        out: Where to: a local folder, a URL, or (local folder, URL).
        columns: Encodings by column name: only these are written. None for all, inferred from the source's schema, or
            from its first rows where it has none.
        compression: E.g. ``"zstd"`` or ``"zstd:7"``; None for none. ``"auto"`` is zstd, but none where a column holds
            images, sound or video, which are compressed already.
        hashes: Digests of every file that the index holds; None for ``["xxh3_64"]``, ``[]`` for none.
        size_limit: Bytes of a shard, as a number or ``"64mb"``.
        num_workers: Processes; None for one per processor. 1 writes in this process.
        kind: What the files are, where their names do not tell: ``parquet``, ``jsonl``, ``csv``, ``tsv``, ``images``...
        transform: Called with each row (a dict of Python values); gives a sample, None to leave the row out, or an
            iterable of samples. For repeatable files it must be deterministic. Without ``columns``, the first sample
            decides them.
        transform_partition: Called instead with an iterator over the rows of a partition; gives its samples: for what needs
            several rows at once, e.g. texts to blocks of tokens. Parts are as ``partition_bytes`` says.
        fill_nulls: Values to write in the place of nulls, by column.
        drop_nulls: Leave out rows with nulls in columns that have no null (all but json).
        val_fraction: Share of the rows that goes into ``out/val``, while the others go into ``out/train``.
        group_by: A column: rows with the same value there are held out together.
        shuffle: Write the rows in a random order over the whole source: good where it lies sorted, e.g. by class. Rows
            pass through files on this machine, about as large as the dataset without compression.
        seed: Chooses the random order, and which rows are held out.
        tmp_dir: A folder for those files; None for one beside a local ``out``, else among temporary files.
        overwrite: Replace the dataset at ``out`` as a whole, at the end, if it is not this very dataset.
        force: Write the dataset again even if it is there already, from the same source and settings.
        keep_local: With a pair, keep the local copies too.
        progress_bar: Show a line that counts rows on stderr.
        partition_bytes: Bytes of the source that one process writes at a time, e.g. ``"256mb"``. None: by its size.
        source_options: For the reader, e.g. ``{"delimiter": ";"}``.
        source_store_options: For the store of the source.
        store_options: For the store of ``out``.
        exist_ok: mosaicml-streaming's word for `overwrite`.

    Raises:
        ValueError: Settings, columns or values that cannot be written; null values, with column and count; no rows.
        FormatError: A file is not what its name says.
        NotFoundError: No such files.
        FileExistsError: ``out`` holds something else; says what differs.
        LightningStreamError: Workers died over and over.
    """
    begin = time.perf_counter()
    _refuse_former(former)
    if IN_WORKER in os.environ:
        raise RuntimeError(
            "a worker process imports the script that its functions are in, and came upon convert() there. Put what "
            "the script does under: if __name__ == '__main__'."
        )
    found = open_source(source, kind, source_options, source_store_options)
    if val_fraction is None and group_by is not None:
        raise ValueError("group_by says which rows stay together; it needs val_fraction, the share of them.")
    settings = Settings(
        out=_placed(out),
        keep_local=keep_local,
        store_options=store_options,
        columns=None if columns is None else dict(columns),
        writer=writer_settings(compression, hashes, size_limit),
        transform=Transform(transform, transform_partition),
        nulls=NullRule(dict(fill_nulls or {}), drop_nulls),
        val_fraction=None if val_fraction is None else HeldOut(val_fraction, seed, group_by),
        partition_bytes=part_size(found)
        if partition_bytes is None
        else max(1, parse_bytes(partition_bytes, "partition_bytes")),
        shuffle_seed=seed if shuffle else None,
        overwrite=overwrite or exist_ok or force,
        force=force,
        tmp_dir=None if tmp_dir is None else os.fspath(tmp_dir),
    )
    conversion = Conversion(found, settings)
    with _alone(settings.out):
        return conversion.run(_processes(num_workers), progress_bar, begin)


_FORMER = {
    "held_out": "val_fraction",
    "held_out_by": "group_by",
    "transform_rows": "transform_partition",
    "part_bytes": "partition_bytes",
    "scratch": "tmp_dir",
}


def _refuse_former(given: Mapping[str, Any]) -> None:
    for name in given:
        if name in _FORMER:
            raise TypeError(f"convert() has no argument {name!r} any more; it is now {_FORMER[name]!r}.")
        raise TypeError(f"convert() got an unexpected keyword argument {name!r}.")


def _placed(out: Any) -> Any:
    """A place that means the same in every process."""
    if isinstance(out, (tuple, list)):
        return tuple(map(_placed, out))
    place = os.fspath(out) if isinstance(out, (str, os.PathLike)) else ""
    if not place:
        raise ValueError(f"out must name a folder or a URL; got {out!r}. Pass one.")
    return place.rstrip("/") if is_remote(place) else str(LocalStore.from_url(place, {}).folder)


def _processes(num_workers: int | None) -> int:
    if num_workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more (1 writes in this process); got {num_workers}.")
    return num_workers


def _alone(out: Any) -> Any:
    """Held by the one process of this machine that writes there: others wait, and then find it done."""
    place = Path(out[-1] if isinstance(out, tuple) else out)
    if is_remote(str(out[-1] if isinstance(out, tuple) else out)):
        return nullcontext()
    place.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(place.with_name(f".{place.name}.lock"), _WAIT_S)
