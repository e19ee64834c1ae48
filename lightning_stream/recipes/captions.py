"""Images with captions, in LAION's layout as img2dataset leaves it, as streamed training data.

That is tars (or folders) in which files of one key are a sample: ``000000012.jpg``, ``.txt`` with the caption, and
``.json`` with what else is known of it; beside each a parquet file with the URLs, which is not needed here.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash

from lightning_stream.convert import ConversionResult, Inputs, convert
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.recipes import shapes
from lightning_stream.recipes.converted_set import TRAIN, VAL, split_datasets
from lightning_stream.recipes.images import PlainImage
from lightning_stream.recipes.task import TaskData
from lightning_stream.shared_files import FileLock, make_folder

DRAWN = "drawn"
END = 0
"""The token that ends a caption and fills up what is left."""
_COLUMNS = {"image": "jpeg", "caption": "str", "key": "str"}
_PICTURES = (".jpg", ".jpeg")
_DRAWN_IN_A_TAR = 100
_WAIT_S = 3600.0


def captioned(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tar's sample as image, caption and key; None for what img2dataset could not fetch, which has no picture."""
    picture = next((row[ending] for ending in ("jpg", "jpeg") if row.get(ending)), None)
    told = row.get("json") or {}
    caption = row.get("txt") or told.get("caption")
    if picture is None or not caption:
        return None
    return {"image": picture, "caption": str(caption), "key": str(row["__key__"])}


def folder_samples(folder: str) -> Iterator[dict[str, Any]]:
    """The samples of one folder of files."""
    for picture in sorted(file for file in Path(folder).iterdir() if file.suffix in _PICTURES):
        caption, told = picture.with_suffix(".txt"), picture.with_suffix(".json")
        row = {
            "jpg": picture.read_bytes(),
            "txt": caption.read_text(encoding="utf-8") if caption.is_file() else "",
            "json": json.loads(told.read_bytes()) if told.is_file() else {},
            "__key__": picture.stem,
        }
        if (sample := captioned(row)) is not None:
            yield sample


def draw_tars(folder: Path, count: int, seed: int) -> None:
    """Drawings of shapes with captions, in tars as img2dataset makes them; nothing where they are there already."""
    make_folder(folder.parent)
    with FileLock(folder.with_name(f".{folder.name}.lock"), _WAIT_S):
        if folder.is_dir():
            return
        draft = folder.with_name(f".{folder.name}.draft")
        draft.mkdir(exist_ok=True)
        for first in range(0, count, _DRAWN_IN_A_TAR):
            with tarfile.open(draft / f"{first // _DRAWN_IN_A_TAR:05}.tar", "w") as tar:
                _fill(tar, range(first, min(count, first + _DRAWN_IN_A_TAR)), seed)
        draft.replace(folder)


def _fill(tar: tarfile.TarFile, numbers: range, seed: int) -> None:
    """Add the drawings of these numbers, each with its caption."""
    for number in numbers:
        jpeg, caption = shapes.shape_jpeg(seed, number)
        files = {
            "jpg": jpeg,
            "txt": caption.encode(),
            "json": json.dumps({"caption": caption, "status": "success"}).encode(),
        }
        for ending, content in files.items():
            entry = tarfile.TarInfo(f"{number:09}.{ending}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


@dataclass(frozen=True)
class CaptionSource:
    """Where images with captions come from.

    Attributes:
        place: A folder of tars, or of folders of files; or ``"drawn"``.
        drawn_in: Folder for the tars of drawings.
        drawn: Their number and seed.
    """

    place: str
    drawn_in: str
    drawn: tuple[int, int]

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.drawn[0]} captioned drawings made by this package" if self.place == DRAWN else self.place

    @property
    def folder(self) -> Path:
        """Where the tars or folders lie."""
        if self.place != DRAWN:
            return Path(self.place).expanduser().absolute()
        count, seed = self.drawn
        return Path(self.drawn_in).absolute() / f"shapes-{shapes.VERSION}-{count}-{seed}"

    def open(self) -> str | Inputs:
        """What `convert` reads.

        Raises:
            NotFoundError: There is no such folder.
            FormatError: It has neither tars nor folders of pictures.
        """
        if self.place == DRAWN:
            draw_tars(self.folder, *self.drawn)
        if not self.folder.is_dir():
            raise NotFoundError(f"there is no folder at {self.folder}. Set data.source to what img2dataset made.")
        if any(self.folder.glob("*.tar")):
            return f"{self.folder}/*.tar"
        folders = sorted({file.parent for file in self.folder.rglob("*") if file.suffix in _PICTURES})
        if not folders:
            lists = any(self.folder.rglob("*.parquet"))
            hint = " The parquet files there list URLs: fetch the pictures with img2dataset first." if lists else ""
            raise FormatError(
                f"images with captions are tars, or folders of .jpg and .txt; {self.folder} has none.{hint}"
            )
        if not any(file.suffix in (".txt", ".json") for folder in folders for file in folder.iterdir()):
            raise FormatError(
                f"a picture's caption is in a .txt or .json file of the same name beside it; {self.folder} has none."
            )
        stamps = [(str(one), one.stat().st_mtime_ns) for one in folders]
        return Inputs([str(one) for one in folders], folder_samples, stamp=str(stamps))


@dataclass(frozen=True)
class CaptionedImage:
    """Pixels and tokens of a sample, for a network.

    Attributes:
        size: Height and width, in pixels.
        length: Tokens of a caption: its UTF-8 bytes, cut off or filled up with `END`.
        mirrored: Whether half of the pictures are mirrored at random.
    """

    size: int
    length: int
    mirrored: bool

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """``{"image": uint8[3, size, size], "tokens": uint8[length], "number": int64}``: a hash of the key."""
        image = PlainImage(self.size, margin=0.0)(sample)["image"]
        if self.mirrored and torch.rand(()) < 0.5:
            image = image.flip(2)
        number = xxhash.xxh3_64_intdigest(sample["key"].encode()) >> 1
        return {"image": image, "tokens": tokens_of(sample["caption"], self.length), "number": torch.tensor(number)}


def tokens_of(caption: str, length: int) -> torch.Tensor:
    """uint8[length]: the caption's bytes, cut off or filled up."""
    held = caption.encode().replace(b"\0", b" ")[:length]
    return torch.frombuffer(bytearray(held.ljust(length, b"\0")), dtype=torch.uint8)


class CaptionData(TaskData):
    """Images with captions: ``{"image": uint8[n, 3, h, w], "tokens": uint8[n, length], "number": int64[n]}`` a batch.

    Args:
        source: Where they come from.
        place: Folder or URL of the shards.
        written: More arguments of `convert`.
        image_size: Pixels to a side.
        length: Tokens of a caption.
        datasets: Arguments of the ``train`` and ``val`` datasets.
        **settings: As in `TaskData`.
    """

    def __init__(
        self,
        source: CaptionSource,
        place: str,
        written: Mapping[str, Any],
        image_size: int,
        length: int,
        datasets: Mapping[str, Mapping[str, Any]],
        **settings: Any,
    ) -> None:
        super().__init__(datasets, self._convert, **settings)
        self.source = source
        self.image_size = image_size
        self.length = length
        self._place = place
        self._written = written

    @property
    def place(self) -> str:
        """Folder or URL of the shards."""
        return self._place

    @cached_property
    def converted(self) -> ConversionResult:
        """What was converted, or is converted now."""
        given = self.source.open()
        transform = None if isinstance(given, Inputs) else captioned
        return convert(given, self._place, columns=_COLUMNS, transform=transform, **self._written)

    def captions(self, count: int) -> list[str]:
        """The first held-out captions, each once."""
        _ = self.converted
        held_out = self.datasets[VAL]
        assert held_out is not None
        found = dict.fromkeys(held_out[index]["caption"] for index in range(min(64, held_out.size)))
        return [*found][:count]

    def notes(self, history: Mapping[int, Mapping[str, float]]) -> tuple[str, ...]:  # noqa: ARG002
        """How many pictures."""
        counts = self.converted.num_samples
        told = f"Learnt from {counts[TRAIN]} pictures with captions, held out {counts[VAL]}."
        if self.source.place != DRAWN:
            return (f"{told} It is {self.source.title}.",)
        expected = "A short run gets a caption's colours, and seldom its shape; more epochs go further."
        return (f"{told} It is {self.source.title}.", expected)

    def _convert(self) -> None:
        print(f"{self.converted}.", file=sys.stderr)


def caption_data(
    *,
    source: str = DRAWN,
    drawn_count: int = 1300,
    drawn_seed: int = 1,
    drawn_in: str = "runs/downloads",
    held_out: float = 0.05,
    conversion_workers: int | None = None,
    remote: str = "runs/shards/captions",
    local: str | None = "runs/cache/captions",
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | str = "256kb",
    cache_limit: int | str | None = None,
    num_canonical_nodes: int | None = None,
    image_size: int = 32,
    caption_length: int = 32,
    seed: int = 1,
    global_batch_size: int = 32,
    eval_batch_size: int = 64,
    num_workers: int = 1,
    persistent_workers: bool = True,
) -> CaptionData:
    """Streamed images with captions: converted into shards under `remote`, read back through the cache in `local`.

    Args:
        source: A folder of tars as img2dataset makes them, or of folders of ``.jpg`` and ``.txt``; or ``"drawn"``.
        drawn_count, drawn_seed, drawn_in: How many drawings, which, and where their tars are kept.
        held_out: Share that is never trained on.
        conversion_workers: Processes that convert; None for one per processor.
        remote: Folder or URL for the shards.
        local: Folder for the cache; None for the default one.
        compression, hashes, size_limit: Of the shards.
        cache_limit: Bytes that the cache may hold, e.g. ``"500gb"``.
        num_canonical_nodes: See `StreamingDataset`; None derives it from the global batch.
        image_size: Pixels to a side.
        caption_length: Bytes of a caption that the network sees.
        seed: Of the order, the mirroring and the noise.
        global_batch_size: Samples of an optimizer step over all devices.
        eval_batch_size: Samples per device in validation.
        num_workers: Processes per device that read and decode.
        persistent_workers: Whether they live on from epoch to epoch.
    """
    given = CaptionSource(source, drawn_in, (drawn_count, drawn_seed))
    written = {
        "val_fraction": held_out,
        "compression": compression,
        "hashes": list(hashes_to_write(hashes)),
        "size_limit": size_limit,
        "num_workers": conversion_workers,
        "overwrite": True,  # a source that changed is converted again
    }
    seen = json.dumps([str(given.folder), held_out, compression, [*hashes_to_write(hashes)], size_limit])
    fingerprint = hashlib.sha256(seen.encode()).hexdigest()[:16]
    place = f"{remote.rstrip('/')}/{fingerprint}"
    transforms = {split: CaptionedImage(image_size, caption_length, mirrored=split == TRAIN) for split in (TRAIN, VAL)}
    datasets = split_datasets(
        place,
        local,
        transforms,
        seed=seed,
        cache_limit=cache_limit,
        num_canonical_nodes=num_canonical_nodes,
    )
    return CaptionData(
        given,
        place,
        written,
        image_size,
        caption_length,
        datasets,
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        seed=seed,
    )
