"""The checkpoint that a path or URL names, the position of the data in it, and the streams that its run recorded."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning_stream
from lightning_stream.cli.arguments import Options, require_answer
from lightning_stream.errors import NotFoundError, StateError
from lightning_stream.order import Position, is_mosaic_state
from lightning_stream.shared_files import scratch_folder
from lightning_stream.stores import LocalStore, Store, open_store

_LATEST = ("last.ckpt", "last.pt", "latest-rank0.pt", "trainer_state.json")
_OF_A_RUN = tuple(f"{folder}{name}" for folder in ("", "checkpoints/", "torch/", "composer/") for name in _LATEST)
_SHARDED = ("meta.pt", ".metadata")
_LOG = "data_log.jsonl"  # what a training run writes beside its report
_WEIGHTS = ("proportion", "repeat", "choose")


class Checkpoint(NamedTuple):
    """A checkpoint: its path or URL, the position of the data in it, and the ``--stream`` arguments of its run."""

    name: str
    state: Mapping[str, Any]
    streams: list[str]

    @property
    def position(self) -> Position:
        """The position. Raises StateError for one of mosaicml-streaming, which is none without its order."""
        if is_mosaic_state(self.state):
            raise StateError(
                f"{self.name} holds a state of mosaicml-streaming, which does not record its order. See it with "
                "`position` alone; to continue, load it into a dataset with the shuffle_algo of that run"
            )
        return Position.from_state(self.state)


@contextmanager
def opened(checkpoint: str, options: Options) -> Iterator[Checkpoint]:
    """A checkpoint, or the newest in the folder of a training run; what is downloaded is deleted at the end."""
    read_position = lightning_stream.read_position  # imports torch, or raises an error that names the extra
    with scratch_folder() as folder:
        name, path = _local(checkpoint.rstrip("/"), options, Path(folder))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected pickle protocol")  # of a file that is refused
                state = read_position(path)
        except StateError as error:
            raise StateError(str(error).replace(str(path), name)) from error
        yield Checkpoint(name, state, _recorded_streams(path))


def _local(checkpoint: str, options: Options, folder: Path) -> tuple[str, Path]:
    """The name and the path of a checkpoint; one in a store is downloaded into the folder."""
    require_answer(checkpoint, options)
    store = open_store(checkpoint, options)
    path = _path_of(store) if isinstance(store, LocalStore) else None
    if path is not None:
        return str(path), path
    if not isinstance(store, LocalStore) and (downloaded := _downloaded(checkpoint, store, options, folder)):
        return downloaded
    raise NotFoundError(
        f"there is no checkpoint at {store.url}, and no {', '.join(_LATEST)} below it. Check the path or URL."
    )


def _path_of(store: LocalStore) -> Path | None:
    """The file, or the newest checkpoint of a folder."""
    path = store.folder
    # Lightning may keep no link to the last of its checkpoints.
    found = [path / name for name in _OF_A_RUN if (path / name).exists()]
    found = found or [*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")]
    if found:
        return max(found, key=lambda file: file.stat().st_mtime)
    return path if path.is_file() or any((path / name).is_file() for name in _SHARDED) else None


def _downloaded(checkpoint: str, store: Store, options: Options, folder: Path) -> tuple[str, Path] | None:
    """The URL of a checkpoint in a store, and where its position is now; None if there is no checkpoint."""
    above, _, name = checkpoint.rpartition("/")
    parent = None if above.endswith("/") else open_store(above, options)
    # A web server may answer for a folder, too, with a page that lists it.
    is_there = parent is not None and parent.exists(name)
    path = folder / f"checkpoint{Path(name).suffix}"
    if not is_there or not Path(name).suffix:
        for known in (*_OF_A_RUN, "meta.pt"):
            if store.exists(known):
                path = folder / f"checkpoint{Path(known).suffix}"
                store.get(known, path)
                return f"{store.url}/{known}", path
        if store.exists(".metadata"):
            return store.url, _sharded(store, folder)
    if parent is None or not is_there:
        return None
    parent.get(name, path)
    return checkpoint, path


def _sharded(store: Store, folder: Path) -> Path:
    """Of a sharded checkpoint, download the metadata and the one file that holds the position."""
    from lightning_stream.trainers.sharded import METADATA, held_position

    store.get(METADATA, folder / METADATA)
    if held := held_position(folder):
        store.get(held.relative_path, folder / held.relative_path)
    return folder


def _recorded_streams(path: Path) -> list[str]:
    """The streams of the newest launch in a training run's log, as ``--stream`` takes them; empty without a log."""
    log = next((folder / _LOG for folder in path.parents[:3] if (folder / _LOG).is_file()), None)
    streams: list[str] = []
    for line in log.read_text(errors="replace").splitlines() if log else ():
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a line that was cut, or of another version
            streams = list(map(_stream, json.loads(line)["streams"]))
    return streams


def _stream(recorded: Mapping[str, Any]) -> str:
    place = recorded.get("remote") or recorded["local"]
    weight = next((f"={name}:{recorded[name]}" for name in _WEIGHTS if recorded.get(name) is not None), "")
    return f"{place}{weight}"
