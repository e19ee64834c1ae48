"""Measures are the same to the last digit, however the samples are spread and in whatever order they are added."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_stream.recipes.evaluation import Tally, tally


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100, width=32)), min_size=1, max_size=40), st.randoms())
def test_a_tally_is_the_same_in_any_order_and_any_parts(samples: list[tuple[bool, float]], chance: object) -> None:
    def counted(some: list[tuple[bool, float]]) -> torch.Tensor:
        return tally(torch.tensor([right for right, _ in some]), torch.tensor([loss for _, loss in some])).sum(0)

    whole = Tally.of(counted(samples))
    shuffled = samples[:]
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    parts = [shuffled[begin : begin + 3] for begin in range(0, len(shuffled), 3)]
    assert Tally.of(torch.stack([counted(part) for part in parts]).sum(0)) == whole
    assert whole.accuracy == sum(right for right, _ in samples) / len(samples)
    assert whole.loss == pytest.approx(math.fsum(loss for _, loss in samples) / len(samples), abs=1e-7)


def test_what_does_not_count_is_in_no_measure() -> None:
    right, losses = torch.tensor([[True, True], [False, True]]), torch.tensor([[1.0, 9.0], [2.0, math.inf]])
    counts = torch.tensor([[True, False], [True, False]])
    counted = Tally.of(tally(right, losses, counts).sum(0))
    assert (counted.right, counted.total, counted.not_finite, counted.loss) == (1, 2, 0, 1.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_never_hidden_in_a_mean(bad: float) -> None:
    counted = Tally.of(tally(torch.tensor([True, False]), torch.tensor([bad, 1.0])).sum(0))
    assert math.isnan(counted.loss)
    assert counted.accuracy == 0.5


def test_nothing_counted_is_no_number() -> None:
    assert math.isnan(Tally().loss)
    assert math.isnan(Tally().accuracy)
