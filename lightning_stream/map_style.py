"""`StatefulDataLoader`: any map-style dataset in our order, with a state that resumes in any world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypedDict, Unpack

import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_stream.dataset import StreamingDataset
from lightning_stream.distributed import WorldLike
from lightning_stream.errors import by_name, checking, refuse_unknown
from lightning_stream.former_names import taking_former
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.collate import collating_as_torch
from lightning_stream.loading.indexed import Readable
from lightning_stream.loading.loader_arguments import options_of
from lightning_stream.loading.packing import Packing
from lightning_stream.loading.randomness import READING, SeededCall
from lightning_stream.loading.sampler import SamplerLists
from lightning_stream.order import Schedule, Tail
from lightning_stream.order.balance import Cost
from lightning_stream.order.config import SAMPLER, UNIFORM
from lightning_stream.reading.mapped import MapReader, MapStream
from lightning_stream.reading.stream import Stream

_SEED = 9176
_NOT_WITH_SAMPLER = ("shuffle", "datasets by name", "schedule", "epoch_size", "batching_method", "forget")
_REFUSED = {
    "batch_sampler": "its batches would be those of one world: pass batch_size=, and sampler= for an order of your own",
    "in_order": "batches come in the order of the run, which its state counts: omit in_order",
}


class MapOptions(TypedDict, total=False):
    """The options of a `MapDataset` that are those of a `StreamingDataset`."""

    schedule: Schedule | Sequence[tuple[float, Mapping[str, float]]] | None
    epoch_size: float | str | None
    sampling_method: str
    batching_method: str
    pack: Packing | None
    balance: str | Cost | None
    bucket_by: str | Mapping[str, Any] | None
    batch_tokens: float | Mapping[str, Any] | None
    transform: Callable[..., Any] | None
    forget: Iterable[int] | None
    replication: float | None


class OrderOptions(MapOptions, total=False):
    """The options of a `StatefulDataLoader` that are its dataset's."""

    seed: int | None
    proportion: Mapping[str, float] | None
    lengths: Any


class LoaderOptions(TypedDict, total=False):
    """The options of a `StatefulDataLoader` that are those of a `StreamingDataLoader`, and not torch's."""

    global_batch_size: int | None
    accumulate: int
    workers: Literal["processes", "threads"] | None
    tail: Tail | None
    evaluation: bool
    world: WorldLike
    on_mismatch: Literal["error", "warn"]


class StatefulOptions(OrderOptions, LoaderOptions, total=False):
    """The options of a `StatefulDataLoader` that are not torch's."""


class MapDataset(StreamingDataset):
    """A map-style dataset, or a mixture of several, as trainers take it: with an order and a position.

    `StatefulDataLoader` makes one of each dataset; `StreamingDataModule` and `data_spec` do, too. ``dataset`` is the
    user's own, and what ``get_worker_info().dataset`` is. Its attributes are read and set here, too, but for those of
    the names that a `StreamingDataset` has.

    Args:
        dataset: An object with ``__len__``, and ``__getitem__`` or ``__getitems__``; or several of them, by name, that
            are mixed by `proportion` or `schedule`.
        shuffle: Whether each epoch has a new random order of all samples; else they come by number.
        sampler: Lists the samples of each epoch, instead; those of one rank (`DistributedSampler`) are refused. The
            run continues exactly, in any world, with the same sampler: it must list the same samples each time that it
            is asked for an epoch, by ``set_epoch`` and the global generators or its ``generator``, which are seeded.
        seed: Key of the order, and of what the dataset draws at random.
        proportion: Share of the epoch of each dataset, by name.
        lengths: Lengths of the samples, for `pack`, `bucket_by` and `batch_tokens`: an array, or a function that
            returns one for a dataset, which is called once; they are called ``"tokens"``. Several by name: a mapping.
        options: `schedule`, `epoch_size`, `sampling_method`, `batching_method`, `pack`, `balance`, `bucket_by`,
            `batch_tokens`, `transform`, `forget` and `replication` of a `StreamingDataset`.

    Raises:
        TypeError: It is no map-style dataset.
        ValueError: Settings that contradict each other.
    """

    @taking_former
    @checking
    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: bool = False,
        sampler: Any = None,
        seed: int | None = None,
        proportion: Mapping[str, float] | None = None,
        lengths: Any = None,
        **options: Unpack[MapOptions],
    ) -> None:
        refuse_unknown(type(self).__name__, options, [*signature(MapDataset).parameters, *MapOptions.__annotations__])
        by_name = lengths if isinstance(lengths, Mapping) else {} if lengths is None else {"tokens": lengths}
        if sampler is not None:
            _refuse_with_sampler({"shuffle": shuffle, "datasets by name": isinstance(dataset, Mapping), **options})
        streams = _streams(dataset, proportion, by_name, options.get("schedule"))
        super().__init__(
            streams=streams,
            shuffle=shuffle,
            shuffle_seed=_SEED if seed is None else seed,
            shuffle_algo=UNIFORM if sampler is None else SAMPLER,
            num_canonical_nodes=1,  # this, and what follows, of an order without shards
            window={"shards": 1, "quick_start": False},
            **options,
        )
        self.dataset = dataset
        source = self._streaming_source
        assert isinstance(source.reader, MapReader)
        if sampler is not None:
            source.lists = SamplerLists(sampler, source.seed, source.snapshot.num_samples)
        source.collating = collating_as_torch
        source.read_one = SeededCall(source.reader.read, source.seed ^ READING)
        if type(self) is MapDataset:  # a subclass has attributes of its own
            self._streaming_user = dataset

    @Readable
    def transform(self) -> Any:
        """The option `transform`, or what the user's dataset calls so."""
        transform = self._streaming_source.transform
        return getattr(self.dataset, "transform", None) if transform is None else transform.function

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch, here and in the user's dataset."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        super().set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of the dataset, over all replicas."""
        return self._streaming_source.snapshot.num_samples

    def subset(self, ids: Any) -> NoReturn:  # noqa: ARG002 - the words of a StreamingDataset
        """Refused: a part of the user's own dataset is a dataset, too."""
        raise TypeError(
            f"a part of a map-style dataset is made before it is loaded; found subset() of a {type(self).__name__}. "
            "Pass torch.utils.data.Subset(dataset, ids) to the loader"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_streaming_")) or "dataset" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it where reading of samples finds it: in the user's dataset, which torch's ``loader.dataset`` is."""
        is_ours = name.startswith("_streaming_") or isinstance(getattr(type(self), name, None), property)
        user = vars(self).get("_streaming_user", self)
        if is_ours or user is self:
            super().__setattr__(name, value)
        else:
            setattr(user, name, value)


def _streams(
    dataset: Any, proportion: Mapping[str, float] | None, lengths: Mapping[str, Any], schedule: object
) -> list[MapStream]:
    """The datasets of a mixture, or the one dataset. TypeError or ValueError for anything else."""
    lengths = by_name("lengths must be numbers", lengths, "{'tokens': numbers}")
    if not isinstance(dataset, Mapping):
        if proportion is not None or schedule is not None:
            raise ValueError(
                "proportion and schedule mix several datasets; found one. Pass them by name, e.g. "
                "{'web': web, 'code': code}"
            )
        _check(dataset)
        return [MapStream(dataset, type(dataset).__name__, None, lengths)]
    dataset = by_name("datasets must be mixed", dataset, "{'web': web, 'code': code}")
    shares = by_name("proportion must be numbers", proportion, "{'web': 0.7, 'code': 0.3}")
    if not dataset or (proportion is None) == (schedule is None) or set(shares or dataset) != set(dataset):
        raise ValueError(
            f"datasets by name are mixed by proportion= or by schedule=, with a number for each name; found the names "
            f"{', '.join(map(str, dataset))}, proportion={proportion} and schedule={schedule}. Pass one dataset (of "
            "splits, e.g. dataset['train']), or proportion={'web': 0.7, 'code': 0.3}"
        )
    for member in dataset.values():
        _check(member)
    if names := [name for name, value in lengths.items() if not callable(value)]:
        raise ValueError(
            f"lengths of several datasets are a function that returns those of one; found numbers for "
            f"{', '.join(names)}. Pass e.g. lengths=lambda dataset: dataset.lengths"
        )
    return [MapStream(member, name, shares.get(name), lengths) for name, member in dataset.items()]


def _refuse_with_sampler(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of an order that a sampler has itself."""
    usual = (None, False, "random")
    if named := [name for name in _NOT_WITH_SAMPLER if settings.get(name) not in usual]:
        raise ValueError(
            "a sampler is the whole order of one dataset, with the samples that it leaves out and the size of its "
            f"epochs: omit {', '.join(named)}"
        )


def _is_map_style(value: Any) -> bool:
    can_read = hasattr(value, "__len__") and (hasattr(value, "__getitem__") or hasattr(value, "__getitems__"))
    return can_read and not isinstance(value, IterableDataset | str | bytes | type)


def _check(dataset: Any) -> None:
    """TypeError for what is no map-style dataset."""
    if not _is_map_style(dataset):
        raise TypeError(
            f"a map-style dataset has __len__ and __getitem__, so that any sample can be read by its number; found "
            f"{type(dataset).__name__}. Of a class, pass an object. A path or URL is read by StreamingDataset. Of an "
            "iterable dataset nothing can be planned: write its samples once (MDSWriter, lightning-stream convert) and "
            "read them by StreamingDataset, or give it __getitem__"
        )


class StatefulDataLoader(StreamingDataLoader):
    """Loads any map-style dataset with torch's arguments, in an order and with a state that hold in any world.

    Global batch k of an epoch has the same samples on any number of nodes, ranks and workers. Each rank gets its share
    of it, so there is no DistributedSampler. `state_dict` is at most 1 KB, the same on every rank, and resumes at the
    next batch in any world. What a dataset draws from random, numpy and torch is seeded for each sample, by its place
    in the run.

    Args:
        dataset: An object with ``__len__``, and ``__getitem__`` or ``__getitems__``: of torch, Hugging Face `datasets`,
            torchvision, a list. Several by name are mixed by `proportion` or `schedule`. Or a `MapDataset`.
        batch_size: Samples per device and micro-batch; `global_batch_size` and `batch_tokens` replace it.
        shuffle: Whether each epoch has a new random order of all samples.
        sampler: Lists the samples of each epoch, instead; see `MapDataset` for what is promised then.
        num_workers, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor, persistent_workers,
            pin_memory_device: As in `torch.utils.data.DataLoader`.
        collate_fn: As in torch, which has the default; it may take a second argument `rng`, see `StreamingDataLoader`.
        drop_last: Whether an epoch's last batch is omitted if it is smaller. Else it is filled up with repeats so that
            all ranks have equal shares, which ``last_batch.filler`` marks; in one process it is smaller, as in torch.
        generator: Its seed is that of the run; `seed` is shorter. Unlike torch's, an order without either has a seed of
            its own: ``torch.manual_seed`` does not change it.
        snapshot_every_n_steps: As in torchdata; every step has an exact state here.
        batch_sampler, in_order: Refused, with the reason.
        seed, proportion, schedule, lengths, pack, bucket_by, batch_tokens, ...: See `MapDataset`.
        global_batch_size, accumulate, workers, tail, evaluation, world, on_mismatch: See `StreamingDataLoader`.

    Raises:
        TypeError: It is no map-style dataset, or an argument is unknown.
        ValueError: Settings that contradict each other.

    Example::

        loader = StatefulDataLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
        for batch in loader:
            torch.save({"model": model.state_dict(), "data": loader.state_dict()}, "run.pt")
    """

    @taking_former
    @checking
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: Literal[True] = True,
        snapshot_every_n_steps: int = 1,  # noqa: ARG002 - every step has a state
        **options: Unpack[StatefulOptions],
    ) -> None:
        refused = {"batch_sampler": batch_sampler is not None, "in_order": not in_order}
        for name in filter(refused.get, refused):
            raise ValueError(f"StatefulDataLoader does not take {name}; {_REFUSED[name]}")
        known = [*signature(StatefulDataLoader).parameters, *StatefulOptions.__annotations__]
        refuse_unknown(type(self).__name__, options, known)
        of_dataset = options_of(OrderOptions, options)
        of_loader = options_of(LoaderOptions, options)
        if generator is not None:
            of_dataset.setdefault("seed", generator.initial_seed())
        if not isinstance(dataset, StreamingDataset):
            dataset = MapDataset(dataset, shuffle=bool(shuffle), sampler=sampler, **of_dataset)
        elif shuffle or sampler is not None or of_dataset:
            raise ValueError("this dataset has its settings already; pass shuffle, sampler, seed and the like to it")
        replaced = options.get("global_batch_size") is not None or dataset.batch_tokens is not None
        super().__init__(
            dataset,
            None if replaced and batch_size == 1 else batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last or None,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **of_loader,
        )


def dataset_of(name: str, data: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> StreamingDataset:
    """The dataset that a trainer's argument describes.

    Args:
        name: What takes the argument, for messages.
        data: A `StreamingDataset`; its keyword arguments, or those of a `MapDataset` with ``dataset`` among them; a
            path or URL; a list of streams; None for the arguments alone; or any map-style dataset.
        arguments: Further arguments of a dataset that is not given whole.

    Raises:
        TypeError: It is none of these.
    """
    if isinstance(data, StreamingDataset):
        if arguments:
            raise TypeError(
                f"a dataset is given whole or by its arguments, not both: found a {type(data).__name__} and "
                f"{', '.join(sorted(arguments))}. Pass these to the dataset"
            )
        return data
    if data is None or isinstance(data, Mapping):
        _refuse_datasets_by_name(name, data or {})
        arguments = {**(data or {}), **arguments}
        return MapDataset(**arguments) if "dataset" in arguments else StreamingDataset(**arguments)
    if isinstance(data, str | os.PathLike):
        return StreamingDataset(data, **arguments)
    if isinstance(data, Sequence) and data and all(isinstance(stream, Stream) for stream in data):
        return StreamingDataset(streams=data, **arguments)
    if not _is_map_style(data):
        raise TypeError(
            f"{name} takes a StreamingDataset, a mapping of its arguments, a path or URL, a list of streams, or a "
            f"map-style dataset, which has __len__ and __getitem__; found {type(data).__name__}. Pass a loader's "
            "dataset; of an iterable dataset nothing can be planned: write its samples once (MDSWriter)"
        )
    return MapDataset(data, **arguments)


def _refuse_datasets_by_name(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for datasets by name, in place of the arguments of one."""
    datasets = [key for key, value in arguments.items() if isinstance(value, Dataset) or _is_map_style(value)]
    if len(datasets) == len(arguments) > 0 and not set(datasets) & {"dataset", *signature(StreamingDataset).parameters}:
        raise TypeError(
            f"{name} takes one dataset, or a mapping of its arguments; found datasets by the names "
            f"{', '.join(map(str, datasets))}. Mix map-style ones by {{'dataset': {{...}}, 'proportion': {{...}}}}, "
            "shards by a list of streams; to train on several at once, give the trainer a loader of each"
        )
