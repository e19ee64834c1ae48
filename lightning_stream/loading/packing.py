"""Documents or whole samples packed into rows of one length, or sorted by length: the settings, and batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_stream.errors import FormatError, checking
from lightning_stream.formats.encodings.base import FlatArrays
from lightning_stream.loading.collate import collate_columns, join_samples, signed
from lightning_stream.order import OrderConfig
from lightning_stream.order.arrays import Ints, starts_of
from lightning_stream.order.buckets import LengthBuckets
from lightning_stream.order.packing import RowPacking, RowSpans
from lightning_stream.order.rules import MAYBE_TEXT, TEXT, Rule, count, violations
from lightning_stream.reading.length_expression import LengthExpression, is_expression
from lightning_stream.reading.reader import SampleReader

Arrays: TypeAlias = "dict[str, NDArray[Any]]"  # of a batch, by name
_RULES: dict[str, Rule] = {
    "column": MAYBE_TEXT,
    "lengths": TEXT,
    "pad_token": Rule("an integer", lambda token: isinstance(token, (int, np.integer)) and not isinstance(token, bool)),
    "row_length": count(1, 2**31 - 1),
}
_OF_ROWS = (
    "input_ids",
    "position_ids",
    "document_ids",
    "num_tokens",
    "cu_seqlens",
    "max_seqlen",
)  # as batches have them
_PLACING = ("row_splits", "cu_seqlens", "max_seqlen", "splits")  # they say where the samples are
_OF_TOKENS = ("columns", "labels", "pad_token")  # settings of rows of tokens alone
_PLACE_BITS = 40  # of a row's position; the number of a sample in its row comes above them


@checking
@dataclass(frozen=True)
class Packing:
    """How documents are packed into rows of one length; then a sample of the run is a row.

    Each window of documents is packed by best-fit decreasing, so rows have hardly any padding. The rows are a pure
    function of data and settings: the same in every world, and after every resume.

    Documents are cut where they must be, and their tokens become arrays of rows. Where `lengths` is an expression, or
    `column` is None, whole samples of any columns are packed instead: see below.

    Args:
        column: The column of tokens: a 1-d array of integers in each sample. Its lengths must be known without reading
            it, see `MDSWriter(lengths=...)`. None packs whole samples.
        row_length: S, tokens of a row.
        window: Documents that are packed together; None for as many as fill about 700 rows when the run starts, from
            4,096 to 65,536. More of them leave less padding, half a row for each window; fewer make the first batch
            after a resume faster.
        long_documents: What happens to documents of more than S tokens. ``"split"`` cuts them after every S tokens, and
            is the default; ``"truncate"`` keeps the first S tokens; ``"drop"`` omits them, with a warning that counts
            them; ``"error"`` refuses data that has any. Whole samples are dropped or refused; they are refused by
            default.
        columns: Further columns with one number for each token, such as a loss mask. They are packed alike, and have
            other names than what a batch has without them.
        labels: Whether batches have ``labels``: the tokens, but -100 for the first token of each document and for
            padding.
        cu_seqlens: Whether batches have ``cu_seqlens`` and ``max_seqlen``, as variable-length attention takes them.
        pad_token: The token that fills the end of a row.
        lengths: Name of the lengths in the dataset; None for the name of the column. Or an expression of them, of
            whole numbers, ``+ - * //``, ``max``, ``min`` and powers, such as ``"tokens + 576 * images"``: then whole
            samples are packed.

    A batch of B rows has, all int32 but the tokens:

    - ``input_ids`` [B, S], in the stored dtype (int32 for uint16, int64 for uint32);
    - ``position_ids`` [B, S]: places in the document, counted from its first token in the row;
    - ``document_ids`` [B, S]: the number of the document in the row; padding counts as one more document;
    - ``num_tokens`` [B]: tokens of each row, padding excluded.

    Of whole samples, a transform gets each one, and a collate function the samples of each row, a list of lists.
    Without a collate function, a batch of n samples of T length together, row after row and without padding, has

    - the columns: arrays and tensors joined along their first axis, numbers and the rest as without packing;
    - ``splits``: for each column of arrays, where the samples begin in it, int32 [n + 1];
    - ``row_splits`` [B + 1]: which samples each row has;
    - ``cu_seqlens`` [n + 1], ``max_seqlen``: where the samples begin among the T places, and the longest of them;
    - ``position_ids``, ``document_ids`` [T]: the place in the sample, and the number of the sample in the batch;
    - ``num_tokens`` [B]: the length of each row.

    A column of such a name replaces what is described here, but for those that say where the samples are.

    Raises:
        ValueError: A setting, or an expression, that is wrong; or a sample with a column ``splits``, ``row_splits``,
            ``cu_seqlens`` or ``max_seqlen``.

    Example::

        StreamingDataset("s3://bucket/tokens", shuffle=True, pack=Packing(column="tokens", row_length=2048))
        StreamingDataset("s3://bucket/chats", pack=Packing(lengths="tokens + 576 * images", row_length=8192))
    """

    column: str | None = "tokens"
    row_length: int = 2048
    window: int | None = None
    long_documents: Literal["split", "truncate", "drop", "error"] | None = None
    columns: tuple[str, ...] = ()
    labels: bool = False
    cu_seqlens: bool = False
    pad_token: int = 0
    lengths: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.lengths, str) and is_expression(self.lengths):
            LengthExpression(self.lengths)  # refuses a wrong one
            object.__setattr__(self, "column", None)
        if self.long_documents is None:
            object.__setattr__(self, "long_documents", "error" if self.is_whole else "split")
        object.__setattr__(self, "columns", tuple(self.columns))  # a list of a config file
        problems = violations({**vars(self), "lengths": self.lengths_name}, _RULES)
        if self.is_whole and self.long_documents in ("split", "truncate"):
            problems.append(
                f"long_documents={self.long_documents!r} would cut samples, and whole ones are packed: pass 'drop' or "
                "'error'."
            )
        if self.is_whole and (of_tokens := [name for name in _OF_TOKENS if getattr(self, name)]):
            problems.append(f"{', '.join(of_tokens)} cannot be given for whole samples: they are of rows of tokens.")
        if same := {*_OF_ROWS, *(["labels"] if self.labels else [])} & {*self.columns} - {self.column}:
            problems.append(f"columns={sorted(same)} are what a batch has itself: write them under other names.")
        if problems:
            raise ValueError(f"Documents cannot be packed this way. {' '.join(problems)}")
        self.rows("")  # refuses other wrong values

    def rows(self, lengths_digest: str) -> RowPacking:
        """What decides which rows there are, but for a window that is not given: `resolved` chooses that."""
        window: dict[str, Any] = {} if self.window is None else {"window": self.window}
        rule = "drop" if self.long_documents == "error" else self.long_documents  # of none there is nothing to drop
        return RowPacking(self.row_length, long_documents=rule or "split", lengths=lengths_digest, **window)

    @property
    def is_whole(self) -> bool:
        """Whether whole samples are packed."""
        return self.column is None

    def check_lengths(self, lengths: NDArray[np.integer]) -> None:
        """Raise ValueError for lengths of samples that no row could have, unless these may be dropped."""
        limits = []
        if self.long_documents == "error":
            limits.append(("longer than a row", lengths > self.row_length, "pass long_documents='drop', "))
        if self.is_whole:
            limits.append(("of length 0, and so in no row", lengths == 0, ""))
        for what, wrong, remedy in limits:
            if wrong.any():
                first = int(np.argmax(wrong))
                raise ValueError(
                    f"every sample must be in a row, but of {len(lengths):,} samples {np.count_nonzero(wrong):,} are "
                    f"{what} (row_length={self.row_length}), the first of them sample {first} with {lengths[first]:,} "
                    f"by {self.lengths_name!r}. Correct row_length or the lengths, {remedy}or leave them out by "
                    "the lengths of filter (of a map-style dataset, by torch.utils.data.Subset)"
                )

    def resolved(self, reader: SampleReader, resumed: OrderConfig | None) -> RowPacking:
        """With what was to be chosen, from the data and the run's first start."""
        self._check_column(reader)
        rows = self.rows(reader.lengths_digest(self.lengths_name))
        if self.window is not None:
            return rows
        former = None if resumed is None else resumed.packing
        window = rows.usual_window(reader.lengths(self.lengths_name)) if former is None else former.window
        return replace(rows, window=window)

    def _check_column(self, reader: SampleReader) -> None:
        """Raise ValueError where the tokens are not stored."""
        for index in () if self.column is None else reader.indexes:
            if index.columns and index.columns.get(self.column or "", "str") == "str":
                raise ValueError(
                    f"rows are packed from a stored column of tokens, before any transform; found column="
                    f"{self.column!r} among {dict(index.columns)}. Tokenise first: convert(source, out=..., "
                    'transform=tokenise, lengths={"tokens": len}); or pack whole samples: column=None'
                )

    @property
    def lengths_name(self) -> str:
        """The name of the lengths in the dataset."""
        return self.lengths or self.column  # type: ignore[return-value]  # one of both is checked


def places_in_rows(rows: RowSpans, positions: Ints) -> tuple[list[int], list[int]]:
    """The ids of the samples of these rows, and for each a number of its own, of its row's position and its place."""
    counts = np.diff(rows.edges)
    places = np.arange(len(rows.ids)) - np.repeat(rows.edges[:-1], counts)
    return rows.ids.tolist(), (np.repeat(positions, counts) + (places << _PLACE_BITS)).tolist()


def by_row(samples: Sequence[Any], rows: RowSpans) -> list[list[Any]]:
    """The samples of each row."""
    return [list(samples[begin:end]) for begin, end in pairwise(rows.edges.tolist())]


def collate_rows(samples: Iterable[Sequence[Any]], rows: RowSpans) -> dict[str, Any]:
    """The batch of whole samples that `Packing` describes."""
    lengths = rows.num_tokens
    edges = starts_of(lengths)
    layout = {
        "row_splits": rows.edges.astype(np.int32),
        "cu_seqlens": edges.astype(np.int32),
        "max_seqlen": np.array(lengths.max(initial=0), np.int32),
        "position_ids": (np.arange(edges[-1]) - np.repeat(edges[:-1], lengths)).astype(np.int32),
        "document_ids": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "num_tokens": np.diff(edges[rows.edges]).astype(np.int32),
    }
    joined = [*chain.from_iterable(samples)]
    first = joined[0] if joined else None
    if isinstance(first, Mapping) and (same := [name for name in _PLACING if name in first]):
        raise ValueError(
            f"columns of packed samples must not have the names of what says where they are in a batch; found {same}. "
            "Rename them in a transform, or pass a collate_fn"
        )
    return {**collate_columns(layout), **join_samples(joined)}


def take_rows(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """Some rows of a batch that `collate_rows` made, as such a batch; columns may have replaced parts of the layout."""
    row_splits = batch["row_splits"][rows.start : rows.stop + 1]
    samples = slice(int(row_splits[0]), int(row_splits[-1]))
    edges = batch["cu_seqlens"][samples.start : samples.stop + 1]
    places = slice(int(edges[0]), int(edges[-1]))
    splits = {name: values[samples.start : samples.stop + 1] for name, values in batch["splits"].items()}
    taken = {
        "row_splits": row_splits - samples.start,
        "cu_seqlens": edges - places.start,
        "max_seqlen": edges.diff().max(),
        "splits": {name: values - values[0] for name, values in splits.items()},
    }
    num_places = int(batch["cu_seqlens"][-1])
    of_layout = {"num_tokens": (rows, len(batch["row_splits"]) - 1)}
    of_layout |= dict.fromkeys(("position_ids", "document_ids"), (places, num_places))
    for name in batch.keys() - taken.keys():
        part, size = of_layout.get(name, (samples, 0))
        if name in splits:
            part = slice(int(splits[name][0]), int(splits[name][-1]))
        elif len(batch[name]) != size:
            part = samples
        taken[name] = batch[name][part]
        if name == "document_ids" and part is places:
            taken[name] = taken[name] - samples.start
    return taken


def read_rows(
    reader: SampleReader,
    rows: RowSpans,
    packing: Packing,
    use_flat: Callable[..., Arrays] | None = None,
) -> Arrays:
    """Read the documents of some rows into the arrays that `Packing` describes; `use_flat` replaces the reader's."""
    ids, which = np.unique(rows.ids, return_inverse=True)
    lengths = reader.lengths(packing.lengths_name)[ids]
    names = dict.fromkeys((packing.column or "", *packing.columns))
    begins = _begins(rows, packing.row_length)

    def copied(columns: Mapping[str, FlatArrays], memory: memoryview) -> Arrays:
        arrays = {}
        for name in names:
            _check(name, columns[name], ids, lengths)
            values = columns[name]
            fill = _pad_token(packing, values.dtype) if name == packing.column else 0
            size = values.dtype.itemsize
            placed: NDArray[Any] = np.full((len(rows), packing.row_length), fill, dtype=values.dtype)
            target = placed.reshape(-1).view(np.uint8).data
            spans = values.begins[which] + rows.first * size, rows.num_tokens * size, begins * size
            for source, length, at in zip(*(span.tolist() for span in spans), strict=True):
                target[at : at + length] = memory[source : source + length]
            arrays["input_ids" if name == packing.column else name] = signed(placed)
        return arrays

    batch = (use_flat or reader.use_flat)(ids, [*names], copied)
    return {**batch, **_layout(rows, begins, batch["input_ids"], packing)}


def _pad_token(packing: Packing, dtype: np.dtype[Any]) -> int:
    token = int(packing.pad_token)
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= token <= np.iinfo(dtype).max:
        raise ValueError(
            f"pad_token must be one that the column {packing.column!r} of {dtype} can hold; found {token}. "
            "Pass labels=True for labels of -100"
        )
    return token


def split_rows(batch: Arrays) -> list[dict[str, Any]]:
    """The rows of a batch one by one, for a transform or a collate function; without what belongs to whole batches."""
    per_row = {name: values for name, values in batch.items() if name not in ("cu_seqlens", "max_seqlen")}
    return [{name: values[row] for name, values in per_row.items()} for row in range(len(batch["input_ids"]))]


def _begins(rows: RowSpans, row_length: int) -> Ints:
    """Where each span begins in the rows, counted through all of them."""
    ends = np.cumsum(rows.num_tokens)
    row = np.repeat(np.arange(len(rows)), np.diff(rows.edges))
    before = np.concatenate([[0], ends])[rows.edges[:-1]]  # tokens in the rows before
    begins: Ints = ends - rows.num_tokens - before[row] + row * row_length
    return begins


def _layout(rows: RowSpans, begins: Ints, tokens: NDArray[Any], packing: Packing) -> Arrays:
    """What follows from the places of the documents alone."""
    num_rows, row_length = tokens.shape
    counts = np.add.reduceat(rows.num_tokens, rows.edges[:-1]) if num_rows else np.empty(0, dtype=np.int64)
    # Padding is one more segment, at the end of its row.
    padded = np.flatnonzero(counts < row_length)
    pad_begins = padded * row_length + counts[padded]
    segments = np.sort(np.concatenate([begins, pad_begins]))
    edges = np.append(segments, num_rows * row_length)
    sizes = np.diff(edges)
    first_of_row = np.searchsorted(segments, np.arange(num_rows) * row_length)
    in_row = np.arange(len(segments)) - first_of_row[segments // row_length]
    position = np.arange(num_rows * row_length, dtype=np.int32)
    position -= np.repeat(segments.astype(np.int32), sizes)
    layout: Arrays = {
        "position_ids": position.reshape(tokens.shape),
        "document_ids": np.repeat(in_row.astype(np.int32), sizes).reshape(tokens.shape),
        "num_tokens": counts.astype(np.int32),
    }
    if packing.labels:
        labels = tokens.astype(np.int64)
        labels.reshape(-1)[segments] = -100
        labels[np.arange(row_length) >= counts[:, None]] = -100
        layout["labels"] = labels
    if packing.cu_seqlens:
        layout["cu_seqlens"] = edges.astype(np.int32)
        layout["max_seqlen"] = np.array(sizes.max(initial=0), dtype=np.int32)
    return layout


def _check(name: str, values: FlatArrays, ids: Ints, lengths: NDArray[np.integer]) -> None:
    """Refuse documents that do not have the lengths that the rows were planned with."""
    wrong = np.flatnonzero(values.counts != lengths)
    if len(wrong):
        k = int(wrong[0])
        raise FormatError(
            f"Sample {ids[k]}, column {name!r}: a document must have as many values as its length; found "
            f"{values.counts[k]}, and its length is {lengths[k]}. Write the lengths of this data again."
        )


@dataclass(frozen=True)
class Bucketing:
    """How samples of similar lengths come together, as the user gave it: None for what is to be chosen."""

    by: str  # name of the lengths
    window: int | None = None  # samples that are sorted together
    batch_tokens: int | None = None  # tokens of a global batch, padding included; None: it has one number of samples
    batch_multiple: int | None = None  # what the sizes of its batches are multiples of

    def resolved(self, reader: SampleReader, batch_size: int, resumed: OrderConfig | None) -> LengthBuckets:
        """With what was to be chosen, from the data and the run's first start."""
        return LengthBuckets.resolved(
            reader.lengths(self.by),
            window=self.window,
            batch_tokens=self.batch_tokens,
            batch_size=batch_size if self.batch_tokens is None else self.batch_multiple,
            digest=reader.lengths_digest(self.by),
            resumed=None if resumed is None else resumed.buckets,
        )
