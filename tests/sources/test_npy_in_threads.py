"""Heads of NumPy's files are read whole, whichever threads read them at once."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lightning_stream.sources import npy


def test_many_threads_read_heads_and_arrays_at_once() -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    plain, packed = io.BytesIO(), io.BytesIO()
    np.save(plain, array)
    np.savez(packed, first=array, second=array + 1)

    def read(_: int) -> bool:
        head = npy.read_head(plain.getvalue())
        both = npy.load(io.BytesIO(packed.getvalue()))
        single = npy.load(io.BytesIO(plain.getvalue()))
        assert head == (128, (3, 4), np.dtype(np.int16))
        assert (single == array).all()
        return bool((both["second"] == array + 1).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(400)))
