"""Plain loops whose batches are taken ahead of the training, by Ray or by a thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from queue import Queue
from threading import Thread
from typing import Any

from hosts.run import Run
from hosts.with_torch import loop


def ray(run: Run) -> None:
    """What Ray's `prepare_data_loader` makes of a loader; the ranks are those of the launcher here, not of Ray."""
    import torch
    from ray.train.torch.train_loop_utils import _WrappedDataLoader

    loader = run.loader()
    if run.checkpoint is not None:
        loader.load_state_dict(json.loads(run.checkpoint.read_text()))
    prepared = _WrappedDataLoader(loader, torch.device("cpu"), True)

    def save(name: str) -> None:
        if run.rank == 0:
            (run.saves / name).write_text(json.dumps(loader.state_dict()))

    loop(run, _With(prepared, loader), save)


def thread(run: Run) -> None:
    """A thread that takes batches far ahead; the loop counts those that it trained on."""
    loader = run.loader()
    if run.checkpoint is not None:
        loader.load_state_dict(json.loads(run.checkpoint.read_text()))
    counted = _InThread(loader)

    def save(name: str) -> None:
        if run.rank == 0:
            (run.saves / name).write_text(json.dumps(loader.state_dict(num_batches=counted.num_batches)))

    loop(run, counted, save)


class _With:
    """The batches of a wrapper, with what its loader says of them."""

    def __init__(self, batches: Any, loader: Any) -> None:
        self._batches = batches
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    @property
    def last_batch(self) -> Any:
        return self._loader.last_batch


class _InThread:
    """A loader's batches, of which a thread takes five ahead."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.num_batches = 0
        self.last_batch: Any = None

    def __iter__(self) -> Iterator[Any]:
        self.num_batches = 0
        taken: Queue[Any] = Queue(5)
        thread = Thread(target=self._take, args=(taken,))
        thread.start()
        while (pair := taken.get()) is not None:
            batch, self.last_batch = pair
            self.num_batches += 1
            yield batch
        thread.join()

    def _take(self, taken: Queue[Any]) -> None:
        for batch in self._loader:
            taken.put((batch, self._loader.last_batch))
        taken.put(None)
