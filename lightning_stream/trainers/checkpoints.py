"""Moves the data's position between trainers: from a checkpoint of any of them to the data of any other."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from lightning_stream.errors import StateError
from lightning_stream.loading.plain import STATE_KEY, unpacked

# Composer's checkpoints hold these beside tensors and plain values: the clock's times, and numpy's random state.
_PLAIN = (timedelta, TorchVersion, np.ndarray, np.dtype, type(np.dtype(np.uint32)))


def read_position(checkpoint: str | os.PathLike[str], *, trusted: bool = False) -> Mapping[str, Any]:
    """Read the data's position in a checkpoint of Lightning or Composer; any of our loaders can continue from it.

    Weights are not read. Example: ``start_at(read_position("last.ckpt"), data_spec(...))``.

    Args:
        checkpoint: A file, or the folder of a sharded checkpoint (FSDP, ModelParallelStrategy, Composer).
        trusted: Whether to read a file that holds other objects than plain ones, which runs code that the file names.

    Raises:
        StateError: The checkpoint holds no position.
        FileNotFoundError: There is no such file or folder.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(f"a position is read from a checkpoint's file or folder, but there is none at {path}")
    content = _read_folder(path, trusted) if path.is_dir() else _read_file(path, trusted)
    of_composer = (content.get("state") or {}).get("dataset_state") or {}
    of_lightning = (content.get("callbacks") or {}).get(STATE_KEY) or {}
    state = unpacked(of_composer.get("train")) or of_lightning.get("position")
    if state is None:
        raise StateError(
            f"a checkpoint written with StreamingDataModule, StreamingCallback or data_spec holds the data's position; "
            f"{path} holds none"
        )
    return state


def start_at(state: Mapping[str, Any], data: Any) -> None:
    """Let a run's data begin at a position; call it before `fit`. Weights and clocks do not change.

    Example: ``start_at(read_position("ep1-ba400.pt"), data_module)``.

    Args:
        state: What `read_position` or a loader's `state_dict` returned.
        data: What the trainer gets: a `data_spec`, a `StreamingDataModule` or `StreamingCallback`, or a loader.

    Raises:
        StateError: The state cannot be continued over this data under these settings. Lightning knows its world only
            in `fit`, so it is raised there.
    """
    callback = getattr(data, "position_callback", data)
    if hasattr(callback, "start_at"):
        callback.start_at(state)
        return
    loader = getattr(data, "dataloader", data)
    if not hasattr(loader, "load_state_dict"):
        raise TypeError(
            "a position is given to a data_spec, a StreamingDataModule, a StreamingCallback or a StreamingDataLoader; "
            f"found {type(data).__name__}"
        )
    loader.load_state_dict(state)


def _read_file(path: Path, trusted: bool) -> Mapping[str, Any]:
    reconstruct: Any = np.empty(0).__reduce__()[0]  # numpy keeps it in a private module, which it has moved
    with torch.serialization.safe_globals([*_PLAIN, reconstruct]):
        # Mapped, tensors are read only where they are used; files of torch before 1.6 are no zip files.
        is_zip = zipfile.is_zipfile(path)
        found: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=not trusted, mmap=is_zip)
    return found


def _read_folder(path: Path, trusted: bool) -> Mapping[str, Any]:
    """Read the file beside the shards (Lightning), or only the one key (Composer)."""
    if (path / "meta.pt").is_file():
        return _read_file(path / "meta.pt", trusted)
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    wanted: dict[str, Any] = {"state": {"dataset_state": {"train": {STATE_KEY: ""}}}}
    reader = FileSystemReader(path)
    if f"state.dataset_state.train.{STATE_KEY}" not in reader.read_metadata().state_dict_metadata:
        return {}
    load(wanted, storage_reader=reader, no_dist=True)
    return wanted
