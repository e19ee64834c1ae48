"""How a batch is made, in any process, and how long each stage takes.

The stages of a batch, in their order here: it is planned, its shards are announced, so that they are fetched; its
samples are read, as columns where nothing asks for single ones; transformed; collated; and, if they were read before
their shards were verified, compared before they are handed out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import length_hint
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import note_names
from lightning_stream.formats.mds.gather import flat_copies
from lightning_stream.loading.collate import collate_columns, collate_samples
from lightning_stream.loading.packing import by_row, collate_rows, places_in_rows, read_rows, split_rows
from lightning_stream.loading.randomness import PreservedGenerators, SeededCall
from lightning_stream.loading.shared_position import Start
from lightning_stream.loading.source import BatchSettings, SampleSource
from lightning_stream.monitoring.meter import Made, SampledClocks
from lightning_stream.order.batches import EpochOrder
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.reading.bad_samples import readable
from lightning_stream.reading.look_ahead import read_ahead
from lightning_stream.reading.mapped import MapReader, columns_of
from lightning_stream.reading.shard_pool import UseFlat

T = TypeVar("T")
Delivery = tuple[Any, MicroBatch, Made]  # a batch, its samples, and the times of its making

_WAITED = Path("/proc/thread-self/schedstat")  # what a thread computed, and waited for a core
_log = logging.getLogger(__name__)


@dataclass
class BatchMaker:
    """Makes the batches of a loader, in any process. It never calls the dataset, but for a subclass's `get_item`.

    Attributes:
        source: The samples.
        collate: From samples to a batch; None for the default.
        memory: Where the arrays of a batch are made; None for memory of their own.
        in_threads: Whether threads of the training process make batches, which share its random generators.
    """

    source: SampleSource
    collate: SeededCall | None = None
    memory: Callable[[int], memoryview | None] | None = None
    in_threads: bool = False

    def batches(
        self, settings: BatchSettings, start: Start, index: int = 0, count: int = 1, num_waiting: int = 0
    ) -> Generator[Delivery]:
        """The batches of one worker of several, from a start to the end of its epoch; so many may wait in each."""
        planned, order = self.planned(settings, start, index, count, num_waiting=num_waiting)
        processor = clocks_of_processor()
        began = perf_counter()
        for batch in planned:
            yield self.make(batch, order, perf_counter() - began, processor)
            began = perf_counter()

    def planned(
        self,
        settings: BatchSettings,
        start: Start,
        index: int = 0,
        count: int = 1,
        in_progress: int = 1,
        num_waiting: int = 0,
    ) -> tuple[Iterator[MicroBatch], EpochOrder]:
        """The samples of these batches, whose shards are fetched meanwhile, and the order that they are of.

        The caller makes at most `in_progress` of them at a time.
        """
        source = self.source
        batches = settings.micro_batches(self.source, start)
        ahead = read_ahead(
            source.reader,
            batches.plan,
            batches.walk(index, count),
            source.predownload,
            settings.device_batch_size,
            count,
            in_progress,
            num_waiting,
        )
        return ahead, batches.plan.order

    def make(self, planned: MicroBatch, order: EpochOrder, planning_s: float, processor: SampledClocks) -> Delivery:
        """Make one batch, whose planning took so long."""
        source = self.source
        of_thread = source.reader.counters.of_thread
        of_thread.waited_s = of_thread.transform_s = of_thread.collate_s = 0.0
        processor.begin()
        began = perf_counter()
        batch, info, unverified = readable(source.reader, source.bad_data, planned, order, self._batch)
        ended = perf_counter()
        making_s = ended - began - of_thread.waited_s
        read_s = making_s - of_thread.transform_s - of_thread.collate_s
        stages = (planning_s, of_thread.waited_s, read_s, of_thread.transform_s, of_thread.collate_s)
        thread_s, process_s, queued_s = processor.passed(making_s)
        made = Made(
            began - planning_s, ended, stages, planning_s + thread_s, planning_s + process_s, queued_s, unverified
        )
        return batch, info, made

    def _batch(self, batch: MicroBatch) -> Any:
        """Read, transform and collate: columns are gathered at once where nothing asks for single samples."""
        if self._gathers:
            return collate_columns(self._columns(batch))
        with self._preserved():
            samples = self._samples(batch)
            began = perf_counter()
            collated = self._collated(samples, batch)
        self.source.reader.counters.of_thread.collate_s += perf_counter() - began
        return collated

    def _collated(self, samples: list[Any], batch: MicroBatch) -> Any:
        if self.collate is not None:
            try:
                return self.collate(samples, batch.epoch, int(batch.positions[0]))
            except Exception as error:
                self._name_samples(error, "collating", batch.sample_ids[:8].tolist())
                raise
        try:
            if batch.rows is not None and self.source.packs_whole:
                return collate_rows(samples, batch.rows)
            return self._default_collate(samples)
        except (TypeError, AttributeError):
            self._refuse_none(samples)
            raise

    def _refuse_none(self, samples: list[Any]) -> None:
        """Raise TypeError where the transform returned no sample."""
        transform = self.source.transform
        results = chain.from_iterable(samples) if self.source.packs_whole else samples
        if transform is None or all(sample is not None for sample in results):
            return
        name = getattr(transform.function, "__qualname__", type(transform.function).__name__)
        raise TypeError(
            f"a transform returns the sample that is trained on; found None from {name}. End it by return; samples are "
            "left out by filter=, before the epoch is planned"
        ) from None

    @cached_property
    def _default_collate(self) -> Callable[[list[Any]], Any]:
        collating = self.source.collating
        return partial(collate_samples, out=self.memory) if collating is None else collating(self.memory)

    @cached_property
    def _gathers(self) -> bool:
        """Whether nothing asks for single samples."""
        source = self.source
        if source.transform is not None or self.collate is not None:
            return False
        return source.read_one is None if source.packing is None else not source.packing.is_whole

    def _columns(self, batch: MicroBatch) -> dict[str, Any]:
        reader = self.source.reader
        packing = self.source.packing
        if batch.rows is None or packing is None:
            return reader.batch(batch.delivered, self.memory, batch.version)
        if not isinstance(reader, MapReader):
            return read_rows(reader, batch.rows, packing)
        with self._preserved():
            return read_rows(reader, batch.rows, packing, partial(self._use_documents, batch))

    def _use_documents(self, batch: MicroBatch, ids: NDArray[np.int64], names: Sequence[str], use: UseFlat[T]) -> T:
        """As `use_flat` of a reader, of a dataset's samples: each draws at random by its number, in all of its rows."""
        samples = list(self._read(batch, ids.tolist(), ids.tolist()))
        return use(*flat_copies(columns_of(samples, names), names))

    def samples(self, batch: MicroBatch) -> list[Any]:
        """Read and transform the samples of one micro-batch: its rows, where documents are packed into rows.

        Where whole samples are, the lists of those of each row.
        """
        with self._preserved():
            samples: list[Any] = self._samples(batch)
            return samples

    def _samples(self, batch: MicroBatch) -> Any:
        if batch.rows is None:
            return self._single(batch, batch.delivered.tolist(), batch.positions.tolist())
        if self.source.packs_whole:
            return by_row(self._single(batch, *places_in_rows(batch.rows, batch.positions)), batch.rows)
        ids_of = [ids.tolist() for ids in np.split(batch.rows.ids, batch.rows.edges[1:-1])]
        return self._all_transformed(batch, split_rows(self._columns(batch)), ids_of, batch.positions.tolist())

    def _single(self, batch: MicroBatch, ids: list[int], positions: list[int]) -> Any:
        """Read and transform samples one by one; `positions` are what each draws its random numbers by."""
        samples = self._read(batch, ids, positions)
        return self._all_transformed(batch, samples, ([sample_id] for sample_id in ids), positions)

    def _read(self, batch: MicroBatch, ids: list[int], positions: list[int]) -> Iterable[Any]:
        """Samples of these ids; those of a map-style dataset at once where nothing is drawn at random."""
        reader = self.source.reader
        read_one = self.source.read_one
        if isinstance(reader, MapReader) and read_one is not None:
            samples = read_one.read_unseeded(partial(self._unseeded, reader, read_one.function, ids))
            if samples is not None:
                return samples
        return self._seeded(batch, ids, positions)

    def _unseeded(self, reader: MapReader, read: Callable[[int], Any], ids: list[int]) -> Any:
        """Samples of a dataset that may not draw at random, as it returned them."""
        remaining = iter(ids)
        try:
            if reader.read_many is None or read != reader.read:  # a subclass's own
                return [read(sample_id) for sample_id in remaining]
            returned = reader.read_many(ids)
            samples = returned if isinstance(returned, Sized) else list(returned)
            is_of_samples = not isinstance(returned, (Mapping, AbstractSet)) and not hasattr(returned, "columns")
            if len(samples) != len(ids) or not is_of_samples:
                raise ValueError(
                    f"__getitems__ returns a sample for each number; found {len(samples)} samples for {len(ids)} "
                    f"numbers, as {type(returned).__name__}. Return a list of all, or leave some out of the dataset"
                )
            return samples
        except Exception as error:
            begun = ids[: len(ids) - length_hint(remaining)]
            self._name_samples(error, "reading", begun[-1:] or ids)
            raise

    def _seeded(self, batch: MicroBatch, ids: list[int], positions: list[int]) -> Generator[Any]:
        """Read samples one by one: as a subclass of the dataset does, if that has its own way."""
        read_one = self.source.read_one
        for sample_id, position in zip(ids, positions, strict=True):
            if read_one is None:
                yield self.source.reader.sample(sample_id, batch.version)
                continue
            try:
                sample = read_one(sample_id, batch.epoch, position)
            except Exception as error:
                self._name_samples(error, "reading", [sample_id])
                raise
            yield sample

    def _all_transformed(
        self, batch: MicroBatch, samples: Iterable[Any], ids_of: Iterable[list[int]], positions: list[int]
    ) -> Any:
        transform = self.source.transform
        if transform is None:  # a collate_fn gets what __getitems__ returned, as in torch
            return samples if self.collate is not None and isinstance(samples, Sized) else list(samples)
        of_thread = self.source.reader.counters.of_thread
        transformed = []
        for sample, ids, position in zip(samples, ids_of, positions, strict=True):
            began = perf_counter()
            try:
                transformed.append(transform(sample, batch.epoch, position))
            except Exception as error:
                self._name_samples(error, "transforming", ids)
                note_names(error, sample)
                raise
            of_thread.transform_s += perf_counter() - began
        return transformed

    def _name_samples(self, error: Exception, doing: str, ids: list[int]) -> None:
        """Add to an error of the user's code which samples it came from."""
        snapshot = self.source.snapshot
        reader = self.source.reader
        shards = snapshot.shards_of(np.array(ids))
        stream = snapshot.stream_names[int(snapshot.streams_of(np.array(ids[:1]))[0])]
        files = sorted({reader.entry(int(shard))[1].raw.basename for shard in shards})
        # A note shows in the traceback, also in one that crosses processes; the error's type and text stay.
        error.add_note(f"While {doing} samples {ids} of stream {stream!r}, shard {', '.join(files)}.")

    def _preserved(self) -> AbstractContextManager[None]:
        """Restores the global generators; not in threads, which never change them, nor in workers, which seed them."""
        return nullcontext() if self.in_threads or self.memory is not None else PreservedGenerators()

    def verified(self, settings: BatchSettings, batches: Iterable[Delivery]) -> Generator[Delivery]:
        """Batches that are about to be handed out; made again if their shards have come and have other bytes.

        Those whose shards have not come are noted. Raises StoreError where one that was handed out before was wrong.
        """
        reader = self.source.reader
        delivered = reader.shards.delivered
        for delivery in batches:
            delivered.compare_arrived()
            while (unverified := delivery[2].unverified) and not reader.is_right(unverified, wait=False):
                info = delivery[1]
                _log.warning("The batch at %s was read unverified and wrong: it is made again.", info.label)
                order = self.source.order(settings.order).epoch(info.epoch)
                delivery = self.make(info, order, 0.0, clocks_of_processor())
            if unverified:
                delivered.add(unverified, delivery[1].label)
            yield delivery
            del delivery  # or its memory would stay in use while the next one is made


def clocks_of_processor(num_threads: int = 1) -> SampledClocks:
    """The processor time of the thread that makes batches, and of its whole process; the time it waited for a core.

    Reading them takes 20 us, a tenth of a batch of 256 token rows.
    """
    return SampledClocks(thread_time, lambda: process_time() / num_threads, _queued_s)


def _queued_s() -> float:
    """Seconds that this thread could have computed so far, but waited for a core; 0 where the system does not tell."""
    try:
        with _WAITED.open("rb", buffering=0) as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0
