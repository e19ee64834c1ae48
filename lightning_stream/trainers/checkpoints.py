"""Moves the data's position between trainers: from a checkpoint of any of them to the data or a file of any other."""

from __future__ import annotations

import json
import os
import secrets
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
from lightning_stream.order import Position, is_mosaic_state
from lightning_stream.shared_files import publish

_DEEPEST = 6  # levels at which the files of plain loops are searched; Lightning keeps states of loaders at the fifth
# Composer's checkpoints hold these beside tensors and plain values: the clock's times, and numpy's random state.
_PLAIN = (timedelta, TorchVersion, np.ndarray, np.dtype, type(np.dtype(np.uint32)))


def read_position(checkpoint: str | os.PathLike[str], *, trusted: bool = False) -> Mapping[str, Any]:
    """Read the data's position in a checkpoint of any trainer; any of our loaders can continue from it.

    Weights are not read. Example: ``start_at(read_position("last.ckpt"), data_spec(...))``.

    Args:
        checkpoint: A file of Lightning, Composer or a plain loop (also JSON), or the folder of a sharded checkpoint
            (FSDP, ModelParallelStrategy, Composer). A plain loop may keep the state under any key.
        trusted: Whether to read a file that holds other objects than plain ones, which runs code that the file names.

    Raises:
        StateError: The checkpoint holds no position, or several; or torch cannot read it without running code.
        FileNotFoundError: There is no such file or folder.
    """
    path = Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(f"a position is read from a checkpoint's file or folder, but there is none at {path}")
    return position_of(_read(path, trusted), str(path))


def position_of(content: Any, name: str) -> Mapping[str, Any]:
    """The data's position in what a checkpoint holds; see `read_position`."""
    of_composer = _inner(content, "state", "dataset_state")
    state = unpacked(of_composer.get("train")) or _inner(content, "callbacks", STATE_KEY).get("position")
    clock = _inner(content, "state", "timestamp", "Timestamp")
    if state and is_mosaic_state(state) and not state["sample_in_epoch"] and not clock.get("batch_in_epoch", 1):
        # At the end of an epoch that library saves the epoch that is over; Composer's clock has the next one.
        state = {**state, "epoch": max(state["epoch"], clock["epoch"])}
    found = dict(_states_in(content)) if state is None else {name: state}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise StateError(f"a checkpoint must hold one position of data; {name} holds some at {', '.join(found)}")
    raise StateError(
        f"a checkpoint written with StreamingDataModule, StreamingCallback or data_spec, or with the loader's "
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
        for number, value in enumerate(content):
            yield from _states_in(value, f"{at}[{number}]", depth - 1)


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


def trainer_of(content: Any) -> str:
    """The trainer whose checkpoint this is: ``lightning`` or ``composer``; else ``plain``."""
    if "pytorch-lightning_version" in _inner(content) or STATE_KEY in _inner(content, "callbacks"):
        return "lightning"
    return "composer" if _inner(content, "state", "timestamp") else "plain"


def _inner(content: Any, *names: str) -> Mapping[str, Any]:
    """The mapping below these names; empty if there is none."""
    for name in names:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content if isinstance(content, Mapping) else {}


def write_position(
    state: Mapping[str, Any],
    to: str | os.PathLike[str],
    into: str | os.PathLike[str] | None = None,
    *,
    steps: int = -1,
    trainer: str | None = None,
) -> str:
    """Write a position as a file of its own, or as part of a copy of a checkpoint; return whose checkpoint that is.

    Weights, optimizer and the counts of all steps stay those of the checkpoint. Nothing is overwritten, and no file is
    left half written.

    Args:
        state: What `read_position` returned.
        to: The new file; one that ends in ``.json`` is JSON, any other is written by `torch.save`.
        into: A checkpoint of Lightning or Composer, one file, which is copied; None for the position alone.
        steps: Global batches of the epoch that are done, for Composer's clock; -1 where they are not known.
        trainer: ``lightning`` or ``composer``, to refuse a checkpoint of another one.

    Raises:
        FileExistsError: There is a file already.
        FileNotFoundError: There is no such folder, or no checkpoint.
        StateError: The trainer could not continue from that checkpoint.
    """
    target = Path(to)
    if target.exists():
        raise FileExistsError(f"a position is written to a new file, but {target} exists. Name another, or delete it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"a position is written into a folder that exists; {target.parent} does not. Make it")
    found, content = ("plain", dict(state)) if into is None else _with_position(Path(into), state, steps)
    if into is not None and trainer in ("lightning", "composer") and trainer != found:
        raise StateError(f"a position for {trainer} is written into a checkpoint of it; {into} is one of {found}")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        if target.suffix == ".json" and into is None:
            draft.write_text(json.dumps(content))
        else:
            torch.save(content, draft)
        publish(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return found


def _with_position(path: Path, state: Mapping[str, Any], steps: int) -> tuple[str, dict[str, Any]]:
    """The trainer and the content of a checkpoint, with another position of the data."""
    if path.is_dir():
        raise StateError(
            f"a position is written into a checkpoint of one file; {path} is a sharded one. Load that as it is, and "
            "move the position in the training script: start_at(read_position(...), data)"
        )
    content = dict(_read(path, trusted=False))
    trainer = trainer_of(content)
    if trainer == "lightning":
        if not content.get("loops"):
            raise StateError(f"Lightning continues from a whole checkpoint; {path} has weights alone. Pass a whole one")
        own = {STATE_KEY: {"position": dict(state), "validated_step": -1}}
        return trainer, {**content, "callbacks": {**content.get("callbacks", {}), **own}}
    if trainer == "plain":
        raise StateError(
            f"a position is written into a checkpoint of Lightning or Composer; {path} is none. The file of a plain "
            "loop has its own layout: write the position alone, and load that in the script"
        )
    inner, clock = content["state"], content["state"]["timestamp"]["Timestamp"]
    is_ours = not is_mosaic_state(state)
    now = {"epoch": state["epoch"], "sample_in_epoch": state["position"] if is_ours else state["sample_in_epoch"]}
    steps = _steps_of(state) if steps < 0 else steps
    if steps >= 0:
        # A dataset in torch's own DataLoader asks this clock where it is.
        clock = {**clock, **now, "batch_in_epoch": steps}
    elif {name: clock[name] for name in now} != now:
        raise StateError(
            "Composer's clock counts the batches of an epoch, which this state does not record. Pass a checkpoint that "
            "Composer wrote at this position, or load the state in the training script: start_at(read_position(...))"
        )
    held = {"train": {STATE_KEY: json.dumps(dict(state))} if is_ours else dict(state)}
    inner = {**inner, "timestamp": {"Timestamp": clock}, "dataset_state": {**inner.get("dataset_state", {}), **held}}
    return trainer, {**content, "state": inner}


def _steps_of(state: Mapping[str, Any]) -> int:
    """Global batches of the epoch that are done; -1 where the state does not tell."""
    if is_mosaic_state(state):
        return -1 if state["sample_in_epoch"] else 0
    position = Position.from_state(state)
    buckets = position.order.buckets
    return position.num_steps(None) if buckets is None or buckets.batch_tokens is None else -1


def _read(path: Path, trusted: bool) -> Any:
    """What a file holds, or what a folder holds beside its shards. StateError where torch cannot read it."""
    try:
        return _read_folder(path, trusted) if path.is_dir() else _read_file(path, trusted)
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


def _read_folder(path: Path, trusted: bool) -> Any:
    """Read the file beside the shards (Lightning), or only the one key (Composer)."""
    if (path / "meta.pt").is_file():
        return _read_file(path / "meta.pt", trusted)
    from lightning_stream.trainers.sharded import position_in

    return position_in(path, trusted)
