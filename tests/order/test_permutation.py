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
from lightning_stream.order.permutation import Purpose, permutation, raw, stable_argsort

GOLDEN = json.loads((Path(__file__).parent / "golden" / "order_1.json").read_text())


def test_the_golden_file_is_of_this_order_version():
    assert GOLDEN["order_version"] == ORDER_VERSION


@pytest.mark.parametrize("case", GOLDEN["permutations"], ids=lambda case: str(case["key"]))
def test_a_keyed_permutation_never_changes(case):
    purpose, *numbers = case["key"]
    assert permutation(Purpose(purpose), *numbers, size=len(case["order"])).tolist() == case["order"]


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
    streams = {purpose: raw(purpose, 9176, 0, size=4).tobytes() for purpose in Purpose}
    assert len(set(streams.values())) == len(Purpose)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), max_size=50))
def test_equal_keys_keep_their_order(keys):
    keys = np.array(keys, dtype=np.uint64)
    assert np.array_equal(stable_argsort(keys), np.argsort(keys, kind="stable"))
