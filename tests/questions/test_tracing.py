"""A step of a run names its samples, and a sample its steps."""

from __future__ import annotations

import numpy as np
import pytest
from support.orders import run_over

from lightning_stream.order import Position, World
from lightning_stream.questions import Delivery, explain, trace, where
from lightning_stream.questions.tracing import steps_done


def run_of():
    return run_over([[60, 40], [30, 20]], batch_size=8, shuffle=True)


def test_explain_says_which_epoch_batch_and_samples_come_next():
    run = run_of()
    position = Position.start(run, batch_size=8, tail="pad", epoch=2).advanced(run, 24)
    found = explain(run, position)
    assert (found.epoch, found.position, found.num_samples, found.steps_left) == (2, 24, 150, 16)
    assert np.array_equal(found.upcoming.ids, run.epoch(2).ids(24, 32))
    assert found.upcoming.step == 3
    assert "global batch 3, positions 24 to 31" in str(found)


def test_explain_of_an_epochs_end_is_the_beginning_of_the_next():
    run = run_of()
    found = explain(run, Position.start(run, batch_size=8, tail="drop").advanced(run, 144))
    assert (found.epoch, found.position, found.upcoming.step) == (1, 0, 0)


def test_trace_honours_the_changes_of_batch_size():
    run = run_of()
    position = Position.start(run, batch_size=8, tail="pad").advanced(run, 16)
    position = position.rebased_on(run, batch_size=12, tail="pad").advanced(run, 40)
    position = position.rebased_on(run, batch_size=4, tail="pad")
    wanted = [(0, 8), (8, 16), (16, 28), (28, 40), *((at, min(at + 4, 150)) for at in range(40, 150, 4))]
    traced = [trace(run, position, step) for step in range(len(wanted))]
    assert [(batch.begin, batch.end) for batch in traced] == wanted
    assert np.array_equal(np.concatenate([batch.ids for batch in traced]), run.epoch(0).ids(0, 150))
    assert explain(run, position).upcoming.step == 4
    with pytest.raises(ValueError, match="has 32 of them, not step 32"):
        trace(run, position, 32)


def test_steps_whose_batch_does_not_divide_over_this_world_are_traced_too():
    run, world = run_of(), World(0, 3)
    position = Position.start(run, batch_size=8, tail="pad").advanced(run, 16)
    position = position.rebased_on(run, batch_size=12, tail="pad", world=world)
    assert [trace(run, position, step, world=world).end for step in range(4)] == [8, 16, 28, 40]
    assert explain(run, position, world=world).upcoming.step == 2
    order, delivery = run.epoch(0), Delivery(world, 4)
    early, late = (where(run, position, int(order.ids(at, at + 1)[0]), delivery) for at in (9, 20))
    assert [(one.step, one.rank) for one in early] == [(1, 0)]
    assert [one.step for one in late] == [2]


def test_a_traced_batch_names_shards_and_streams():
    run = run_of()
    batch = trace(run, Position.start(run, batch_size=8, tail="pad"), 0)
    assert np.array_equal(batch.streams, (batch.ids >= 100).astype(int))
    assert np.array_equal(batch.shards, np.searchsorted([0, 60, 100, 130], batch.ids, side="right") - 1)


def test_steps_are_counted_with_the_batches_of_remainders() -> None:
    run = run_over([[5], [5], [5]], batch_size=4, shuffle=True, batching_method="per_stream")
    start = Position.start(run, batch_size=4, tail="pad")
    assert [steps_done(run, start.advanced(run, end)) for end in (8, 12, 13, 14, 15)] == [2, 3, 4, 5, 6]


def test_steps_are_counted_up_to_the_border_that_exact_moves() -> None:
    run = run_over([[10]], batch_size=4, shuffle=True)
    start = Position.start(run, batch_size=4, tail="exact")  # 4 to 6 and 6 to 10, with 4 replicas
    assert [steps_done(run, start.advanced(run, end)) for end in (4, 6, 10)] == [1, 2, 3]
