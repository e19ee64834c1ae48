"""`StreamingDataModule`: streamed datasets in Lightning, with the position inside the trainer's checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_stream.dataset import StreamingDataset
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.order import Tail, World
from lightning_stream.trainers.lightning_loops import loader_kept_as_it_is
from lightning_stream.trainers.lightning_package import LightningDataModule
from lightning_stream.trainers.lightning_position import StreamingCallback

DatasetLike = StreamingDataset | Mapping[str, Any]


class StreamingDataModule(LightningDataModule):
    """Streams training and evaluation data into Lightning, and continues a stopped run exactly.

    The position goes into the trainer's ``.ckpt`` as plain values and counts optimizer steps, never fetches; a run may
    continue on another number of nodes, devices and workers, or with another accumulation.

    Args:
        train, val, test, predict: A `StreamingDataset`, or its keyword arguments as a mapping.
        global_batch_size: Samples of one optimizer step over all replicas and accumulated micro-batches; each device
            gets ``global_batch_size / (replicas * accumulation)`` at a time.
        batch_size: Samples per device and micro-batch, instead.
        eval_batch_size: Samples per device in validation, test and prediction; defaults to the training's.
        num_workers: Worker processes per rank.
        eval_num_workers: The same in evaluation; defaults to `num_workers`.
        collate_fn: From a list of samples to a batch.
        tail: What happens to a training epoch's rest: ``"pad"``, ``"drop"`` or ``"exact"``. Evaluation is always exact.
        pin_memory: None pins where the trainer trains on CUDA.
        prefetch_factor, persistent_workers, multiprocessing_context: As in `torch.utils.data.DataLoader`.
        replication: Groups of this many consecutive ranks get the same samples; None asks the trainer's strategy, which
            knows of tensor parallelism.
        prepare: Called once per node before anything is read, e.g. to convert the data.
        seed_steps, on_missing_state, check_delivery, show_position: See `StreamingCallback`.

    Raises:
        ValueError: Neither or both of `global_batch_size` and `batch_size`.
    """

    def __init__(
        self,
        train: DatasetLike | None = None,
        val: DatasetLike | None = None,
        test: DatasetLike | None = None,
        predict: DatasetLike | None = None,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        eval_num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        tail: Tail = "pad",
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        replication: int | None = None,
        prepare: Callable[[], object] | None = None,
        seed_steps: int | None = None,
        on_missing_state: str = "error",
        check_delivery: bool = True,
        show_position: bool = True,
    ) -> None:
        super().__init__()
        if (global_batch_size is None) == (batch_size is None):
            raise ValueError(
                "pass either global_batch_size= (samples of one optimizer step over all devices) or batch_size= (per "
                f"device); found global_batch_size={global_batch_size}, batch_size={batch_size}"
            )
        self.datasets = {
            name: given if given is None or isinstance(given, StreamingDataset) else StreamingDataset(**given)
            for name, given in {"train": train, "val": val, "test": test, "predict": predict}.items()
        }
        self.global_batch_size = global_batch_size
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.eval_num_workers = num_workers if eval_num_workers is None else eval_num_workers
        self.tail = tail
        self.pin_memory = pin_memory
        self.replication = replication
        self.prepare = prepare
        self._worker_arguments = {
            "collate_fn": collate_fn,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
        }
        self._loaders: weakref.WeakSet[StreamingDataLoader] = weakref.WeakSet()
        self.position_callback = StreamingCallback(
            seed_steps, on_missing_state, check_delivery=check_delivery, show_position=show_position
        )
        self.position_callback.make_loader = self._make_train_loader

    def prepare_data(self) -> None:
        """Run `prepare`; Lightning calls this once per node, before any process reads."""
        if self.prepare is not None:
            self.prepare()

    def setup(self, stage: str) -> None:
        """Put the position's callback first, so that what ModelCheckpoint saves is up to date."""
        trainer: Any = self.trainer
        assert trainer is not None
        if stage != "fit":
            return
        for other in [c for c in trainer.callbacks if isinstance(c, StreamingCallback)]:
            if other.make_loader is None:
                raise ValueError(
                    "one callback keeps the position, and StreamingDataModule brings its own: remove StreamingCallback "
                    "from the trainer's callbacks, and pass its settings (seed_steps=...) to StreamingDataModule"
                )
            trainer.callbacks.remove(other)  # of a fit before this one, perhaps with another data module
        trainer.callbacks.insert(0, self.position_callback)

    def train_dataloader(self) -> StreamingDataLoader:
        """The training loader, at the position trained up to."""
        loader = self._make_train_loader()
        self.position_callback.attach(loader)
        return loader

    def val_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Each validation sample once, over any number of devices."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Each test sample once, over any number of devices."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Each sample once, over any number of devices."""
        return self._evaluation_loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """The position; the callback's copy is the one that is loaded, since it survives a renamed class."""
        return self.position_callback.state_dict()

    def close(self) -> None:
        """End the worker processes of all loaders made so far, which otherwise live as long as the trainer."""
        for loader in list(self._loaders):
            loader.close()

    def world(self) -> World:
        """This process among those of the trainer."""
        trainer: Any = self.trainer
        assert trainer is not None
        return World(
            rank=trainer.global_rank,
            num_ranks=trainer.world_size,
            ranks_per_node=trainer.world_size // max(1, trainer.num_nodes),
            replication=self.replication or _replication_of(trainer),
        )

    def _make_train_loader(self) -> StreamingDataLoader:
        dataset = self.datasets["train"]
        if dataset is None:
            raise ValueError("the trainer asked for training data, but StreamingDataModule got none: pass train=")
        trainer: Any = self.trainer
        loader = StreamingDataLoader(
            dataset,
            self.batch_size,
            global_batch_size=self.global_batch_size,
            accumulate=trainer.accumulate_grad_batches,
            num_workers=self.num_workers,
            tail=self.tail,
            world=self.world(),
            pin_memory=self._pins(),
            **self._worker_arguments,
        )
        return self._kept(loader)

    def _evaluation_loader(self, name: str) -> StreamingDataLoader | list[Any]:
        dataset = self.datasets[name]
        if dataset is None:
            return []
        world = self.world()
        train_size = self.batch_size or max(1, (self.global_batch_size or 1) // world.num_replicas)
        loader = StreamingDataLoader(
            dataset,
            self.eval_batch_size or train_size,
            evaluation=True,
            num_workers=self.eval_num_workers,
            world=world,
            pin_memory=self._pins(),
            **self._worker_arguments,
        )
        return self._kept(loader)

    def _kept(self, loader: StreamingDataLoader) -> StreamingDataLoader:
        self._loaders.add(loader)
        trainer: Any = self.trainer
        return loader_kept_as_it_is(loader) if trainer.overfit_batches else loader

    def _pins(self) -> bool:
        trainer: Any = self.trainer
        on_cuda = isinstance(getattr(trainer.strategy, "root_device", None), torch.device) and (
            trainer.strategy.root_device.type == "cuda"
        )
        return on_cuda if self.pin_memory is None else self.pin_memory


def _replication_of(trainer: Any) -> int:
    """How many ranks share their samples, by what the strategy would tell a distributed sampler."""
    ranks = int(trainer.world_size)
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return max(1, ranks // int(sampler.get("num_replicas", ranks)))
