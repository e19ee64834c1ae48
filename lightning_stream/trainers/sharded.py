"""Reads one value of a checkpoint that torch.distributed.checkpoint wrote, without running code that its files name.

torch itself unpickles the metadata of such a checkpoint, and the values beside its tensors, as they are.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from lightning_stream.errors import StateError
from lightning_stream.loading.plain import STATE_KEY

METADATA = ".metadata"
_KEY = f"state.dataset_state.train.{STATE_KEY}"
_MODULES = ("torch", "torch.serialization", "pathlib", "pathlib._local", metadata.__name__, filesystem.__name__)
_FUNCTIONS = {("torch.serialization", "_get_layout")}


class _Unpickler(pickle.Unpickler):
    """Makes the values of metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Find what torch writes into metadata; UnpicklingError for anything else."""
        if module in _MODULES and "." not in name:
            symbol = super().find_class(module, name)
            is_own = isinstance(symbol, type) and symbol.__module__ == metadata.__name__
            is_path = isinstance(symbol, type) and issubclass(symbol, PurePath)
            is_plain = isinstance(symbol, torch.dtype) or symbol in (torch.Size, filesystem._StorageInfo)  # noqa: SLF001
            if is_own or is_path or is_plain or (module, name) in _FUNCTIONS:
                return symbol
        raise pickle.UnpicklingError(f"the metadata of a sharded checkpoint has no {module}.{name}")


def held_position(folder: Path, trusted: bool = False) -> Any:
    """The file, the offset and the length of the data's position, as attributes of what torch keeps; None without it.

    Raises:
        StateError: The file is not in the folder, or its content is compressed.
        UnpicklingError: The metadata holds more than plain values, and is not trusted.
    """
    with (folder / METADATA).open("rb") as file:
        content = pickle.load(file) if trusted else _Unpickler(file).load()  # noqa: S301
    entry = next((info for index, info in (content.storage_data or {}).items() if index.fqn == _KEY), None)
    if entry is not None and Path(entry.relative_path).name != entry.relative_path:
        named = repr(entry.relative_path)
        raise StateError(f"a sharded checkpoint holds its files in one folder; the metadata of {folder} names {named}")
    if entry is not None and vars(entry).get("transform_descriptors"):
        raise StateError(f"the position in a sharded checkpoint must not be compressed; {folder} has it compressed")
    return entry


def position_in(folder: Path, trusted: bool) -> dict[str, Any]:
    """What Composer's state keeps of the data, as its checkpoint of one file would; empty without it.

    Args:
        folder: The folder of the checkpoint.
        trusted: Whether its files may hold other objects than plain ones, which runs code that they name.
    """
    entry = held_position(folder, trusted)
    if entry is None:
        return {}
    with (folder / entry.relative_path).open("rb") as file:
        file.seek(entry.offset)
        value = torch.load(BytesIO(file.read(entry.length)), weights_only=not trusted)
    return {"state": {"dataset_state": {"train": {STATE_KEY: value}}}}
