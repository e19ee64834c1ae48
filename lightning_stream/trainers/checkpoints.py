"""Moves the data's position between trainers: from a checkpoint of any of them to the data of any other."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from lightning_stream.errors import StateError
from lightning_stream.loading.plain import STATE_KEY, unpacked
from lightning_stream.order import is_mosaic_state

_DEEPEST = 6  # levels at which the files of plain loops are searched; Lightning keeps states of loaders at the fifth
_BESIDE = ("meta.pt", "trainer_state.json")  # the weights: Lightning's shards, Transformers' files
# Composer's checkpoints hold these beside tensors and plain values: the clock's times, and numpy's random state.
_PLAIN = (timedelta, TorchVersion, np.ndarray, np.dtype, type(np.dtype(np.uint32)))


def read_position(checkpoint: str | os.PathLike[str], *, trusted: bool = False) -> Mapping[str, Any]:
    """Read the data's position in a checkpoint of any trainer; any of our loaders can continue from it.

    Weights are not read. Example: ``start_at(read_position("last.ckpt"), data_spec(...))``.

    Args:
        checkpoint: A file of Lightning, Composer or a plain loop (also JSON), or the folder of a sharded checkpoint
            (FSDP, ModelParallelStrategy, Composer) or of Transformers. A plain loop may keep the state under any key.
        trusted: Whether to read a file that holds other objects than plain ones, which runs code that the file names.

    Raises:
        StateError: The checkpoint holds no position, or several; or torch cannot read it without running code.
        FileNotFoundError: There is no such file, or it is no folder of a checkpoint.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(f"a position is read from a checkpoint's file or folder, but there is none at {path}")
    return position_of(_read(path, trusted), str(path))


def position_of(content: Any, name: str) -> Mapping[str, Any]:
    """The data's position in what a checkpoint holds; see `read_position`."""
    of_composer = inner(content, "state", "dataset_state")
    state = unpacked(of_composer.get("train")) or inner(content, "callbacks", STATE_KEY).get("position")
    clock = inner(content, "state", "timestamp", "Timestamp")
    if state and is_mosaic_state(state) and not state["sample_in_epoch"] and not clock.get("batch_in_epoch", 1):
        # At the end of an epoch that library saves the epoch that is over; Composer's clock has the next one.
        state = {**state, "epoch": max(state["epoch"], clock["epoch"])}
    states = dict(_states_in(content)) if state is None else {name: state}
    if len(states) == 1:
        return next(iter(states.values()))
    if states:
        raise StateError(f"a checkpoint must hold one position of data; {name} holds some at {', '.join(states)}")
    raise StateError(
        f"a checkpoint of a StreamingDataModule, a Streaming(Trainer)Callback or data_spec, or with the loader's "
        f"state_dict, holds the data's position; {name} holds none"
    )


def _states_in(content: Any, at: str = "", depth: int = _DEEPEST) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The states of data in a file, and where they are: all of it, or values of its mappings and lists."""
    if isinstance(content, Mapping):
        if is_mosaic_state(content) or content.keys() >= {"order_version", "snapshot"}:
            yield at, content
        elif isinstance(content.get(STATE_KEY), str):
            yield at, unpacked(content) or {}
        elif depth:
            for name, value in content.items():
                yield from _states_in(value, f"{at}.{name}" if at else str(name), depth - 1)
    elif isinstance(content, (list, tuple)) and depth:
        for k, value in enumerate(content):
            yield from _states_in(value, f"{at}[{k}]", depth - 1)


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


def inner(content: Any, *names: str) -> Mapping[str, Any]:
    """The mapping below these names; empty if there is none."""
    for name in names:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content if isinstance(content, Mapping) else {}


def _read(path: Path, trusted: bool) -> Any:
    """What a file holds, or what a folder holds beside its shards. StateError where torch cannot read it."""
    try:
        if not path.is_dir():
            return _read_file(path, trusted)
        for name in _BESIDE:
            if (path / name).is_file():
                return _read_file(path / name, trusted)
        from lightning_stream.trainers.sharded import METADATA, position_in

        if not (path / METADATA).is_file():
            raise FileNotFoundError(
                f"the folder of a checkpoint has {METADATA} or {' or '.join(_BESIDE)} in it; found none of them in "
                f"{path}. Pass the folder of one checkpoint, or a file"
            )
        return position_in(path, trusted)
    except (OSError, StateError):
        raise
    except Exception as error:  # torch raises anything for a file that is damaged, or not made by it
        raise StateError(
            f"{path} is not a checkpoint that torch reads with weights_only={not trusted} ({type(error).__name__}). "
            "Check the path; a file that you trust can be read in code: read_position(path, trusted=True)"
        ) from error


def _read_file(path: Path, trusted: bool) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_bytes())
    reconstruct: Any = np.empty(0).__reduce__()[0]  # numpy keeps it in a private module, which it has moved
    with torch.serialization.safe_globals([*_PLAIN, reconstruct]):
        # Mapped, tensors are read only where they are used; files of torch before 1.6 are no zip files.
        is_zip = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=not trusted, mmap=is_zip)
