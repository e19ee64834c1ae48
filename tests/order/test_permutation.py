"""Permutations and whole orders are pinned: a changed number here is a new order version."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stream.order import ORDER_VERSION, OrderConfig, RunOrder, Snapshot, StreamWeights, ledger
from lightning_stream.order import permutation as permutations
from lightning_stream.order.permutation import RngStream, permutation, random_u64

GOLDEN = json.loads((Path(__file__).parent / "golden" / "order_1.json").read_text())


def test_the_golden_file_is_of_this_order_version():
    assert GOLDEN["order_version"] == ORDER_VERSION


@pytest.mark.parametrize("case", GOLDEN["permutations"], ids=lambda case: str(case["key"]))
def test_a_keyed_permutation_never_changes(case):
    purpose, *numbers = case["key"]
    assert permutation(RngStream(purpose), *numbers, size=len(case["order"])).tolist() == case["order"]


@pytest.mark.parametrize("case", GOLDEN["orders"], ids=lambda case: case["name"])
def test_an_epochs_order_never_changes(case):
    config = OrderConfig.resolve(**case["settings"])
    weights = [StreamWeights(**one) for one in case["weights"]]
    run = RunOrder(Snapshot.of(case["sizes"]), weights, config)
    order = run.epoch(case["epoch"])
    ids = order.ids(0, order.num_samples)
    assert ids[: len(case["first"])].tolist() == case["first"]
    assert hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest() == case["sha256"]
    assert f"{ledger.expected(order, 0, order.num_samples):016x}" == case["ledger"]


def test_every_purpose_has_its_own_numbers():
    streams = {purpose: random_u64(purpose, 9176, 0, size=4).tobytes() for purpose in RngStream}
    assert len(set(streams.values())) == len(RngStream)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 3000), st.integers(0, 9), st.data())
def test_a_part_of_a_permutation_is_read_as_of_all_of_it(size: int, key: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    whole = permutation(RngStream.SAMPLES, key, size=size)
    assert np.array_equal(permutation(RngStream.SAMPLES, key, size=size, begin=begin, end=end), whole[begin:end])


def test_a_part_of_numbers_that_are_not_spread_evenly_is_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.arange(1000, dtype=np.uint64)[::-1] % 7
    monkeypatch.setattr(permutations, "random_u64", lambda *_, size: keys[:size])
    wanted = np.argsort(keys, kind="stable")[700:720]
    assert np.array_equal(permutation(RngStream.SAMPLES, 1, size=1000, begin=700, end=720), wanted)


@pytest.mark.parametrize("size", [511, 512, 513, 1000, 4096, 70_000])
def test_a_permutation_is_the_stable_argsort_at_any_size(size: int) -> None:
    keys = random_u64(RngStream.SAMPLES, 9176, size, size=size)
    assert np.array_equal(permutation(RngStream.SAMPLES, 9176, size, size=size), np.argsort(keys, kind="stable"))


def test_numbers_too_much_alike_to_carry_their_index_are_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.arange(1000, dtype=np.uint64)[::-1] % 7  # all differ in their lowest bits alone
    monkeypatch.setattr(permutations, "random_u64", lambda *_, size: keys[:size])
    assert np.array_equal(permutation(RngStream.SAMPLES, 1, size=1000), np.argsort(keys, kind="stable"))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 9))
def test_a_sample_is_located_in_shards_of_any_sizes(sizes: list[int], length: int, last: int) -> None:
    for some in (sizes, [length] * len(sizes), [*[length] * len(sizes), last]):
        snapshot = Snapshot.of([some])
        ids = np.arange(snapshot.num_samples)
        shards, within = snapshot.locate(ids)
        assert shards.tolist() == [k for k, size in enumerate(some) for _ in range(size)]
        assert within.tolist() == [k for size in some for k in range(size)]
