"""CIFAR-10 as distributed: the binary or the Python archive, packed or unpacked; nothing in it is ever executed."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes.converted_set import TRAIN, VAL

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_BATCHES = {TRAIN: [f"data_batch_{number}" for number in range(1, 6)], VAL: ["test_batch"]}


@dataclass(frozen=True)
class Cifar10:
    """50,000 images to train on and 10,000 held out, of ten classes.

    Attributes:
        path: ``cifar-10-binary.tar.gz`` or ``cifar-10-python.tar.gz``, or a folder that holds what is in one of them.
    """

    path: Path

    classes = CLASSES
    columns: Mapping[str, str] = field(default_factory=lambda: {"image": "ndarray:uint8:3,32,32", "label": "int"})

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"the CIFAR-10 images in {self.path}"

    def fingerprint(self) -> str:
        """Digest of the batches' bytes."""
        total = xxhash.xxh3_128()
        for split in (TRAIN, VAL):
            for name in self.pieces(split):
                total.update(self._bytes(name))
        return f"cifar{total.hexdigest()}"

    def pieces(self, split: str) -> list[str]:
        """The names of the files that are there of a split's batches.

        Raises:
            NotFoundError: There are none.
        """
        there = self._names()
        found = [name for batch in _BATCHES[split] for name in (f"{batch}.bin", batch) if name in there]
        if not found:
            raise NotFoundError(
                f"{self.path} must be CIFAR-10's binary or Python archive, or a folder of its batches; it holds no "
                f"{_BATCHES[split][0]}.bin and no {_BATCHES[split][0]}."
            )
        return found

    def read(self, piece: str) -> Iterator[dict[str, Any]]:
        """The samples of a batch: their pixels uint8[3, 32, 32] and labels."""
        data = self._bytes(piece)
        pixels, labels = _from_binary(data, piece) if piece.endswith(".bin") else _from_pickle(data, piece)
        for image, label in zip(pixels, labels, strict=True):
            if not 0 <= label < len(CLASSES):
                raise FormatError(f"CIFAR-10 has labels 0 to {len(CLASSES) - 1}; {piece} has one of {label}.")
            yield {"image": image, "label": int(label)}

    def _names(self) -> set[str]:
        if not self.path.exists():
            raise NotFoundError(f"there is no CIFAR-10 archive at {self.path}.")
        if self.path.is_dir():
            return {file.name for file in self.path.rglob("*") if file.is_file()}
        with _archive(self.path) as archive:
            return {PurePosixPath(member.name).name for member in archive if member.isreg()}

    def _bytes(self, name: str) -> bytes:
        if self.path.is_dir():
            return next(self.path.rglob(name)).read_bytes()
        with _archive(self.path) as archive:
            for member in archive:
                file = archive.extractfile(member) if PurePosixPath(member.name).name == name else None
                if file is not None:
                    return file.read()
        raise NotFoundError(f"{self.path} holds no {name}.")


def _archive(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, "r:*")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise FormatError(f"{path} must be a whole .tar.gz; reading it failed: {error}. Fetch it again.") from error


def _from_binary(data: bytes, name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if not data or len(data) % (1 + _PIXELS):
        raise FormatError(f"a batch has samples of {1 + _PIXELS} bytes; {name} has {len(data)} bytes. Fetch it again.")
    rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + _PIXELS)
    return rows[:, 1:].reshape(-1, *_SHAPE), rows[:, 0]


class _Part:
    """Stands where a pickle wants an array or its type: it keeps what it is told, and does nothing."""

    def __init__(self, *told: Any) -> None:
        self.told: tuple[Any, ...] = told

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.told = state


class _InertUnpickler(pickle.Unpickler):
    """Reads plain values, and arrays as `_Part`; whatever else a pickle asks for is refused, and nothing is called."""

    _KNOWN = (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"))

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy._core", "numpy.core"), name) not in self._KNOWN:
            raise FormatError(f"a batch holds numbers and text only; this one asks for {module}.{name}: refused.")
        return _Part

    def persistent_load(self, pid: Any) -> Any:
        raise FormatError(f"a batch holds numbers and text only; this one refers to {pid!r}: refused.")


def _from_pickle(data: bytes, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        held = _InertUnpickler(io.BytesIO(data), encoding="bytes").load()
        array, labels = held[b"data"], np.array(held[b"labels"], np.int64)
        _, shape, _, by_column, raw = array.told
        flat = np.frombuffer(raw, np.uint8)
        rows = flat.reshape(shape[::-1]).T if by_column else flat.reshape(shape)
        pixels = rows.reshape(-1, *_SHAPE)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise FormatError(
            f"{name} must be a batch of CIFAR-10's Python archive; reading it failed: {error}."
        ) from error
    if len(labels) != len(pixels):
        raise FormatError(f"a batch has one label for each image; {name} has {len(labels)} for {len(pixels)}.")
    return pixels, labels
