"""The rows of a DataFrame in a cache of shards, keyed by its plan, and readable while Spark still fills it."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_stream.cache import default_folder
from lightning_stream.cache.folder import CacheFolder
from lightning_stream.cache.shards import Lease
from lightning_stream.cache.space import CacheEntry, Space
from lightning_stream.convert.partition import partition_of
from lightning_stream.convert.publish import MANIFEST, alone
from lightning_stream.errors import CacheError, NotFoundError, StoreError
from lightning_stream.formats.index import INDEX_NAME, Index
from lightning_stream.reading.reader import SampleReader
from lightning_stream.reading.stream import Stream
from lightning_stream.reading.stream_shards import StreamShards
from lightning_stream.shared_files import LOCK_FDS, publish_bytes, try_flock
from lightning_stream.spark.convert import Conversion, quoted
from lightning_stream.spark.partition import SparkJob
from lightning_stream.stores import absolute, is_remote, open_store
from lightning_stream.threads import DaemonPool, Lock

_LABEL = "rows of a Spark DataFrame"  # in `lightning-stream cache list`
_LOOK_S = 0.1  # between two looks for the next partition's receipt


class FrameCache:
    """A DataFrame's rows as samples. Conversion begins with the first use: a thread runs it in Spark.

    Pickles and forks without the DataFrame: another process waits until the cache is filled, and reads it.
    ``lightning-stream cache`` lists and prunes a cache of this machine's user, as a whole, unless it is being read.

    Args:
        dataframe: The rows.
        columns: Those to keep; None for all.
        cache: Folder or URL, shared by all machines, in which each DataFrame gets a folder of its own; None for one of
            this machine's user.
    """

    def __init__(
        self, dataframe: Any, columns: Sequence[str] | None = None, cache: str | os.PathLike[str] | None = None
    ) -> None:
        chosen = dataframe if columns is None else dataframe.select(*map(quoted, columns))
        place = None if cache is None else absolute(cache)
        compression = "zstd" if place is not None and is_remote(place) else None
        settings = SparkJob.read({"out": ".", "compression": compression, "overwrite": True})
        self._plan = partial(Conversion.plan, chosen, settings)
        draft = self._plan()
        key = draft.job.fingerprint
        private = default_folder(f"spark-frame-{key}") if place is None else None
        uri = str(private) if place is None else f"{place}/{key}"
        self._begin(uri, private, replace(draft, job=replace(draft.job, out=uri)))

    def _begin(self, uri: str, private: Path | None, conversion: Conversion | None) -> None:
        self.uri = uri
        self._private = None if private is None else CacheFolder(private)
        self.lease: Lease | None = None  # of a private cache: it cannot be pruned until this is closed
        self._conversion = conversion
        self._pool = DaemonPool(1, "spark-frame-cache")
        self._filling: Future[None] | None = None
        self._lock = Lock()
        self._reader: SampleReader | None = None
        _caches.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "private": self._private and self._private.path}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._begin(state["uri"], state["private"], None)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are in the cache."""
        return open_store(self.uri).exists(INDEX_NAME)

    def start(self) -> Future[None]:
        """Begin to fill the cache, unless that was done. Returns at once."""
        with self._lock:
            if self._filling is None:
                self._filling = self._pool.submit(self._fill)
            return self._filling

    def wait(self) -> SampleReader:
        """Wait until all rows are in the cache; return what reads them, by their number in the DataFrame's order.

        Raises:
            ValueError: Values that cannot be written; see `dataframe_to_mds`.
            CacheError: The process that was filling it did not finish.
        """
        if self._reader is not None:
            return self._reader
        if self._conversion is not None:
            self.start().result()
        else:
            with self._alone():
                if not self._is_taken():
                    raise CacheError(
                        f"{self.uri} must hold a DataFrame's rows; the process that converts them has not finished. "
                        "See its error, or read the DataFrame there once before starting others."
                    )
        self._reader = self._read(None)
        return self._reader

    def __len__(self) -> int:
        """Number of rows; waits until it is known."""
        return int(self.wait().snapshot.num_samples)

    def parts(self) -> Iterator[SampleReader]:
        """Yield a reader of each partition, in the DataFrame's order, as soon as it is converted.

        Raises:
            CacheError: Rows that were read are not those that the cache has in the end.
        """
        if self._conversion is None or self._reader is not None:
            yield self.wait()
            return
        filling = self.start()
        num_read = 0
        names: list[str] = []
        while not filling.done():
            try:
                shards = self._conversion.job.receipt(num_read).shards
            except NotFoundError:
                wait_for([filling], _LOOK_S)
                continue
            num_read += 1
            names += map(_name, shards)
            if shards:
                yield self._read(shards)
        filling.result()
        index = json.loads(open_store(self.uri).read(INDEX_NAME))
        # Receipts are gone by now; none were written where it was complete before.
        rest = index["shards"]
        if names != [_name(shard) for shard in rest if partition_of(_name(shard)) < num_read]:
            raise CacheError(
                f"rows of {self.uri} were written again, in another order, after they had been read: an earlier run "
                "that was cut short had left them. All are there now. Read the DataFrame again."
            )
        for _, part in groupby(rest[len(names) :], lambda shard: partition_of(_name(shard))):
            yield self._read(list(part))

    def _fill(self) -> None:
        assert self._conversion is not None
        try:
            with self._alone():
                if not self._is_taken():
                    self._check_rows(self._conversion)
                    self._conversion.write()
                    self._is_taken()
        except StoreError as error:
            raise StoreError(f"{error} Pass it as cache=.") from error

    def _check_rows(self, made: Conversion) -> None:
        """Raise CacheError if the rows are others than those that the cache's name stands for."""
        now = self._plan()
        if (now.analyzed, now.stamps) != (made.analyzed, made.stamps):
            raise CacheError(
                "the rows of a DataFrame must stay as they are until the first use of its dataset converts them; a "
                "file, table or view that it reads was changed before. Nothing was converted. Make the dataset of the "
                "DataFrame again."
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude others that fill the cache, or prune it."""
        with ExitStack() as locks:
            locks.enter_context(alone(self.uri))
            if self._private is not None:
                with self._private.translated_errors():
                    self._private.prepare()
                locks.enter_context(self._private.lock(MANIFEST))
            yield

    def _is_taken(self) -> bool:
        """Whether all rows are in the cache; from now on, a private one cannot be pruned."""
        folder = self._private
        is_complete = self.is_complete
        if folder is None or self.lease is not None or not is_complete:
            return is_complete
        first = folder.path / MANIFEST
        if not first.exists():
            return False  # pruned: the manifest goes first
        first.touch()  # `cache prune` deletes what was not read for longest
        fd = LOCK_FDS.open(first, os.O_RDONLY)
        self.lease = Lease(folder.path, fd, MANIFEST)
        try_flock(fd, first, shared=True)  # nobody prunes it now: see _alone
        index = Index.from_file(folder.path / INDEX_NAME)
        files = [raw for entry in index for raw, _ in entry.files]
        publish_bytes(f"frame {_LABEL}".encode(), folder.control / "source", folder.modes)
        # One entry for all files: they are of use only together.
        names = (MANIFEST, *(file.basename for file in files))
        Space(folder).mark(CacheEntry(names, sum(file.num_bytes for file in files)))
        return True

    def _read(self, shards: Sequence[Mapping[str, Any]] | None) -> SampleReader:
        """A reader of the shards that have these entries in the index; of all if None."""
        reader = SampleReader(StreamShards([Stream(remote=self.uri)]))
        if shards is not None:
            index = json.dumps({"version": 2, "shards": shards}).encode()
            reader.shards.indexes = (Index.from_bytes(index, self.uri),)
        return reader


def _name(shard: Mapping[str, Any]) -> str:
    return str(shard["raw_data"]["basename"])


_caches: weakref.WeakSet[FrameCache] = weakref.WeakSet()


def _renew() -> None:
    """Start over in a forked child: the thread that converts, and the locks that it holds, are the parent's."""
    for cache in list(_caches):
        if vars(cache)["_reader"] is None:
            cache.__setstate__(cache.__getstate__())


os.register_at_fork(after_in_child=_renew)
