"""Which samples of its streams a dataset keeps: by their ids, their lengths, or a function of each sample."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.cache.folder import CacheFolder
from lightning_stream.errors import note_names
from lightning_stream.fingerprint import function_text
from lightning_stream.order.bitmap import Bitmap, as_ids, ids_below
from lightning_stream.order.rules import AMOUNT
from lightning_stream.processes import Progress, ShardRange, num_processes, pickled, refuse_in_worker, run_partitions
from lightning_stream.reading.bad_samples import UNREADABLE, BadData, BadDataPolicy
from lightning_stream.reading.reader import SampleReader
from lightning_stream.sources.in_place import is_made

Keep = Callable[[dict[str, Any]], bool]
LengthRule = tuple[float | None, float | None] | Callable[..., NDArray[np.bool_]]
LengthRules = Mapping[str | tuple[str, ...], LengthRule]
Ids = Iterable[int] | NDArray[np.int64] | str | os.PathLike[str]

_VERSION = 2  # grows when a kept result of the same name would differ
# A killed evaluation loses a part of each process
_MIN_SAMPLES = 4096
_MOST_PARTS = 256
_ALONE_S = 5.0  # processes take as long to start
_WAIT_S = 7 * 24 * 3600.0  # for another process's evaluation; a process that dies is not waited for
_REMEDY = "give it more, or have the function use less; what the processes printed is above"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Filters:
    """The rules that a sample must pass: the parts of `filter` of `StreamingDataset`.

    Raises:
        TypeError: A rule of the wrong type.
        ValueError: An empty range of lengths.
    """

    sample: Keep | None = None
    lengths: LengthRules | None = None
    exclude_ids: Ids | None = None
    policy: BadDataPolicy = field(default_factory=BadDataPolicy)

    def __post_init__(self) -> None:
        if self.sample is not None and not callable(self.sample):
            raise TypeError(
                "filter is a function of a sample that returns True or False, or a mapping with that as 'sample', "
                f"rules of 'lengths', and 'exclude_ids'; found {self.sample!r} for the function. Pass a function"
            )
        if not isinstance(self.lengths or {}, Mapping):
            raise TypeError(f"the lengths of filter are a dict, e.g. {{'tokens': (64, 4096)}}; found {self.lengths!r}")
        for name, rule in (self.lengths or {}).items():
            if callable(rule):
                continue
            if not isinstance(name, str) or not isinstance(rule, (tuple, list)) or len(rule) != 2:
                raise TypeError(
                    "the lengths of filter have, for the name of a length, the least and the greatest that are kept, "
                    f"or a function of their array; found {name!r}: {rule!r}. Pass e.g. {{'tokens': (64, None)}}"
                )
            least, greatest = rule
            if not all(limit is None or AMOUNT.accepts(limit) for limit in rule):
                raise TypeError(f"a limit in the lengths of filter is None or {AMOUNT.text}; found {name!r}: {rule!r}")
            if least is not None and greatest is not None and least > greatest:
                raise ValueError(f"lengths of filter have the least first; found {name!r}: {rule!r}. Exchange them")

    def applied(self, reader: SampleReader) -> SampleReader:
        """The reader of the samples that are kept: the given one where there are no rules."""
        rules = (self.sample, self.lengths, self.exclude_ids)
        return reader if all(rule is None for rule in rules) else reader.only(self.chosen)

    def chosen(self, reader: SampleReader) -> tuple[Bitmap, dict[str, int]]:
        """The samples that are kept, and how many are left after each rule, by the rule.

        It evaluates a function of samples unless a process of this machine has.

        Raises:
            ValueError: No sample is kept, or an id to exclude is unknown.
        """
        size = reader.snapshot.num_samples
        mask = np.ones(size, dtype=np.bool_)
        left = dict[str, int]()
        if self.exclude_ids is not None:
            mask &= _not_excluded(self.exclude_ids, reader)
            left["exclude_ids"] = int(mask.sum())
        for names, rule in (self.lengths or {}).items():
            mask &= _passed(reader, names, rule)
            left[f"filter_lengths[{names!r}]={_text(rule)}"] = int(mask.sum())
        if self.sample is not None and mask.any():
            passing = reader.only(Bitmap.of_mask(mask))
            mask[mask] = Evaluation(passing, self.sample, BadData(self.policy)).mask()
            left[f"filter={_text(self.sample)}"] = int(mask.sum())
        if not mask.any():
            counts = ", ".join(f"{rule} left {count:,}" for rule, count in left.items())
            raise ValueError(f"filters must keep some samples; of {size:,}, {counts}. Correct the last one")
        return Bitmap.of_mask(mask), left


def _text(rule: object) -> str:
    """A rule in a word: a function by its name."""
    return str(getattr(rule, "__name__", type(rule).__name__)) if callable(rule) else repr(rule)


def ids_of(ids: Ids) -> NDArray[np.integer]:
    """Ids that are given themselves, or as a file with one a line or of numpy (``.npy``)."""
    return as_ids(_read(Path(ids)) if isinstance(ids, (str, os.PathLike)) else ids, "exclude_ids")


def _not_excluded(ids: Ids, reader: SampleReader) -> NDArray[np.bool_]:
    """bool[num_samples]: the samples of a reader that are not among these ids of the streams' samples."""
    size = reader.shards.snapshot.num_samples
    mask = np.ones(size, dtype=np.bool_)
    mask[ids_below(ids_of(ids), size, "exclude_ids")] = False
    return mask if reader.members is None else mask[reader.members.mask]


def _read(path: Path) -> NDArray[Any]:
    """The ids in a file: of numpy, or one a line."""
    if path.suffix == ".npy":
        return np.asarray(np.load(path, allow_pickle=False))
    lines = path.read_text().splitlines()
    wrong = next((line_number for line_number, line in enumerate(lines, 1) if not line.strip().isdecimal()), None)
    if wrong is not None:
        raise ValueError(
            f"a file of ids has one sample id a line; found {lines[wrong - 1][:40]!r} in line {wrong} of {path}"
        )
    return np.array(lines, dtype=np.int64)


def _passed(reader: SampleReader, names: str | tuple[str, ...], rule: LengthRule) -> NDArray[np.bool_]:
    """bool[num_samples]: whether each sample passes a rule about its lengths."""
    lengths = [reader.lengths(name) for name in ((names,) if isinstance(names, str) else names)]
    if callable(rule):
        mask = np.asarray(rule(*lengths))
        if mask.dtype != np.bool_ or mask.shape != lengths[0].shape:
            raise ValueError(
                f"a function in the lengths of filter returns bool[{len(lengths[0])}], an answer for each sample; that "
                f"of {names!r} returned {mask.dtype}{list(mask.shape)}"
            )
        return mask
    least, greatest = rule
    mask = lengths[0] >= (0 if least is None else least)
    return mask if greatest is None else mask & (lengths[0] <= greatest)


@dataclass(frozen=True)
class Evaluation:
    """A function's answers for samples of a reader, computed once per machine and kept in its first cache folder.

    The name under which they are kept is a digest of the samples, of the columns that are read of them, of the function
    with what it uses, and of the decoders. Each part is kept when it is done, so that an evaluation that was killed
    continues from there.
    """

    reader: SampleReader
    keep: Keep
    bad_data: BadData

    def mask(self) -> NDArray[np.bool_]:
        """bool[num_samples]: the samples that the function keeps."""
        done = partial(self._folder.result, self.name)
        if (packed := done()) is None:
            refuse_in_worker("the filter")  # which would wait for this process
            with self._folder.translated_errors():
                self._folder.prepare()
            packed = self._folder.run_once(f"{self.name}.result", done, lambda _: self._compute(), _WAIT_S)
        return _unpacked(packed, self.reader.snapshot.num_samples)

    @property
    def _folder(self) -> CacheFolder:
        cache = self.reader.caches[0]
        return CacheFolder(cache.folder, cache.config.shared)

    @cached_property
    def name(self) -> str:
        """The name of the result."""
        decoders = sorted((self.reader.shards.config.decoders or {}).items())
        texts = [f"filter {_VERSION}", self.reader.snapshot.digest, function_text(self.keep)]
        texts += [f"{column} {function_text(decode)}" for column, decode in decoders]
        for stream_id, index in enumerate(self.reader.indexes):
            if index.chosen is not None or is_made(index):  # the digest says nothing of what is read of the data
                texts.append(f"columns {stream_id} {index.column_sets}")
        return f"filter-{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:32]}"

    def __call__(self, part: ShardRange) -> NDArray[np.bool_]:
        """Evaluate a part, in any process, and keep the answers; a part that has been is read."""
        offsets = self.reader.snapshot.shard_offsets
        if (packed := self._folder.result(self._result_of(part))) is not None:
            return _unpacked(packed, int(offsets[part.end] - offsets[part.begin]))
        answers = np.concatenate([self._of_shard(shard) for shard in range(part.begin, part.end)])
        self._folder.keep_result(self._result_of(part), np.packbits(answers).tobytes())
        return answers

    def _of_shard(self, shard: int) -> NDArray[np.bool_]:
        """bool[samples of the shard]."""
        ids = np.arange(*self.reader.snapshot.shard_offsets[shard : shard + 2])
        with self.reader.read_ahead(ids):
            with suppress(*UNREADABLE):  # the samples tell that; the answers are kept, so they need the verified shard
                for sample_id in ids[:1].tolist():
                    self.reader.open_for(sample_id)
            # No `map`, which a StopIteration of the function would end without an error.
            return np.fromiter((self._keeps(sample_id) for sample_id in ids.tolist()), np.bool_)

    def _keeps(self, sample_id: int) -> bool:
        """Whether a sample is kept; one that cannot be read is, where training would substitute it."""
        try:
            sample = self.reader.sample(sample_id)
        except UNREADABLE:
            if self.bad_data.is_bad(self.reader, sample_id):
                return True
            sample = self.reader.sample(sample_id)  # only the first attempt failed
        try:
            answer = self.keep(sample)
            if not isinstance(answer, (bool, np.bool_)):
                raise TypeError(f"a filter returns True or False; found {answer!r}")
        except Exception as error:
            error.add_note(f"While filtering sample {self.reader.original_ids(np.array([sample_id]))[0]}.")
            note_names(error, sample)
            raise
        return bool(answer)

    def _compute(self) -> bytes:
        """Evaluate what no process has, in several processes if it is much; keep and return one bit per sample."""
        offsets = self.reader.snapshot.shard_offsets
        count = min(max(1, offsets[-1] // _MIN_SAMPLES), _MOST_PARTS)
        bounds = np.unique(offsets.searchsorted(np.linspace(0, offsets[-1], count + 1))).tolist()
        parts = [ShardRange(partition_id, *pair) for partition_id, pair in enumerate(pairwise(bounds))]
        progress = Progress(len(parts), "filtering")
        until = time.monotonic() + _ALONE_S
        by_part = dict[int, NDArray[np.bool_]]()
        missing = list(parts)
        while missing and time.monotonic() < until:
            part = missing.pop(0)
            answers = by_part[part.partition_id] = self(part)
            progress(len(answers))
        by_part |= run_partitions(
            self, missing, self._num_workers(len(missing)), lambda part: progress(len(part)), _REMEDY
        )
        in_order = [by_part[part.partition_id] for part in parts] or [np.zeros(1, bool)]
        packed = np.packbits(np.concatenate(in_order)).tobytes()
        self._folder.keep_result(self.name, packed, parts=map(self._result_of, parts))
        return packed

    def _num_workers(self, num_parts: int) -> int:
        if num_parts <= 1 or multiprocessing.current_process().daemon:  # a DataLoader's worker may start no process
            return 1
        try:
            pickled(self)
        except ValueError as error:
            _log.warning("The filter is evaluated in one process, which takes longer: %s", error)
            return 1
        return num_processes(None)

    def _result_of(self, part: ShardRange) -> str:
        return f"{self.name}.{part.begin}-{part.end}"


def _unpacked(packed: bytes, size: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=size).view(np.bool_)
