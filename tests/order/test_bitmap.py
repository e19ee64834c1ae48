"""A bitmap finds its members by number, and counts them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stream.order.bitmap import Bitmap


@given(st.lists(st.booleans(), max_size=400), st.integers(0, 3))
def test_a_bitmap_is_the_ascending_array_of_its_members(answers: list[bool], repeats: int) -> None:
    mask = np.array(answers * (1 + repeats), dtype=np.bool_)
    ids = np.flatnonzero(mask)
    bitmap = Bitmap.of_mask(mask)
    assert len(bitmap) == len(ids)
    assert bitmap.mask.tolist() == mask.tolist()
    assert bitmap.select(np.arange(len(ids))).tolist() == ids.tolist()
    assert [bitmap[number] for number in range(len(ids))] == ids.tolist()
    bounds = np.arange(len(mask) + 1)
    assert bitmap.count_before(bounds).tolist() == np.searchsorted(ids, bounds).tolist()
    assert Bitmap.of_ids(ids[::-1], len(mask)).bits.tobytes() == bitmap.bits.tobytes()


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999, 1])
def test_a_large_bitmap_needs_two_bits_for_each_id(share: float) -> None:
    size = 1_000_000
    mask = np.random.default_rng(0).random(size) < share
    tracemalloc.start()
    bitmap = Bitmap.of_mask(mask)
    num_members = len(bitmap)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 2.1 * size / 8 + 4096
    ids = np.flatnonzero(mask)
    numbers = np.random.default_rng(1).integers(0, num_members, 1000 if num_members else 0)
    assert (bitmap.select(numbers) == ids[numbers]).all()
