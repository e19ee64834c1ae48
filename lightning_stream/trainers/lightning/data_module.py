"""`StreamingDataModule`: streamed datasets in Lightning, with the position inside the trainer's checkpoints."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, Literal, Unpack

from lightning_stream.distributed import detect_world
from lightning_stream.errors import checking, refuse_unknown
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.loader_arguments import WorkerOptions, options_of
from lightning_stream.map_style import dataset_of
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.order import Tail, World
from lightning_stream.trainers.lightning.callback import CallbackOptions, StreamingCallback
from lightning_stream.trainers.lightning.loops import loader_kept_as_it_is, sampler_replicas
from lightning_stream.trainers.lightning.package import LightningDataModule

# Lightning warns of what does not hold here: our loaders' lengths are exact, no validation data is no mistake, and the
# deprecated name of torch is one that Lightning uses.
_OUT_OF_PLACE = (
    "Your `IterableDataset` has `__len__` defined",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "You defined a `validation_step` but have no `val_dataloader`",
)


class ModuleOptions(WorkerOptions, CallbackOptions, total=False):
    """What a data module passes on: to its loaders, and to its callback."""


class _Loaders(weakref.WeakSet[StreamingDataLoader]):
    """The loaders made so far, in this process: launchers copy the module to each that they start."""

    def __reduce__(self) -> tuple[type[_Loaders], tuple[()]]:
        return _Loaders, ()


class StreamingDataModule(LightningDataModule):
    """Streams training and evaluation data into Lightning, and continues a stopped run exactly.

    The position goes into the trainer's ``.ckpt`` as plain values and counts optimizer steps, never fetches; a run may
    continue on another number of nodes, devices and workers, or with another accumulation.

    Args:
        train, val, test, predict: A `StreamingDataset`, its keyword arguments as a mapping, or its path or URL; or any
            map-style dataset, in its own order: ``MapDataset(dataset, shuffle=True)`` shuffles it.
        global_batch_size: Samples of one optimizer step over all replicas and accumulated micro-batches; each device
            gets ``global_batch_size / (replicas * accumulation)`` at a time.
        batch_size: Samples per device and micro-batch, instead.
        eval_batch_size: Samples per device in validation, test and prediction; defaults to the training's.
        eval_num_workers: `num_workers` in evaluation, if that differs.
        tail: What happens to a training epoch's last partial batch: ``"pad"``, ``"drop"`` or ``"exact"``. Evaluation is
            always exact.
        pin_memory: None pins where the trainer trains on CUDA.
        replication: Groups of this many consecutive ranks get the same samples; None asks the trainer's strategy, which
            knows about tensor parallelism.
        prepare: Called once per node before anything is read, e.g. to convert the data.
        on_mismatch: Where the data or the order settings differ from the checkpoint's: ``"error"``, or ``"warn"`` to
            continue in another order from there.
        options: `num_workers`, `workers`, `collate_fn`, `timeout`, `worker_init_fn`, `prefetch_factor`,
            `persistent_workers` and `multiprocessing_context` of a `StreamingDataLoader`; `seed_steps`,
            `on_missing_state`, `check_delivery`, `show_position`, `monitor`, `watch_after_s`, `report` and
            `record_delivery` of a `StreamingCallback`.

    Attributes:
        datasets: The datasets by their names, ``"train"`` and so on; None for those that were not passed.
        options: As passed, for another trainer than Lightning's.

    Raises:
        ValueError: Neither or both of `global_batch_size` and `batch_size`.
        TypeError: An argument that datasets do not have.
    """

    trainer: Any

    @checking
    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        eval_batch_size: int | None = None,
        eval_num_workers: int | Literal["auto"] | None = None,
        tail: Tail = "pad",
        pin_memory: bool | None = None,
        replication: int | None = None,
        prepare: Callable[[], object] | None = None,
        on_mismatch: Literal["error", "warn"] = "error",
        **options: Unpack[ModuleOptions],
    ) -> None:
        super().__init__()
        names = [*signature(StreamingDataModule).parameters, *ModuleOptions.__annotations__]
        refuse_unknown(type(self).__name__, options, names)
        arguments = {"train": train, "val": val, "test": test, "predict": predict}
        self.datasets = {
            name: None if what is None else dataset_of(f"{name}=", what) for name, what in arguments.items()
        }
        budget = next((dataset.batch_tokens for dataset in self.datasets.values() if dataset is not None), None)
        if (global_batch_size, batch_size, budget).count(None) != 2:
            raise ValueError(
                "pass either global_batch_size= (samples of one optimizer step over all devices) or batch_size= (per "
                f"device), or batch_tokens= to the dataset; found global_batch_size={global_batch_size}, "
                f"batch_size={batch_size}, batch_tokens={budget}"
            )
        self.global_batch_size = global_batch_size
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.tail = tail
        self.pin_memory = pin_memory
        self.replication = replication
        self.prepare = prepare
        self.on_mismatch = on_mismatch
        self.options = options
        self.num_workers = options.get("num_workers", 0)
        self.eval_num_workers = self.num_workers if eval_num_workers is None else eval_num_workers
        self._loaders = _Loaders()
        self._ignored: list[Any] = []  # the filters that keep Lightning's wrong advice out, while it runs
        self.position_callback = StreamingCallback(**options_of(CallbackOptions, options))
        self.position_callback.make_loader = partial(StreamingDataModule.train_dataloader, self)

    def prepare_data(self) -> None:
        """Run `prepare`; Lightning calls this once per node, before any process reads."""
        if self.prepare is not None:
            self.prepare()

    def setup(self, stage: str) -> None:
        """Put the position's callback first, so that what ModelCheckpoint saves is up to date."""
        self._ignore_advice()
        if stage != "fit" or self.trainer is None:
            return
        callbacks = self.trainer.callbacks
        for other in [callback for callback in callbacks if isinstance(callback, StreamingCallback)]:
            if other.make_loader is None and not other.is_passive:
                raise ValueError(
                    "one callback keeps the position, and StreamingDataModule brings its own: remove StreamingCallback "
                    "from the trainer's callbacks, and pass its settings (seed_steps=...) to StreamingDataModule"
                )
            callbacks.remove(other)  # of a fit before this one, perhaps with another data module
        callbacks.insert(0, self.position_callback)

    def train_dataloader(self) -> StreamingDataLoader:
        """A training loader; the one that the trainer asks for begins at the position trained up to."""
        loader = self._loader(
            "train",
            self.batch_size,
            global_batch_size=self.global_batch_size,
            accumulate=self._accumulate(),
            tail=self.tail,
            on_mismatch=self.on_mismatch,
        )
        self.position_callback.place(loader)
        if not len(loader):  # nothing is left of a mixture that has ended; or no epoch has a batch
            loader.check()
            self._ignore("Total length of .* across ranks is zero")
        return loader

    def teardown(self, stage: str) -> None:
        """Let Lightning's warnings through again."""
        for warning_filter in self._ignored:
            if warning_filter in warnings.filters:
                warnings.filters.remove(warning_filter)  # type: ignore[attr-defined]
        self._ignored = []

    def _ignore_advice(self) -> None:
        self.teardown("")
        self._ignore(*_OUT_OF_PLACE if self.datasets["val"] is None else _OUT_OF_PLACE[:-1])

    def _ignore(self, *advice: str) -> None:
        before = list(warnings.filters)
        for text in advice:
            warnings.filterwarnings("ignore", text)
        self._ignored += [warning_filter for warning_filter in warnings.filters if warning_filter not in before]

    @property
    def val_dataloader(self) -> Callable[[], Any]:
        """Makes the loader that gives each validation sample once, over any number of devices.

        While training without `val` it is the base class's own: Lightning then takes it that there is no validation.
        """
        if self.datasets["val"] is None and (self.trainer is None or self.trainer.state.fn == "fit"):
            self._ignore_advice()  # Lightning warns next
            base: Callable[[], Any] = super().val_dataloader
            return base
        return partial(self._evaluation_loader, "val")

    def test_dataloader(self) -> StreamingDataLoader:
        """Each test sample once, over any number of devices."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> StreamingDataLoader:
        """Each sample once, over any number of devices."""
        return self._evaluation_loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """The position; the callback's copy is the one that is loaded, since it survives a renamed class."""
        return self.position_callback.state_dict()

    def stats(self) -> LoaderStats:
        """Where the time of the latest fit has gone so far, see `StreamingDataLoader.stats`."""
        return self.position_callback.stats()

    def close(self) -> None:
        """End the worker processes of all loaders made so far, which otherwise live as long as the trainer."""
        for loader in list(self._loaders):
            loader.close()

    def world(self) -> World:
        """This process among those of the trainer, or of the launcher where there is no trainer."""
        trainer = self.trainer
        if trainer is None:  # looked at without a trainer
            return detect_world(None, self.replication or 1)
        # Where ranks share their samples, the strategy names fewer replicas to a distributed sampler.
        replication = self.replication or max(1, int(trainer.world_size) // sampler_replicas(trainer))
        per_node = trainer.world_size // max(1, trainer.num_nodes)
        return World(trainer.global_rank, trainer.world_size, per_node, replication)

    def _evaluation_loader(self, name: str) -> StreamingDataLoader:
        size = self.batch_size if self.eval_batch_size is None else self.eval_batch_size
        dataset = self.datasets[name]
        if size is None and self.global_batch_size is None and dataset is not None and dataset.batch_tokens is None:
            raise ValueError(f"the {name} data needs a batch size: pass eval_batch_size=, or batch_tokens= to it too")
        if size is None and self.global_batch_size is not None:
            size = max(1, self.global_batch_size // (self.world().num_replicas * self._accumulate()))
        no_workers = self.eval_num_workers == 0 != self.num_workers
        of_workers = dict.fromkeys(("prefetch_factor", "multiprocessing_context")) | {"persistent_workers": False}
        options = of_workers if no_workers else {}
        return self._loader(name, size, evaluation=True, num_workers=self.eval_num_workers, **options)

    def _loader(self, name: str, batch_size: int | None, **options: Any) -> StreamingDataLoader:
        dataset = self.datasets[name]
        if dataset is None:
            raise ValueError(f"the trainer asked for {name} data, but StreamingDataModule got none: pass {name}=")
        common = {**options_of(WorkerOptions, self.options), "world": self.world(), "pin_memory": self._pins()}
        loader = StreamingDataLoader(dataset, batch_size, **{**common, **options})
        self._loaders.add(loader)
        return loader_kept_as_it_is(loader) if self.trainer is not None and self.trainer.overfit_batches else loader

    def _accumulate(self) -> int:
        return 1 if self.trainer is None else int(self.trainer.accumulate_grad_batches)

    def _pins(self) -> bool:
        device = None if self.trainer is None else getattr(self.trainer.strategy, "root_device", None)
        return getattr(device, "type", "") == "cuda" if self.pin_memory is None else self.pin_memory
