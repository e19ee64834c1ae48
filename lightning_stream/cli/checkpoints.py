"""The checkpoint that a path or URL names, the position of the data in it, and the streams that its run recorded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning_stream
from lightning_stream.cli.arguments import Options, require_answer
from lightning_stream.errors import NotFoundError, StateError
from lightning_stream.order import Position, is_mosaic_state
from lightning_stream.run_log import read_run
from lightning_stream.shared_files import scratch_folder
from lightning_stream.stores import LocalStore, Store, open_store

_LATEST = ("last.ckpt", "last.pt", "latest-rank0.pt", "trainer_state.json")
_OF_A_RUN = tuple(f"{folder}{name}" for folder in ("", "checkpoints/", "torch/", "composer/") for name in _LATEST)
_SHARDED = ("meta.pt", ".metadata")
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


def read_checkpoint(text: str, options: Options) -> Checkpoint:
    """A checkpoint, or the newest in the folder of a training run."""
    require_answer(text, options)
    read_position = lightning_stream.read_position  # imports torch, or raises an error that names the extra
    store = open_store(text.rstrip("/"), options)
    with scratch_folder() as folder:
        if isinstance(store, LocalStore):
            path = _newest(store)
            name = str(path)
        else:
            name, path = _downloaded(store, text.rstrip("/"), options, Path(folder))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected pickle protocol")  # of a file that is refused
                return Checkpoint(name, read_position(path), _recorded_streams(path))
        except StateError as error:
            raise StateError(str(error).replace(str(path), name)) from error


def _newest(store: LocalStore) -> Path:
    """The file, or the newest checkpoint of a folder."""
    path = store.folder
    # Lightning may keep no link to the last of its checkpoints.
    files = [path / name for name in _OF_A_RUN if (path / name).exists()]
    files = files or [*path.glob("*.ckpt"), *path.glob("checkpoints/*.ckpt")]
    if not files and not path.is_file() and not any((path / name).is_file() for name in _SHARDED):
        raise _none_at(store)
    return max(files, key=lambda file: file.stat().st_mtime, default=path)


def _none_at(store: Store) -> NotFoundError:
    names = ", ".join(_LATEST)
    return NotFoundError(f"there is no checkpoint at {store.url}, and no {names} below it. Check the path or URL.")


def _downloaded(store: Store, checkpoint: str, options: Options, folder: Path) -> tuple[str, Path]:
    """The URL of a checkpoint in a store, and the path of its copy; of a sharded one, only what holds the position."""
    from lightning_stream.trainers.sharded import held_position

    above, _, name = checkpoint.rpartition("/")
    parent = None if above.endswith("/") else open_store(above, options)
    # A web server may answer for a folder, too, with a page that lists it.
    is_file = parent is not None and parent.exists(name)
    file = None if is_file and Path(name).suffix else next(filter(store.exists, (*_OF_A_RUN, *_SHARDED)), None)
    path = folder / Path(file or name).name
    if file is None and parent is not None and is_file:
        parent.get(name, path)
        return checkpoint, path
    if file is None:
        raise _none_at(store)
    store.get(file, path)
    if file != ".metadata":
        return f"{store.url}/{file}", path
    if entry := held_position(folder):
        store.get(entry.relative_path, folder / entry.relative_path)
    return store.url, folder


def _recorded_streams(path: Path) -> list[str]:
    """The streams of the newest launch in a training run's log, as ``--stream`` takes them; empty without a log."""
    for folder in path.parents[:3]:
        with suppress(OSError, ValueError):  # there is none, or it is that of another version
            return list(map(_stream, read_run(folder).launches[-1].start.streams))
    return []


def _stream(recorded: Mapping[str, Any]) -> str:
    place = recorded.get("remote") or recorded["local"]
    split = [f"/{recorded['split']}"] if recorded.get("split") else []
    weights = [f"={name}:{recorded[name]}" for name in _WEIGHTS if recorded.get(name) is not None]
    return "".join([place.rstrip("/"), *split, *weights])
