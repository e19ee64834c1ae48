"""Labelled photos to MDS shards by Spark: its binary file source reads them, its executors write the shards.

The sets are those of the local conversion: the same photos held out, the same bytes, in another order.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_stream.convert.publish import MANIFEST
from lightning_stream.recipes.photos import PhotoFolder, PhotoKey, PhotoSource
from lightning_stream.stores import open_store

Photos = Mapping[PhotoKey, Callable[[], bytes]]
_PHOTOS_OF_PARTITION = 500


@contextmanager
def spark_session() -> Iterator[Any]:
    """The active Spark session, or one of this machine for as long as the conversion takes.

    Raises:
        MissingExtraError: There is no pyspark, or no Java; says what to install.
    """
    from lightning_stream.spark.session import active_session, local_session

    active = active_session()
    if active is not None:
        yield active
        return
    session = local_session(conf={"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"})
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def as_folder(source: PhotoSource, photos: Photos) -> Iterator[Path]:
    """The photos as files in class folders, which is what Spark reads: drawings and archives are unpacked meanwhile."""
    if isinstance(source, PhotoFolder):
        yield source.folder
        return
    with tempfile.TemporaryDirectory(prefix="photos-for-spark-") as place:
        for (label, name), read in photos.items():
            path = Path(place) / label / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(read())
        yield Path(place)


def write_sets(
    session: Any,
    folder: Path,
    sets: Mapping[str, Sequence[PhotoKey]],
    classes: Sequence[str],
    place: str,
    writer: Mapping[str, Any],
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Write each set as an MDS dataset of its name.

    Args:
        session: Of Spark, whose executors see the folder.
        folder: Photos, in class folders.
        sets: Which photos belong to which set.
        classes: A label is an index into them.
        place: Folder or URL of the sets.
        writer: ``columns``, ``compression``, ``hashes`` and ``size_limit``.

    Returns:
        Photos written, by set; and those that could not be decoded, as ``class/name``.
    """
    from lightning_stream.spark import dataframe_to_mds

    counts: dict[str, int] = {}
    unreadable: list[str] = []
    for split, keys in sets.items():
        counts[split] = 0
        if not keys:
            continue
        rows, out = _rows(session, folder, keys, classes), f"{place}/{split}"
        dataframe_to_mds(rows, mds_kwargs={**writer, "out": out, "overwrite": True}, udf_iterable=_samples)
        counts[split] = json.loads(open_store(out).read(MANIFEST))["num_samples"]
        if counts[split] < len(keys):
            unreadable += [row["name"] for row in rows.mapInPandas(_undecodable, "name string").collect()]
    return counts, tuple(sorted(unreadable))


def _rows(session: Any, folder: Path, keys: Sequence[PhotoKey], classes: Sequence[str]) -> Any:
    """One row per photo: name, class as a number, and bytes; spread over partitions by their place among the keys."""
    from pyspark.sql import functions as f

    number = {label: k for k, label in enumerate(classes)}
    table = [(f"{label}/{name}", number[label], at) for at, (label, name) in enumerate(keys)]
    wanted = session.createDataFrame(table, "name string, label int, at int")
    files = session.read.format("binaryFile").option("recursiveFileLookup", "true").load(_literal(folder))
    name = f.array_join(f.slice(f.split("path", "/"), -2, 2), "/")
    rows = files.select(name.alias("name"), "content").join(f.broadcast(wanted), "name")
    partitions = max(2, -(-len(keys) // _PHOTOS_OF_PARTITION))
    return rows.repartition(partitions, "at").sortWithinPartitions("at").select("name", "label", "content")


def _literal(folder: Path) -> str:
    """A path in which Spark takes no character for a pattern."""
    return "".join(f"\\{letter}" if letter in "\\{}[]*?" else letter for letter in str(folder))


def _samples(frame: Any) -> Iterator[dict[str, Any]]:
    """The samples of some rows, in an executor; photos that cannot be decoded are left out."""
    from lightning_stream.recipes.photo_conversion import as_jpeg

    for name, label, content in zip(frame["name"], frame["label"], frame["content"], strict=True):
        image = as_jpeg(bytes(content))
        if image is not None:
            yield {"image": image, "label": int(label), "name": name}


def _undecodable(frames: Iterable[Any]) -> Iterator[Any]:
    """The names of the photos that `_samples` leaves out."""
    from lightning_stream.recipes.photo_conversion import as_jpeg

    for frame in frames:
        yield frame.loc[[as_jpeg(bytes(content)) is None for content in frame["content"]], ["name"]]
