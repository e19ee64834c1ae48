"""Labelled photos to MDS shards, once for each source: a train and a val set, and a description beside them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any

from PIL import Image

from lightning_stream.errors import FormatError
from lightning_stream.recipes.converted_set import TRAIN, VAL, Made, convert_once, describe
from lightning_stream.recipes.labelled_set import is_held_out, writing_order
from lightning_stream.recipes.photos import PhotoKey, PhotoSource
from lightning_stream.stores import open_store
from lightning_stream.writer import MDSWriter

DESCRIPTION = "photos.json"
COLUMNS = {"image": "jpeg", "label": "int", "name": "str"}
LOCAL, SPARK = "local", "spark"
_VERSION = 1


@dataclass(frozen=True)
class ConversionConfig:
    """How shards are made, and how many photos are held out.

    Attributes:
        compression: E.g. ``"zstd"``; None for none.
        hashes: Digests that the index holds for every file.
        size_limit: Bytes of a shard, e.g. ``"512kb"``.
        held_out: Share of each class that goes into the val set, in (0, 1).
        convert: Who does it: ``"local"``, this process; or ``"spark"``, Spark's executors.
    """

    compression: str | None = "zstd"
    hashes: tuple[str, ...] = ("xxh3_64",)
    size_limit: int | str = "512kb"
    held_out: float = 0.1
    convert: str = LOCAL

    def __post_init__(self) -> None:
        if self.convert not in (LOCAL, SPARK):
            raise ValueError(f"convert must be {LOCAL!r} or {SPARK!r}; found {self.convert!r}.")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is a share of the photos, in (0, 1); found {self.held_out}.")


@dataclass(frozen=True)
class Description:
    """What a converted set holds, as kept beside it."""

    title: str
    drawn: bool
    classes: tuple[str, ...]
    num_train: int
    num_val: int
    unreadable: tuple[str, ...] = ()

    @classmethod
    def from_bytes(cls, data: bytes) -> Description:
        """Read it back."""
        held = json.loads(data)
        return cls(**{**held, "classes": tuple(held["classes"]), "unreadable": tuple(held["unreadable"])})

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), indent=1).encode()


@dataclass(frozen=True)
class Conversion:
    """One source under one config: where its shards belong, and how they come to be there.

    The shards of each source and config lie in a folder of their own, named by a fingerprint of both: a changed source
    is converted anew beside the old one, and no reader ever meets a mixture.

    Attributes:
        source: The photos.
        config: How to convert.
        place: Folder or URL of this very set.
    """

    source: PhotoSource
    config: ConversionConfig
    place: str

    @classmethod
    def plan(cls, source: PhotoSource, remote: str | os.PathLike[str], config: ConversionConfig) -> Conversion:
        """The conversion of a source into a place of its own under `remote`. Reads the source for its fingerprint."""
        return cls(source, config, f"{os.fspath(remote).rstrip('/')}/{_fingerprint(source, config)}")

    def describe(self) -> Description | None:
        """What the converted set holds; None where there is none yet."""
        return describe(self.place, DESCRIPTION, Description.from_bytes)

    def run(self) -> Made[Description]:
        """Convert, unless it was done; one process of a machine does it while others wait.

        Raises:
            FormatError: There are no photos, or a class has none to hold out or to train on.
        """
        return convert_once(self.place, self.describe, self._convert)

    def _convert(self, place: str) -> Description:
        with self.source.open() as photos:
            classes = tuple(sorted({label for label, _ in photos}))
            write = self._write_by_spark if self.config.convert == SPARK else self._write
            counts, unreadable = write(photos, classes, place)
        done = Description(self.source.title, self.source.drawn, classes, counts[TRAIN], counts[VAL], unreadable)
        _check(done)
        open_store(place).put(DESCRIPTION, done.to_bytes())
        return done

    def _write(
        self, photos: Mapping[PhotoKey, Callable[[], bytes]], classes: tuple[str, ...], place: str
    ) -> tuple[dict[str, int], tuple[str, ...]]:
        from tqdm import tqdm  # type: ignore[import-untyped]

        counts, unreadable = {TRAIN: 0, VAL: 0}, []
        with self._writer(f"{place}/{TRAIN}") as train, self._writer(f"{place}/{VAL}") as val:
            order = writing_order(photos)
            for key in tqdm(order, desc="converting", unit=" photos", file=sys.stderr, disable=None):
                label, name = key
                jpeg = as_jpeg(photos[key]())
                if jpeg is None:
                    unreadable.append(f"{label}/{name}")
                    continue
                held_out = is_held_out(key, self.config.held_out)
                (val if held_out else train).write(
                    {"image": jpeg, "label": classes.index(label), "name": f"{label}/{name}"}
                )
                counts[VAL if held_out else TRAIN] += 1
        return counts, tuple(unreadable)

    def _write_by_spark(
        self, photos: Mapping[PhotoKey, Callable[[], bytes]], classes: tuple[str, ...], place: str
    ) -> tuple[dict[str, int], tuple[str, ...]]:
        from lightning_stream.recipes.spark_photos import as_folder, spark_session, write_sets

        sets: dict[str, list[PhotoKey]] = {TRAIN: [], VAL: []}
        for key in writing_order(photos):
            sets[VAL if is_held_out(key, self.config.held_out) else TRAIN].append(key)
        with spark_session() as session, as_folder(self.source, photos) as folder:
            return write_sets(session, folder, sets, classes, place, self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        config = self.config
        return {
            "columns": COLUMNS,
            "compression": config.compression,
            "hashes": config.hashes,
            "size_limit": config.size_limit,
        }

    def _writer(self, place: str) -> MDSWriter:
        return MDSWriter(
            out=place,
            **self._settings,
            overwrite=True,  # on a URL, an attempt that was cut short may have left shards, though no index
        )


def _check(done: Description) -> None:
    """Raise FormatError if there is nothing to learn from, or nothing to try it on."""
    total = done.num_train + done.num_val
    bad = f"; {len(done.unreadable)} files cannot be decoded, e.g. {done.unreadable[0]}" if done.unreadable else ""
    if not total:
        raise FormatError(
            f"photos are .jpg, .jpeg or .png files in a folder for each class, <photos>/<class>/<photo>.jpg; found "
            f"none: {done.title}{bad}. Set data.photos to the folder that holds those of the classes."
        )
    if len(done.classes) < 2:
        raise FormatError(
            f"telling classes apart needs two of them and more; found {', '.join(done.classes)} alone: {done.title}. "
            "Set data.photos to a folder with a folder for each class."
        )
    for split, count in {TRAIN: done.num_train, VAL: done.num_val}.items():
        if not count:
            raise FormatError(
                f"a {split} set needs photos; by data.held_out it gets none of these {total}: {done.title}{bad}. Add "
                "photos, or change data.held_out."
            )


def as_jpeg(data: bytes) -> bytes | None:
    """A picture file as JPEG: its own bytes where it is one already; None where it cannot be decoded."""
    try:
        with Image.open(BytesIO(data)) as image:
            if image.format == "JPEG":
                image.draft("RGB", (32, 32))  # every byte is read, and few pixels are made
                image.load()
                return data
            out = BytesIO()
            image.convert("RGB").save(out, format="JPEG", quality=95)
            return out.getvalue()
    except (OSError, ValueError, SyntaxError):
        return None


def _fingerprint(source: PhotoSource, config: ConversionConfig) -> str:
    told = asdict(config)
    if config.convert == LOCAL:
        del told["convert"]  # as fingerprints were before there was a choice
    settings = json.dumps([_VERSION, source.fingerprint(), told, COLUMNS], sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()[:16]
