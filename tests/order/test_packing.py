"""Packing the documents of one window: no token is lost or repeated, and the rows are those of best-fit decreasing."""

from __future__ import annotations

import hashlib
from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import pack_window

from lightning_stream.order.packing import LONG_DOCUMENTS, RowPacking
from lightning_stream.order.permutation import RngStream, random_u64

prop = settings(max_examples=300, deadline=None, derandomize=True)
documents = st.lists(st.integers(0, 40), max_size=60)
row_lengths = st.integers(1, 30)
policies = st.sampled_from(LONG_DOCUMENTS)


def pieces_of(lengths, row_length, policy):
    """(document, first token, tokens) of all that is packed."""
    pieces = []
    for document, length in enumerate(lengths):
        if length > row_length and policy == "drop":
            continue
        end = min(length, row_length) if policy == "truncate" else length
        pieces += [(document, first, min(row_length, end - first)) for first in range(0, end, row_length)]
    return pieces


def best_fit_decreasing(lengths, row_length, policy):
    """Best-fit decreasing as it is written down: one piece after another, and a look at every open row."""
    rows, clock = [], count()
    for piece in sorted(pieces_of(lengths, row_length, policy), key=lambda one: -one[2]):
        fitting = [row for row in rows if row["room"] >= piece[2]]
        if fitting:
            row = min(fitting, key=lambda row: (row["room"], row["since"]))
        else:
            row = {"room": row_length, "spans": []}
            rows.append(row)
        row["room"] -= piece[2]
        row["since"] = next(clock)
        row["spans"].append(piece)
    return sorted(sorted(row["spans"]) for row in rows)


def spans_of(rows):
    """The spans of each row."""
    spans = list(zip(rows.ids.tolist(), rows.first.tolist(), rows.num_tokens.tolist(), strict=True))
    edges = rows.edges.tolist()
    return [spans[a:b] for a, b in pairwise(edges)]


def drawn_lengths(size, most):
    """Lengths of which most are short, the same under every version of numpy."""
    numbers = random_u64(RngStream.SAMPLES, 17, size, size=size)
    return (numbers % np.uint64(most) >> (numbers >> np.uint64(60))).astype(np.int64)


def log_normal_lengths(size, seed):
    """Lengths of documents of 700 tokens in the mean."""
    drawn = np.random.default_rng(seed).lognormal(np.log(700) - 1.2**2 / 2, 1.2, size)
    return np.clip(drawn, 1, 200_000).astype(np.uint32)


@prop
@given(documents, row_lengths, policies)
def test_the_rows_are_those_of_best_fit_decreasing(lengths, row_length, policy):
    rows = pack_window(np.array(lengths, dtype=np.uint32), row_length, policy)
    assert spans_of(rows) == best_fit_decreasing(lengths, row_length, policy)


@pytest.mark.parametrize(("size", "most", "row_length"), [(3000, 900, 256), (2000, 5000, 1024), (4000, 30, 64)])
def test_many_documents_of_equal_lengths_are_packed_as_one_by_one(size, most, row_length):
    lengths = drawn_lengths(size, most)
    assert spans_of(pack_window(lengths, row_length)) == best_fit_decreasing(lengths.tolist(), row_length, "split")


@prop
@given(documents, row_lengths, policies)
def test_every_token_that_is_kept_is_in_one_row(lengths, row_length, policy):
    rows = pack_window(np.array(lengths, dtype=np.int64), row_length, policy)
    assert sorted(span for row in spans_of(rows) for span in row) == pieces_of(lengths, row_length, policy)


@prop
@given(documents, row_lengths, policies)
def test_a_row_has_at_most_its_length_and_no_document_twice(lengths, row_length, policy):
    rows = pack_window(np.array(lengths, dtype=np.int64), row_length, policy)
    assert len(rows) == len(spans_of(rows))
    for row in spans_of(rows):
        assert 0 < sum(tokens for _, _, tokens in row) <= row_length
        assert all(tokens > 0 for _, _, tokens in row)
        assert len({document for document, _, _ in row}) == len(row)


@pytest.mark.parametrize(
    ("lengths", "row_length", "policy", "expected"),
    [
        ([], 4, "split", []),
        ([0, 0, 0], 4, "split", []),
        ([4, 4], 4, "drop", [[(0, 0, 4)], [(1, 0, 4)]]),
        ([2, 0, 1], 1, "split", [[(0, 0, 1)], [(0, 1, 1)], [(2, 0, 1)]]),
        ([9, 8], 4, "split", [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 1)], [(1, 0, 4)], [(1, 4, 4)]]),
        ([9, 8], 4, "truncate", [[(0, 0, 4)], [(1, 0, 4)]]),
        ([9, 8], 4, "drop", []),
        ([3, 9, 4, 0, 5], 6, "split", [[(0, 0, 3), (1, 6, 3)], [(1, 0, 6)], [(2, 0, 4)], [(4, 0, 5)]]),
    ],
)
def test_windows_at_the_edge(lengths, row_length, policy, expected):
    assert spans_of(pack_window(np.array(lengths, dtype=np.uint32), row_length, policy)) == expected


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64, np.uint64])
def test_the_packing_never_changes(dtype):
    rows = pack_window(drawn_lengths(20_000, 30_000).astype(dtype), 2048)
    columns = np.concatenate([rows.edges, rows.ids, rows.first, rows.num_tokens]).astype("<i8")
    assert hashlib.sha256(columns.tobytes()).hexdigest()[:16] == "8deddec8b054043d"


@pytest.mark.parametrize(("row_length", "most"), [(2048, 0.001), (8192, 0.001), (32768, 0.002)])
def test_rows_of_log_normal_documents_are_nearly_full(row_length, most):
    windows = [pack_window(log_normal_lengths(16384, seed), row_length) for seed in range(6)]
    room = sum(map(len, windows)) * row_length
    assert room - sum(int(rows.num_tokens.sum()) for rows in windows) <= most * room


@prop
@given(documents, row_lengths, st.randoms(use_true_random=False))
def test_rows_can_be_taken_in_any_order(lengths, row_length, random):
    rows = pack_window(np.array(lengths, dtype=np.int64), row_length)
    chosen = random.sample(range(len(rows)), random.randint(0, len(rows)))
    taken = rows.take(np.array(chosen, dtype=np.int64))
    assert spans_of(taken) == [spans_of(rows)[row] for row in chosen]


@pytest.mark.parametrize("lengths", [np.array([3, -1]), np.array([[3]]), np.array([1.5])])
def test_lengths_that_are_no_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match=r"Lengths must be a 1-d array of integers"):
        pack_window(lengths, 8)


def test_all_wrong_settings_are_named_together():
    with pytest.raises(ValueError, match=r"row_length .* not 0.*window .* not 0.*long_documents .* not 'cut'"):
        RowPacking(row_length=0, window=0, long_documents="cut")
