"""Sounds of some classes as streamed training data, kept as WAV files in a column with an encoding of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.formats.hashing import hashes_to_write
from lightning_stream.recipes import chords
from lightning_stream.recipes.converted_set import TRAIN, VAL, split_datasets
from lightning_stream.recipes.labelled_data import LabelledData
from lightning_stream.recipes.labelled_set import FileKey, LabelledSet, LabelledSource, is_held_out, writing_order
from lightning_stream.recipes.wav import WAV, Recording

PLAYED = "played"
DESCRIPTION = "sounds.json"
COLUMNS = {"sound": WAV, "label": "int", "name": "str"}
_PIECE_SOUNDS = 200


class Piece(NamedTuple):
    """Some sounds, by class and name."""

    keys: tuple[FileKey, ...]

    def __repr__(self) -> str:
        return f"{'/'.join(self.keys[0])}..{'/'.join(self.keys[-1])} {len(self.keys)}"


@dataclass(frozen=True)
class PlayedChords:
    """Chords played by this package.

    Attributes:
        count: Sounds in all, spread evenly over the classes.
        seed: Chooses the sounds.
        held_out: Share of each class that is held out.
    """

    count: int
    seed: int
    held_out: float

    columns = COLUMNS

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.count} chords played by this package (not recordings)"

    @property
    def classes(self) -> tuple[str, ...]:
        """Their kinds."""
        return tuple(chords.KINDS)

    def fingerprint(self) -> str:
        """The playing's version and the arguments."""
        return f"chords {chords.VERSION} {self.count} {self.seed} {self.held_out}"

    def pieces(self, split: str) -> list[Piece]:
        """The sounds of a split, kinds mixed."""
        kinds = self.classes
        keys = [(kinds[number % len(kinds)], f"{number:05}.wav") for number in range(self.count)]
        return pieces_of(keys, split, self.held_out, self.title)

    def read(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Play the sounds of a piece."""
        for kind, name in piece.keys:
            sound = chords.play(kind, self.seed, int(name.partition(".")[0]))
            yield {"sound": chords.wav_file(sound), "label": self.classes.index(kind), "name": f"{kind}/{name}"}


@dataclass(frozen=True)
class SoundFolder:
    """WAV files in a folder for each class.

    Attributes:
        folder: Holds the folders of the classes.
        held_out: Share of each class that is held out.
    """

    folder: Path
    held_out: float

    columns = COLUMNS

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"the sounds in {self.folder}"

    @property
    def classes(self) -> tuple[str, ...]:
        """The folders' names, sorted."""
        return tuple(sorted({label for label, _ in self._files()}))

    def fingerprint(self) -> str:
        """Of names and contents."""
        total = xxhash.xxh3_128(str(self.held_out).encode())
        for key, file in self._files().items():
            total.update(f"{'/'.join(key)}\0{xxhash.xxh3_128_hexdigest(file.read_bytes())}\n".encode())
        return f"sounds{total.hexdigest()}"

    def pieces(self, split: str) -> list[Piece]:
        """The sounds of a split, classes mixed."""
        return pieces_of([*self._files()], split, self.held_out, self.title)

    def read(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The sounds of a piece, byte for byte.

        Raises:
            FormatError: A file is not what its name says.
        """
        classes = self.classes
        for label, name in piece.keys:
            file = self.folder / label / name
            try:
                data = bytes(Recording(file.read_bytes()).checked())
            except ValueError as error:
                raise FormatError(f"{file}: {error} Mend it, or move it away.") from error
            yield {"sound": data, "label": classes.index(label), "name": f"{label}/{name}"}

    def _files(self) -> dict[FileKey, Path]:
        """By class and name.

        Raises:
            NotFoundError: There are none.
        """
        files = sorted(self.folder.glob("*/*.[wW][aA][vV]"))
        if not files:
            raise NotFoundError(
                f"sounds are .wav files in a folder for each class; found none in {self.folder}. Set data.source to "
                f"the folder that holds those of the classes, or to {PLAYED!r}."
            )
        return {(file.parent.name, file.name): file for file in files}


def pieces_of(keys: Sequence[FileKey], split: str, held_out: float, title: str) -> list[Piece]:
    """Those of a split in an order that mixes the classes, some hundred at a time.

    Raises:
        FormatError: The split has none.
    """
    order = [key for key in writing_order(dict.fromkeys(keys)) if is_held_out(key, held_out) == (split == VAL)]
    if not order:
        raise FormatError(f"a {split} set needs sounds; {title} gives it none of {len(keys)}. Change data.held_out.")
    return [Piece(tuple(order[at : at + _PIECE_SOUNDS])) for at in range(0, len(order), _PIECE_SOUNDS)]


@dataclass(frozen=True)
class SoundWindow:
    """A part of a sound, for a network: the only part that is decoded.

    Attributes:
        moments: Its length.
        random: Whether it begins anywhere, and is louder or softer, at random; else it is the middle.
    """

    moments: int
    random: bool

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with its sound as float32[moments], channels mixed; silence fills up what is shorter."""
        sound = sample["sound"]
        spare = max(0, sound.num_moments - self.moments)
        begin, gain = spare // 2, 1.0
        if self.random:
            where, loudness = torch.rand(2).tolist()
            begin, gain = int(where * (spare + 1)), 0.5 + loudness
        heard = sound.moments(begin, self.moments).mean(0) * gain
        full = np.pad(heard, (0, self.moments - len(heard))).astype(np.float32)
        return {"sound": torch.from_numpy(full), "label": sample["label"]}


class SoundData(LabelledData):
    """Sounds and labels, streamed as batches of ``{"sound": float32[n, moments], "label": int64[n]}``.

    Args:
        conversion: Makes the shards that `datasets` read.
        moments: Length of a sound that the network hears.
        datasets: Arguments of the ``train`` and ``val`` datasets, see `split_datasets`.
        **settings: As in `TaskData`.
    """

    def __init__(
        self, conversion: LabelledSet, moments: int, datasets: Mapping[str, Mapping[str, Any]], **settings: Any
    ) -> None:
        super().__init__(conversion, datasets, **settings)
        self.moments = moments


def sound_data(
    *,
    source: str | None = PLAYED,
    played_count: int = 1000,
    played_seed: int = 1,
    held_out: float = 0.1,
    conversion_workers: int | None = None,
    remote: str = "runs/shards/sounds",
    local: str | None = "runs/cache/sounds",
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | str = "512kb",
    cache_limit: int | str | None = None,
    num_canonical_nodes: int | None = None,
    moments: int = 8000,
    seed: int = 1,
    global_batch_size: int = 32,
    eval_batch_size: int = 128,
    num_workers: int = 1,
    persistent_workers: bool = True,
) -> SoundData:
    """Streamed sounds: converted into shards under `remote`, read back through the cache in `local`.

    Args:
        source: ``"played"`` (chords by this package) or a folder with a folder of WAV files for each class; None where
            `remote` itself holds a converted set.
        played_count, played_seed: How many chords, and which.
        held_out: Share of each class that is never trained on.
        conversion_workers: Processes that convert; None for one per processor.
        remote: Folder or URL for the shards.
        local: Folder for the cache; None for the default one.
        compression, hashes, size_limit: Of the shards.
        cache_limit: Bytes that the cache may hold, e.g. ``"10gb"``.
        num_canonical_nodes: See `StreamingDataset`; None derives it from the global batch.
        moments: Length of the part of a sound that is decoded and heard.
        seed: Of the order and the augmentation.
        global_batch_size: Sounds of an optimizer step over all devices.
        eval_batch_size: Sounds per device in validation.
        num_workers: Processes per device that read and decode; 0 does so between steps.
        persistent_workers: Whether they live on from epoch to epoch.
    """
    given: LabelledSource | None = None
    if source == PLAYED:
        given = PlayedChords(played_count, played_seed, held_out)
    elif source is not None:
        given = SoundFolder(Path(source).expanduser().absolute(), held_out)
    shards = {
        "compression": compression,
        "hashes": hashes_to_write(hashes),
        "size_limit": size_limit,
        "num_workers": conversion_workers,
    }
    conversion = LabelledSet.plan(given, remote, shards, DESCRIPTION)
    datasets = split_datasets(
        conversion.place,
        local,
        {split: SoundWindow(moments, random=split == TRAIN) for split in (TRAIN, VAL)},
        seed=seed,
        cache_limit=cache_limit,
        num_canonical_nodes=num_canonical_nodes,
    )
    return SoundData(
        conversion,
        moments,
        datasets,
        global_batch_size=global_batch_size,
        eval_batch_size=eval_batch_size,
        num_workers=num_workers,
        persistent_workers=persistent_workers,
        seed=seed,
    )
